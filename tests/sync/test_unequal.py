"""Shards with unequal counts: means, unbiased variances and gradients go by the entries of all devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.quick import quick_jit
from tests.sync.mappings import DATA, GRADIENT, MAPPINGS, PARAMETER, STATE

SPREAD = ("pmap", "shard_map", "unchecked shard_map", "vmap")
RUNNING = {
    "unbiased": nj.Ema(1.0, unbiased=True),
    "by entries": nj.Cumulative(by="entries"),
    "debiased": nj.Ema(0.25, debias=True),
}
OPTIONS = {"layout": "N C", "axis_names": "N data"}


@functools.cache
def program(spread: str):
    """f(x, g, where, scale, bias, state) → y, dx, dparams and a new state for each rule, of four shards in float32."""

    def step(x, g, where, scale, bias, *state):
        def apply(x, scale, bias):
            y, moments = nj.normalize(x, nj.Affine(scale, bias, "C"), where=where, **OPTIONS)
            given = nj.BatchStats(*state, "C")
            return y, jax.tree.leaves([nj.update(given, moments, running=rule) for rule in RUNNING.values()])

        y, pullback, news = jax.vjp(apply, x, scale, bias, has_aux=True)
        return y, *pullback(g), *news

    mapping = MAPPINGS[spread]
    roles = (DATA,) * 2 + (GRADIENT,) * 2 + (STATE,) * 4 * len(RUNNING)
    run = quick_jit(mapping.wrap(step, (DATA,) * 3 + (PARAMETER,) * 6, roles))

    def whole(*args):
        y, dx, d_scale, d_bias, *news = (mapping.whole(out, role) for out, role in zip(run(*args), roles, strict=True))
        states = [nj.BatchStats(*news[i : i + 4], "C") for i in range(0, len(news), 4)]
        return y, dx, d_scale, d_bias, dict(zip(RUNNING, states, strict=True))

    return whole


def fresh(features):
    return tuple(np.asarray(leaf) for leaf in jax.tree.leaves(nj.BatchStats.init(C=features)))


@pytest.mark.case(36)
@pytest.mark.case(37)
@pytest.mark.parametrize("spread", SPREAD)
def test_four_zeros_here_and_one_eight_there_have_mean_1_6_and_unbiased_variance_12_8_everywhere(spread):
    x = np.full((4, 4, 1), np.nan, np.float32)
    x[1], x[3, 2] = 0.0, 8.0
    where = np.isfinite(x)
    ones, zeros = np.ones(1, np.float32), np.zeros(1, np.float32)
    *_, states = program(spread)(x, np.ones_like(x), where, ones, zeros, *fresh(1))
    unbiased, entries = states["unbiased"], states["by entries"]
    # The mean of the shards' means would be 4, or 2 over all four of them; 12.8 = 10.24 · 5/4.
    np.testing.assert_allclose(unbiased.mean, np.full_like(unbiased.mean, 1.6), rtol=1e-6)
    np.testing.assert_allclose(unbiased.var, np.full_like(unbiased.var, 12.8), rtol=1e-6)
    np.testing.assert_allclose(entries.var, np.full_like(entries.var, 10.24), rtol=1e-6)
    np.testing.assert_array_equal(entries.weight, np.full_like(entries.weight, 5))
    np.testing.assert_array_equal(entries.count, np.ones_like(entries.count))


@pytest.mark.case(36)
@pytest.mark.case(37)
@pytest.mark.parametrize("spread", SPREAD)
def test_the_backward_divides_by_the_entries_of_all_devices(spread, rng):
    x, g = rng.normal(1.5, 2.0, (2, 4, 4, 3)).astype(np.float32)
    scale, bias = rng.normal(size=(2, 3)).astype(np.float32)
    # 4, 2, 1 and no rows: what one device would divide by differs from the mean over devices, and from the sum's 7.
    where = np.broadcast_to((np.arange(4) < np.array([[4], [2], [1], [0]]))[..., None], x.shape)
    y, dx, d_scale, d_bias, states = program(spread)(x, g, where, scale, bias, *fresh(3))
    spec = {"layout": "S N C", "axis_names": "S N", "where": where}
    exact = reference.normalize(x, scale, bias, names="C", **spec)
    slopes = reference.backward(x, g, scale, bias, names="C", **spec)
    # 28 rounded terms in a sum: 16 eps √28 of numbers of size 10 at most.
    for actual, wanted in zip((y, dx, d_scale, d_bias), (exact, *slopes), strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-4)
    mean, var, m = reference.moments(x, **spec)
    assert m[0] == 7
    for new, factor in ((states["unbiased"], 7 / 6), (states["by entries"], 1.0)):
        np.testing.assert_allclose(new.mean, np.broadcast_to(mean, new.mean.shape), atol=1e-5)
        np.testing.assert_allclose(new.var, np.broadcast_to(factor * var, new.var.shape), rtol=1e-5)


@pytest.mark.parametrize("spread", SPREAD)
def test_shards_that_are_all_empty_leave_every_state_bit_for_bit(spread, rng):
    x, g = rng.normal(size=(2, 4, 4, 3)).astype(np.float32)
    x[:, ::2] = np.nan
    scale, bias, mean = rng.normal(size=(3, 3)).astype(np.float32)
    var, weight = rng.uniform(0.5, 2.0, (2, 3)).astype(np.float32)
    state = (mean, var, np.int32(5), weight)
    y, dx, d_scale, d_bias, states = program(spread)(x, g, np.zeros(x.shape, bool), scale, bias, *state)
    np.testing.assert_array_equal(y[:, 1::2], np.broadcast_to(bias, y[:, 1::2].shape))
    np.testing.assert_array_equal(dx, np.zeros_like(dx))
    np.testing.assert_array_equal(d_scale, np.zeros(3))
    np.testing.assert_allclose(d_bias, g[:, 1::2].sum((0, 1)), atol=1e-5)
    for new in states.values():
        for leaf, kept in zip(jax.tree.leaves(new), state, strict=True):
            np.testing.assert_array_equal(leaf, np.broadcast_to(kept, leaf.shape))


@pytest.mark.parametrize("spread", SPREAD)
def test_one_entry_on_all_devices_together_leaves_the_unbiased_factor_out(spread):
    x = np.full((4, 4, 1), 3.0, np.float32)
    where = np.zeros(x.shape, bool)
    where[2, 1] = True
    ones, zeros = np.ones(1, np.float32), np.zeros(1, np.float32)
    *_, states = program(spread)(x, x, where, ones, zeros, *fresh(1))
    np.testing.assert_array_equal(states["unbiased"].mean, np.full_like(states["unbiased"].mean, 3.0))
    np.testing.assert_array_equal(states["unbiased"].var, np.zeros_like(states["unbiased"].var))


def test_a_shard_that_pools_no_row_takes_part():
    """One device's batch may have no rows at all, as the last of an epoch."""
    layer = lambda x: nj.moments(x, layout="N C", axis_names="N data")  # noqa: E731
    pooled = quick_jit(jax.vmap(layer, axis_name="data"))(jnp.zeros((4, 0, 3)))
    np.testing.assert_array_equal(pooled.count, np.zeros((4, 3)))
    np.testing.assert_array_equal(pooled.var, np.zeros((4, 3)))
