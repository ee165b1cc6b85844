"""Properties of the theory for any finite input, by hypothesis: precision, merging, running statistics, gradients."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import numpy as np

import normjax as nj
from normjax import reference
from tests.closeness import close64 as close
from tests.quick import quick_jit

EPS64 = float(np.finfo(np.float64).eps)

BATCH = {"layout": "N C", "axis_names": "N"}


SHAPES = [(1,), (2,), (7,), (3, 4), (2, 3, 5)]
profile = hypothesis.settings(deadline=None, derandomize=True, max_examples=25, database=None)


def arrays(spread: float):
    elements = st.floats(-spread, spread, width=32, allow_subnormal=False)
    return st.sampled_from(SHAPES).flatmap(lambda shape: hnp.arrays(np.float32, (*shape, 2), elements=elements))


@functools.cache
def _forward(center):
    def forward(x, where):
        options = {"center": center, "where": where, "eps": 1e-3}
        return nj.normalize(x, layout="... C", axis_names="...", **options)

    return jax.jit(forward)


@profile
@hypothesis.given(x=arrays(1000.0), center=st.booleans(), data=st.data())
def test_any_finite_input_under_any_mask_is_within_1e_5_of_the_reference(x, center, data):
    where = data.draw(hnp.arrays(bool, x.shape))
    y, found = _forward(center)(x, where)
    axes = {"layout": "... C", "axis_names": "...", "where": where, "center": center}
    expected = reference.normalize(x, eps=1e-3, **axes)
    # An excluded entry may lie far outside: its x̂ is as precise as it is large.
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    mean, var, count = reference.moments(x, **axes)
    eps32 = float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(found.mean, mean, rtol=0, atol=4 * eps32 * np.max(np.abs(x), initial=0))
    np.testing.assert_allclose(found.var, var, rtol=64 * eps32, atol=1e-30)
    np.testing.assert_array_equal(found.count, count)


@quick_jit
def _merged(x, owners):
    parts = [nj.moments(x, where=owners == i, layout="N C", axis_names="N") for i in range(3)]
    return nj.merge(*parts), nj.merge(*parts[::-1])


@profile
@hypothesis.given(x=arrays(100.0), data=st.data())
def test_moments_of_any_split_merge_to_those_of_the_whole_in_any_order(x, data):
    x = x.reshape(-1, 2).astype(np.float64)
    owners = data.draw(hnp.arrays(np.int32, (len(x), 1), elements=st.integers(0, 2)))
    with jax.enable_x64(True):
        for found in _merged(x, owners):
            close(found.mean, x.mean(0), m=len(x))
            close(found.var, x.var(0), m=len(x))
            np.testing.assert_array_equal(found.count, len(x))


@functools.cache
def _updated(debias):
    def step(x, state, alpha):
        batch = nj.moments(x, layout="N C", axis_names="N")
        return batch, nj.update(state, batch, running=nj.Ema(alpha, debias=debias))

    return jax.jit(step)


@profile
@hypothesis.given(x=arrays(100.0), alpha=st.floats(0, 1, width=32), debias=st.booleans())
def test_running_statistics_stay_between_the_least_and_the_largest_seen(x, alpha, debias):
    x = x.reshape(-1, 2)
    state = nj.BatchStats.init(C=2)
    low, high = jax.tree.map(np.array, (state.mean, state.var)), jax.tree.map(np.array, (state.mean, state.var))
    for i in range(3):
        batch, state = jax.tree.map(np.asarray, _updated(debias)(x * (i - 1), state, alpha))
        low = jax.tree.map(np.minimum, low, (batch.mean, batch.var))
        high = jax.tree.map(np.maximum, high, (batch.mean, batch.var))
        for least, stored, largest in zip(low, (state.mean, state.var), high, strict=True):
            assert np.all(least <= stored)
            assert np.all(stored <= largest)


@quick_jit
def _slope(x, g):
    return jax.vjp(lambda x: nj.batch_norm(x, train=True, eps=1e-3, **BATCH)[0], x)[1](g)[0]


@profile
@hypothesis.given(x=arrays(10.0), seed=st.integers(0, 2**16))
def test_the_gradient_of_any_input_sums_to_zero_over_its_group(x, seed):
    x = x.reshape(-1, 2).astype(np.float64)
    g = np.random.default_rng(seed).normal(size=x.shape)
    with jax.enable_x64(True):
        # Each term is at most 1/√ε times the largest cotangent.
        bound = 32 * EPS64 * np.sqrt(x.size) * np.abs(g).max() / np.sqrt(1e-3)
        np.testing.assert_allclose(np.sum(np.asarray(_slope(x, g)), 0), 0, atol=bound)
