"""The reference against the invariants of the theory, under masks, for empty groups, and in its running statistics."""

import ast
from pathlib import Path

import numpy as np
import pytest

from normjax import reference
from tests.closeness import close64 as close

ONE = {"layout": "N", "axis_names": "N"}


@pytest.mark.parametrize("center", [True, False])
def test_scaling_x_equals_scaling_eps_and_a_negative_factor_flips_the_sign(center, rng):
    x = rng.normal(size=(4, 9))
    options = {"layout": "N D", "axis_names": "D", "center": center}
    for factor in (3.0, -3.0):
        y = reference.normalize(factor * x, eps=0.1, **options)
        close(y, np.sign(factor) * reference.normalize(x, eps=0.1 / factor**2, **options), m=9)


def test_the_part_of_dx_along_the_standardised_values_vanishes_with_eps(rng):
    x, g = rng.normal(size=(2, 50))
    var = float(np.var(x))
    for eps in (1.0, 1e-3, 0.0):
        standard = reference.normalize(x, eps=eps, **ONE)
        dx = reference.backward(x, g, eps=eps, **ONE)[0]
        expected = np.sum(g * standard) / np.sqrt(var + eps) * eps / (var + eps)
        close(np.sum(standard * dx), expected, m=50)


def test_the_standardised_values_have_mean_0_and_variance_v_over_v_plus_eps(rng):
    x = rng.normal(3.0, 2.0, size=40)
    y = reference.normalize(x, eps=0.5, **ONE)
    close(np.mean(y), 0, m=40)
    close(np.var(y), np.var(x) / (np.var(x) + 0.5), m=40)


def test_scaling_the_weight_before_a_norm_leaves_the_output_and_shrinks_the_gradient(rng):
    inputs, weight = rng.normal(size=(20, 3)), rng.normal(size=(3, 4))
    g = rng.normal(size=(20, 4))
    options = {"layout": "N C", "axis_names": "N", "eps": 0}

    def output_and_gradient(weight):
        hidden = inputs @ weight
        return reference.normalize(hidden, **options), inputs.T @ reference.backward(hidden, g, **options)[0]

    (y, dw), (y_scaled, dw_scaled) = output_and_gradient(weight), output_and_gradient(7 * weight)
    close(y_scaled, y, m=20)
    close(7 * dw_scaled, dw, m=20, k=64)


def test_scale_root_of_variance_and_bias_mean_give_the_batch_back_but_no_other(rng):
    x = rng.normal(4.0, 3.0, size=(30, 2))
    mean, var, _ = reference.moments(x, layout="N C", axis_names="N")
    affine = {"scale": np.sqrt(var + 1e-5), "bias": mean, "names": "C"}
    close(reference.normalize(x, layout="N C", axis_names="N", **affine), x, m=30)
    other = reference.normalize(2 * x, layout="N C", axis_names="N", **affine)
    assert np.max(np.abs(other - 2 * x)) > 1


def test_only_batch_norm_in_training_couples_the_examples(rng):
    x = rng.normal(size=(4, 6, 8))
    changed = np.concatenate([x[:1], 5 * x[1:]])

    def first_changes(**options):
        before, after = (reference.normalize(batch, layout="N L C=(G=2 K)", **options)[0] for batch in (x, changed))
        return not np.array_equal(before, after)

    assert first_changes(axis_names="N L")
    assert not first_changes(axis_names="N L", mean=np.zeros(8), var=np.ones(8))
    assert not first_changes(axis_names="C")
    assert not first_changes(axis_names="L")
    assert not first_changes(axis_names="L K")
    assert not first_changes(axis_names="C", center=False)


def test_batch_statistics_perturb_an_activation_by_order_one_over_root_m(rng):
    draws = 400

    def noise(m):
        others = rng.normal(size=(draws, m - 1))
        batches = np.concatenate([np.full((draws, 1), 0.5), others], axis=1)
        return np.std(reference.normalize(batches, layout="draw N", axis_names="N")[:, 0])

    # A standard deviation from n draws is off by 1/√(2n); five times that for the ratio of two.
    np.testing.assert_allclose(noise(64) / noise(1024), 4.0, rtol=5 * np.sqrt(2 / (2 * draws)))


# --- masks, empty groups, NaN


def test_excluded_entries_change_no_statistic(rng):
    x = rng.normal(size=(8, 3))
    where = (np.arange(8) < 5)[:, None]
    expected = reference.moments(x[:5], layout="N C", axis_names="N")
    x[5:] = [[np.nan], [np.inf], [-10.0]]
    for actual, wanted in zip(reference.moments(x, layout="N C", axis_names="N", where=where), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)
    y = reference.normalize(x, layout="N C", axis_names="N", where=where)
    close(y[7], (-10 - expected[0]) / np.sqrt(expected[1] + 1e-5))
    assert np.isnan(y[5]).all()


@pytest.mark.parametrize("frozen", [{}, {"mean": np.zeros(3), "var": np.ones(3)}], ids=["batch", "frozen"])
def test_an_excluded_nan_takes_no_part_in_the_gradient_whatever_its_cotangent(frozen, rng):
    x, g = rng.normal(size=(2, 8, 3))
    scale = rng.normal(size=(8, 3))
    options = {"names": "N C", "layout": "N C", "axis_names": "N", "where": (np.arange(8) < 5)[:, None], **frozen}
    broken, bad_g, bad_scale = x.copy(), g.copy(), scale.copy()
    broken[6:] = [[np.nan], [-np.inf]]
    bad_g[6:] = bad_scale[6:] = np.nan
    g[6:] = 0
    expected = reference.backward(x, g, scale, scale, **options)
    actual = reference.backward(broken, bad_g, bad_scale, bad_scale, **options)
    for got, wanted in zip(actual, expected, strict=True):
        close(got[:6], wanted[:6], m=8)
        np.testing.assert_array_equal(got[6:], 0)


def test_an_included_nan_reaches_its_own_group_and_no_other(rng):
    x, g = rng.normal(size=(2, 6, 2))
    x[3, 1] = np.nan
    options = {"layout": "N C", "axis_names": "N"}
    for array in (
        reference.normalize(x, **options),
        reference.backward(x, g, **options)[0],
        reference.moments(x, **options)[1],
    ):
        assert np.isfinite(array[..., 0]).all()
        assert np.isnan(array[..., 1]).all()


def test_a_group_without_an_entry_gives_the_bias_and_zero_gradient(rng):
    x, g = rng.normal(size=(2, 2, 4))
    x[1, 2] = np.nan
    where = np.array([[True], [False]])
    options = {"layout": "N D", "axis_names": "D", "where": where, "names": "D"}
    scale, bias = rng.normal(size=(2, 4))
    assert [float(number[1]) for number in reference.moments(x, layout="N D", axis_names="D", where=where)] == [0, 0, 0]
    np.testing.assert_array_equal(reference.normalize(x, scale, bias, **options)[1], bias)
    dx, dscale, _ = reference.backward(x, g, scale, bias, **options)
    np.testing.assert_array_equal(dx[1], 0)
    alone = reference.backward(x[:1], g[:1], scale, bias, **{**options, "where": None})
    close(dscale, alone[1])


def test_an_empty_batch_has_empty_statistics():
    x = np.zeros((0, 3))
    for number in reference.moments(x, layout="N C", axis_names="N"):
        np.testing.assert_array_equal(number, np.zeros(3))
    assert reference.normalize(x, layout="N C", axis_names="N").shape == (0, 3)
    dx, dscale, _ = reference.backward(x, x, np.ones(3), np.ones(3), names="C", layout="N C", axis_names="N")
    assert dx.shape == (0, 3)
    np.testing.assert_array_equal(dscale, np.zeros(3))


@pytest.mark.parametrize("frozen", [{}, {"mean": 2.0, "var": 0.0, "stat_names": ""}], ids=["batch", "frozen"])
def test_with_eps_zero_a_group_of_variance_zero_gives_the_bias_and_zero_gradient(frozen):
    options = {**ONE, "eps": 0, **frozen}
    np.testing.assert_array_equal(reference.normalize([2, 2, 2], 5.0, 3.0, **options), [3, 3, 3])
    dx, dscale, dbias = reference.backward([2, 2, 2], [1, 2, 4], 5.0, 3.0, **options)
    np.testing.assert_array_equal(dx, 0)
    assert (dscale, dbias) == (0, 7)


def test_an_infinite_variance_gives_nan_and_not_silent_zeros():
    assert np.isnan(reference.normalize([1.0, 2.0], mean=0.0, var=np.inf, stat_names="", **ONE)).all()
    assert np.isnan(reference.normalize([1e200, -1e200], center=False, **ONE)).all()


# --- running statistics and merging


def one_update(rule, weight=0.0, mean=0.0, var=1.0, batch=(10.0, 5.0, 4.0), **options):
    return tuple(float(number) for number in reference.update(mean, var, weight, *batch, rule=rule, **options))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"rule": "ema"}, (1.0, 1.4, 1.0)),
        ({"rule": "ema", "unbiased": True}, (1.0, 0.9 + 0.1 * 20 / 3, 1.0)),
        ({"rule": "ema", "new_weight": 1.0, "batch": (2.0, 8.0, 3.0), "unbiased": True}, (2.0, 12.0, 1.0)),
        ({"rule": "ema", "batch": (10.0, 0.0, 1.0), "unbiased": True}, (1.0, 0.9, 1.0)),
        ({"rule": "ema_debiased"}, (10.0, 5.0, 0.1)),
        ({"rule": "ema_debiased", "weight": 0.1, "mean": 29.0}, (19.0, 1 + 4 / 1.9, 0.19)),
        ({"rule": "cumulative_entries"}, (10.0, 5.0, 4.0)),
        ({"rule": "cumulative_entries", "weight": 12.0, "mean": 2.0}, (4.0, 2.0, 16.0)),
        ({"rule": "cumulative_updates"}, (10.0, 5.0, 1.0)),
        ({"rule": "cumulative_updates", "weight": 3.0, "mean": 2.0}, (4.0, 2.0, 4.0)),
        ({"rule": "ema", "batch": (0.0, 0.0, 0.0)}, (0.0, 1.0, 0.0)),
        ({"rule": "ema_debiased", "batch": (0.0, 0.0, 0.0)}, (0.0, 1.0, 0.0)),
        ({"rule": "cumulative_entries", "batch": (0.0, 0.0, 0.0)}, (0.0, 1.0, 0.0)),
        ({"rule": "cumulative_updates", "weight": 3.0, "batch": (0.0, 0.0, 0.0)}, (0.0, 1.0, 3.0)),
    ],
)
def test_one_update_moves_the_running_statistics_by_its_rule(options, expected):
    # Worked by hand: r + (a/w')(batch − r), from a running mean of 0 and variance of 1.
    close(one_update(**options), expected, k=8)


def test_cumulative_statistics_are_the_plain_averages(rng):
    means, variances, counts = rng.normal(size=5), rng.uniform(1, 2, 5), np.array([3.0, 1, 7, 2, 9])
    for rule, weights in (("cumulative_entries", counts), ("cumulative_updates", np.ones(5))):
        state = (0.0, 1.0, 0.0)
        for batch in zip(means, variances, counts, strict=True):
            state = reference.update(*state, *batch, rule=rule)
        close(state[0], np.average(means, weights=weights), m=5)
        close(state[1], np.average(variances, weights=weights), m=5)
        close(state[2], np.sum(weights))


def test_axes_that_the_state_lacks_are_averaged_by_their_counts():
    # Two ghost batches of two features; the second feature sees only one of them, the third none.
    mean = np.array([[1.0, 4.0, 0.0], [5.0, 0.0, 0.0]])
    var = np.array([[2.0, 3.0, 0.0], [6.0, 0.0, 0.0]])
    count = np.array([[3.0, 2.0, 0.0], [1.0, 0.0, 0.0]])
    state = (np.full(3, -1.0), np.full(3, 9.0), np.zeros(3))
    new = reference.update(*state, mean, var, count, rule="cumulative_entries", extra_axes=(0,))
    np.testing.assert_array_equal(new, [[2.0, 4.0, -1.0], [3.0, 3.0, 9.0], [4.0, 2.0, 0.0]])
    # m/(m−1) belongs to each group: 2·3/2 and 6 (one entry: skipped), weighed 3 to 1.
    new = reference.update(*state, mean, var, count, rule="cumulative_entries", extra_axes=(0,), unbiased=True)
    np.testing.assert_array_equal(new[1], [3.75, 6.0, 9.0])


def test_the_running_variance_stays_between_the_smallest_and_the_largest_batch_variance(rng):
    variances = rng.uniform(0.5, 0.7, 1000)
    state = (0.0, 1.0, 0.0)
    eps = float(np.finfo(np.float64).eps)
    for var in variances:
        state = reference.update(*state, 0.0, var, 8.0, rule="ema_debiased", new_weight=0.4)
        assert 0.5 - eps <= state[1] <= 0.7 + eps


def test_merge_of_pieces_is_the_moments_of_the_whole(rng):
    x = rng.normal(50.0, 2.0, size=(12, 3))
    pieces = [
        reference.moments(x[start:stop], layout="N C", axis_names="N") for start, stop in ((0, 2), (2, 2), (2, 12))
    ]
    for actual, expected in zip(
        reference.merge(*map(np.stack, zip(*pieces, strict=True))),
        reference.moments(x, layout="N C", axis_names="N"),
        strict=True,
    ):
        close(actual, expected, m=12)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([(0, 0, 4), (8, 0, 1)], (1.6, 10.24, 5)),
        ([(0, 0, 1), (3, 0, 1), (6, 0, 2)], (3.75, 6.1875, 4)),
        ([(0, 0, 0), (2, 5, 3)], (2, 5, 3)),
        ([(0, 0, 0)], (0, 0, 0)),
        ([(0, 4, 1), (0, 8, 3)], (0, 7, 4)),  # mean squares
    ],
)
def test_merge_weighs_each_group_by_its_entries(groups, expected):
    close(reference.merge(*np.array(groups, float).T), expected, k=8)


def test_the_reference_imports_nothing_but_numpy_and_the_standard_library():
    tree = ast.parse(Path(reference.__file__).read_text(encoding="utf-8"))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {ast.unparse(node) for node in imported} == {"import math", "import re", "import numpy as np"}
