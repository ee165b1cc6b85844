"""Cases of half precision: squares that overflow, weights and casts, sums, averages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.cases.common import (
    COLUMN,
    FAMILY,
    HOW,
    ROW,
    close,
    each_batch_like,
    each_family,
    each_how,
    rounded_once,
    same,
)

each_half = pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])


def bfloat16(values):
    return np.asarray(values, jnp.bfloat16)


# --- 16: squares beyond half precision


@pytest.mark.case(16)
@each_how
def test_float16_whose_squares_overflow_is_normalised_in_float32(how):
    x = np.array([[300, 301, -300, -301]], np.float16)
    y = HOW[how](lambda x: nj.rms_norm(x, eps=1e-6, **ROW)[0])(x)
    same(y, np.array([[0.99834, 1.00166, -0.99834, -1.00166]]).astype(np.float16))


@pytest.mark.case(16)
@each_half
@each_family
def test_half_precision_costs_one_cast_of_the_output_and_one_of_each_gradient(norm, dtype, rng):
    # Squares of 256 to 511 overflow float16 and neighbours are one spacing of bfloat16 apart.
    x = np.asarray(rng.integers(128, 255, norm.shape) * 2, dtype)
    _, g, scale, bias = norm.problem(rng, dtype)
    y, *cotangents, _ = norm.vjp(x, g, scale, bias)
    rounded_once(y, norm.exact(x, scale, bias))
    for actual, exact in zip(cotangents, norm.exact_cotangents(x, g, scale, bias), strict=True):
        assert actual.dtype == dtype
        rounded_once(actual, exact, m=x.size)


# --- 17: the weight is applied before the cast; after it is a recipe


@pytest.mark.case(17)
@each_how
def test_the_weight_is_multiplied_in_float32_and_the_product_cast_once(how):
    x, weight = bfloat16([[5, 4, 1, 4]]), np.full(4, 1.98, np.float32)
    y = HOW[how](lambda x: nj.rms_norm(x, nj.Affine(weight, None, "D"), eps=1e-6, **ROW)[0])(x)
    same(y, bfloat16([[2.59375, 2.078125, 0.51953125, 2.078125]]))


@pytest.mark.case(17)
@each_how
def test_without_params_the_user_may_multiply_after_the_cast(how):
    x, weight = bfloat16([[5, 4, 1, 4]]), bfloat16(1.98)
    y = HOW[how](lambda x: nj.rms_norm(x, eps=1e-6, **ROW)[0] * weight)(x)
    same(y, bfloat16([[2.59375, 2.0625, 0.515625, 2.0625]]))


@pytest.mark.case(17)
@each_family
def test_float32_parameters_are_applied_before_the_only_cast(norm, rng):
    dtype = jnp.bfloat16
    x, _, _, _ = norm.problem(rng, dtype)
    _, _, scale, bias = norm.problem(rng)
    rounded_once(norm.run(x, scale, bias), norm.exact(x, scale, bias))
    once = np.asarray(norm.run(x), dtype)
    rounded_once(once, norm.exact(x))


# --- 18: zero-centred scales


@pytest.mark.case(18)
@each_how
def test_one_is_added_to_a_small_bfloat16_scale_in_float32(how):
    params = nj.Affine(np.full(4, 2**-9, jnp.bfloat16), None, "D", zero_centered=True)
    y = HOW[how](lambda x: nj.rms_norm(x, params, eps=0.0, **ROW)[0])(np.ones((2, 4), np.float32))
    same(y, np.full((2, 4), 1 + 2**-9, np.float32))


@pytest.mark.case(18)
@pytest.mark.parametrize(
    ("family", "dtype", "derivative"),
    [
        ("rms", np.float32, "vjp"),
        ("rms", jnp.bfloat16, "vjp"),
        ("rms", jnp.bfloat16, "jvp"),
        ("rms", jnp.bfloat16, "autodiff"),
        ("batch", jnp.bfloat16, "vjp"),
        ("layer", jnp.bfloat16, "jvp"),
    ],
)
def test_the_gradient_of_x_uses_one_plus_gamma_and_gamma_s_own_does_not_notice(family, dtype, derivative, rng):
    norm = FAMILY[family]
    x, g, _, bias = norm.problem(rng)
    scale = np.asarray(rng.normal(size=norm.sizes) / 256, dtype)

    @jax.jit
    def function(x, g, scale):
        def apply(x, scale):
            params = nj.Affine(scale, bias, norm.names, zero_centered=True)
            return norm.fn(x, params, train=True, derivative=derivative, **norm.axes)[0]

        y, pullback = jax.vjp(apply, x, scale)
        return y, *pullback(g)

    y, dx, d_scale = function(x, g, scale)
    close(y, norm.exact(x, scale, bias, zero_centered=True))
    exact_dx, exact_d_scale, _ = norm.exact_cotangents(x, g, scale, bias, zero_centered=True)
    close(dx, exact_dx, m=norm.m)
    assert d_scale.dtype == dtype
    rounded_once(d_scale, exact_d_scale, m=x.size)
    rounded_once(d_scale, norm.exact_cotangents(x, g, 1 + np.asarray(scale, np.float64), bias)[1], m=x.size)


@pytest.mark.case(18)
@pytest.mark.parametrize("start", [1.0, 0.0, 0.25])
def test_scale_init_is_the_gamma_that_is_used_however_it_is_stored(start):
    x = np.array([[1, -1]], np.float32)
    for zero_centered in (False, True):
        params = nj.Affine.init(D=2, scale_init=start, zero_centered=zero_centered)
        close(nj.layer_norm(x, params, eps=0.0, **ROW)[0], start * x)


# --- 19: the dtype of the output

FLOATS = [jnp.bfloat16, np.float16, np.float32]


@pytest.mark.case(19)
@pytest.mark.parametrize(
    ("dtype", "parameters"), [(jnp.bfloat16, np.float32), (np.float32, jnp.bfloat16), (np.float16, jnp.bfloat16)]
)
@each_family
def test_the_output_has_x_s_dtype_or_the_one_asked_for_and_gradients_have_their_primals(norm, dtype, parameters):
    x = jax.ShapeDtypeStruct(norm.shape, dtype)
    scale = jax.ShapeDtypeStruct(norm.sizes, parameters)
    assert jax.eval_shape(norm, x, scale, scale).dtype == dtype
    for asked in FLOATS:
        assert jax.eval_shape(lambda *args: norm(*args, dtype=asked), x, scale, scale).dtype == asked  # noqa: B023

    def gradients(x, scale, bias):
        return jax.grad(lambda *args: jnp.sum(norm(*args).astype(jnp.float32)), argnums=(0, 1, 2))(x, scale, bias)

    assert [d.dtype for d in jax.eval_shape(gradients, x, scale, scale)] == [dtype, parameters, parameters]


@pytest.mark.case(19)
@pytest.mark.parametrize(
    ("dtype", "asked", "how"),
    [
        (jnp.bfloat16, None, "eager"),
        (jnp.bfloat16, None, "vmap"),
        (jnp.bfloat16, np.float32, "jit"),
        (np.float32, jnp.bfloat16, "jit"),
    ],
)
def test_a_bfloat16_input_with_float32_weights_gives_bfloat16_unless_told_otherwise(dtype, asked, how, rng):
    x = np.asarray(rng.standard_normal((2, 4)), dtype)
    scale = np.asarray(rng.standard_normal(4), np.float32)
    y = HOW[how](lambda x: nj.rms_norm(x, nj.Affine(scale, None, "D"), dtype=asked, **ROW)[0])(x)
    assert y.dtype == (asked or dtype)
    rounded_once(y, reference.normalize(x, scale, names="D", center=False, **ROW))


@pytest.mark.case(19)
@pytest.mark.parametrize("dtype", [*FLOATS, np.int32, np.bool_])
@each_batch_like
def test_state_stays_float32_and_evaluation_keeps_x_s_dtype(norm, dtype):
    x = jax.ShapeDtypeStruct(norm.shape, dtype)
    state = nj.BatchStats.init(C=norm.sizes[0])
    expected = np.float32 if dtype in (np.int32, np.bool_) else dtype
    for train in (True, False):
        y, new = jax.eval_shape(lambda x, state: norm.pair(x, state=state, train=train), x, state)  # noqa: B023
        assert y.dtype == expected
        assert [leaf.dtype for leaf in jax.tree.leaves(new)] == [leaf.dtype for leaf in jax.tree.leaves(state)]


# --- 21: sums of gradients


@pytest.mark.case(21)
@pytest.mark.parametrize(
    ("dtype", "derivative"),
    [(jnp.bfloat16, "vjp"), (jnp.bfloat16, "jvp"), (jnp.bfloat16, "autodiff"), (np.float16, "vjp")],
)
@pytest.mark.parametrize("axis_names", ["D", "N"])
def test_gradients_of_parameters_are_summed_in_float32(axis_names, dtype, derivative, rng):
    fn = {"D": nj.layer_norm, "N": nj.batch_norm}[axis_names]
    x, g = np.asarray(rng.standard_normal((4096, 4)), dtype), np.ones((4096, 4), dtype)
    scale, bias = np.asarray(rng.standard_normal((2, 4)), dtype)
    axes = {"layout": "N D", "axis_names": axis_names}

    def apply(scale, bias):
        return fn(x, nj.Affine(scale, bias, "D"), train=True, derivative=derivative, **axes)[0]

    gradients = jax.jit(lambda g: jax.vjp(apply, scale, bias)[1](g))
    same(gradients(g)[1], np.full(4, 4096, dtype))
    random = np.asarray(rng.standard_normal((4096, 4)), dtype)
    d_scale, d_bias = gradients(random)
    _, exact_scale, exact_bias = reference.backward(x, random, scale, bias, names="D", **axes)
    rounded_once(d_scale, exact_scale, m=4096)
    rounded_once(d_bias, exact_bias, m=4096)


# --- 23: counts and averages in half precision


@pytest.mark.case(23)
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
@pytest.mark.parametrize(("shards", "rows"), [(150, 500), (8, 9000)])
def test_more_entries_than_half_precision_counts_are_pooled_over_a_mapped_axis(shards, rows, dtype, rng):
    x = np.asarray(rng.normal(2, 1, (shards, rows, 2)), dtype)
    pooled = jax.vmap(lambda x: nj.moments(x, layout="N C", axis_names="N data"), axis_name="data")
    moments = jax.jit(pooled)(x)
    mean, var, count = reference.moments(x, layout="S N C", axis_names="S N")
    same(moments.count, np.full((shards, 2), shards * rows, np.float32))
    for actual, exact in ((moments.mean, mean), (moments.var, var)):
        assert actual.dtype == np.float32
        # The means of few shards are added up by XLA in turn: as many roundings as there are shards.
        close(actual, np.broadcast_to(exact, actual.shape), m=shards)
    assert count[0] == shards * rows


@pytest.mark.case(23)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32])
def test_500_small_steps_reach_1_9934_whatever_the_batches_are_made_of(dtype):
    x = np.full((4, 3), 2, dtype)
    state = nj.BatchStats(np.ones(3, np.float32), np.full(3, 2, np.float32), jnp.array(0), np.zeros(3, np.float32), "C")
    step = lambda s, _: (nj.batch_norm(x, None, s, train=True, running=nj.Ema(0.01), **COLUMN)[1], None)  # noqa: E731
    final, _ = jax.jit(lambda state: jax.lax.scan(step, state, length=500))(state)
    np.testing.assert_allclose(final.mean, 2 - 0.99**500, atol=1e-4)
    np.testing.assert_allclose(final.mean, 1.9934, atol=1e-4)
    np.testing.assert_allclose(final.var, 2 * 0.99**500, rtol=1e-4)


@pytest.mark.case(23)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
@pytest.mark.parametrize("train", [True, False])
def test_a_state_in_half_precision_is_refused_when_traced(dtype, train):
    with pytest.raises(TypeError, match=r"BatchStats.init: dtype is \w+; running statistics need float32 or more"):
        nj.BatchStats.init(C=3, dtype=dtype)
    for field in ("mean", "var", "weight"):
        state = jax.tree.map(lambda leaf: leaf, nj.BatchStats.init(C=3))
        object.__setattr__(state, field, getattr(state, field).astype(dtype))
        with pytest.raises(TypeError, match=rf"batch_norm: state.{field} is \w+; running statistics need float32"):
            jax.eval_shape(lambda x, s: nj.batch_norm(x, None, s, train=train, **COLUMN), np.ones((8, 3)), state)
