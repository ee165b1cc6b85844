"""Cases of masks and padding."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.cases.common import (
    COLUMN,
    FAMILY,
    QUICK,
    close,
    each_derivative,
    each_family,
    each_how,
    rounded_once,
    same,
)
from tests.quick import quick_jit

WORTHLESS = [np.nan, np.inf, -np.inf]

# --- 29: worthless entries behind the mask


@pytest.mark.case(29)
@pytest.mark.parametrize(
    ("how", "derivative"), [("jit", "vjp"), ("jit", "jvp"), ("jit", "autodiff"), ("eager", "vjp"), ("vmap", "vjp")]
)
@pytest.mark.parametrize("value", WORTHLESS)
def test_nan_in_masked_rows_leaves_the_gradients_of_finite_padding(value, how, derivative, rng):
    x = np.asarray(rng.standard_normal((8, 3)), np.float32)
    where = np.arange(8)[:, None] < 4
    scale, bias = np.asarray(rng.standard_normal((2, 3)), np.float32)
    gradients = masked_loss_gradients(how, derivative)
    d_scale, dx = gradients(scale, np.where(where, x, np.float32(value)), bias)
    same((d_scale, dx), gradients(scale, np.where(where, x, np.float32(0)), bias))
    assert np.all(np.isfinite(d_scale))
    same(np.asarray(dx)[4:], np.zeros((4, 3), np.float32))


@functools.cache
def masked_loss_gradients(how, derivative):
    where = np.arange(8)[:, None] < 4

    def loss(scale, x, bias):
        y = nj.batch_norm(x, nj.Affine(scale, bias, "C"), where=where, train=True, derivative=derivative, **COLUMN)[0]
        return jnp.sum(y**3, where=where)

    return QUICK[how](jax.grad(loss, argnums=(0, 1)))


@pytest.mark.case(29)
@each_derivative
@pytest.mark.parametrize("value", WORTHLESS)
@each_family
def test_an_excluded_worthless_entry_reaches_nothing_but_its_own_output(norm, value, derivative, rng):
    x, g, scale, bias = norm.problem(rng)
    where = rng.random(norm.shape) < 0.7
    lost = ~where & (rng.random(norm.shape) < 0.5)
    assert lost.any()
    x = np.where(lost, np.float32(value), x)
    # The cotangent is random, or worthless itself, at the lost entries too: a zero there would hide 0·NaN.
    worthless = np.where(lost, np.float32(value), g)
    y, *cotangents, _ = norm.vjp(x, g, scale, bias, where=where, derivative=derivative)
    exact = norm.exact(x, scale, bias, where=where)
    close(np.asarray(y)[~lost], exact[~lost])
    assert np.all(~np.isfinite(np.asarray(y)[lost]) | (exact[lost] == np.asarray(y)[lost]))
    for actual, expected in zip(cotangents, norm.exact_cotangents(x, g, scale, bias, where=where), strict=True):
        close(actual, expected, m=x.size)
    same(cotangents, norm.vjp(x, worthless, scale, bias, where=where, derivative=derivative)[1:4])


@pytest.mark.case(29)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [("batch", jnp.bfloat16), ("layer", np.float16), ("group", jnp.bfloat16), ("rms", jnp.bfloat16)],
)
def test_the_same_holds_in_half_precision(family, dtype, rng):
    norm = FAMILY[family]
    x, g, scale, bias = norm.problem(rng, dtype)
    where = rng.random(norm.shape) < 0.7
    x = np.where(where, x, np.asarray(np.nan, dtype))
    y, *cotangents, _ = norm.vjp(x, g, scale, bias, where=where)
    rounded_once(np.asarray(y)[where], norm.exact(x, scale, bias, where=where)[where])
    for actual, expected in zip(cotangents, norm.exact_cotangents(x, g, scale, bias, where=where), strict=True):
        rounded_once(actual, expected, m=x.size)


@pytest.mark.case(29)
@pytest.mark.parametrize("rule", [nj.Ema(0.5), nj.Cumulative()], ids=str)
def test_excluded_worthless_entries_do_not_reach_the_state(rule, rng):
    x, where = np.asarray(rng.standard_normal((8, 3)), np.float32), rng.random((8, 3)) < 0.6
    step = quick_jit(
        lambda x: nj.batch_norm(x, None, nj.BatchStats.init(C=3), where=where, train=True, running=rule, **COLUMN)
    )
    _, state = step(np.where(where, x, np.float32(0)))
    for value in WORTHLESS:
        same(step(np.where(where, x, np.float32(value)))[1], state)


# --- 34: masks that do not fit


@pytest.mark.case(34)
@each_how
@pytest.mark.parametrize(
    ("shape", "mask"),
    [
        ((1, 2, 3, 4), (1, 2)),
        ((1, 2, 3, 4), (4,)),
        ((1, 2, 3, 4), ()),
        ((1, 2, 3, 4), (1, 2, 3, 4, 1)),
        ((1, 2, 3, 4), (1, 2, 3, 5)),
        ((1, 2, 3, 4), (2, 2, 3, 4)),
        ((1, 2, 3, 4), (0, 2, 3, 4)),
    ],
)
def test_a_mask_that_does_not_fit_is_an_error_with_both_shapes(shape, mask, how):
    function = QUICK[how](lambda x, where: nj.layer_norm(x, where=where, layout="... D", axis_names="D")[0])
    with pytest.raises(ValueError, match="layer_norm: where has shape ") as raised:
        function(np.ones(shape, np.float32), np.ones(mask, bool))
    assert f"where has shape {mask}, but x has shape {shape}" in str(raised.value)


@pytest.mark.case(34)
@each_family
def test_every_family_refuses_a_mask_of_lower_rank_by_its_own_name(norm):
    with pytest.raises(ValueError, match=f"{norm.fn.__name__}: where has shape .* but x has shape") as raised:
        norm(np.ones(norm.shape, np.float32), where=np.ones(norm.shape[:-1], bool))
    assert str(norm.shape[:-1]) in str(raised.value)
    assert str(norm.shape) in str(raised.value)


@pytest.mark.case(34)
@each_family
def test_a_mask_of_size_1_along_any_axes_equals_the_full_one(norm, rng):
    x, _, scale, bias = norm.problem(rng)
    masks = []
    for axis in (0, len(norm.shape) - 1):
        small = rng.random([1 if i == axis else size for i, size in enumerate(norm.shape)]) < 0.6
        masks += [small, np.array(np.broadcast_to(small, norm.shape))]
    ys = quick_jit(lambda masks: [norm(x, scale, bias, where=where) for where in masks])(masks)
    for y, where in zip(ys, masks, strict=True):
        close(y, norm.exact(x, scale, bias, where=where))


# --- 35: padding


def padded(x, lengths, length, value):
    """x (N, L, C) padded to a length, beyond each example's own with the value; and its mask."""
    where = np.arange(length)[None, :, None] < np.asarray(lengths)[:, None, None]
    wide = np.zeros((x.shape[0], length, x.shape[2]), x.dtype)
    wide[:, : x.shape[1]] = x
    return np.where(where, wide, np.asarray(value, x.dtype)), where


PADDED = {
    "batch": (nj.batch_norm, "N L C", "N L", "C"),
    "instance": (nj.instance_norm, "N L C", "L", "C"),
    "group": (nj.group_norm, "N L C=(G=2 K)", "L K", "C"),
    "layer over positions": (nj.layer_norm, "N L C", "L C", "C"),
    "rms over positions": (nj.rms_norm, "N L C", "L C", "C"),
}


@functools.cache
def padded_program(name, how, channels):
    fn, layout, axis_names, names = PADDED[name]

    def function(x, g, where):
        def apply(x, scale):
            params, state = nj.Affine(scale, None, names), nj.BatchStats.init(C=channels)
            state = state if fn is nj.batch_norm else None
            return fn(x, params, state, where=where, train=True, layout=layout, axis_names=axis_names)

        y, pullback, state = jax.vjp(apply, x, np.ones(channels, np.float32), has_aux=True)
        return y, *pullback(g), state

    return QUICK[how](function)


@pytest.mark.case(35)
@pytest.mark.parametrize(("name", "how"), [*((name, "jit") for name in PADDED), ("batch", "eager"), ("group", "vmap")])
def test_neither_the_value_nor_the_length_of_the_padding_shows(name, how, rng):
    channels = 2 if name == "group" else 1
    x = np.asarray(rng.normal(3, 1, (2, 5, channels)), np.float32)
    g = np.asarray(rng.standard_normal(x.shape), np.float32)
    lengths, run = (5, 3), padded_program(name, how, channels)
    first = None
    for length in (5, 10):
        # What the padding's own output sends back is part of the loss; a loss over valid entries has none of it.
        cotangent, valid = padded(g, lengths, length, 0)
        valid = np.broadcast_to(valid, cotangent.shape)
        results = []
        for value in (-10, 0, 1e30, np.nan):
            wide, where = padded(x, lengths, length, value)
            y, dx, d_scale, state = run(wide, cotangent, where)
            results.append((np.asarray(y)[valid], np.asarray(dx)[valid], d_scale, state))
            assert np.all(np.asarray(dx)[~valid] == 0)
        for other in results[1:]:
            same(other, results[0])
        first = first or results[0]
        for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(first), strict=True):
            close(a, b)
    fn, layout, axis_names, _ = PADDED[name]
    wide, where = padded(x, lengths, 5, -10)
    exact = reference.normalize(wide, layout=layout, axis_names=axis_names, center=fn is not nj.rms_norm, where=where)[
        np.broadcast_to(where, wide.shape)
    ]
    close(first[0], exact)


@pytest.mark.case(35)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32])
@each_family
def test_a_mask_of_numbers_is_refused_rather_than_rounded(norm, dtype):
    where = np.full(norm.shape, 0.25).astype(dtype)
    with pytest.raises(TypeError, match=rf"{norm.fn.__name__}: where must be boolean .* got dtype {where.dtype}"):
        norm(np.ones(norm.shape, np.float32), where=where)
