"""Cases of micro-batches and of statistics estimated anew."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.cases.common import COLUMN, QUICK, close, each_how, same
from tests.quick import quick_jit

# --- 79: micro-batches


@pytest.mark.case(79)
@each_how
def test_four_updates_with_mean_1_weigh_0_3439_and_one_combined_update_0_1(how):
    x = np.ones((4, 2, 3), np.float32)

    def function(x):
        one_by_one = nj.BatchStats.init(C=3)
        for part in x:
            _, one_by_one = nj.batch_norm(part, None, one_by_one, train=True, **COLUMN)
        merged = nj.merge(*(nj.moments(part, **COLUMN) for part in x))
        return one_by_one, nj.update(nj.BatchStats.init(C=3), merged)

    one_by_one, combined = QUICK[how](function)(x)
    close(one_by_one.mean, np.full(3, 1 - 0.9**4))
    close(combined.mean, np.full(3, 0.1))
    assert (one_by_one.count, combined.count) == (4, 1)


@functools.cache
def merged_parts(center):
    return quick_jit(lambda parts: nj.merge(*(nj.moments(part, center=center, **COLUMN) for part in parts)))


SPLITS = [[8, 8], [1, 15], [4, 4, 4, 4], [3, 0, 6, 7], [1] * 16]


@pytest.mark.case(79)
@pytest.mark.parametrize("center", [True, False], ids=["centred", "uncentred"])
@pytest.mark.parametrize("mean", [0.0, 1e4], ids=["at 0", "at 10⁴"])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_merged_moments_of_micro_batches_are_those_of_the_full_batch(sizes, mean, center, rng):
    x = np.asarray(rng.standard_normal((16, 5)) + mean, np.float32)
    parts = np.split(x, np.cumsum(sizes)[:-1])
    merged = merged_parts(center)(parts)
    exact_mean, exact_var, count = reference.moments(x, center=center, **COLUMN)
    same(merged.count, count.astype(np.float32))
    # Each part's mean is rounded once: the variance of those roundings is second order, their product first.
    np.testing.assert_allclose(merged.mean, exact_mean, rtol=2e-7, atol=1e-6)
    spacing = np.spacing(np.float32(mean)) if center else 0
    np.testing.assert_allclose(merged.var, exact_var, rtol=4e-6 + 4 * spacing)
    if mean == 0:
        y, _ = quick_jit(lambda x, merged: nj.normalize(x, moments=merged, center=center, **COLUMN))(x, merged)
        close(y, reference.normalize(x, center=center, **COLUMN))


@pytest.mark.case(79)
@pytest.mark.parametrize("road", ["stacked", "scan", "pairwise"])
def test_merging_a_stack_a_scan_and_pairs_agree(road, rng):
    x = np.asarray(rng.standard_normal((4, 2, 3, 5)), np.float32)  # four micro-batches "N L C"
    axes = {"layout": "N L C", "axis_names": "N L"}
    if road == "stacked":
        merged = quick_jit(lambda x: nj.merge(jax.vmap(lambda part: nj.moments(part, **axes))(x), axis=0))(x)
    elif road == "scan":
        body = lambda total, part: (nj.merge(total, nj.moments(part, **axes)), None)  # noqa: E731
        merged, _ = quick_jit(lambda x: jax.lax.scan(body, nj.Moments.init(C=5), x))(x)
    else:

        @quick_jit
        def by_pairs(x):
            a, b, c, d = (nj.moments(part, **axes) for part in x)
            return nj.merge(nj.merge(a, b), nj.merge(c, nj.merge(d, nj.Moments.init(C=5))))

        merged = by_pairs(x)
    mean, var, count = reference.moments(x.reshape(8, 3, 5), **axes)
    close(merged.mean, mean)
    close(merged.var, var)
    same(merged.count, count.astype(np.float32))
    state, expected = nj.update(nj.BatchStats.init(C=5), merged), nj.BatchStats.init(C=5)
    _, expected = nj.batch_norm(x.reshape(8, 3, 5), None, expected, train=True, **axes)
    close(state.mean, np.float64(expected.mean))
    close(state.var, np.float64(expected.var))


# --- 80: re-estimated statistics


@pytest.mark.case(80)
@each_how
def test_three_unequal_batches_merge_to_3_75_and_6_1875_and_average_by_their_entries(how):
    batches = [np.array(values, np.float32)[:, None] for values in ([0], [3], [6, 6])]
    original = nj.BatchStats(
        np.full(1, 9, np.float32), np.full(1, 9, np.float32), jnp.array(5), np.ones(1, np.float32), "C"
    )

    def function(*batches):
        merged = nj.merge(*(nj.moments(x, **COLUMN) for x in batches))
        averaged = {"entries": nj.BatchStats.init(C=1), "updates": nj.BatchStats.init(C=1)}
        for x in batches:
            for by, state in averaged.items():
                averaged[by] = nj.batch_norm(x, None, state, train=True, running=nj.Cumulative(by=by), **COLUMN)[1]
        fresh = nj.update(nj.BatchStats.init(C=1), merged, running=nj.Ema(1.0))
        return merged, averaged, fresh, nj.update(original, merged)

    merged, averaged, fresh, _ = QUICK[how](function)(*batches)
    close((merged.mean[0], merged.var[0], merged.count[0]), (3.75, 6.1875, 4))
    close((fresh.mean[0], fresh.var[0]), (3.75, 6.1875))
    by_entries, by_updates = averaged["entries"], averaged["updates"]
    close((by_entries.mean[0], by_entries.weight[0], by_entries.count), (3.75, 4, 3))
    close((by_updates.mean[0], by_updates.weight[0], by_updates.count), (3, 3, 3))
    close((by_entries.var[0], by_updates.var[0]), (0, 0))  # the batches' own variances, averaged
    close((original.mean[0], original.var[0], original.count), (9, 9, 5))


@pytest.mark.case(80)
@pytest.mark.parametrize("by", ["entries", "updates"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_cumulative_averages_of_random_batches_are_the_reference_s(by, masked, rng):
    state, expected = nj.BatchStats.init(C=3), (np.zeros(3), np.ones(3), np.zeros(3))
    originals = jax.tree.map(np.array, state)
    start = state

    @quick_jit
    def step(x, state, where):
        return nj.batch_norm(x, None, state, where=where, train=True, running=nj.Cumulative(by=by), **COLUMN)[1]

    for size in (5, 1, 8, 2):
        x = np.asarray(rng.normal(2, 3, (size, 3)), np.float32)
        where = rng.random(x.shape) < 0.7 if masked else None
        state = step(x, state, where)
        batch = reference.moments(x, where=where, **COLUMN)
        expected = reference.update(*expected, *batch, rule=f"cumulative_{by}")
    for actual, exact in zip((state.mean, state.var, state.weight), expected, strict=True):
        close(actual, exact)
    same(start, originals)
