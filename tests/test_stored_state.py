"""What is stored: traced weights, no gradient, and the dtypes of running statistics."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.closeness import close

SPEC = {"layout": "N C", "axis_names": "N"}


@pytest.mark.case(58)
@pytest.mark.parametrize("debias", [False, True])
def test_the_new_weight_may_be_traced(debias, rng):
    x = rng.normal(2.0, 3.0, (8, 3)).astype(np.float32)
    traces = []

    @jax.jit
    def step(new_weight):
        traces.append(new_weight)
        running = nj.Ema(new_weight, debias=debias)
        return nj.batch_norm(x, None, nj.BatchStats.init(C=3), train=True, running=running, **SPEC)[1]

    for new_weight in (0.1, 0.7):
        rule = {"rule": "ema_debiased" if debias else "ema", "new_weight": new_weight}
        right = reference.update(np.zeros(3), np.ones(3), np.zeros(3), *reference.moments(x, **SPEC), **rule)
        state = step(new_weight)
        for actual, expected in zip((state.mean, state.var, state.weight), right, strict=True):
            close(actual, expected, m=8)
    assert len(traces) == 1


def test_no_gradient_reaches_or_leaves_the_new_state(rng):
    x = rng.normal(size=(8, 3)).astype(np.float32)

    def loss(x, mean, var, new_weight):
        state = nj.BatchStats(mean, var, jnp.int32(0), jnp.zeros(3), "C")
        _, new = nj.batch_norm(x, None, state, train=True, running=nj.Ema(new_weight), **SPEC)
        return jnp.sum(new.mean * 3 + new.var**2)

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(x, jnp.ones(3), jnp.ones(3), 0.1)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


@pytest.mark.parametrize("derivative", ["vjp", "jvp", "autodiff"])
def test_the_state_given_to_evaluation_is_an_ordinary_differentiable_input(derivative, rng, x64):
    x, g = rng.normal(size=(2, 8, 3))
    scale, mean, var = rng.normal(size=3), rng.normal(size=3), rng.uniform(0.5, 2, 3)

    def loss(mean, var):
        state = nj.BatchStats(mean, var, jnp.int32(0), jnp.zeros(3), "C")
        params = nj.Affine(scale, None, "C")
        return jnp.sum(g * nj.batch_norm(x, params, state, train=False, derivative=derivative, **SPEC)[0])

    d_mean, d_var = jax.jit(jax.grad(loss, (0, 1)))(mean, var)
    # y = γ (x − μ)/r: dy/dμ = −γ/r, dy/dv = −γ (x − μ)/(2 r³)
    r = np.sqrt(var + 1e-5)
    np.testing.assert_allclose(d_mean, -np.sum(g, 0) * scale / r, rtol=1e-10)
    np.testing.assert_allclose(d_var, -np.sum(g * (x - mean), 0) * scale / (2 * r**3), rtol=1e-10)


@pytest.mark.case(61)
def test_checkpointing_updates_the_state_once(rng):
    x = rng.normal(2.0, 3.0, (8, 3)).astype(np.float32)
    g = rng.normal(size=(8, 3)).astype(np.float32)
    start = nj.BatchStats.init(C=3)

    def loss(x):
        y, state = jax.checkpoint(lambda x: nj.batch_norm(x, None, start, train=True, **SPEC))(x)
        return jnp.sum(g * y), state

    (_, state), _ = jax.jit(jax.value_and_grad(loss, has_aux=True))(x)
    mean, var, _ = reference.update(np.zeros(3), np.ones(3), np.zeros(3), *reference.moments(x, **SPEC), rule="ema")
    close(state.mean, mean, m=8)
    close(state.var, var, m=8)
    assert state.count == 1


@pytest.mark.case(24)
def test_five_hundred_steps_of_bfloat16_input_do_not_stall():
    x = jnp.full((4, 1), 2.0, jnp.bfloat16)
    one = nj.BatchStats(jnp.ones(1), jnp.ones(1), jnp.int32(0), jnp.zeros(1), "C")
    step = lambda state, _: (nj.batch_norm(x, None, state, train=True, running=nj.Ema.flax(0.99), **SPEC)[1], None)  # noqa: E731
    state, _ = jax.jit(lambda state: jax.lax.scan(step, state, length=500))(one)
    assert state.mean.dtype == jnp.float32
    close(state.mean, [2 - 0.99**500], m=500)


def dtypes(state):
    return [str(leaf.dtype) for leaf in jax.tree.leaves(state)]


@pytest.mark.case(20)
@pytest.mark.parametrize("running", [nj.Ema(), nj.Ema(np.float64(0.1), True, True), nj.Cumulative("entries", True)])
@pytest.mark.parametrize("given", ["bfloat16", "float16", "float32", "float64", "int32"])
@pytest.mark.parametrize("stored", ["float32", "float64"])
def test_with_float64_on_the_state_keeps_its_own_dtypes(stored, given, running, x64):
    x = jax.ShapeDtypeStruct((4, 3), given)
    step = functools.partial(nj.batch_norm, train=True, running=running, **SPEC)
    _, new = jax.eval_shape(step, x, None, nj.BatchStats.init(C=3, dtype=stored))
    assert dtypes(new) == [stored, stored, "int32", "float32"]


def test_the_default_state_is_float32_with_float64_on(x64):
    assert dtypes(nj.BatchStats.init(C=3)) == ["float32", "float32", "int32", "float32"]
    assert dtypes(nj.Moments.init(C=3)) == ["float32"] * 3
    assert dtypes(nj.Affine.init(C=3)) == ["float32"] * 2


@pytest.mark.case(25)
def test_a_float64_state_keeps_float64_precision(x64):
    x = np.array([[1e8], [1e8 + 1]])
    layer = jax.jit(functools.partial(nj.batch_norm, train=True, running=nj.Ema(1), **SPEC))
    _, state = layer(x, None, nj.BatchStats.init(C=1, dtype=jnp.float64))
    np.testing.assert_allclose(state.mean, [1e8 + 0.5], rtol=1e-15)
    np.testing.assert_allclose(state.var, [0.25], rtol=1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.int32, bool])
def test_a_state_below_float32_is_refused(dtype):
    name = jnp.dtype(dtype).name
    words = "running statistics need float32 or more, since small steps are lost below"
    floating = jnp.issubdtype(dtype, jnp.floating)
    refused = rf"dtype is {name}; {words}" if floating else rf"dtype='{name}' must be a floating-point or complex dtype"
    with pytest.raises(TypeError, match=rf"^BatchStats\.init: {refused}"):
        nj.BatchStats.init(C=3, dtype=dtype)
    state = jax.tree.map(lambda leaf: leaf.astype(dtype), nj.BatchStats.init(C=3))
    with pytest.raises(TypeError, match=rf"^update: state.mean is {name}; {words}.*BatchStats.init\(dtype=jnp.float32"):
        nj.update(state, nj.Moments.init(C=3))
