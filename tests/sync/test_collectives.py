"""Collectives of one synchronised batch norm, counted with their payloads in programs compiled for eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from benchmarks.deviceless import hlo
from normjax import _mapped, reference
from tests.derivatives import DERIVATIVES, dear
from tests.quick import quick_jit
from tests.sync.mappings import DATA, GRADIENT, NORM, NORMED, PARAMETER, STATE, Mapping, Pmap, ShardMap, Vmap

DEVICES, CHANNELS, FLOAT = 8, 16, 4
EIGHT = (("data",), (DEVICES,))
SPREAD = {
    "pmap": Pmap(*EIGHT),
    "unchecked shard_map": ShardMap(*EIGHT, check=False),
    "shard_map": ShardMap(*EIGHT),
}
# Each device's means, and what rounding left out of six of them in five more; and the sum of all devices' squares.
FORWARD = FLOAT * (DEVICES * (2 * CHANNELS - CHANNELS // 6) + CHANNELS)
MOST = FLOAT * DEVICES * (2 * CHANNELS + 1)
assert FORWARD <= MOST
BACKWARD = FLOAT * 2 * CHANNELS
each_derivative = pytest.mark.parametrize("derivative", DERIVATIVES)


def synchronised(derivative="vjp", train=True, axis_names="N data"):
    """f(x, scale, bias, mean, var) → y and the new mean and var."""

    def norm(x, scale, bias, mean, var):
        state = nj.BatchStats(mean, var, jnp.int32(0), jnp.zeros(CHANNELS, jnp.float32), "C")
        options = {"layout": "N C", "axis_names": axis_names, "train": train, "derivative": derivative}
        y, new = nj.sync_batch_norm(x, nj.Affine(scale, bias, "C"), state, **options)
        return y, new.mean, new.var

    return norm


def value_and_gradient(norm):
    """f(x, scale, bias, mean, var, g) → y, dx, dscale, dbias and the new mean and var."""

    def step(x, scale, bias, mean, var, g):
        def apply(x, scale, bias):
            y, *state = norm(x, scale, bias, mean, var)
            return y, state

        y, pullback, state = jax.vjp(apply, x, scale, bias, has_aux=True)
        return y, *pullback(g), *state

    return step


def collectives(function, *arguments) -> list[int]:
    """The payload in bytes of each collective of the compiled program, in order."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in arguments]
    text = quick_jit(function).lower(*shapes).compile().as_text()
    return [payload for _, payload in hlo.count(text).collectives]


X, C = (DEVICES, 4, CHANNELS), (CHANNELS,)
ROLES = ((DATA, *(PARAMETER,) * 4, DATA), (DATA, DATA, GRADIENT, GRADIENT, STATE, STATE))


def of_step(step, spread="unchecked shard_map"):
    return collectives(SPREAD[spread].wrap(step, *ROLES), X, C, C, C, C, X)


@each_derivative
@pytest.mark.parametrize("spread", SPREAD)
def test_value_and_gradient_take_two_collectives(spread, derivative):
    # Checked, the gradients of scale and bias arrive summed, by the very same collective.
    assert of_step(value_and_gradient(synchronised(derivative)), spread) == [FORWARD, BACKWARD]


@pytest.mark.parametrize("spread", SPREAD)
def test_a_mask_sends_the_counts_along(spread):
    def norm(x, scale, bias, *state):
        where = jnp.arange(len(x))[:, None] <= jax.lax.axis_index("data") % len(x)
        params = nj.Affine(scale, bias, "C")
        y, m = nj.normalize(x, params, layout="N C", axis_names="N data", where=where)
        return y, m.mean, m.var

    payloads = of_step(value_and_gradient(norm), spread)
    assert payloads == [FORWARD + FLOAT * DEVICES, BACKWARD]
    assert payloads[0] <= MOST


@each_derivative
def test_a_checkpoint_that_saves_the_statistics_takes_two_collectives(derivative):
    policy = jax.checkpoint_policies.save_only_these_names("normjax_stats")
    norm = jax.checkpoint(synchronised(derivative), policy=policy)
    assert of_step(value_and_gradient(norm)) == [FORWARD, BACKWARD]


def test_a_checkpoint_without_the_policy_takes_the_forwards_collective_again():
    # What the policy is for, and what the count above would notice.
    norm = jax.checkpoint(synchronised(), policy=jax.checkpoint_policies.nothing_saveable)
    assert sum(of_step(value_and_gradient(norm))) == FORWARD + FORWARD + BACKWARD


def test_one_more_collective_is_noticed():
    def norm(x, *others):
        return synchronised()(x - jax.lax.pmean(x.mean(0), "data"), *others)

    mean = FLOAT * CHANNELS
    assert of_step(value_and_gradient(norm)) == [mean, FORWARD, BACKWARD, mean]


@pytest.mark.parametrize("derivative", ["jvp", "autodiff"])
def test_value_and_tangent_take_two_collectives(derivative):
    def step(x, scale, bias, mean, var, g):
        norm = lambda x: synchronised(derivative)(x, scale, bias, mean, var)[0]  # noqa: E731
        return jax.jvp(norm, (x,), (g,))

    wrapped = SPREAD["unchecked shard_map"].wrap(step, ROLES[0], (DATA, DATA))
    assert collectives(wrapped, X, C, C, C, C, X) == [FORWARD, BACKWARD]


def test_evaluation_takes_no_collective():
    norm = synchronised(train=False)
    assert collectives(SPREAD["unchecked shard_map"].wrap(norm, NORM[:1] + NORM[2:], NORMED), X, C, C, C, C) == []


def test_a_root_mean_square_needs_no_slots():
    def step(x, g):
        norm = lambda x: nj.rms_norm(x, layout="N D", axis_names="N data")[0]  # noqa: E731
        y, pullback = jax.vjp(norm, x)
        return y, *pullback(g)

    wrapped = SPREAD["unchecked shard_map"].wrap(step, (DATA, DATA), (DATA, DATA))
    assert collectives(wrapped, X, X) == [FLOAT * (CHANNELS + 1), FLOAT * CHANNELS]


def test_more_shards_than_slots_are_worth_take_two_forward_collectives_of_a_fixed_size():
    """Eight examples on each of eight devices: 64 slots would take 129 C + 64 numbers, the two take 8 C + 1."""
    mapping = Mapping((SPREAD["unchecked shard_map"], Vmap(("inner",), (8,))), pooled=("data", "inner"))
    norm = value_and_gradient(synchronised(axis_names="N data inner"))
    x = (DEVICES, 8, 4, CHANNELS)
    largest, sums, backward = collectives(mapping.wrap(norm, *ROLES), x, C, C, C, C, x)
    assert (largest, sums, backward) == (FLOAT * 2 * CHANNELS, FLOAT * (6 * CHANNELS + 1), BACKWARD)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("size", [0, 1, 5, 6, 7, 12, 33])
def test_six_integers_of_20_bits_travel_in_five_floats(size, dtype, rng, x64):
    rows = rng.integers(0, 2**20, (5, size))
    rows[:2] = [[0], [2**20 - 1]]
    sent = jnp.stack([_mapped._six_in_five(jnp.asarray(row, dtype)) for row in rows])
    assert sent.shape == (5, size - size // 6)
    assert sent.dtype == dtype
    np.testing.assert_array_equal(_mapped._five_to_six(sent, size), rows)


@functools.cache
def _standardised(devices: int, masked: bool):
    def norm(x, where):
        y, m = nj.normalize(x, layout="N C", axis_names="N data", where=where if masked else None, eps=0.0)
        return y, m.mean, m.var

    return jax.jit(Vmap(("data",), (devices,)).wrap(norm, (DATA, DATA), (DATA, DATA, DATA)))


@dear(
    lambda rows, means_at, devices, masked: masked == (rows == 12),
    rows=[64, 12],  # 1/12 is no float: e's last product is rounded
    means_at=[(1e4, 0.0), (1e4, 1.0), (1e4, 100.0), (-1e6, 1.0), (1e7, 3.0)],  # of all devices, and how far apart
    devices=[2, 8, 40],
    masked=[False, True],
)
def test_a_mean_of_ten_thousand_costs_nothing(rows, means_at, devices, masked, rng):
    mean, apart = means_at
    means = mean + apart * rng.normal(size=(devices, 1, 9))
    x = rng.normal(means, 1.0, (devices, rows, 9)).astype(np.float32)
    where = rng.random(x.shape) < 0.5 if masked else np.ones(x.shape, bool)
    y, mean, var = _standardised(devices, masked)(x, where)
    spec = {"layout": "S N C", "axis_names": "S N", "where": where}
    exact = reference.normalize(x, eps=0.0, **spec)
    # 1e-6, as on one device, and relative where x̂ is larger than 1.
    assert np.max(np.abs(np.asarray(y, np.float64) - exact) / np.maximum(1, np.abs(exact))) <= 1e-6
    wanted_mean, wanted_var, _ = reference.moments(x, **spec)
    np.testing.assert_allclose(np.asarray(var, np.float64), np.broadcast_to(wanted_var, var.shape), rtol=2e-6)
    np.testing.assert_allclose(np.asarray(mean, np.float64), np.broadcast_to(wanted_mean, mean.shape), rtol=1e-7)
