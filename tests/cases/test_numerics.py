"""Cases of cancellation, overflow, eps and rescaling, and of running variances."""

import functools

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
    ROW,
    close,
    each_centred,
    each_derivative,
    each_family,
    each_how,
    error,
    rounded_once,
    same,
)

# --- 1: a large mean and a small spread


@pytest.mark.case(1)
@each_how
def test_four_neighbours_of_40_000_are_normalised_to_float32_accuracy(how):
    x = np.float32([[40000, 40001, 40002, 40003]])
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
    assert np.max(np.abs(np.asarray(var) / exact_var - 1)) < limit
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
    x = np.float32([[1e30], [1e20]]) * np.float32([1, -1, 1, -1])
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
    x = np.float32([x])
    where = np.array([[True, True, True, False]]) if masked else None
    options = {**ROW, "center": center, "where": where}
    y, moments = nj.normalize(x, **options)
    right_or_nan(y, reference.normalize(x, **options))
    assert not np.any(np.asarray(moments.var) < 0)


@pytest.mark.case(6)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float64])
def test_other_dtypes_overflow_to_the_right_number_or_nan_too(dtype, x64):
    x = np.array([[1, -1, 1, -1]], dtype) * np.asarray(1e200 if dtype == jnp.float64 else 1e30, dtype)
    for family in (nj.layer_norm, nj.rms_norm):
        right_or_nan(family(x, **ROW)[0], [[1, -1, 1, -1]])


@pytest.mark.case(6)
@each_how
def test_evaluation_with_an_infinite_running_variance_is_nan_and_never_zero(how):
    state = nj.BatchStats(np.zeros(3, np.float32), np.float32([np.inf, 4, 1]), np.int32(1), np.ones(3, np.float32), "C")
    x = np.float32([[1, 2, 3], [2, 4, 6]])
    y = HOW[how](lambda x: nj.batch_norm(x, None, state, layout="N C", axis_names="N", train=False)[0])(x)
    y = np.asarray(y)
    assert np.all(np.isnan(y[:, 0]))
    close(y[:, 1:], np.asarray(x)[:, 1:] / np.sqrt(np.array([4, 1]) + 1e-5))


@pytest.mark.case(6)
def test_the_running_variance_of_a_batch_that_overflowed_is_no_plausible_number():
    x = np.float32([[1e30], [-1e30]])
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
    x, weight = jnp.asarray(x.astype(np.float32)), jnp.asarray(weight.astype(np.float32))
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
    x = np.float32(np.linspace(1e4, 1e4 + 1, 100)[:, None])
    step = lambda state, _: (nj.batch_norm(x, None, state, layout="N C", axis_names="N", train=True)[1], None)  # noqa: E731
    state, _ = jax.jit(lambda state: jax.lax.scan(step, state, length=1000))(nj.BatchStats.init(C=1))
    _, var, _ = reference.moments(x, layout="N C", axis_names="N")
    np.testing.assert_allclose(state.var, var, rtol=1e-5)  # 1000 roundings, of which each forgets nine tenths: ≤ 10 ulp
