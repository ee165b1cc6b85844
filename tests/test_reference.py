"""The reference against numbers worked by hand, central differences and jax.grad, in every layout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax import reference
from tests.closeness import close64 as close
from tests.quick import quick_jit

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

    @quick_jit
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
    np.testing.assert_allclose(dx, np.array([0.5, -0.5]) / np.sqrt(1e-5), rtol=4 * float(np.finfo(np.float64).eps))
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
