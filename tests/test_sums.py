"""Sums in blocks, which large arrays take on the CPU: the same numbers and derivatives, and nothing written between."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import _sums, reference

# Large enough to be cut into blocks: the innermost axis, an axis before kept ones, one among several, both kinds.
CALLS = {
    "layer": (nj.layer_norm, (256, 256), {"layout": "N D", "axis_names": "D"}, {"D": 256}),
    "batch": (nj.batch_norm, (4096, 16), {"layout": "N C", "axis_names": "N", "train": True}, {"C": 16}),
    "batch of images": (
        nj.batch_norm,
        (24, 14, 14, 16),
        {"layout": "N H W C", "axis_names": "N H W", "train": True},
        {"C": 16},
    ),
    "group": (nj.group_norm, (12, 14, 14, 32), {"layout": "N H W C=(G=4 K)", "axis_names": "H W K"}, {"C": 32}),
    "channels first": (
        nj.batch_norm,
        (24, 16, 14, 14),
        {"layout": "N C H W", "axis_names": "N H W", "train": True},
        {"C": 16},
    ),
}
every_call = pytest.mark.parametrize("call", CALLS)


def terms(x, k):
    return x - k, x * x * k


def plain(axes, x, k):
    return [jnp.sum(term, axes, keepdims=True) for term in terms(x, k)]


@pytest.mark.parametrize(
    ("shape", "axes", "cut"),
    [
        ((128, 512), (1,), (1, 16, False)),
        ((4096, 24), (0,), (0, 16, True)),
        ((24, 14, 14, 16), (0, 1, 2), (2, 14, True)),
        ((128, 7, 7, 12), (0, 1, 2), (2, 7, True)),
        ((64, 34, 16, 2), (0, 1, 2), (2, 16, True)),
        ((512, 144), (0, 1), (1, 9, False)),
        ((257, 263), (0, 1), None),
        ((4096, 24), (1,), None),
        ((128, 511), (1,), None),
        ((60, 32), (1,), ()),
        ((60, 33), (1,), None),
        ((60, 129), (1,), None),
        ((64, 128), (1,), None),
    ],
    ids=str,
)
def test_sums_in_blocks_and_their_derivatives_are_plain_sums(shape, axes, cut, rng, x64):
    assert _sums._cut(shape, axes, axes) == cut
    x = jnp.asarray(rng.normal(size=shape))
    k = jnp.asarray(rng.normal(size=[1 if axis in axes else size for axis, size in enumerate(shape)]))

    @functools.partial(jax.jit, static_argnums=0)
    def both_ways(summed, x, k, dx, g):
        values, vjp = jax.vjp(summed, x, k)
        return values, vjp([g, g * g]), jax.jvp(summed, (x, k), (dx, g))[1]

    directions = jnp.asarray(rng.normal(size=shape)), jnp.asarray(rng.normal(size=k.shape))
    ours = both_ways(lambda x, k: list(_sums.sums(terms, axes, x, k)), x, k, *directions)
    theirs = both_ways(functools.partial(plain, axes), x, k, *directions)
    # √m roundings of partial sums, which themselves grow with √m, of terms up to 64.
    bound = np.finfo(np.float64).eps * 64 * x.size / k.size
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=bound), ours, theirs)


@every_call
@pytest.mark.parametrize("derivative", ["vjp", "jvp", "autodiff"])
def test_large_arrays_have_the_reference_s_output_and_gradients(call, derivative, rng, x64):
    _, shape, axes, sizes = CALLS[call]
    x, g = rng.normal(size=(2, *shape)) + 3
    scale, bias = rng.normal(size=(2, *sizes.values()))

    program = jax.jit(functools.partial(output_and_gradients, call, derivative))
    where = {"names": tuple(sizes), "layout": axes["layout"], "axis_names": axes["axis_names"]}
    expected = reference.normalize(x, scale, bias, **where), *reference.backward(x, g, scale, bias, **where)
    for actual, exact in zip(program(x, scale, bias, g), expected, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=0, atol=1e-10 * np.abs(exact).max())


@pytest.mark.parametrize("shape", [(63, 128), (127, 64), (255, 32), (500, 16), (60, 129), (16, 1000)], ids=str)
def test_statistics_of_any_group_size_are_within_1e_6_of_float64(shape, rng):
    x = (1e4 + rng.normal(size=(60, *shape))).astype(np.float32)
    norm = jax.jit(jax.vmap(functools.partial(nj.normalize, layout="N D", axis_names="D")))
    x_hat, moments = norm(x)
    var = np.var(x, axis=2, dtype=np.float64)
    exact = (x - np.mean(x, axis=2, dtype=np.float64, keepdims=True)) / np.sqrt(var + 1e-5)[..., None]
    assert np.max(np.abs(moments.var / var - 1)) < 1e-6
    assert np.max(np.abs(x_hat - exact) / np.maximum(1, np.abs(exact))) < 1e-6


@pytest.mark.parametrize("mask", [None, (2**16, 1), (2**16, 2**16)], ids=str)
def test_groups_of_more_entries_than_an_int32_holds_are_traced(mask):
    x = jax.ShapeDtypeStruct((2**16, 2**16), jnp.float32)
    where = None if mask is None else jax.ShapeDtypeStruct(mask, jnp.bool_)

    def loss(x, where):
        y, _ = nj.normalize(x, where=where, layout="N C", axis_names="N C")
        return jnp.sum(y)

    assert jax.eval_shape(jax.grad(loss), x, where).shape == x.shape


@every_call
def test_nothing_of_the_size_of_x_is_written_between_input_and_output(call):
    _, shape, _, sizes = CALLS[call]
    x, c = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(tuple(sizes.values()), jnp.float32)
    program = jax.jit(functools.partial(output_and_gradients, call, "vjp")).lower(x, c, c, x).compile()
    temporary = program.memory_analysis().temp_size_in_bytes
    assert temporary < x.size * 4 / 2, f"{temporary} bytes are written, of which x has {x.size * 4}"


@pytest.mark.parametrize("shape", [(8, 16), (256, 256)], ids=str)
def test_a_norm_after_another_is_computed_once_and_adds_as_much_to_the_gradient_s_program_as_the_first(shape):
    def length(norms):
        def loss(params, x):
            for affine in params:
                x, _ = nj.layer_norm(x, affine, layout="N C", axis_names="C")
            return jnp.sum(x**2)

        params = [nj.Affine.init(C=shape[1])] * norms
        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, jnp.ones(shape)).compile().as_text().count(" = ")

    few, some, many = map(length, (2, 4, 6))
    assert many - some < 1.2 * (some - few)


def output_and_gradients(call, derivative, x, scale, bias, g):
    norm, _, axes, sizes = CALLS[call]
    state = nj.BatchStats.init(C=sizes["C"], dtype=x.dtype) if norm is nj.batch_norm else None

    def output(x, scale, bias):
        return norm(x, nj.Affine(scale, bias, tuple(sizes)), state, **axes, derivative=derivative)[0]

    y, vjp = jax.vjp(output, x, scale, bias)
    return y, *vjp(g)
