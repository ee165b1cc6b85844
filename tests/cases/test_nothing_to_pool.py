"""Cases of batches, groups and shards without an entry."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import reference
from tests.cases.common import (
    COLUMN,
    QUICK,
    Norm,
    close,
    each_batch_like,
    each_derivative,
    each_family,
    each_how,
    same,
)
from tests.quick import quick_jit

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

    y, state = QUICK[how](function)(x, filled_state(), where)
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
    y, new = quick_jit(lambda x, state: norm.pair(x, state=state, where=where))(x, old)
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

    state = QUICK[how](train)(filled_state(), batches)
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
        return quick_jit(jax.shard_map(on_one, **specs, **options))

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
    "vmap": stacked_map(lambda function, **options: quick_jit(jax.vmap(function, **options))),
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

        y, pullback, new = jax.vjp(apply, x, params, has_aux=True)
        return y, *pullback(g), new

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
