"""Mapped axes of more than 32 lanes, whose statistics are pooled by sums: as exact as those of few, also in groups."""

import jax
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.quick import quick_jit

LANES = (40, 100)
ROWS, FEATURES = 8, 3


def far_apart(rng, lanes):
    """Lanes that take turns in four groups, two of them at the ends, none at the middle of all."""
    means = np.array([1e4, -1e4, 3e3, -2e3])[np.arange(lanes) % 4]
    return rng.normal(means[:, None, None], 1.0, (lanes, ROWS, FEATURES)), [list(range(i, lanes, 4)) for i in range(4)]


def all_but_one(lanes):
    """A mask that leaves one whole lane out, whose shift is 0."""
    return np.arange(lanes)[:, None, None] != 5


def one_mean(rng, lanes):
    return rng.normal(1e4, 1.0, (lanes, ROWS, FEATURES))


def a_lane_a_little_off(rng, lanes):
    """Seen from 0, where no lane is that counts, most lanes are on one side of the nearest end."""
    x = rng.normal(1e6, 1.0, (lanes, ROWS, FEATURES))
    x[lanes // 3] += 1e4
    return x


def a_lane_of_zeros(rng, lanes):
    x = rng.normal(1e4, 1.0, (lanes, ROWS, FEATURES))
    x[lanes // 3] = 0.0
    return x


def a_lane_far_off(rng, lanes):
    x = rng.normal(0.0, 1.0, (lanes, ROWS, FEATURES))
    x[lanes // 3] += 1e6
    return x


def assert_x_hat(x, where=None, groups=None):
    """x̂ of float32 lanes is within 1e-6 of float64 on the same input; where |x̂| > 1, relative to it."""
    x = x.astype(np.float32)

    def layer(x, where):
        options = {"layout": "N C", "axis_names": "N data", "eps": 0.0, "axis_index_groups": groups}
        return nj.normalize(x, where=where, **options)[0]

    y = jax.jit(jax.vmap(layer, axis_name="data"))(x, where)
    for group in groups or [slice(None)]:
        mask = None if where is None else where[group]
        wanted = reference.normalize(x[group], layout="S N C", axis_names="S N", eps=0.0, where=mask)
        error = np.abs(np.asarray(y, np.float64)[group] - wanted) / np.maximum(1, np.abs(wanted))
        assert error.max() < 1e-6


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("made", [one_mean, a_lane_a_little_off])
def test_a_lane_of_which_nothing_counts_costs_no_digits(made, lanes, rng):
    assert_x_hat(made(rng, lanes), all_but_one(lanes))


@pytest.mark.parametrize("lanes", LANES)
def test_groups_of_lanes_far_apart_cost_each_other_no_digits(lanes, rng):
    x, groups = far_apart(rng, lanes)
    assert_x_hat(x, groups=groups)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("made", [a_lane_of_zeros, a_lane_far_off])
def test_a_lane_far_from_all_others_costs_no_digits(made, lanes, rng):
    assert_x_hat(made(rng, lanes))


@pytest.mark.parametrize("derivative", ["vjp", "jvp", "autodiff"])
@pytest.mark.parametrize("groups", [None, [[5], list(range(5)), list(range(6, 40))]])
def test_the_backward_has_what_passes_between_lanes(groups, derivative, rng, x64):
    lanes = LANES[0]
    x, g = rng.normal(size=(2, lanes, ROWS, FEATURES))
    x += rng.normal(0.0, 3.0, (lanes, 1, FEATURES))  # most of the variance is between lanes
    where = rng.random(x.shape) < rng.uniform(0.3, 1.0, (lanes, 1, 1))
    where[7] = False

    @quick_jit
    def step(x, g):
        def layer(x, where):
            options = {"layout": "N C", "axis_names": "N data", "axis_index_groups": groups, "derivative": derivative}
            return nj.normalize(x, where=where, **options)[0]

        y, pullback = jax.vjp(lambda x: jax.vmap(layer, axis_name="data")(x, where), x)
        return y, *pullback(g)

    y, dx = map(np.asarray, step(x, g))
    for group in groups or [slice(None)]:
        spec = {"layout": "S N C", "axis_names": "S N", "where": where[group]}
        np.testing.assert_allclose(y[group], reference.normalize(x[group], **spec), rtol=1e-10, atol=1e-10)
        wanted, *_ = reference.backward(x[group], g[group], **spec)
        np.testing.assert_allclose(dx[group], wanted, rtol=1e-10, atol=1e-10)
