"""Cases of cancellation, overflow, constant input and zero variance."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.cases.common import (
    EPS32,
    FAMILY,
    HOW,
    Norm,
    close,
    each_centred,
    each_derivative,
    each_family,
    each_how,
    error,
    rounded_once,
    same,
)

ROW = {"layout": "N D", "axis_names": "D"}


# --- 1: a large mean and a small spread


@pytest.mark.case(1)
@each_how
def test_four_neighbours_of_40_000_are_normalised_to_float32_accuracy(how):
    x = jnp.array([[40000.0, 40001, 40002, 40003]])
    y = HOW[how](lambda x: nj.layer_norm(x, **ROW)[0])(x)
    assert error(y, [[-1.3416354, -0.4472118, 0.4472118, 1.3416354]]) < 1e-6


@pytest.mark.case(1)
@each_how
@each_centred
def test_a_large_mean_and_a_small_spread_give_what_float64_gives(norm, how, rng):
    x = np.asarray(4e6 + rng.integers(0, 99, norm.shape), np.float32)  # integers below 2²⁴ are exact
    assert error(norm.run(x, how=how), norm.exact(x)) < 1e-6


@pytest.mark.case(1)
@pytest.mark.parametrize(("dtype", "base"), [(jnp.bfloat16, 128), (jnp.float16, 1024)])
@each_centred
def test_a_large_mean_in_half_precision_costs_no_more_than_the_last_cast(norm, dtype, base, rng):
    x = np.asarray(base + rng.integers(0, 99, norm.shape), dtype)  # 8 bits hold 128 to 255, 11 bits 1024 to 2047
    y = norm.run(x)
    assert y.dtype == dtype
    rounded_once(y, norm.exact(x))


# --- 3: shifted rows, and every input of the contract's numbers


def shifted(shape, mean, *, spread=1.0, masked=0.0, layout="N D", axis_names="D", limit=1e-6, edit=None):
    """One input: N(0, spread²) + mean, edited, of which a share is masked out and worthless."""

    def make(rng):
        x = rng.standard_normal(shape) * spread + mean
        if edit is not None:
            edit(x)
        where = rng.random(shape) >= masked if masked else None
        if where is not None:
            x = np.where(where, x, -3e4)
        return x.astype(np.float32), where

    return make, {"layout": layout, "axis_names": axis_names}, limit


def first_eighth_at_zero(x):
    x[..., : x.shape[-1] // 8] = 0


def one_entry_at_a_million(x):
    x[..., 0] = 1e6


BATCH = {"layout": "N C", "axis_names": "N"}
GHOST = {"layout": "N=(B n=512) C", "axis_names": "n"}
BLOCKS = {"layout": "N=(n=512 B) C", "axis_names": "n"}
GROUPS = {"layout": "N L C=(G=3 K)", "axis_names": "L K"}
COLUMNS = np.array([0, 1e2, 1e4])
SMALL = {
    "5 × 4 at 2 000": shifted((5, 4), 2000),
    "64 × 256 at 2 000": shifted((64, 256), 2000),
    "64 × 1 024 at 10⁴": shifted((64, 1024), 1e4),
    "64 × 1 024 at 10⁶": shifted((64, 1024), 1e6),
    "columns at 0, 10², 10⁴": shifted((4096, 3), COLUMNS, spread=0.1, **BATCH),
    "ghosts": shifted((4096, 3), COLUMNS, spread=0.1, **GHOST),
    "interleaved ghosts": shifted((4096, 3), COLUMNS, spread=0.1, **BLOCKS),
    "groups": shifted((8, 64, 12), 1e4, **GROUPS),
    "instances": shifted((4, 256, 3), COLUMNS, layout="N L C", axis_names="L"),
    "masked rows": shifted((64, 256), 2000, masked=0.3),
    "masked rows at 10⁶": shifted((64, 1024), 1e6, masked=0.3),
    "masked columns": shifted((4096, 3), COLUMNS, spread=0.1, masked=0.3, **BATCH),
    "masked ghosts": shifted((4096, 3), COLUMNS, spread=0.1, masked=0.3, **GHOST),
    "masked groups": shifted((8, 64, 12), 1e4, masked=0.6, **GROUPS),
    "first eighth at 0, the rest at 10⁴": shifted((64, 1024), 1e4, edit=first_eighth_at_zero, limit=1e-5),
    "one entry at 10⁶": shifted((64, 1024), 0, edit=one_entry_at_a_million, limit=1e-5),
    "masked, first eighth at 0": shifted((64, 1024), 1e4, masked=0.3, edit=first_eighth_at_zero, limit=1e-5),
    "masked, one entry at 10⁶": shifted((64, 1024), 0, masked=0.3, edit=one_entry_at_a_million, limit=1e-5),
}
LARGE = {
    "200 000 rows at 10⁴": shifted((200_000, 4), 1e4, **BATCH),
    "200 000 masked rows at 10⁴": shifted((200_000, 4), 1e4, masked=0.3, **BATCH),
    "a group of 2²² at 10⁴": shifted((2**22,), 1e4, layout="N", axis_names="N"),
    "a masked group of 2²² at 10⁴": shifted((2**22,), 1e4, masked=0.3, layout="N", axis_names="N"),
}


@functools.cache
def normalised_and_running(layout, axis_names, how):
    """A function of x and where: x̂, the running mean and the running variance after one update that keeps nothing."""
    axes = {"layout": layout, "axis_names": axis_names}

    def function(x, where=None):
        kept = jax.eval_shape(lambda x: nj.moments(x, **axes), x)
        state = nj.BatchStats.init(**dict(zip(kept.names, kept.mean.shape, strict=True)))
        y, state = nj.batch_norm(x, None, state, where=where, train=True, running=nj.Ema(1.0), **axes)
        return y, state.mean, state.var

    return HOW[how](function)


def check_numbers(make, axes, limit, how, rng):
    x, where = make(rng)
    y, mean, var = normalised_and_running(**axes, how=how)(*((x,) if where is None else (x, where)))
    exact_mean, exact_var, _ = reference.moments(x, where=where, **axes)
    assert error(y, reference.normalize(x, where=where, **axes)) < limit
    assert np.max(np.abs(var / exact_var - 1)) < limit
    # A mean kept as one float32 is off by half its spacing, and by what the pair was off: some ulp of the deviation.
    allowed = EPS32 * np.abs(exact_mean) + limit * np.sqrt(exact_var)
    assert np.all(np.abs(np.asarray(mean, np.float64) - exact_mean) <= allowed)


@pytest.mark.case(3)
@pytest.mark.parametrize(("make", "axes", "limit"), {**SMALL, **LARGE}.values(), ids={**SMALL, **LARGE}.keys())
def test_any_mean_and_group_size_give_output_and_running_variance_of_float64(make, axes, limit, rng):
    check_numbers(make, axes, limit, "jit", rng)


@pytest.mark.case(3)
@pytest.mark.parametrize("how", ["eager", "vmap"])
@pytest.mark.parametrize(
    "name", ["64 × 256 at 2 000", "columns at 0, 10², 10⁴", "masked rows", "masked ghosts", "groups"]
)
def test_the_numbers_hold_eagerly_and_under_vmap(name, how, rng):
    check_numbers(*SMALL[name], how, rng)


@pytest.mark.case(3)
@each_centred
def test_shifted_groups_come_out_with_mean_0_and_variance_1_less_eps_share(norm, rng):
    x = np.asarray(rng.standard_normal(norm.shape) + 2000, np.float32)
    y = np.asarray(norm.run(x), np.float64)
    mean, var, _ = reference.moments(y, **norm.axes)
    _, exact_var, _ = reference.moments(x, **norm.axes)
    assert np.max(np.abs(mean)) < 1e-6
    assert np.max(np.abs(var - (1 - 1e-5 / (exact_var + 1e-5)))) < 2e-6  # twice x̂'s: a variance is a square


@pytest.mark.case(3)
@each_derivative
def test_gradients_at_a_large_mean_are_those_of_float64(derivative, rng):
    norm = FAMILY["layer"]
    x, g, scale, bias = norm.problem(rng, mean=2000)
    exact = norm.exact_cotangents(x, g, scale, bias)
    for a, e in zip(norm.vjp(x, g, scale, bias, derivative=derivative)[1:4], exact, strict=True):
        close(a, e, m=x.size)


# --- 4: constants


CONSTANTS = [7.5e10, 1e6, 0.1, 1.5678, -3e-7]


@pytest.mark.case(4)
@pytest.mark.parametrize(
    ("length", "how"), [(3, "jit"), (7, "eager"), (7, "jit"), (7, "vmap"), (8, "jit"), (1000, "jit")]
)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_equal_values_have_variance_0_and_give_the_bias(length, masked, how):
    x = jnp.repeat(jnp.asarray(CONSTANTS, jnp.float32)[:, None], length, 1)
    where = jnp.arange(length)[None] % 3 != 1
    params = nj.Affine(jnp.full(length, 2.0), jnp.linspace(-1, 1, length), "D")

    def function(x):
        y, moments = nj.normalize(x, params, where=where if masked else None, **ROW)
        return y, moments.mean, moments.var

    y, mean, var = HOW[how](function)(x)
    same(var, np.zeros(len(CONSTANTS), np.float32))
    same(mean, x[:, 0])
    same(y, jnp.broadcast_to(params.bias, x.shape))


def constant_groups(norm, constants, dtype):
    """An x whose groups are constant: a bias along the kept axes spread over zeros."""
    kept = jax.eval_shape(lambda x: nj.moments(x, **norm.axes), np.zeros(norm.shape, dtype)).names
    return reference.normalize(np.zeros(norm.shape), None, constants, names=kept, **norm.axes).astype(dtype)


@pytest.mark.case(4)
@pytest.mark.parametrize(
    ("dtype", "derivative"),
    [(np.float32, "vjp"), (np.float32, "jvp"), (np.float32, "autodiff"), (jnp.bfloat16, "vjp"), (np.float16, "vjp")],
)
@each_centred
def test_constant_groups_give_the_bias_and_no_gradient_of_scale(norm, dtype, derivative, rng):
    _, g, scale, bias = norm.problem(rng, dtype)
    x = constant_groups(norm, rng.choice([0.1, 1.5678, 3e4, -7.7], norm.groups), dtype)
    y, _, d_scale, d_bias, _ = norm.vjp(x, g, scale, bias, derivative=derivative)
    same(y, norm.exact(x, scale, bias).astype(dtype))
    same(d_scale, np.zeros_like(scale))
    rounded_once(d_bias, norm.exact_cotangents(x, g, scale, bias)[2], m=x.size)


@pytest.mark.case(4)
@pytest.mark.parametrize("shards", [3, 50], ids=["few shards", "many shards"])
def test_constants_spread_over_a_mapped_axis_give_the_bias(shards):
    x = jnp.broadcast_to(jnp.asarray(CONSTANTS, jnp.float32), (shards, 7, len(CONSTANTS)))
    normalise = lambda x: nj.normalize(x, layout="N C", axis_names="N data")  # noqa: E731
    y, moments = jax.jit(jax.vmap(normalise, axis_name="data"))(x)
    same(y, jnp.zeros_like(x))
    same(moments.var, jnp.zeros((shards, len(CONSTANTS))))


# --- 6: squares that overflow


def right_or_nan(y, exact):
    with np.errstate(over="ignore"):
        exact = np.asarray(exact, jnp.promote_types(y.dtype, np.float32)).astype(np.float64)  # may round to infinity
    y = np.asarray(y, np.float64)
    finite = np.isfinite(exact)
    near = np.abs(y - np.where(finite, exact, 0)) <= 1e-6 * np.maximum(1, np.abs(exact))
    assert np.all(np.isnan(y) | (y == exact) | (finite & near))


@pytest.mark.case(6)
@each_how
@pytest.mark.parametrize("size", [1e15, 1e19, 1e20, 1e30, 1e38])
@each_family
def test_squares_that_overflow_give_the_right_number_or_nan(norm, size, how):
    x = np.asarray(np.resize([1.0, -1.0, 1.0], norm.shape) * size, np.float32)
    exact = norm.exact(x)
    y = norm.run(x, how=how)
    right_or_nan(y, exact)
    if size < 1e19:
        assert error(y, exact) < 1e-6


@pytest.mark.case(6)
@pytest.mark.parametrize("family", [nj.layer_norm, nj.rms_norm])
@each_how
def test_alternating_rows_of_1e20_and_1e30_are_plus_and_minus_one_or_nan(family, how):
    x = jnp.array([[1e30], [1e20]]) * jnp.array([1.0, -1, 1, -1])
    right_or_nan(HOW[how](lambda x: family(x, **ROW)[0])(x), [[1, -1, 1, -1]] * 2)


@pytest.mark.case(6)
@pytest.mark.parametrize(
    "x",
    [[3e38, 3e38, -3e38, -3e38], [1e30, 0, 0, 0], [2e19, 1e19, 0, 0], [3e38, 3e38, 3e38, 3e38], [3e38, 3e38, 3e38, 0]],
    ids=str,
)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("center", [True, False], ids=["centred", "uncentred"])
def test_sums_and_differences_that_overflow_give_the_right_number_or_nan(x, masked, center):
    x = jnp.array([x])
    where = jnp.array([[True, True, True, False]]) if masked else None
    options = {**ROW, "center": center, "where": where}
    y, moments = nj.normalize(x, **options)
    right_or_nan(y, reference.normalize(x, **options))
    assert not np.any(np.asarray(moments.var) < 0)


@pytest.mark.case(6)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_other_dtypes_overflow_to_the_right_number_or_nan_too(dtype, x64):
    x = jnp.array([[1, -1, 1, -1]], dtype) * jnp.asarray(1e200 if dtype == jnp.float64 else 1e30, dtype)
    for family in (nj.layer_norm, nj.rms_norm):
        right_or_nan(family(x, **ROW)[0], [[1, -1, 1, -1]])


@pytest.mark.case(6)
@each_how
def test_evaluation_with_an_infinite_running_variance_is_nan_and_never_zero(how):
    state = nj.BatchStats(jnp.zeros(3), jnp.array([jnp.inf, 4.0, 1.0]), jnp.array(1), jnp.ones(3), "C")
    x = jnp.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
    y = HOW[how](lambda x: nj.batch_norm(x, None, state, layout="N C", axis_names="N", train=False)[0])(x)
    assert np.all(np.isnan(y[:, 0]))
    close(y[:, 1:], np.asarray(x)[:, 1:] / np.sqrt(np.array([4, 1]) + 1e-5))


@pytest.mark.case(6)
def test_the_running_variance_of_a_batch_that_overflowed_is_no_plausible_number():
    x = jnp.array([[1e30], [-1e30]])
    _, state = nj.batch_norm(x, None, nj.BatchStats.init(C=1), layout="N C", axis_names="N", train=True)
    assert not np.isfinite(state.var[0])


# --- 7: eps and rescaling


@pytest.mark.case(7)
@pytest.mark.parametrize(("size", "how"), [(4096, "eager"), (4096, "jit"), (4096, "vmap"), (64, "jit")])
def test_one_entry_among_zeros_keeps_eps_at_its_own_size(size, how):
    function = HOW[how](lambda x: nj.rms_norm(x, **ROW)[0])
    values = np.array([100.0, 1e-2, 1e4, 0.0])
    x = np.zeros((4, size), np.float32)
    x[:, 3] = values
    y = np.array(function(x))
    np.testing.assert_allclose(y[:, 3], values / np.sqrt(values**2 / size + 1e-5), rtol=1e-6)
    if size == 4096:
        np.testing.assert_allclose(y[0, 3], 63.99987, rtol=1e-6)
    y[:, 3] = 0
    same(y, np.zeros_like(x))


@pytest.mark.case(7)
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
@each_family
def test_zeros_give_the_bias_in_every_family(norm, dtype, rng):
    _, _, scale, bias = norm.problem(rng, dtype)
    x = np.zeros(norm.shape, dtype)
    same(norm.run(x, scale, bias), norm.exact(x, scale, bias).astype(dtype))


@pytest.mark.case(7)
@pytest.mark.parametrize("eps", [1e-8, 1e-5, 1.0])
@each_family
def test_eps_of_the_order_of_the_variance_is_added_to_it_unscaled(norm, eps, rng):
    x = np.asarray(rng.standard_normal(norm.shape) * np.sqrt(eps), np.float32)
    assert error(norm.run(x, eps=eps), norm.exact(x, eps=eps)) < 1e-6


# --- 8: compiled and eager


@pytest.mark.case(8)
@pytest.mark.parametrize("norm", [FAMILY[name] for name in ("batch", "layer", "rms")], ids=["batch", "layer", "rms"])
def test_compiling_the_norm_with_what_feeds_it_changes_nothing(norm, rng):
    x, weight = rng.standard_normal((64, 256)), rng.standard_normal((256, 256)) / 16
    x, weight = jnp.asarray(x, jnp.float32), jnp.asarray(weight, jnp.float32)
    size = int(np.prod(norm.shape))

    def function(x, weight):
        h = (jnp.tanh(x @ weight) * 0.5 + 20).reshape(-1)[:size].reshape(norm.shape)
        return h, norm(h)

    # h is fused with the norm and may be rounded elsewhere: one spacing of h, in standard deviations, on top.
    for h, y in (function(x, weight), jax.jit(function)(x, weight)):
        deviation = np.sqrt(reference.moments(h, center=norm.center, **norm.axes)[1].min())
        assert error(y, norm.exact(h)) < 1e-6 + EPS32 * 20.5 / deviation


@pytest.mark.case(8)
@pytest.mark.parametrize("how", ["eager"])
@each_family
def test_compiled_values_and_gradients_equal_eager_ones_to_a_few_ulp(norm, how, rng):
    problem = norm.problem(rng, mean=20)
    for compiled, eager in zip(norm.vjp(*problem), norm.vjp(*problem, how=how), strict=True):
        close(compiled, np.asarray(eager, np.float64), m=problem[0].size, k=4)


# --- 11: one entry in a group


ONE_ENTRY = {
    "layer": Norm(nj.layer_norm, (5, 1), "N D", "D", "D", (1,), (5,)),
    "groups of one channel": Norm(nj.group_norm, (7, 27), "N C=(G=27 K)", "K", "C", (27,), (7, 27)),
    "instance": Norm(nj.instance_norm, (2, 1, 1, 3), "N H W C", "H W", "C", (3,), (2, 3)),
    "batch": Norm(nj.batch_norm, (1, 3), "N C", "N", "C", (3,), (3,)),
    "ghost": Norm(nj.batch_norm, (4, 3), "N=(B n=1) C", "n", "C", (3,), (4, 3)),
}


@pytest.mark.case(11)
@pytest.mark.parametrize(
    ("name", "derivative", "how"),
    [
        *((name, "vjp", "jit") for name in ONE_ENTRY),
        *(("layer", way, "jit") for way in ("jvp", "autodiff")),
        ("layer", "vjp", "eager"),
        ("batch", "vjp", "vmap"),
        ("batch", "jvp", "jit"),
    ],
)
def test_a_group_of_one_entry_gives_exactly_the_bias_and_no_gradient(name, how, derivative, rng):
    norm = ONE_ENTRY[name]
    x, g = np.asarray(rng.standard_normal((2, *norm.shape)) * 1e6, np.float32)
    scale, bias = np.full(norm.sizes, 2, np.float32), np.full(norm.sizes, 3, np.float32)
    y, dx, d_scale, _, _ = norm.vjp(x, g, scale, bias, how=how, derivative=derivative)
    same(y, np.full_like(x, 3))
    same(d_scale, np.zeros_like(scale))
    same(dx, np.zeros_like(x))


def first_of_each_group(norm):
    """A mask with one entry of each group: the first."""
    places = np.arange(math.prod(norm.shape)).reshape(norm.shape)
    mask = np.zeros(norm.shape, bool)
    # The group of an entry is told by the mean of a random table, which no two groups share.
    table = np.random.default_rng(0).random(norm.shape)
    mean, _, _ = reference.moments(table, **norm.axes)
    kept = jax.eval_shape(lambda x: nj.moments(x, **norm.axes), table).names
    group = reference.normalize(np.zeros(norm.shape), None, mean, names=kept, **norm.axes)
    for value in np.unique(group):
        mask.flat[places[group == value].min()] = True
    return mask


@pytest.mark.case(11)
@each_derivative
@each_centred
def test_a_group_that_the_mask_leaves_one_entry_gives_it_the_bias(norm, derivative, rng):
    x, g, scale, bias = norm.problem(rng, mean=1e6)
    first = first_of_each_group(norm)
    assert first.sum() == math.prod(norm.groups)
    g = np.where(first, g, np.float32(0))
    y, dx, d_scale, _, _ = norm.vjp(x, g, scale, bias, where=first, derivative=derivative)
    same(np.asarray(y)[first], norm.exact(np.zeros(norm.shape), scale, bias).astype(np.float32)[first])
    same(d_scale, np.zeros_like(scale))
    # The entry's own u·r less the group's: two roundings, or one where the compiler fuses them.
    assert np.max(np.abs(dx)) <= EPS32 * np.max(np.abs(scale)) * np.max(np.abs(g)) / np.sqrt(1e-5)


# --- 12: gradients where the deviation is 0


@pytest.mark.case(12)
@each_derivative
@each_how
def test_the_gradient_of_a_constant_pair_is_finite_and_right(how, derivative):
    x, g = jnp.ones((1, 2)), jnp.array([[1.0, 0.0]])
    apply = lambda x: nj.layer_norm(x, derivative=derivative, **ROW)[0]  # noqa: E731
    dx = HOW[how](lambda x, g: jax.vjp(apply, x)[1](g)[0])(x, g)
    np.testing.assert_allclose(dx, 316.2278 * np.array([[0.5, -0.5]]), rtol=1e-6)


@pytest.mark.case(12)
@each_derivative
@each_family
def test_constant_groups_have_the_gradients_of_the_reference(norm, derivative, rng):
    _, g, scale, bias = norm.problem(rng)
    x = np.full(norm.shape, 0.7 if norm.center else 0, np.float32)
    actual = norm.vjp(x, g, scale, bias, derivative=derivative)[1:4]
    for a, e in zip(actual, norm.exact_cotangents(x, g, scale, bias), strict=True):
        close(a, e, m=x.size)


@pytest.mark.case(12)
@each_derivative
@each_family
def test_with_eps_0_a_group_of_variance_0_gives_the_bias_and_zero_gradient(norm, derivative, rng):
    _, g, scale, bias = norm.problem(rng)
    x = np.full(norm.shape, 0.7 if norm.center else 0, np.float32)
    y, dx, d_scale, d_bias, d_eps = norm.vjp(x, g, scale, bias, eps=0, derivative=derivative)
    same(y, norm.exact(x, scale, bias, eps=0).astype(np.float32))
    for cotangent in (dx, d_scale, d_eps):
        same(cotangent, np.zeros(cotangent.shape, np.float32))
    close(d_bias, norm.exact_cotangents(x, g, scale, bias, eps=0)[2], m=x.size)


@pytest.mark.case(12)
@pytest.mark.parametrize("derivative", ["vjp", "jvp"])
@pytest.mark.parametrize("family", ["batch", "layer"])
def test_with_eps_0_the_second_derivative_at_variance_0_is_zero_too(family, derivative, rng):
    norm = FAMILY[family]
    _, g, scale, bias = norm.problem(rng)
    x = np.full(norm.shape, 0.7 if norm.center else 0, np.float32)
    slope = jax.grad(lambda x: jnp.sum(norm(x, scale, bias, eps=0.0, derivative=derivative) * g))
    same(jax.jit(jax.grad(lambda x: jnp.sum(slope(x) ** 2)))(x), np.zeros_like(x))


@pytest.mark.case(12)
@each_derivative
def test_evaluation_with_a_running_variance_of_0_and_eps_0_gives_the_bias_and_zero_gradient(derivative):
    params = nj.Affine(jnp.array([2.0, 2.0]), jnp.array([3.0, 3.0]), "C")
    state = nj.BatchStats(jnp.zeros(2), jnp.array([0.0, 4.0]), jnp.array(1), jnp.ones(2), "C")

    def apply(x):
        options = {"layout": "N C", "axis_names": "N", "train": False, "eps": 0.0, "derivative": derivative}
        return nj.batch_norm(x, params, state, **options)[0]

    y, pullback = jax.vjp(apply, jnp.ones((2, 2)))
    close(y, [[3, 4], [3, 4]])
    close(pullback(jnp.array([[1.0, 2.0], [3.0, 4.0]]))[0], [[0, 2], [0, 4]])


@pytest.mark.case(12)
@pytest.mark.parametrize("eps", [-1e-5, -1, float("nan")])
@each_family
def test_a_negative_eps_is_refused(norm, eps):
    with pytest.raises(ValueError, match=rf"{norm.fn.__name__}: eps={eps!r} must be at least 0"):
        norm(jnp.ones(norm.shape), eps=eps)


# --- 14: running variances


RULES = {
    "ema": nj.Ema(0.4),
    "debiased ema": nj.Ema(0.4, debias=True),
    "unbiased, debiased ema": nj.Ema(0.4, unbiased=True, debias=True),
    "by entries": nj.Cumulative(),
    "by updates": nj.Cumulative(by="updates", unbiased=True),
}


@functools.cache
def trained(running):
    """A program: the state before and after every step, and each batch's own moments."""

    def step(state, batch):
        x, where = batch
        options = {"layout": "N C", "axis_names": "N", "where": where}
        _, new = nj.batch_norm(x, None, state, train=True, running=running, **options)
        seen = nj.moments(x, **options)
        return new, (state.mean, new.mean, seen.mean, state.var, new.var, seen.var, seen.count)

    return jax.jit(lambda state, batches, where: jax.lax.scan(step, state, (batches, where)))


@pytest.mark.case(14)
@pytest.mark.parametrize("running", RULES.values(), ids=RULES)
@pytest.mark.parametrize("mean", [0.0, 1e4], ids=["at 0", "at 10⁴"])
def test_over_1000_steps_the_running_statistics_stay_between_the_batches(running, mean, rng):
    batches = np.asarray(rng.uniform(size=(1000, 20, 3)) + mean, np.float32)
    where = rng.random((1000, 20, 1)) < 0.8
    _, seen = trained(running)(nj.BatchStats.init(C=3), batches, where)
    old_mean, new_mean, mean, old_var, new_var, var, m = map(np.asarray, seen)
    stored = var * (m / (m - 1)) if running.unbiased else var
    assert np.all(np.asarray(new_var) >= 0)
    for old, new, batch in ((old_mean, new_mean, mean), (old_var, new_var, stored)):
        old, new, batch = (np.asarray(array, np.float64) for array in (old, new, batch))
        slack = 4 * EPS32 * np.maximum(np.abs(old), np.abs(batch))  # m/(m−1) is rounded here and there
        assert np.all(np.minimum(old, batch) - slack <= new)
        assert np.all(new <= np.maximum(old, batch) + slack)
    if not isinstance(running, nj.Ema) or running.debias:  # nothing is left of the start values
        assert np.all(np.min(stored, 0) * (1 - 1e-6) <= new_var)
        assert np.all(new_var <= np.max(stored, 0) * (1 + 1e-6))


@pytest.mark.case(14)
def test_the_same_batch_for_ever_leaves_the_running_variance_at_its_own():
    x = jnp.asarray(np.linspace(1e4, 1e4 + 1, 100)[:, None], jnp.float32)
    step = lambda state, _: (nj.batch_norm(x, None, state, layout="N C", axis_names="N", train=True)[1], None)  # noqa: E731
    state, _ = jax.jit(lambda state: jax.lax.scan(step, state, length=1000))(nj.BatchStats.init(C=1))
    _, var, _ = reference.moments(x, layout="N C", axis_names="N")
    np.testing.assert_allclose(state.var, var, rtol=1e-5)  # 1000 roundings, of which each forgets nine tenths: ≤ 10 ulp
