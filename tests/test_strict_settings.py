"""JAX's strict settings: no silent promotion, no NaN on the way, no leaked tracer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from tests.quick import checking_leaks
from tests.trees import SPEC

FAMILY = {
    "batch": (nj.batch_norm, "N L C", "N L", True),
    "batch evaluated": (nj.batch_norm, "N L C", "N L", False),
    "layer": (nj.layer_norm, "N L C", "L C", None),
    "instance": (nj.instance_norm, "N L C", "L", None),
    "group": (nj.group_norm, "N L C=(G=2 K)", "L K", None),
    "rms": (nj.rms_norm, "N L C", "C", None),
}
every_layer = pytest.mark.parametrize(("norm", "layout", "axis_names", "train"), FAMILY.values(), ids=FAMILY.keys())


def gradient_of(norm, layout, axis_names, train, derivative="vjp", **options):
    """The gradient in x, params and eps of a layer with everything: mask, state, both parameters."""

    def loss(x, params, eps, state, where):
        spec = {"layout": layout, "axis_names": axis_names, "train": train, "derivative": derivative, **options}
        y, new = norm(x, params, state, where=where, eps=eps, **spec)
        # Weights that are no constant, so that no gradient is trivially zero.
        weights = jnp.reshape(jnp.cos(jnp.arange(y.size, dtype=jnp.float32)), y.shape)
        return jnp.sum(y.astype(jnp.float32) * weights), new

    return jax.grad(loss, (0, 1, 2), has_aux=True)


STRICT = [("vjp", False, False), ("vjp", True, True), ("jvp", True, False), ("autodiff", False, True)]


@pytest.mark.parametrize(("derivative", "masked", "x64_on"), STRICT)
@every_layer
def test_no_dtype_or_rank_is_promoted_silently(norm, layout, axis_names, train, derivative, masked, x64_on):
    is_batch = norm is nj.batch_norm
    options = {"running": nj.Ema(0.1, unbiased=True, debias=True)} if is_batch else {}
    call = gradient_of(norm, layout, axis_names, train, derivative, **options)
    where = jax.ShapeDtypeStruct((2, 3, 1), jnp.bool_) if masked else None
    with jax.enable_x64(x64_on), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        params = nj.Affine.init(C=4, zero_centered=True)
        state = nj.BatchStats.init(C=4) if is_batch else None
        eps = jax.ShapeDtypeStruct((), jnp.float32)
        for dtype in (jnp.bfloat16, jnp.float32, jnp.float64)[: 3 if x64_on else 2]:
            x = jax.ShapeDtypeStruct((2, 3, 4), dtype)
            (dx, d_params, d_eps), new = jax.eval_shape(call, x, params, eps, state, where)
            assert (dx.dtype, d_params.scale.dtype, d_eps.dtype) == (dtype, jnp.float32, jnp.float32)
            if is_batch:
                assert [str(leaf.dtype) for leaf in jax.tree.leaves(new)] == ["float32", "float32", "int32", "float32"]


@pytest.mark.parametrize("call", ["merge", "pool", "cumulative", "moments given", "mapped", "decay"])
def test_the_helpers_promote_nothing_silently(call):
    calls = {
        "merge": lambda x, p, s: nj.merge(nj.moments(x, **SPEC), nj.moments(x, where=x > 0, **SPEC)),
        "pool": lambda x, p, s: nj.pool_stats(
            jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), nj.BatchStats(*jax.tree.leaves(s), "device C")), "device"
        ),
        "cumulative": lambda x, p, s: nj.update(s, nj.moments(x, **SPEC), running=nj.Cumulative(unbiased=True)),
        "moments given": lambda x, p, s: nj.normalize(x, p, moments=nj.moments(x, **SPEC), **SPEC),
        "mapped": lambda x, p, s: jax.vmap(
            lambda x: nj.batch_norm(x, p, s, layout="C", axis_names="data", train=True), axis_name="data"
        )(x),
        "decay": lambda x, p, s: jax.tree.map(jnp.asarray, nj.decay_mask(p)),
    }
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        out = jax.eval_shape(calls[call], jnp.ones((4, 3)), nj.Affine.init(C=3), nj.BatchStats.init(C=3))
    assert all(leaf.dtype in (jnp.float32, jnp.int32, jnp.bool_) for leaf in jax.tree.leaves(out))


@functools.cache
def compiled_gradient_of(*layer):
    """One program for every eps."""
    return jax.jit(gradient_of(*layer))


@pytest.mark.parametrize("eps", [0.0, 1e-5])
@every_layer
def test_constant_and_empty_groups_pass_debug_nans(norm, layout, axis_names, train, eps):
    x = jnp.ones((2, 3, 4))
    where = jnp.stack([jnp.zeros((3, 1), bool), jnp.ones((3, 1), bool)])
    params, state = nj.Affine.init(C=4), nj.BatchStats.init(C=4) if norm is nj.batch_norm else None
    with jax.debug_nans(True):
        call = compiled_gradient_of(norm, layout, axis_names, train)
        (dx, d_params, _), _ = call(x, params, jnp.float32(eps), state, where)
    assert dx.shape == x.shape
    assert np.all(np.isfinite(dx))
    assert np.all(np.isfinite(d_params.scale))


@pytest.mark.parametrize("derivative", ["vjp", "jvp", "autodiff"])
@pytest.mark.parametrize("jitted", [True, False], ids=["eager", "disable_jit"])
def test_gradients_outside_jit_pass_debug_nans(jitted, derivative, rng):
    x = jnp.asarray(rng.normal(size=(8, 4)), jnp.float32)
    where = jnp.asarray(rng.random((8, 4)) < 0.7)
    params, state = nj.Affine.init(C=4), nj.BatchStats.init(C=4)

    def loss(x, params, train, where):
        layer = functools.partial(nj.batch_norm, train=train, where=where, derivative=derivative, **SPEC)
        y, _ = layer(x, params, state)
        return jnp.sum(y**3)

    with jax.debug_nans(True), jax.disable_jit(not jitted):
        for train, mask in [(True, None), (True, where), (False, None)]:
            dx, d_params = jax.grad(loss, argnums=(0, 1))(x, params, train, mask)
            assert np.all(np.isfinite(dx))
            assert np.all(np.isfinite(d_params.scale))


@every_layer
def test_no_tracer_leaks(norm, layout, axis_names, train):
    params, state = nj.Affine.init(C=4), nj.BatchStats.init(C=4) if norm is nj.batch_norm else None
    x = jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)
    where = jax.ShapeDtypeStruct((2, 3, 4), jnp.bool_)
    with checking_leaks():
        for _ in range(2):
            call = gradient_of(norm, layout, axis_names, train)
            (dx, _, _), _ = jax.eval_shape(call, x, params, jnp.float32(1e-5), state, where)
    assert dx.shape == (2, 3, 4)
