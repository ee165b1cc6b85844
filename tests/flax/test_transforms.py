"""The transforms of JAX, linen and nnx around the modules, each twice in a row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as flax_nnx

from normjax import linen, nnx
from tests.closeness import close
from tests.quick import quick_jit
from tests.trees import same

TRAIN, EVALUATE = {"use_running_average": False}, {"use_running_average": True}


def ema(xs, momentum=0.9, axis=0):
    """Running mean and variance over batches, from 0 and 1, in float64."""
    mean, var = 0.0, 1.0
    for x in np.asarray(xs, np.float64):
        mean = momentum * mean + (1 - momentum) * x.mean(axis)
        var = momentum * var + (1 - momentum) * x.var(axis)
    return mean, var


def statistics(module) -> tuple:
    return module.mean[...], module.var[...]


def new(**settings) -> nnx.BatchNorm:
    return nnx.BatchNorm(5, momentum=0.9, **settings, rngs=flax_nnx.Rngs(0))


def batches(rng, *shape):
    return jnp.asarray(rng.normal(size=shape) + 1, jnp.float32)


# --- nnx


def test_nnx_jit_twice_equals_two_eager_calls(rng):
    xs, jitted, eager = batches(rng, 2, 6, 5), new(), new()
    step = flax_nnx.jit(lambda norm, x: norm(x))
    for x in xs:
        close(step(jitted, x), eager(x), m=6)
    for one, other, exact in zip(statistics(jitted), statistics(eager), ema(xs), strict=True):
        close(one, exact, m=6)
        close(other, exact, m=6)


def test_nnx_jit_takes_lists_of_axes(rng):
    x = batches(rng, 4, 3, 5)
    norm = nnx.LayerNorm(15, reduction_axes=[1, 2], feature_axes=[1, 2], axis_index_groups=[[0]], rngs=flax_nnx.Rngs(0))
    step = flax_nnx.jit(lambda norm, x: norm(x))
    close(step(norm, x), norm(x), m=15)


@pytest.mark.case(52)
def test_nnx_vmap_twice_over_one_synchronised_norm_is_the_whole_batch(rng):
    xs, norm = batches(rng, 2, 4, 6, 5), new(axis_name="example")
    mapped = flax_nnx.vmap(lambda norm, x: norm(x), in_axes=(None, 0), axis_name="example")
    for x in xs:
        y = mapped(norm, x)
        whole = x.reshape(-1, 5)
        close(y.reshape(-1, 5), (whole - whole.mean(0)) / np.sqrt(whole.var(0) + 1e-5), m=24)
    for got, exact in zip(statistics(norm), ema(xs.reshape(2, -1, 5)), strict=True):
        close(got, exact, m=24)


@pytest.mark.case(52)
def test_nnx_vmap_over_a_norm_that_pools_no_mapped_axis_fails_and_leaves_it_whole(rng):
    x, norm = batches(rng, 4, 6, 5), new()
    mapped = flax_nnx.vmap(lambda norm, x: norm(x), in_axes=(None, 0))
    for _ in range(2):
        with pytest.raises(ValueError, match="was batched"):
            mapped(norm, x)
    norm.eval()
    for _ in range(2):
        close(mapped(norm, x), x / np.sqrt(1 + 1e-5))
    norm.train()
    norm(x[0])
    close(statistics(norm)[0], ema(x[:1])[0], m=6)


def test_nnx_vmap_over_an_ensemble_keeps_a_state_for_each_member(rng):
    xs = batches(rng, 2, 3, 6, 5)
    create = flax_nnx.vmap(lambda rngs: nnx.BatchNorm(5, momentum=0.9, rngs=rngs), in_axes=0)
    norms = create(flax_nnx.Rngs(0).split(3))
    mapped = flax_nnx.vmap(lambda norm, x: norm(x), in_axes=(0, 0))
    for x in xs:
        y = mapped(norms, x)
    close(y, (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5), m=6)
    for got, exact in zip(statistics(norms), ema(xs, axis=1), strict=True):
        close(got, exact, m=6)


@pytest.mark.case(61)
def test_nnx_remat_moves_the_statistics_once(rng):
    x, norm, other = batches(rng, 6, 5), new(), new()

    def loss(norm, apply):
        return jnp.sum(apply(norm, x) ** 3)

    remat = flax_nnx.remat(lambda norm, x: norm(x))
    grads = flax_nnx.grad(functools.partial(loss, apply=remat))(norm)
    plain = flax_nnx.grad(functools.partial(loss, apply=lambda norm, x: norm(x)))(other)
    for one, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        close(one, expected, m=30)
    for got, exact in zip(statistics(norm), ema(x[None]), strict=True):
        close(got, exact, m=6)


@pytest.mark.case(65)
def test_nnx_eval_shape_builds_and_calls(rng):
    for _ in range(2):
        norm = flax_nnx.eval_shape(new)
        assert norm.mean.shape == norm.scale.shape == (5,)
        y = flax_nnx.eval_shape(lambda norm, x: norm(x), norm, jax.ShapeDtypeStruct((6, 5), jnp.bfloat16))
        assert (y.shape, y.dtype) == ((6, 5), jnp.float32)


def test_a_view_and_train_and_eval_choose_the_statistics(rng):
    x, norm = batches(rng, 6, 5), new()
    model = flax_nnx.Sequential(norm, flax_nnx.Dropout(0.0))
    view = flax_nnx.view(model, use_running_average=True, deterministic=True)
    np.testing.assert_allclose(view(x), x / np.sqrt(1 + 1e-5), rtol=1e-6)
    np.testing.assert_array_equal(norm.mean[...], np.zeros(5))
    model.train()
    batch = norm(x)
    np.testing.assert_allclose(np.mean(batch, 0), np.zeros(5), atol=1e-6)
    close(statistics(norm)[0], ema(x[None])[0], m=6)
    assert view.layers[0].mean[...] is norm.mean[...]  # the view shares its variables
    model.eval()
    np.testing.assert_array_equal(norm(x), flax_nnx.view(model, use_running_average=True)(x))
    np.testing.assert_array_equal(norm(x, use_running_average=False), batch)


# --- linen


def variables(rng):
    return {
        "params": {"scale": jnp.asarray(rng.normal(size=5), jnp.float32), "bias": jnp.zeros(5)},
        "batch_stats": {"mean": jnp.zeros(5), "var": jnp.ones(5)},
    }


@pytest.mark.case(51)
def test_linen_vmap_twice_over_one_synchronised_norm_is_the_whole_batch(rng):
    xs, start = batches(rng, 2, 4, 6, 5), variables(rng)
    axes = {"variable_axes": {"params": None, "batch_stats": None}, "split_rngs": {"params": False}}
    mapped = nn.vmap(linen.BatchNorm, **axes, axis_name="example")(momentum=0.9, axis_name="example", **TRAIN)
    state = start
    for x in xs:
        y, new = mapped.apply(state, x, mutable=["batch_stats"])
        state = {**state, **new}
    whole = xs[1].reshape(-1, 5)
    expected = (whole - whole.mean(0)) / np.sqrt(whole.var(0) + 1e-5) * start["params"]["scale"]
    close(y.reshape(-1, 5), expected, m=24)
    for name, exact in zip(("mean", "var"), ema(xs.reshape(2, -1, 5)), strict=True):
        close(state["batch_stats"][name], exact, m=24)


def test_linen_vmap_over_an_ensemble_keeps_variables_for_each_member(rng):
    xs = batches(rng, 2, 3, 6, 5)
    axes = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True}}
    mapped = nn.vmap(linen.BatchNorm, **axes)(momentum=0.9, **TRAIN)
    state = mapped.init(jax.random.key(0), xs[0])
    assert jax.tree.map(jnp.shape, state["batch_stats"]) == {"mean": (3, 5), "var": (3, 5)}
    for x in xs:
        _, new = mapped.apply(state, x, mutable=["batch_stats"])
        state = {**state, **new}
    for name, exact in zip(("mean", "var"), ema(xs, axis=1), strict=True):
        close(state["batch_stats"][name], exact, m=6)


class Layer(nn.Module):
    """One layer of a stack, as `nn.scan` takes it: the carry comes and goes."""

    @nn.compact
    def __call__(self, x, _):
        return linen.BatchNorm(momentum=0.9, **TRAIN)(nn.Dense(5)(x)), None


def test_linen_scan_over_layers_twice_equals_a_loop(rng):
    x = batches(rng, 6, 5)
    axes = {"variable_axes": {"params": 0, "batch_stats": 0}, "split_rngs": {"params": True}}
    stack = nn.scan(Layer, **axes, length=3)()
    start = quick_jit(stack.init)(jax.random.key(0), x, None)
    apply = quick_jit(lambda state: stack.apply(state, x, None, mutable=["batch_stats"]))
    state = start
    for _ in range(2):
        (y, _), new = apply(state)
        state = {**state, **new}
    each = [jax.tree.map(lambda leaf, i=i: leaf[i], start) for i in range(3)]
    for _ in range(2):
        by_hand = x
        for i, layer in enumerate(each):
            (by_hand, _), new = Layer().apply(layer, by_hand, None, mutable=["batch_stats"])
            each[i] = {**layer, **new}
    close(y, by_hand, m=60)
    for i, layer in enumerate(each):
        for one, other in zip(
            jax.tree.leaves(state["batch_stats"]), jax.tree.leaves(layer["batch_stats"]), strict=True
        ):
            close(one[i], other, m=60)


class Steps(nn.Module):
    """One norm over many steps. A carry of `nn.scan` must exist before its first step: initialisation makes it."""

    @nn.compact
    def __call__(self, xs):
        norm = linen.BatchNorm(momentum=0.9, **TRAIN, name="norm")
        if self.is_initializing():
            norm(xs[0])
        lifted = {"variable_broadcast": "params", "variable_carry": "batch_stats", "split_rngs": {"params": False}}
        return nn.scan(lambda norm, carry, x: (carry, norm(x)), **lifted)(norm, None, xs)[1]


@pytest.mark.case(62)
def test_linen_scan_over_steps_threads_the_statistics(rng):
    xs = batches(rng, 3, 8, 5)
    state = Steps().init(jax.random.key(0), xs)
    same(state["batch_stats"], {"norm": {"mean": jnp.zeros(5), "var": jnp.ones(5)}})
    apply = quick_jit(functools.partial(Steps().apply, mutable=["batch_stats"]))
    for _ in range(2):
        y, new = apply(state, xs)
        state = {**state, **new}
    close(y, (xs - xs.mean(1, keepdims=True)) / np.sqrt(xs.var(1, keepdims=True) + 1e-5), m=8)
    for name, exact in zip(("mean", "var"), ema(np.concatenate([xs, xs])), strict=True):
        close(state["batch_stats"]["norm"][name], exact, m=8)


@pytest.mark.case(61)
def test_linen_remat_moves_the_statistics_once(rng):
    x, start = batches(rng, 6, 5), variables(rng)

    def run(kind, params):
        y, new = kind(momentum=0.9, **TRAIN).apply({**start, "params": params}, x, mutable=["batch_stats"])
        return jnp.sum(y**3), new["batch_stats"]

    for _ in range(2):
        (_, stats), grads = jax.value_and_grad(functools.partial(run, nn.remat(linen.BatchNorm)), has_aux=True)(
            start["params"]
        )
    (_, _), plain = jax.value_and_grad(functools.partial(run, linen.BatchNorm), has_aux=True)(start["params"])
    for one, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        close(one, expected, m=30)
    for name, exact in zip(("mean", "var"), ema(x[None]), strict=True):
        close(stats[name], exact, m=6)


@pytest.mark.case(65)
def test_linen_eval_shape_initialises_and_applies():
    norm = linen.BatchNorm(**TRAIN)
    x = jax.ShapeDtypeStruct((6, 5), jnp.bfloat16)
    for _ in range(2):
        shapes = jax.eval_shape(norm.init, jax.random.key(0), x)
        assert jax.tree.map(lambda leaf: leaf.shape, shapes["batch_stats"]) == {"mean": (5,), "var": (5,)}
        y, new = jax.eval_shape(functools.partial(norm.apply, mutable=["batch_stats"]), shapes, x)
        assert (y.shape, y.dtype) == ((6, 5), jnp.float32)
        same(jax.tree.map(jnp.zeros_like, new["batch_stats"]), jax.tree.map(jnp.zeros_like, shapes["batch_stats"]))


# --- derivatives


@pytest.mark.case(57)
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_forward_mode_works_where_derivative_says_so(framework, rng):
    x, dx = batches(rng, 2, 6, 5)

    def run(derivative, x):
        if framework == "nnx":
            return nnx.LayerNorm(5, derivative=derivative, rngs=flax_nnx.Rngs(0))(x)
        return linen.LayerNorm(derivative=derivative).init_with_output(jax.random.key(0), x)[0]

    tangents = [jax.jvp(functools.partial(run, derivative), (x,), (dx,))[1] for derivative in ("jvp", "autodiff")]
    close(tangents[0], tangents[1], m=5)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(functools.partial(run, "vjp"), (x,), (dx,))


@pytest.mark.case(54)
def test_jacobians_of_each_example_in_evaluation_are_diagonal(rng):
    x, start = batches(rng, 4, 5), variables(rng)
    norm = linen.BatchNorm(**EVALUATE)
    jacobians = jax.vmap(jax.jacrev(lambda x: norm.apply(start, x)))(x)
    expected = np.diag(np.asarray(start["params"]["scale"]) / np.sqrt(1 + 1e-5))
    close(jacobians, np.broadcast_to(expected, (4, 5, 5)))
    module = new()
    module.eval()
    graph, state = flax_nnx.split(module)
    jacobians = jax.vmap(jax.jacrev(lambda x: flax_nnx.merge(graph, state)(x)))(x)
    close(jacobians, np.broadcast_to(np.eye(5) / np.sqrt(1 + 1e-5), (4, 5, 5)))


@pytest.mark.case(55)
def test_gradients_of_each_example_in_training_are_refused(rng):
    """A batch of one, whose gradient for scale is 0: what a bare vmap over grad makes of it."""
    x, start = batches(rng, 8, 5), variables(rng)
    norm = linen.BatchNorm(**TRAIN)

    def loss(params, x):
        y, _ = norm.apply({**start, "params": params}, x, mutable=["batch_stats"])
        return jnp.sum(y**3)

    with pytest.raises(ValueError, match="every entry would be a group of its own"):
        jax.vmap(jax.grad(loss), in_axes=(None, 0))(start["params"], x)


@pytest.mark.case(56)
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_a_group_of_one_entry_gives_the_bias(framework, rng):
    x, settings = batches(rng, 3, 4), {"num_groups": 4, "bias_init": nn.initializers.constant(2.0)}
    if framework == "nnx":
        y = nnx.GroupNorm(4, **settings, rngs=flax_nnx.Rngs(0))(x)
        with pytest.raises(ValueError, match="num_groups=32 does not divide the 72 channels"):
            nnx.GroupNorm(72, rngs=flax_nnx.Rngs(0))
    else:
        y, _ = linen.GroupNorm(**settings).init_with_output(jax.random.key(0), x)
    np.testing.assert_array_equal(y, np.full((3, 4), 2.0))
