"""Cases of vmap, checkpoint, loops and eval_shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.cases.common import (
    COLUMN,
    FAMILY,
    close,
    each_batch_like,
    each_derivative,
    each_family,
    same,
)
from tests.quick import checking_leaks, quick_jit

# --- 51: nested vmap


@pytest.mark.case(51)
@pytest.mark.parametrize(("axis_names", "lacks"), [("N", "inner"), ("N outer", "inner"), ("N inner", "outer")])
def test_a_state_that_pools_only_some_mapped_axes_cannot_leave_as_one_for_all(axis_names, lacks, rng):
    x = np.asarray(rng.standard_normal((2, 3, 4, 5)), np.float32)

    def layer(x):
        state = nj.BatchStats.init(C=5)
        return nj.batch_norm(x, None, state, layout="N C", axis_names=axis_names, train=True)

    once = jax.vmap(layer, axis_name="inner", out_axes=(0, None))
    with pytest.raises(ValueError, match=rf"axis_name={lacks}\) but out_axes is None"):
        jax.eval_shape(jax.vmap(once, axis_name="outer", out_axes=(0, None)), x)


# --- 52: vmap, twice


@pytest.mark.case(52)
@pytest.mark.parametrize("pooled", [False, True], ids=["a state for each", "one state"])
def test_a_second_call_under_vmap_takes_the_state_of_the_first(pooled, rng):
    xs = np.asarray(rng.standard_normal((2, 4, 6, 5)) + 1, np.float32)

    def layer(x, state):
        names = "lane N" if pooled else "N"
        return nj.batch_norm(x, None, state, layout="N C", axis_names=names, train=True, running=nj.Ema.flax(0.9))

    start, axis = nj.BatchStats.init(C=5), None if pooled else 0
    state = start if pooled else jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), start)
    mapped = quick_jit(jax.vmap(layer, in_axes=(0, axis), out_axes=(0, axis), axis_name="lane"))
    with checking_leaks():
        for x in xs:
            y, state = mapped(x, state)
    axes = {"layout": "E N C", "axis_names": "E N" if pooled else "N"}
    close(y, reference.normalize(xs[1], **axes), m=24)
    first, second = (reference.moments(x, **axes) for x in xs)
    close(state.mean, 0.9 * 0.1 * first[0] + 0.1 * second[0], m=24)
    close(state.var, 0.9**2 + 0.9 * 0.1 * first[1] + 0.1 * second[1], m=24)
    assert np.all(state.count == 2)


# --- 54: Jacobians of each example in evaluation


@pytest.mark.case(54)
@pytest.mark.parametrize(
    ("jacobian", "derivative"),
    [(jax.jacrev, "vjp"), (jax.jacrev, "jvp"), (jax.jacrev, "autodiff"), (jax.jacfwd, "jvp"), (jax.jacfwd, "autodiff")],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize(("layout", "shape"), [("C", (4, 3)), ("L C", (4, 2, 3)), ("C L", (4, 3, 2))])
def test_each_example_s_jacobian_in_evaluation_is_diagonal(layout, shape, jacobian, derivative, rng):
    x = np.asarray(rng.standard_normal(shape), np.float32)
    scale, mean = np.asarray(rng.standard_normal((2, 3)), np.float32)
    var = np.asarray(rng.uniform(0.5, 2, 3), np.float32)
    state = nj.BatchStats(mean, var, np.int32(7), np.ones(3, np.float32), "C")

    def norm(x):
        params, options = nj.Affine(scale, scale, "C"), {"layout": layout, "axis_names": "N", "derivative": derivative}
        return nj.batch_norm(x, params, state, train=False, **options)

    jacobians, new = quick_jit(jax.vmap(jacobian(norm, has_aux=True), out_axes=(0, None)))(x)
    slope = scale / np.sqrt(np.float64(var) + 1e-5)
    along_c = [3 if name == "C" else 1 for name in layout.split()]
    diagonal = np.diag(np.broadcast_to(slope.reshape(along_c), shape[1:]).ravel())
    close(jacobians, np.broadcast_to(diagonal, (4, *diagonal.shape)).reshape(4, *shape[1:], *shape[1:]))
    same(new, state)


# --- 61: checkpoint


POLICIES = {
    "save nothing": None,
    "save everything": jax.checkpoint_policies.everything_saveable,
    "save the statistics": jax.checkpoint_policies.save_only_these_names("normjax_stats"),
}


@pytest.mark.case(61)
@pytest.mark.parametrize(
    ("family", "derivative", "policy"),
    [
        *(("batch", "vjp", policy) for policy in POLICIES),
        ("batch", "jvp", "save the statistics"),
        ("batch", "autodiff", "save nothing"),
        ("ghost", "vjp", "save the statistics"),
    ],
)
def test_under_checkpoint_the_state_moves_once_and_gradients_are_the_same(family, derivative, policy, rng):
    norm, policy = FAMILY[family], POLICIES[policy]
    x, g, scale, bias = norm.problem(rng)
    mean, var = np.asarray(rng.uniform(1, 2, (2, *norm.sizes)), np.float32)
    state = nj.BatchStats(mean, var, np.asarray(3, np.int32), np.ones(norm.sizes, np.float32), "C")

    def layer(x, scale, bias, state):
        return norm.pair(x, scale, bias, state, running=nj.Ema.flax(0.9), derivative=derivative)

    @quick_jit
    def step(x, scale, bias, state):
        def loss(x, scale, bias):
            y, new = jax.checkpoint(layer, policy=policy)(x, scale, bias, state)
            return jnp.sum(y * g), new

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(x, scale, bias)

    gradients, new = step(x, scale, bias, state)
    batch_mean, batch_var, _ = reference.moments(x, **norm.axes)
    groups = batch_mean.reshape(-1, *norm.sizes), batch_var.reshape(-1, *norm.sizes)
    close(new.mean, 0.9 * mean + 0.1 * groups[0].mean(0))
    close(new.var, 0.9 * var + 0.1 * groups[1].mean(0))
    assert new.count == 4
    for actual, expected in zip(gradients, norm.exact_cotangents(x, g, scale, bias), strict=True):
        close(actual, expected, m=x.size)


# --- 62: loops


@pytest.mark.case(62)
@pytest.mark.parametrize(
    "transform", ["scan", "scan of grad", "vmap of scan", "loop", "fori_loop", "while_loop", "while_loop of cond"]
)
def test_over_three_batches_the_state_is_threaded_in_order(transform, rng):
    batches = np.asarray(rng.standard_normal((3, 8, 4)) + 5, np.float32)

    def step(state, x):
        y, state = nj.batch_norm(x, None, state, train=True, running=nj.Ema.flax(0.9), **COLUMN)
        return state, y

    def with_gradient(state, x):
        slope, state = jax.grad(lambda x: (jnp.sum(step(state, x)[1] ** 3), step(state, x)[0]), has_aux=True)(x)
        return state, slope

    def while_loop(state, batches, body):
        below = lambda carry: carry[0] < len(batches)  # noqa: E731
        return jax.lax.while_loop(below, lambda carry: (carry[0] + 1, body(*carry)), (0, state))[1]

    def odd_turns_evaluate(i, state):
        """Six turns: each batch is trained on in the first of two."""
        x = batches[i // 2]
        evaluate = lambda state: nj.batch_norm(x, None, state, train=False, **COLUMN)[1]  # noqa: E731
        return jax.lax.cond(i % 2 == 0, lambda state: step(state, x)[0], evaluate, state)

    run = {
        "scan": lambda state, batches: jax.lax.scan(step, state, batches)[0],
        "scan of grad": lambda state, batches: jax.lax.scan(with_gradient, state, batches)[0],
        "loop": lambda state, batches: functools.reduce(lambda state, x: step(state, x)[0], batches, state),
        "fori_loop": lambda state, batches: jax.lax.fori_loop(0, 3, lambda i, s: step(s, batches[i])[0], state),
        "while_loop": lambda state, batches: while_loop(state, batches, lambda i, s: step(s, batches[i])[0]),
    }
    state = nj.BatchStats.init(C=4)
    if transform == "vmap of scan":
        stacked = np.stack([batches, -batches])
        states = quick_jit(jax.vmap(lambda batches: run["scan"](state, batches)))(stacked)
        same(states.mean[1], -states.mean[0])
        state = jax.tree.map(lambda leaf: leaf[0], states)
    elif transform == "while_loop of cond":
        batches = jnp.asarray(batches)
        state = quick_jit(lambda state: while_loop(state, range(6), odd_turns_evaluate))(state)
    else:
        state = (run[transform] if transform == "loop" else quick_jit(run[transform]))(state, batches)
    m0, m1, m2 = (reference.moments(x, **COLUMN)[0] for x in batches)
    v0, v1, v2 = (reference.moments(x, **COLUMN)[1] for x in batches)
    close(state.mean, 0.9**2 * 0.1 * m0 + 0.9 * 0.1 * m1 + 0.1 * m2)
    close(state.var, 0.9**3 + 0.9**2 * 0.1 * v0 + 0.9 * 0.1 * v1 + 0.1 * v2)
    assert state.count == 3


@pytest.mark.case(62)
def test_a_scan_over_stacked_layers_threads_each_layer_s_own_state(rng):
    x = np.asarray(rng.standard_normal((8, 4)), np.float32)
    scales, biases = np.asarray(rng.standard_normal((2, 3, 4)), np.float32)
    layers = nj.Affine(scales, biases, "C"), jax.vmap(lambda _: nj.BatchStats.init(C=4))(np.arange(3))

    def layer(h, params_and_state):
        y, state = nj.batch_norm(jnp.tanh(h), *params_and_state, train=True, **COLUMN)
        return y, state

    y, states = quick_jit(lambda x, layers: jax.lax.scan(layer, x, layers))(x, layers)
    h = np.asarray(x, np.float64)
    for i in range(3):
        h = np.tanh(h)
        close(states.mean[i], 0.1 * h.mean(0))
        close(states.var[i], 0.9 + 0.1 * h.var(0))
        h = reference.normalize(h, scales[i], biases[i], names="C", **COLUMN)
    close(y, h, k=64)  # three layers, each of which may multiply the error of the one before


# --- 65: eval_shape


@pytest.mark.case(65)
@each_derivative
@each_family
def test_shapes_are_known_without_values(norm, derivative, rng):
    x, _, scale, bias = norm.problem(rng)
    where = np.ones(norm.shape, bool)
    state = nj.BatchStats.init(C=norm.sizes[0]) if norm.fn is nj.batch_norm else None

    def step(x, scale, bias, state, where):
        y, new = norm.pair(x, scale, bias, state, where=where, derivative=derivative)
        slope = jax.grad(lambda x: jnp.sum(norm.pair(x, scale, bias, state, where=where, derivative=derivative)[0]))(x)
        return y, new, slope

    shapes = jax.eval_shape(step, x, scale, bias, state, where)
    describe = lambda tree: jax.tree.map(lambda leaf: (np.shape(leaf), jnp.result_type(leaf)), tree)  # noqa: E731
    assert jax.tree.structure(shapes) == jax.tree.structure((x, state, x))
    assert jax.tree.leaves(describe(shapes)) == jax.tree.leaves(describe((x, state, x)))


@pytest.mark.case(65)
@pytest.mark.parametrize("train", [True, False])
@each_batch_like
def test_a_model_can_be_initialised_and_called_without_values(norm, train):
    def model(key):
        x = jax.random.normal(key, norm.shape)
        size = norm.sizes[0]
        params, state = nj.Affine.init(C=size), nj.BatchStats.init(C=size)
        return norm.fn(x, params, state, train=train, **norm.axes), params, nj.moments(x, **norm.axes)

    (y, state), params, moments = jax.eval_shape(model, jax.ShapeDtypeStruct((2,), np.uint32))
    assert y.shape == norm.shape
    assert state.mean.shape == state.var.shape == state.weight.shape == params.scale.shape == norm.sizes
    assert moments.mean.shape == moments.count.shape == norm.groups
    assert (
        repr(params)
        == f"Affine(scale=float32[{norm.sizes[0]}], bias=float32[{norm.sizes[0]}], names='C', zero_centered=False)"
    )
