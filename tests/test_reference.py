"""The reference against numbers worked by hand, the invariants of the theory, central differences and jax.grad."""

import ast
import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax import reference

EPS = float(np.finfo(np.float64).eps)


def close(actual, expected, *, m=1, k=32):
    """Equal within k·eps·√m of the largest expected number: m roundings of a sum add up like a random walk."""
    expected = np.asarray(expected)
    size = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=k * EPS * np.sqrt(m) * size)


# --- gradients


@dataclasses.dataclass(frozen=True)
class Case:
    """One norm, told twice: in the layout grammar for the reference, and by axis numbers for the plain formula."""

    shape: tuple[int, ...]
    layout: str
    axis_names: str
    wide: tuple[int, ...]  # x with one axis for each factor
    axes: tuple[int, ...]  # what is reduced, numbered in wide
    names: str = ""
    stored: tuple[int, ...] = ()  # the shape of scale and bias
    affine: tuple[int, ...] = ()  # the same, to broadcast against wide
    center: bool = True
    masked: float = 0.0  # the share of entries that the mask leaves out
    zero_centered: bool = False
    stats: tuple[int, ...] | None = None  # frozen statistics, to broadcast against wide
    stat_names: str | None = None

    @property
    def m(self) -> int:
        return int(np.prod([self.wide[axis] for axis in self.axes]))


IMAGE = {"shape": (2, 3, 2, 6), "wide": (2, 3, 2, 6)}
BATCH = {**IMAGE, "layout": "N H W C", "axis_names": "N H W", "axes": (0, 1, 2)}
CHANNEL = {"names": "C", "stored": (6,), "affine": (6,)}
GROUPS = {"shape": (2, 3, 2, 6), "layout": "N H W C=(G=2 K)", "axis_names": "H W K", "wide": (2, 3, 2, 2, 3)}
CASES = {
    "batch": Case(**BATCH, **CHANNEL),
    "batch without affine": Case(**BATCH),
    "batch of scalars": Case((9,), "N", "N", (9,), (0,)),
    "channels first": Case((3, 6, 5), "N C L", "N L", (3, 6, 5), (0, 2), "C", (6,), (6, 1)),
    "layer": Case((3, 4, 7), "... D", "D", (3, 4, 7), (2,), "D", (7,), (7,)),
    "layer over unnamed axes": Case((3, 4, 7), "N ...", "...", (3, 4, 7), (1, 2), "...", (4, 7), (4, 7)),
    "instance": Case(**IMAGE, layout="N H W C", axis_names="H W", axes=(1, 2), **CHANNEL),
    "group": Case(**GROUPS, axes=(1, 2, 4), names="C", stored=(6,), affine=(2, 3)),
    "group, scale along the groups": Case(**GROUPS, axes=(1, 2, 4), names="G", stored=(2,), affine=(2, 1)),
    "rms": Case((3, 4, 7), "... D", "D", (3, 4, 7), (2,), "D", (7,), (7,), center=False),
    "rms, masked": Case((3, 4, 7), "... D", "D", (3, 4, 7), (2,), "D", (7,), (7,), center=False, masked=0.3),
    "ghost": Case((8, 3, 5), "N=(B n=4) L C", "n L", (2, 4, 3, 5), (1, 2), "C", (5,), (5,)),
    "ghost by block": Case((8, 5), "(n=4 B) C", "n", (4, 2, 5), (0,), "C", (5,), (5,)),
    "masked": Case(**BATCH, **CHANNEL, masked=0.4),
    "masked, whole groups": Case((12, 3), "N D", "D", (12, 3), (1,), "D", (3,), (3,), masked=0.6),
    "conditional": Case(**BATCH, names="N C", stored=(2, 6), affine=(2, 1, 1, 6)),
    "conditional, masked": Case(**BATCH, names="N C", stored=(2, 6), affine=(2, 1, 1, 6), masked=0.4),
    "scale for each position": Case(**BATCH, names="N H W C", stored=(2, 3, 2, 6), affine=(2, 3, 2, 6)),
    "zero-centred": Case((5, 7), "N D", "D", (5, 7), (1,), "D", (7,), (7,), zero_centered=True),
    "frozen": Case(**BATCH, **CHANNEL, stats=(6,)),
    "frozen, masked": Case(**BATCH, **CHANNEL, stats=(6,), masked=0.4),
    "frozen along one factor": Case(**GROUPS, axes=(1, 2, 4), stats=(2, 1), stat_names="G"),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def problem(case: Case, rng):
    """Random x, cotangent, scale, bias and the options of the reference for one case."""
    x = rng.normal(1.5, 2.0, case.shape)
    g = rng.normal(size=case.shape)
    scale, bias = rng.normal(size=(2, *case.stored))
    options = {
        "names": case.names,
        "layout": case.layout,
        "axis_names": case.axis_names,
        "center": case.center,
        "zero_centered": case.zero_centered,
        "eps": 1e-3,
        "where": rng.random(case.shape) >= case.masked if case.masked else None,
    }
    if case.stats is not None:
        stat_shape = tuple(size for size in case.stats if size > 1)
        options |= {"mean": rng.normal(size=stat_shape), "var": rng.uniform(0.5, 2.0, stat_shape)}
        options["stat_names"] = case.stat_names or "C"
    return x, g, scale, bias, options


def plain(case: Case, options, x, scale, bias):
    """The formula as one would write it down, for jax.grad."""
    where = None if options["where"] is None else options["where"].reshape(case.wide)
    x, scale, bias = x.reshape(case.wide), scale.reshape(case.affine), bias.reshape(case.affine)
    scale = scale + 1 if case.zero_centered else scale
    if case.stats is not None:
        mean, var = options["mean"].reshape(case.stats), options["var"].reshape(case.stats)
    else:
        # A group that the mask empties has mean 0/0 in jax.numpy: it takes all its entries, and is replaced below.
        some = True if where is None else jnp.any(where, case.axes, keepdims=True)
        where = None if where is None else where | ~some
        mean = jnp.mean(x, case.axes, where=where, keepdims=True) if case.center else 0.0
        var = jnp.mean((x - mean) ** 2, case.axes, where=where, keepdims=True)
        return jnp.where(some, scale * (x - mean) / jnp.sqrt(var + options["eps"]), 0.0) + bias
    return scale * (x - mean) / jnp.sqrt(var + options["eps"]) + bias


@every_case
def test_normalize_and_backward_agree_with_jax_grad_of_the_plain_formula(case, rng, x64):
    x, g, scale, bias, options = problem(case, rng)

    @jax.jit
    def output_and_cotangents(g, *primals):
        y, pullback = jax.vjp(lambda *args: plain(case, options, *args), *primals)
        return y, pullback(g.reshape(case.wide))

    y, expected = output_and_cotangents(g, x, scale, bias)
    close(reference.normalize(x, scale, bias, **options), np.reshape(y, case.shape), m=case.m)
    for actual, wanted in zip(reference.backward(x, g, scale, bias, **options), expected, strict=True):
        # Three sums of m terms stand behind dx, and dscale adds up to all of x once more.
        close(actual, wanted, m=x.size, k=64)


def central_differences(loss, at):
    """The derivative of a scalar function, entry by entry, to fourth order."""
    h = 1e-4
    slopes = np.zeros(np.shape(at))
    for index in np.ndindex(slopes.shape):
        values = []
        for step in (-2, -1, 1, 2):
            moved = np.array(at)
            moved[index] += step * h
            values.append(loss(moved))
        slopes[index] = (values[0] - 8 * values[1] + 8 * values[2] - values[3]) / (12 * h)
    return slopes


@every_case
def test_backward_agrees_with_central_differences(case, rng):
    x, g, scale, bias, options = problem(case, rng)
    dx, dscale, dbias = reference.backward(x, g, scale, bias, **options)
    slopes = {
        "dx": (dx, central_differences(lambda x: np.sum(g * reference.normalize(x, scale, bias, **options)), x)),
        "dscale": (
            dscale,
            central_differences(lambda s: np.sum(g * reference.normalize(x, s, bias, **options)), scale),
        ),
        "dbias": (dbias, central_differences(lambda b: np.sum(g * reference.normalize(x, scale, b, **options)), bias)),
    }
    for name, (actual, expected) in slopes.items():
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-8 * np.max(np.abs(expected)), err_msg=name)


def test_without_scale_or_bias_backward_gives_none_for_it(rng):
    x, g = rng.normal(size=(2, 5, 3))
    options = {"layout": "N C", "axis_names": "N"}
    dx, dscale, dbias = reference.backward(x, g, **options)
    assert dscale is None
    assert dbias is None
    close(dx, reference.backward(x, g, np.ones(3), np.zeros(3), names="C", **options)[0])


def test_the_names_of_scale_and_bias_give_the_order_of_their_axes(rng):
    x, g = rng.normal(size=(2, 3, 4, 5))
    scale, bias = rng.normal(size=(2, 4, 5))
    options = {"layout": "N W C", "axis_names": "N"}
    close(
        reference.normalize(x, scale.T, bias.T, names="C W", **options),
        reference.normalize(x, scale, bias, names=("W", "C"), **options),
    )
    swapped = reference.backward(x, g, scale.T, bias.T, names="C W", **options)
    straight = reference.backward(x, g, scale, bias, names=["W", "C"], **options)
    close(swapped[0], straight[0])
    close(swapped[1], straight[1].T)
    close(swapped[2], straight[2].T)


# --- numbers worked by hand

ONE = {"layout": "N", "axis_names": "N"}
WORKED = [
    ("the batch 1, 3, 5, 7", [1, 3, 5, 7], {"scale": 2, "bias": 1}, [-1.683, 0.106, 1.894, 3.683]),
    ("running statistics", [5], {"scale": 2, "bias": 1, "mean": 3.8, "var": 5.4, "stat_names": ""}, [2.033]),
    ("the batch 1, 2, 3", [1, 2, 3], {}, [-1.2247, 0, 1.2247]),
    ("3 with mean 2, variance 2/3", [3], {"mean": 2, "var": 2 / 3, "stat_names": ""}, [1.2247]),
    ("large mean, small spread", [40000, 40001, 40002, 40003], {}, [-1.3416354, -0.4472118, 0.4472118, 1.3416354]),
    ("eps inside the root", [-1e-3, 1e-3], {}, [-0.30151, 0.30151]),
    ("no centring", [3, 4], {"center": False, "eps": 0}, [0.848528, 1.131371]),
    ("one entry gives the bias", [1e6], {"scale": 2, "bias": 3}, [3]),
    ("zero-centred", [1, 2, 3], {"scale": 1, "zero_centered": True}, [-2.4494, 0, 2.4494]),
]


@pytest.mark.parametrize(("x", "options", "expected"), [row[1:] for row in WORKED], ids=[row[0] for row in WORKED])
def test_the_worked_numbers_come_out(x, options, expected):
    # Half a unit of the third decimal, which is where the theory's own numbers are rounded.
    np.testing.assert_allclose(reference.normalize(x, **ONE, **options), expected, rtol=0, atol=5e-4)


def test_the_layer_norm_of_one_sample_is_the_batch_norm_of_its_features():
    sample = [[1, 3, 5, 7]]
    layer = reference.normalize(sample, 2, 1, layout="N D", axis_names="D")
    np.testing.assert_allclose(layer, [[-1.683, 0.106, 1.894, 3.683]], rtol=0, atol=5e-4)


def test_moments_divide_by_m_and_count_the_entries():
    assert [float(number) for number in reference.moments([1, 3, 5, 7], **ONE)] == [4, 5, 4]
    assert [float(number) for number in reference.moments([3, 4], center=False, **ONE)] == [0, 12.5, 2]


def test_a_constant_group_has_a_gradient_but_none_for_the_scale():
    dx, dscale, dbias = reference.backward([1, 1], [1, 0], 1.0, 0.0, **ONE)
    np.testing.assert_allclose(dx, np.array([0.5, -0.5]) / np.sqrt(1e-5), rtol=4 * EPS)
    assert dscale == 0
    assert dbias == 1


def test_a_group_of_one_entry_gives_the_bias_and_no_gradient():
    dx, dscale, dbias = reference.backward([[1e6]], [[0.7]], [2.0], [3.0], names="D", layout="N D", axis_names="D")
    assert (dx.item(), dscale.item(), dbias.item()) == (0, 0, 0.7)


@pytest.mark.parametrize("value", [0.1, 7.5e10, 1e6 / 3, -1e-300])
def test_equal_entries_have_exactly_zero_variance(value):
    mean, var, _ = reference.moments(np.full(7, value), **ONE)
    assert (mean, var) == (value, 0)


def test_complex_input_has_a_real_variance():
    mean, var, count = reference.moments([1 + 1j, 1 - 1j, 3 + 1j, 3 - 1j], **ONE)
    close([mean, var, count], [2, 2, 4])
    assert np.isrealobj(var)
    close(reference.normalize([1 + 1j, 1 - 1j, 3 + 1j, 3 - 1j], eps=0, **ONE)[0], (-1 + 1j) / np.sqrt(2))


@pytest.mark.parametrize("dtype", ["int8", "bool", "float16", "float32", "bfloat16"])
def test_input_of_every_dtype_is_computed_in_float64(dtype):
    x = jnp.array([0, 1, 1, 0, 1], dtype)
    y = reference.normalize(x, **ONE)
    assert y.dtype == np.float64
    close(y, reference.normalize(np.array([0.0, 1, 1, 0, 1]), **ONE))


# --- layouts

SHAPES = [
    ("N H W C", (2, 3, 4, 5), "N H W", (2, 3, 4, 5), (0, 1, 2), (5,)),
    ("N H W C", (2, 3, 4, 5), ("C", "H"), (2, 3, 4, 5), (1, 3), (2, 4)),
    ("... D", (2, 3, 5), "D", (2, 3, 5), (2,), (2, 3)),
    ("... D", (5,), "D", (5,), (0,), ()),
    ("N ... C", (2, 3, 4, 5), "N ...", (2, 3, 4, 5), (0, 1, 2), (5,)),
    ("N ... C", (2, 3, 4, 5), "C", (2, 3, 4, 5), (3,), (2, 3, 4)),
    ("N C=(G=2 K)", (3, 6), "K", (3, 2, 3), (2,), (3, 2)),
    ("N C=(G K=2)", (3, 6), "N", (3, 3, 2), (0,), (6,)),
    ("N (G=2 K)", (3, 6), "N", (3, 2, 3), (0,), (6,)),
    ("N C=(G=2 K)", (3, 6), "C", (3, 2, 3), (1, 2), (3,)),
    ("N=(B n=2) C=(a=2 b c=2)", (4, 12), "n b", (2, 2, 2, 3, 2), (1, 3), (2, 2, 2)),
    ("N C", (0, 3), "C", (0, 3), (1,), (0,)),
]


@pytest.mark.parametrize(("layout", "shape", "axis_names", "wide", "axes", "kept"), SHAPES)
def test_moments_pool_the_named_axes_and_have_the_shape_of_the_others(layout, shape, axis_names, wide, axes, kept, rng):
    x = rng.normal(size=shape)
    mean, var, count = reference.moments(x, layout=layout, axis_names=axis_names)
    assert mean.shape == var.shape == count.shape == kept
    close(mean, np.mean(x.reshape(wide), axes).reshape(kept), m=x.size)
    close(var, np.var(x.reshape(wide), axes).reshape(kept), m=x.size)
    np.testing.assert_array_equal(count, np.prod([wide[axis] for axis in axes]))


@pytest.mark.parametrize(
    ("layout", "axis_names"),
    [("N H", "N"), ("N H C", "D"), ("N H C=(G=4 K)", "K"), ("N N C", "C"), ("N H C", "N N"), ("N H (G=2 G)", "N")],
)
def test_a_layout_that_does_not_fit_is_refused(layout, axis_names):
    with pytest.raises(AssertionError):
        reference.moments(np.zeros((2, 3, 6)), layout=layout, axis_names=axis_names)


def test_group_norm_lies_between_layer_norm_and_instance_norm(rng):
    x = rng.normal(size=(3, 4, 5, 6))
    layer = reference.normalize(x, layout="N H W C", axis_names="H W C")
    instance = reference.normalize(x, layout="N H W C", axis_names="H W")
    close(reference.normalize(x, layout="N H W C=(G=1 K)", axis_names="H W K"), layer, m=120)
    close(reference.normalize(x, layout="N H W C=(G=6 K)", axis_names="H W K"), instance, m=20)


def test_ghost_batches_are_the_batch_norm_of_each_piece(rng):
    x = rng.normal(size=(6, 5))
    pieces = [reference.normalize(piece, layout="N C", axis_names="N") for piece in (x[:3], x[3:])]
    close(reference.normalize(x, layout="N=(B n=3) C", axis_names="n"), np.concatenate(pieces))


# --- invariants

INVARIANT_CASES = [name for name, case in CASES.items() if case.center and case.stats is None and not case.masked]


@pytest.mark.parametrize("name", INVARIANT_CASES)
def test_a_shift_changes_nothing_and_dx_sums_to_zero_over_each_group(name, rng):
    case = CASES[name]
    x, g, scale, bias, options = problem(case, rng)
    # The entries themselves are rounded to eps·|shift| when shifted.
    shifted = reference.normalize(x + 100, scale, bias, **options)
    close(shifted, reference.normalize(x, scale, bias, **options), m=case.m, k=100 * 32)
    dx = reference.backward(x, g, scale, bias, **options)[0]
    close(np.sum(dx.reshape(case.wide), case.axes), 0, m=case.m)


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
    for var in variances:
        state = reference.update(*state, 0.0, var, 8.0, rule="ema_debiased", new_weight=0.4)
        assert 0.5 - EPS <= state[1] <= 0.7 + EPS


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
