"""Replicas that were trained apart: they are not taken for one state, and `pool_stats` makes them one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from tests.quick import quick_jit
from tests.sync.mappings import DATA, MAPPINGS, PARAMETER, STATE

SPREAD = ("pmap", "shard_map", "unchecked shard_map", "vmap")
OWN = {"layout": "N C", "axis_names": "N", "train": True}


def leaves(state):
    return tuple(jax.tree.leaves(state))


def train(x):
    """The state of one replica, after a batch of its own."""
    return nj.batch_norm(x, None, nj.BatchStats.init(C=3), running=nj.Ema(1.0), **OWN)[1]


@pytest.mark.case(47)
def test_statistics_of_one_device_do_not_count_as_replicated():
    program = MAPPINGS["shard_map"].wrap(lambda x: leaves(train(x)), (DATA,), (STATE,) * 4)
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(program, np.zeros((4, 2, 3), np.float32))


def sizes_of_shards(rng):
    """Four shards, told apart by their means, and what all their rows give together."""
    x = rng.normal(rng.normal(size=(4, 1, 3)), 1.0, (4, 6, 3)).astype(np.float32)
    return x, x.reshape(-1, 3)


@pytest.mark.case(47)
@pytest.mark.parametrize("spread", SPREAD)
def test_pooled_in_the_mapping_they_are_the_statistics_of_all_rows_and_replicated(spread, rng):
    x, rows = sizes_of_shards(rng)
    mapping = MAPPINGS[spread]
    pool = lambda x: leaves(nj.pool_stats(train(x), "data"))  # noqa: E731
    results = quick_jit(mapping.wrap(pool, (DATA,), (STATE,) * 4))(x)
    mean, var, count, weight = (mapping.whole(leaf, STATE) for leaf in results)
    # E[var] + Var[mean]: the mean of the variances alone would miss what tells the shards apart.
    np.testing.assert_allclose(mean, np.broadcast_to(rows.mean(0), mean.shape), atol=1e-6)
    np.testing.assert_allclose(var, np.broadcast_to(rows.var(0), var.shape), rtol=1e-5)
    assert np.all(np.mean(x.var(1), 0) < rows.var(0) * 0.9)
    np.testing.assert_array_equal(count, np.ones_like(count))
    np.testing.assert_array_equal(weight, np.ones_like(weight))


def test_pooled_over_one_of_two_mesh_axes_and_over_both(rng):
    x, _ = sizes_of_shards(rng)
    pooled = {}
    for name in ("one of two mesh axes", "both of two mesh axes"):
        mapping = MAPPINGS[name]
        pool = lambda x, names=mapping.pooled: leaves(nj.pool_stats(train(x), names))  # noqa: E731
        results = quick_jit(mapping.wrap(pool, (DATA,), (STATE,) * 4))(x.reshape(2, 2, 6, 3))
        pooled[name] = [mapping.whole(leaf, STATE) for leaf in results[:2]]
    halves = x.reshape(2, 2, 6, 3).swapaxes(1, 2).reshape(12, 2, 3)
    for i, moment in enumerate((np.mean, np.var)):
        np.testing.assert_allclose(pooled["one of two mesh axes"][i][0], moment(halves, 0), atol=1e-5)
        np.testing.assert_allclose(pooled["both of two mesh axes"][i][0, 0], moment(x, (0, 1)), atol=1e-5)


def test_a_vmap_axis_inside_checked_shard_map_is_an_error_in_the_name_of_pool_stats():
    inner = jax.vmap(lambda x: leaves(nj.pool_stats(train(x), "inner")), axis_name="inner")
    program = MAPPINGS["shard_map"].wrap(inner, (DATA,), (DATA,) * 4)
    with pytest.raises(ValueError, match=r"^pool_stats: 'inner' is an axis of vmap inside shard_map"):
        jax.eval_shape(program, np.zeros((4, 2, 2, 3), np.float32))


def restored(rng):
    """What a checkpoint of pmap holds: every leaf with an axis for the devices in front, under the names of one."""
    stacked = quick_jit(jax.vmap(train))(rng.normal(size=(4, 6, 3)).astype(np.float32))
    assert stacked.names == ("C",)
    return stacked


CALLS = {
    "training": lambda state: nj.batch_norm(np.ones((6, 3), np.float32), None, state, **OWN),
    "evaluation": lambda state: nj.batch_norm(np.ones((6, 3), np.float32), None, state, **{**OWN, "train": False}),
    "update": lambda state: nj.update(state, nj.Moments.init(C=3)),
    "pool_stats": lambda state: nj.pool_stats(state, "device"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_restored_state_with_a_leading_device_axis_is_an_error_that_names_the_cure(call, rng):
    state = restored(rng)
    with pytest.raises(ValueError, match=r"^(batch_norm|update|pool_stats): state\.") as caught:
        call(state)
    cure = 'pool_stats(BatchStats(mean, var, count, weight, names="device C"), "device")'
    assert f"pool them: {cure}; " in str(caught.value)
    assert "jax.tree.map(lambda leaf: leaf[0], state)" in str(caught.value)
    known = {"mean": state.mean, "var": state.var, "count": state.count, "weight": state.weight}
    names = {"pool_stats": nj.pool_stats, "BatchStats": nj.BatchStats}
    cured = quick_jit(lambda known: eval(cure, {**names, **known}))(known)
    assert cured.names == ("C",)
    np.testing.assert_allclose(cured.mean, state.mean.mean(0), atol=1e-6)
    np.testing.assert_allclose(cured.var, state.var.mean(0) + jnp.var(state.mean, 0), atol=1e-5)


@pytest.mark.parametrize("call", ["training", "update"])
def test_a_state_whose_count_alone_has_an_axis_is_an_error_that_names_the_cure(call):
    state = dataclasses.replace(nj.BatchStats.init(C=3), count=jnp.array([3, 5, 4], jnp.int32))
    with pytest.raises(ValueError, match=r"state\.count has shape \(3,\) but must be a scalar") as caught:
        CALLS[call](state)
    cure = "dataclasses.replace(state, count=state.count.max())"
    assert f"take the largest count, as pool_stats does: {cure}." in str(caught.value)
    assert eval(cure, {"dataclasses": dataclasses, "state": state}).count == 5


def test_a_restored_state_under_a_mapping_is_an_error_that_names_the_cure(rng):
    state = restored(rng)
    layer = lambda x, *state: nj.batch_norm(x, None, nj.BatchStats(*state, "C"), **{**OWN, "axis_names": "N data"})[0]  # noqa: E731
    program = MAPPINGS["shard_map"].wrap(lambda *a: (layer(*a),), (DATA, *(PARAMETER,) * 4), (DATA,))
    with pytest.raises(ValueError, match=r'pool_stats\(BatchStats\(.*names="device C"\), "device"\)'):
        jax.eval_shape(program, np.zeros((4, 6, 3), np.float32), *leaves(state))
