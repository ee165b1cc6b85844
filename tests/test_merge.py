"""Moments of micro-batches: merged, they are those of the full batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.closeness import close
from tests.quick import quick_jit
from tests.trees import SPEC, filled, same


def parts_of(x, where, sizes):
    stops = np.cumsum(sizes)
    return [(x[stop - size : stop], where[stop - size : stop]) for size, stop in zip(sizes, stops, strict=True)]


@pytest.mark.case(79)
@pytest.mark.parametrize("center", [True, False])
def test_micro_batches_equal_the_full_batch(center, rng):
    x = rng.normal(2.0, 3.0, (9, 5, 3)).astype(np.float32)
    where = rng.random((9, 5, 1)) < 0.7
    where[:2] = False  # the first micro-batch is empty
    params, state = filled(rng)
    spec = {"layout": "N L C", "axis_names": "N L", "center": center}
    parts = parts_of(x, where, [2, 3, 4])

    @quick_jit
    def accumulate(parts):
        merged = nj.merge(*(nj.moments(x, where=w, **spec) for x, w in parts))
        y = [nj.normalize(x, params, moments=merged, where=w, **spec)[0] for x, w in parts]
        return merged, jnp.concatenate(y), nj.update(state, merged)

    merged, y, new = accumulate(parts)

    close(y, reference.normalize(x, params.scale, params.bias, names="C", where=where, **spec), m=45)
    batch = reference.moments(x, where=where, **spec)
    for actual, right in zip((merged.mean, merged.var, merged.count), batch, strict=True):
        close(actual, right, m=45)
    mean, var, _ = reference.update(state.mean, state.var, state.weight, *batch, rule="ema")
    close(new.mean, mean, m=45)
    close(new.var, var, m=45)
    assert new.count == 5


@pytest.mark.parametrize("axis", [0, -1])
def test_stacked_moments_merge_along_their_axis(axis, rng):
    x = rng.normal(2.0, 3.0, (4, 5, 3)).astype(np.float32)
    stacked = jax.vmap(functools.partial(nj.moments, **SPEC), out_axes=axis)
    merged = quick_jit(lambda x: nj.merge(stacked(x), axis=axis))(x)
    assert merged.names == ("C",)
    for leaf, right in zip(
        jax.tree.leaves(merged), reference.moments(x, layout="S N C", axis_names="S N"), strict=True
    ):
        close(leaf, right, m=20)


def test_empty_moments_are_the_identity_of_merge(rng):
    moments, empty = nj.moments(rng.normal(2.0, 3.0, (4, 3)).astype(np.float32), **SPEC), nj.Moments.init(C=3)
    merge = quick_jit(nj.merge)
    for merged in (merge(moments), merge(moments, empty), merge(empty, moments)):
        for leaf, right in zip(jax.tree.leaves(merged), jax.tree.leaves(moments), strict=True):
            close(leaf, right)
    same(merge(empty, empty), empty)


def test_the_gradient_through_merged_moments_is_that_of_the_full_batch(rng, x64):
    x, g = rng.normal(2.0, 3.0, (9, 3)), rng.normal(size=(9, 3))
    scale, bias = rng.normal(size=3), rng.normal(size=3)

    def loss(x, scale, bias):
        parts = [x[:2], x[2:5], x[5:]]
        merged = nj.merge(*(nj.moments(part, **SPEC) for part in parts))
        params = nj.Affine(scale, bias, "C")
        y = [nj.normalize(part, params, moments=merged, **SPEC)[0] for part in parts]
        return jnp.sum(g * jnp.concatenate(y))

    got = quick_jit(jax.grad(loss, (0, 1, 2)))(x, scale, bias)
    for actual, right in zip(got, reference.backward(x, g, scale, bias, names="C", **SPEC), strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-10, atol=1e-12)


MOMENTS = nj.Moments.init(C=3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: nj.merge(), ValueError, ["merge: give at least one Moments"]),
        (lambda: nj.merge(3), TypeError, ["merge: moments must be a normjax.Moments; got int"]),
        (lambda: nj.merge(MOMENTS, MOMENTS, axis=0), ValueError, ["axis=0 is for one stacked Moments", "2 were given"]),
        (lambda: nj.merge(MOMENTS, axis=1), ValueError, ["axis=1 is out of range", "shape (3,)"]),
        (lambda: nj.merge(MOMENTS, nj.Moments.init(C=4)), ValueError, ["same axes", "(3,)", "(4,)"]),
        (lambda: nj.merge(MOMENTS, nj.Moments.init(D=3)), ValueError, ["same axes", "('C',)", "('D',)"]),
        (lambda: nj.normalize(np.ones((4, 3)), moments=3, **SPEC), TypeError, ["moments must be a normjax.Moments"]),
        (
            lambda: nj.normalize(np.ones((4, 3)), moments=nj.Moments.init(C=4), **SPEC),
            ValueError,
            ["normalize: moments.mean has shape (4,)", "axis 'C'", "size 3"],
        ),
        (
            lambda: nj.normalize(np.ones((4, 3)), moments=nj.Moments.init(Q=3), **SPEC),
            ValueError,
            ["normalize: moments.mean runs along 'Q'", 'not in layout "N C"'],
        ),
    ],
)
def test_moments_that_do_not_fit_say_so(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
