"""Cases of masks, padding, and batches or shards without an entry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import reference
from tests.cases.common import (
    FAMILY,
    HOW,
    Norm,
    close,
    each_batch_like,
    each_derivative,
    each_family,
    each_how,
    rounded_once,
    same,
)

COLUMN = {"layout": "N C", "axis_names": "N"}
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

    return HOW[how](jax.grad(loss, argnums=(0, 1)))


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
    step = jax.jit(
        lambda x: nj.batch_norm(x, None, nj.BatchStats.init(C=3), where=where, train=True, running=rule, **COLUMN)
    )
    _, state = step(np.where(where, x, np.float32(0)))
    for value in WORTHLESS:
        same(step(np.where(where, x, np.float32(value)))[1], state)


# --- 30: nothing to pool

EMPTY = {
    "batch": Norm(nj.batch_norm, (0, 3), "N C", "N", "C", (3,), (3,)),
    "batch of images": Norm(nj.batch_norm, (0, 2, 2, 3), "N H W C", "N H W", "C", (3,), (3,)),
    "no positions": Norm(nj.instance_norm, (2, 0, 3), "N L C", "L", "C", (3,), (2, 3)),
    "no examples": Norm(nj.layer_norm, (0, 4), "N D", "D", "D", (4,), (0,)),
    "no features": Norm(nj.layer_norm, (4, 0), "N D", "D", "D", (0,), (4,)),
    "groups without positions": Norm(nj.group_norm, (2, 0, 6), "N L C=(G=3 K)", "L K", "C", (6,), (2, 3)),
    "rms": Norm(nj.rms_norm, (0, 4), "N D", "D", "D", (4,), (0,), center=False),
    "rms without features": Norm(nj.rms_norm, (4, 0), "N D", "D", "D", (0,), (4,), center=False),
}
RULES = {
    "ema": nj.Ema(0.1),
    "unbiased, debiased ema": nj.Ema(0.1, unbiased=True, debias=True),
    "by entries": nj.Cumulative(),
    "by updates": nj.Cumulative(by="updates"),
}


def filled_state(size=3):
    values = np.linspace(1, 2, size, dtype=np.float32)
    return nj.BatchStats(values, values + 1, np.asarray(4, np.int32), values + 2, "C")


@pytest.mark.case(30)
@pytest.mark.parametrize(
    ("name", "derivative"),
    [*((name, "vjp") for name in EMPTY), ("batch", "jvp"), ("no features", "jvp"), ("batch", "autodiff")],
)
def test_an_empty_array_gives_an_empty_output_and_zero_gradients(name, derivative):
    norm = EMPTY[name]
    x, scale, bias = (np.ones(shape, np.float32) for shape in (norm.shape, norm.sizes, norm.sizes))
    y, dx, d_scale, d_bias, d_eps = norm.vjp(x, x, scale, bias, derivative=derivative)
    same((y, dx), (x, x))
    same((d_scale, d_bias, d_eps), (np.zeros_like(scale), np.zeros_like(bias), np.float32(0)))


@pytest.mark.case(30)
@pytest.mark.parametrize(
    ("rule", "how"), [*((rule, "jit") for rule in RULES), ("ema", "eager"), ("by entries", "vmap")]
)
@pytest.mark.parametrize("shape", [(0, 3), (8, 3)], ids=["empty", "masked"])
def test_a_batch_without_an_entry_leaves_the_state_as_it_was(shape, rule, how, rng):
    running = RULES[rule]
    x = np.asarray(rng.standard_normal(shape), np.float32)
    where = np.zeros(shape, bool)

    def function(x, state, where):
        return nj.batch_norm(x, None, state, where=where, train=True, running=running, **COLUMN)

    y, state = HOW[how](function)(x, filled_state(), where)
    same(state, filled_state())
    same(y, np.zeros_like(x))


@pytest.mark.case(30)
@each_derivative
@pytest.mark.parametrize("value", [0.3, np.nan])
@each_family
def test_a_group_that_the_mask_empties_gives_the_bias_and_zero_gradient(norm, value, derivative, rng):
    _, g, scale, bias = norm.problem(rng)
    x = np.full(norm.shape, value, np.float32)
    nowhere = np.zeros(norm.shape, bool)
    y, dx, d_scale, d_bias, d_eps = norm.vjp(x, g, scale, bias, where=nowhere, derivative=derivative)
    same(
        y, norm.exact(np.zeros(norm.shape), scale, bias).astype(np.float32) if norm.center else np.zeros_like(x) + bias
    )
    same((dx, d_scale, d_eps), (np.zeros_like(x), np.zeros_like(scale), np.float32(0)))
    # An excluded entry that is NaN has no part in the gradient of the bias either.
    close(d_bias, norm.exact_cotangents(x, g, scale, bias, where=nowhere)[2], m=x.size)


@pytest.mark.case(30)
@each_batch_like
def test_a_feature_that_saw_nothing_stays_while_the_others_move(norm, rng):
    x, _, _, _ = norm.problem(rng)
    where = np.moveaxis(np.ones(norm.shape, bool), norm.layout.split().index("C") - len(norm.layout.split()), -1)
    seen = np.arange(norm.sizes[0]) != 1
    where = np.moveaxis(where & seen, -1, norm.layout.split().index("C") - len(norm.layout.split()))
    old = filled_state(norm.sizes[0])
    y, new = jax.jit(lambda x, state: norm.pair(x, state=state, where=where))(x, old)
    same(jax.tree.map(lambda leaf: leaf[1], (new.mean, new.var)), (old.mean[1], old.var[1]))
    same(new.weight[1], old.weight[1])
    assert np.all(np.asarray(new.mean)[seen] != old.mean[seen])
    assert new.count == old.count + 1
    close(y, norm.exact(x, where=where))


@pytest.mark.case(30)
@each_how
def test_training_goes_on_after_an_empty_batch(how, rng):
    batches = np.asarray(rng.standard_normal((3, 8, 3)), np.float32)
    where = np.arange(3)[:, None, None] != 1  # the second batch has no entry

    def train(state, batches):
        for x, present in zip(batches, where, strict=True):
            mask = np.broadcast_to(present, x.shape)
            _, state = nj.batch_norm(x, None, state, where=mask, train=True, **COLUMN)
        return state

    state = HOW[how](train)(filled_state(), batches)
    close(state.mean, 0.9 * (0.9 * filled_state().mean + 0.1 * batches[0].mean(0)) + 0.1 * batches[2].mean(0))
    assert state.count == 6


# --- 31: a shard without an entry


def mesh_map(check_vma):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    options = {"mesh": mesh, "check_vma": check_vma}

    def transform(function):
        def on_one(x, g, where, *rest):
            y, dx, d_params, state = function(x[0], g[0], where[0], *rest)
            if not check_vma:  # the gradient of replicated parameters is this device's own share
                d_params = jax.lax.psum(d_params, "data")
            return y[None], dx[None], d_params, state

        specs = {"in_specs": (P("data"), P("data"), P("data"), P(), P()), "out_specs": (P("data"), P("data"), P(), P())}
        return jax.jit(jax.shard_map(on_one, **specs, **options))

    return transform


def stacked_map(mapping):
    def transform(function):
        mapped = mapping(function, axis_name="data", in_axes=(0, 0, 0, None, None))

        def summed(*args):
            y, dx, d_params, state = mapped(*args)
            for leaf in jax.tree.leaves(state):
                same(leaf[0], leaf[1])
            return y, dx, jax.tree.map(lambda d: d.sum(0), d_params), jax.tree.map(lambda leaf: leaf[0], state)

        return summed

    return transform


MAPPINGS = {
    "vmap": stacked_map(lambda function, **options: jax.jit(jax.vmap(function, **options))),
    "pmap": stacked_map(jax.pmap),
    "shard_map": mesh_map(True),
    "unchecked shard_map": mesh_map(False),
}


@functools.cache
def synchronised(mapping):
    def function(x, g, where, params, state):
        def apply(x, params):
            options = {"layout": "N C", "axis_names": "N data", "where": where, "train": True}
            return nj.sync_batch_norm(x, params, state, **options)

        _, pullback, new = jax.vjp(apply, x, params, has_aux=True)
        return apply(x, params)[0], *pullback(g), new

    return MAPPINGS[mapping](function)


@pytest.mark.case(31)
@pytest.mark.parametrize("value", [0.5, np.nan])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_a_fully_masked_shard_leaves_the_statistics_of_the_others(mapping, value, rng):
    x, g = np.asarray(rng.standard_normal((2, 2, 4, 3)), np.float32)
    where = np.stack([np.ones((4, 3), bool), np.zeros((4, 3), bool)])
    x[1] = value
    scale, bias = np.asarray(rng.standard_normal((2, 3)), np.float32)
    y, dx, d_params, state = synchronised(mapping)(x, g, where, nj.Affine(scale, bias, "C"), filled_state())
    options = {"names": "C", "layout": "S N C", "axis_names": "S N", "where": where}
    finite = np.isfinite(x)
    close(np.asarray(y)[finite], reference.normalize(x, scale, bias, **options)[finite])
    assert np.all(np.isnan(np.asarray(y)[~finite]))
    exact = reference.backward(x, g, scale, bias, **options)
    for actual, expected in zip((dx, d_params.scale, d_params.bias), exact, strict=True):
        close(actual, expected, m=x.size)
    close(state.mean, 0.9 * filled_state().mean + 0.1 * x[0].mean(0))
    close(state.var, 0.9 * filled_state().var + 0.1 * x[0].var(0))


@pytest.mark.case(31)
@pytest.mark.parametrize("value", [0.5, np.nan])
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_shards_without_any_entry_leave_the_state_and_have_zero_gradients(mapping, value, rng):
    x, g = np.full((2, 4, 3), value, np.float32), np.asarray(rng.standard_normal((2, 4, 3)), np.float32)
    where = np.zeros((2, 4, 3), bool)
    scale, bias = np.asarray(rng.standard_normal((2, 3)), np.float32)
    y, dx, d_params, state = synchronised(mapping)(x, g, where, nj.Affine(scale, bias, "C"), filled_state())
    same(y, np.broadcast_to(bias, x.shape))
    same((dx, d_params.scale), (np.zeros_like(x), np.zeros_like(scale)))
    same(state, filled_state())


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
    function = HOW[how](lambda x, where: nj.layer_norm(x, where=where, layout="... D", axis_names="D")[0])
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
    for axis in (0, len(norm.shape) - 1):
        small = rng.random([1 if i == axis else size for i, size in enumerate(norm.shape)]) < 0.6
        full = np.broadcast_to(small, norm.shape)
        exact = norm.exact(x, scale, bias, where=full)
        close(norm.run(x, scale, bias, where=small), exact)
        close(norm.run(x, scale, bias, where=full), exact)


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

        y, pullback, state = jax.vjp(apply, x, jnp.ones(channels), has_aux=True)
        return y, *pullback(g), state

    return HOW[how](function)


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
