"""`pool_stats`: running statistics of replicas that trained apart become one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import reference
from tests.closeness import close
from tests.quick import quick_jit

SPEC = {"layout": "N C", "axis_names": "N"}


STATE = nj.BatchStats.init(C=3)
STACKED = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), STATE)


def replicas(rng, number=4, features=3):
    """States of replicas that saw different data, one of them nothing; count is one number for each."""
    mean = rng.normal(2.0, 3.0, (number, features)).astype(np.float32)
    var = rng.uniform(0.5, 2.0, (number, features)).astype(np.float32)
    weight = rng.uniform(0.5, 1.0, (number, features)).astype(np.float32)
    weight[1] = 0
    return nj.BatchStats(mean, var, np.arange(number, dtype=np.int32), weight, "device C")


def pooled(state):
    """The mean of the means, and E[var] + Var[mean], in float64, each replica by its weight."""
    mean, var, w = (np.asarray(leaf, np.float64) for leaf in (state.mean, state.var, state.weight))
    n = w.sum(0)
    center = (w * mean).sum(0) / n
    return center, (w * (var + (mean - center) ** 2)).sum(0) / n


def assert_pooled(got, state):
    mean, var = pooled(state)
    close(got.mean, mean, m=4)
    close(got.var, var, m=4)
    np.testing.assert_array_equal(got.weight, state.weight.max(0))
    np.testing.assert_array_equal(got.count, np.int32(3))
    assert got.names == ("C",)


def test_replicas_along_an_axis_of_the_arrays_pool_to_one(rng):
    state = replicas(rng)
    assert_pooled(quick_jit(lambda state: nj.pool_stats(state, "device"))(state), state)


def local(state):
    """One replica's own state, from a block that keeps the leading axis."""
    return nj.BatchStats(*(jnp.reshape(leaf, leaf.shape[1:]) for leaf in jax.tree.leaves(state)), "C")


def one_each(state):
    """The stacked state with the names of one replica, for a transform to take apart."""
    return nj.BatchStats(*jax.tree.leaves(state), "C")


@pytest.mark.parametrize("names", ["data", ("data",)])
def test_replicas_along_a_vmap_axis_pool_to_one_that_is_not_mapped(names, rng):
    state = replicas(rng)
    pool = jax.vmap(lambda state: nj.pool_stats(state, names), axis_name="data", out_axes=None)
    assert_pooled(quick_jit(pool)(one_each(state)), state)


def test_replicas_of_pmap_pool_to_the_same_on_every_device(rng):
    state = replicas(rng)
    got = jax.pmap(lambda state: nj.pool_stats(state, "data"), axis_name="data", devices=jax.devices()[:4])(
        one_each(state)
    )
    for device in range(4):
        assert_pooled(jax.tree.map(lambda leaf, device=device: leaf[device], got), state)


@pytest.mark.case(47)
@pytest.mark.parametrize("check_vma", [True, False])
def test_replicas_of_shard_map_pool_to_one_that_counts_as_replicated(check_vma, rng):
    state = replicas(rng)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    pool = jax.shard_map(
        lambda state: nj.pool_stats(local(state), "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        check_vma=check_vma,
    )
    assert_pooled(quick_jit(pool)(one_each(state)), state)


def test_replicas_along_an_array_axis_and_a_mapped_axis_pool_at_once(rng):
    state = replicas(rng)
    halves = jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), state)
    pool = jax.vmap(lambda state: nj.pool_stats(state, "device data"), axis_name="data", out_axes=None)
    assert_pooled(quick_jit(pool)(halves), state)


def test_replicas_that_all_saw_nothing_pool_to_a_fresh_state():
    state = nj.BatchStats(*jax.tree.leaves(STACKED), "device C")
    got = quick_jit(lambda state: nj.pool_stats(state, "device"))(state)
    for leaf, fresh in zip(jax.tree.leaves(got), jax.tree.leaves(STATE), strict=True):
        np.testing.assert_array_equal(leaf, fresh)
        assert leaf.dtype == fresh.dtype


def test_equal_replicas_pool_to_themselves(rng):
    mean, var = rng.normal(1e4, 1.0, 3).astype(np.float32), rng.uniform(1, 2, 3).astype(np.float32)
    one = nj.BatchStats(mean, var, np.int32(2), np.ones(3, np.float32), "C")
    four = nj.BatchStats(*(np.stack([leaf] * 4) for leaf in jax.tree.leaves(one)), "device C")
    got = quick_jit(lambda state: nj.pool_stats(state, "device"))(four)
    np.testing.assert_array_equal(got.mean, one.mean)
    np.testing.assert_array_equal(got.var, one.var)


def test_the_cure_that_the_error_offers_works(rng):
    x = rng.normal(size=(4, 3)).astype(np.float32)
    state = one_each(replicas(rng))
    with pytest.raises(ValueError, match="pool them") as caught:
        nj.batch_norm(x, None, state, train=False, **SPEC)
    advice = str(caught.value).split("pool them: ")[1].split(";")[0]
    known = {"mean": state.mean, "var": state.var, "count": state.count, "weight": state.weight}
    cured = eval(advice, {"pool_stats": nj.pool_stats, "BatchStats": nj.BatchStats, **known})
    y, _ = nj.batch_norm(x, None, cured, train=False, **SPEC)
    mean, var = pooled(state)
    close(y, reference.normalize(x, mean=mean, var=var, stat_names="C", **SPEC), m=4)


def test_nothing_flows_through_pooling(rng):
    state = replicas(rng)
    loss = lambda state: jnp.sum(nj.pool_stats(state, "device").var)  # noqa: E731
    gradient = quick_jit(jax.grad(loss, allow_int=True))(jax.tree.map(jnp.asarray, state))
    np.testing.assert_array_equal(gradient.mean, np.zeros((4, 3)))
    np.testing.assert_array_equal(gradient.var, np.zeros((4, 3)))
