"""Cases of x64, complex numbers, integers and booleans, and of the one default eps."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.cases.common import (
    COLUMN,
    EPS32,
    EPS64,
    FAMILY,
    HOW,
    ROW,
    close,
    each_derivative,
    each_family,
    each_how,
    rounded_once,
)
from tests.quick import quick_jit

# --- 20: the dtype of the state under x64

RULES = {
    "ema": nj.Ema(0.1),
    "debiased, unbiased ema": nj.Ema(0.1, debias=True, unbiased=True),
    "by entries": nj.Cumulative(),
    "by updates": nj.Cumulative(by="updates"),
}


@pytest.mark.case(20)
@pytest.mark.parametrize("running", RULES.values(), ids=RULES)
@pytest.mark.parametrize(("dtype", "stored"), [(np.float64, np.float32), (np.float32, np.float64)])
def test_with_x64_on_the_state_keeps_its_dtype_and_is_a_scan_carry(dtype, stored, running, rng, x64):
    batches = np.asarray(rng.normal(3, 2, (2, 8, 3)), dtype)
    state = nj.BatchStats.init(C=3, dtype=stored)
    step = lambda state, x: nj.batch_norm(x, None, state, train=True, running=running, **COLUMN)[::-1]  # noqa: E731
    new, y = quick_jit(lambda state, batches: jax.lax.scan(step, state, batches))(state, batches)
    assert y.dtype == dtype
    assert [leaf.dtype for leaf in jax.tree.leaves(new)] == [stored, stored, np.int32, np.float32]
    mean, var, weight = np.zeros(3), np.ones(3), np.zeros(3)
    rule = {"ema": "ema_debiased" if getattr(running, "debias", False) else "ema"}
    for x in batches:
        kind = rule["ema"] if isinstance(running, nj.Ema) else f"cumulative_{running.by}"
        batch = reference.moments(x, **COLUMN)
        mean, var, weight = reference.update(mean, var, weight, *batch, rule=kind, unbiased=running.unbiased)
    eps = EPS64 if stored == dtype == np.float64 and kind == "ema" else EPS32  # the weight is a float32 always
    close(new.mean, mean, eps=eps)
    close(new.var, var, eps=eps)
    close(new.weight, weight)


@pytest.mark.case(20)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, jnp.bfloat16])
def test_the_second_step_is_not_compiled_again(dtype, x64):
    traces = []

    @quick_jit
    def step(x, state):
        traces.append(x.dtype)
        return nj.batch_norm(x, None, state, train=True, **COLUMN)[1]

    x, state = np.ones((8, 3), dtype), nj.BatchStats.init(C=3)
    for _ in range(3):
        state = step(x, state)
    assert traces == [dtype]
    assert state.count == 3


# --- 25: wider than float32


@pytest.mark.case(25)
@each_how
def test_float64_neighbours_that_float32_cannot_tell_apart_are_plus_and_minus_one(how, x64):
    y = HOW[how](lambda x: nj.layer_norm(x, eps=1e-12, **ROW)[0])(np.array([[1e8, 1e8 + 1]]))
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, [[-1, 1]], rtol=0, atol=1e-11)


@pytest.mark.case(25)
@each_family
def test_float64_is_computed_in_float64_with_float32_parameters_too(norm, rng, x64):
    x, g, _, _ = norm.problem(rng, np.float64)
    _, _, scale, bias = norm.problem(rng)
    y, dx, d_scale, d_bias, _ = norm.vjp(x, g, scale, bias)
    close(y, norm.exact(x, scale, bias, eps=np.float32(1e-5)), eps=EPS64, m=norm.m)
    exact = norm.exact_cotangents(x, g, scale, bias, eps=np.float32(1e-5))
    close(dx, exact[0], eps=EPS64, m=x.size, k=64)
    for actual, expected in ((d_scale, exact[1]), (d_bias, exact[2])):
        assert actual.dtype == np.float32
        rounded_once(actual, expected)


@pytest.mark.case(25)
@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
@pytest.mark.parametrize("family", ["batch", "group", "rms"])
def test_complex_input_stays_complex_and_has_a_real_variance(family, dtype, rng, x64):
    norm = FAMILY[family]
    x = np.asarray(rng.normal(2, 1, norm.shape) + 1j * rng.normal(-1, 3, norm.shape), dtype)
    y, moments = quick_jit(lambda x: nj.normalize(x, center=norm.center, **norm.axes))(x)
    assert y.dtype == dtype
    eps = float(np.finfo(dtype).eps)
    close(y, norm.exact(x), eps=eps, m=norm.m)
    assert moments.var.dtype == np.finfo(dtype).dtype
    close(np.ravel(moments.var), np.ravel(reference.moments(x, center=norm.center, **norm.axes)[1]), eps=eps, m=norm.m)


# --- 27: integers and booleans


@pytest.mark.case(27)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, np.int32) for family in FAMILY), ("layer", np.int8), ("batch", np.uint8), ("rms", np.bool_)],
)
def test_integers_and_booleans_are_normalised_as_float32_and_train_the_parameters(family, dtype, rng):
    norm = FAMILY[family]
    x = rng.integers(0, 2 if dtype == np.bool_ else 100, norm.shape).astype(dtype)
    _, g, scale, bias = norm.problem(rng)

    @quick_jit
    def function(x, g, scale, bias):
        y, pullback = jax.vjp(lambda scale, bias: norm(x, scale, bias), scale, bias)
        return y, *pullback(g)

    y, d_scale, d_bias = function(x, g, scale, bias)
    assert y.dtype == np.float32
    _, exact_scale, exact_bias = norm.exact_cotangents(x, g, scale, bias)
    close(y, norm.exact(x, scale, bias))
    close(d_scale, exact_scale, m=x.size)
    close(d_bias, exact_bias, m=x.size)


@pytest.mark.case(27)
@each_derivative
@pytest.mark.parametrize("norm", [FAMILY[name] for name in ("batch", "layer", "rms")], ids=["batch", "layer", "rms"])
def test_integer_and_boolean_inputs_get_no_gradient_while_the_others_do(norm, derivative, rng):
    x, g, scale, bias = norm.problem(rng)
    where = rng.random(norm.shape) < 0.7

    def cotangents(x, where, scale, bias, g):
        apply = lambda *args: norm(*args[:1], *args[2:], where=args[1], derivative=derivative)  # noqa: E731
        dx, d_where, d_scale, _ = jax.vjp(apply, x, where, scale, bias)[1](g)
        assert d_where.dtype == jax.dtypes.float0
        assert (dx.dtype == jax.dtypes.float0) == (x.dtype == np.int32)
        return d_scale if x.dtype == np.int32 else (dx, d_scale)

    dx, d_scale = quick_jit(cotangents)(x, where, scale, bias, g)
    exact = norm.exact_cotangents(x, g, scale, bias, where=where)
    close(dx, exact[0], m=norm.m)
    close(d_scale, exact[1], m=x.size)
    whole = np.asarray(x, np.int32)
    assert jax.eval_shape(cotangents, whole, where, scale, bias, g).dtype == np.float32


@pytest.mark.case(27)
@each_family
def test_the_gradient_with_respect_to_integers_is_a_clear_error(norm):
    loss = lambda x: jnp.sum(norm(x))  # noqa: E731
    with pytest.raises(TypeError, match=r"grad requires real- or complex-valued inputs.*int32"):
        jax.grad(loss)(np.ones(norm.shape, np.int32))


# --- 28: the default eps


@pytest.mark.case(28)
@pytest.mark.parametrize("fn", [nj.normalize, nj.sync_batch_norm, *dict.fromkeys(norm.fn for norm in FAMILY.values())])
def test_the_default_eps_is_the_number_1e_5_and_keyword_only(fn):
    eps = inspect.signature(fn).parameters["eps"]
    assert eps.default == 1e-5
    assert eps.kind is inspect.Parameter.KEYWORD_ONLY


@pytest.mark.case(28)
@pytest.mark.parametrize(
    ("family", "dtype"),
    [*((family, jnp.bfloat16) for family in FAMILY), ("layer", np.float16), ("rms", np.float32), ("batch", np.float32)],
)
def test_the_default_eps_is_the_same_for_every_dtype(family, dtype, rng):
    norm = FAMILY[family]
    x = np.asarray(rng.standard_normal(norm.shape) * 3e-3, dtype)  # a variance of 9e-6 shows eps at once
    y = quick_jit(norm)(x)
    rounded_once(y, norm.exact(x, eps=1e-5))
    assert np.max(np.abs(norm.exact(x, eps=float(jnp.finfo(jnp.bfloat16).eps)) - norm.exact(x))) > 0.5
