"""Who sums the gradients of replicated parameters in each regime, and collectives inside remat, scan and vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import reference
from tests.quick import quick_jit
from tests.sync.mappings import DATA, GRADIENT, MAPPINGS, PARAMETER, STATE

SPREAD = ("pmap", "shard_map", "unchecked shard_map", "vmap")
CHECKED = "shard_map"
DEVICES, SHARD = 4, (2, 3)
SPEC = {"layout": "S N C", "axis_names": "S N", "names": "C"}


def problem(rng, *lead):
    """x, cotangents, scale and bias in float64."""
    return *rng.normal(1.0, 2.0, (2, *lead, DEVICES, *SHARD)), *rng.normal(size=(2, 3))


def layer(x, scale, bias, derivative="vjp"):
    options = {"layout": "N C", "axis_names": "N data", "train": True, "derivative": derivative}
    return nj.sync_batch_norm(x, nj.Affine(scale, bias, "C"), **options)[0]


def close(actual, wanted):
    np.testing.assert_allclose(actual, wanted, rtol=1e-10, atol=1e-10)


# Each loss: of one device, and what the caller makes of the devices' gradients of replicated parameters.
LOSSES = {
    "sum": lambda terms: jnp.sum(terms),
    "mean": lambda terms: jnp.mean(terms),
    "psum of sums": lambda terms: jax.lax.psum(jnp.sum(terms), "data"),
}
# How often the gradient of the same loss on one device is in dx, and in what a device holds of dscale; where each holds
# its own share, in the sum of the shares.
UNTYPED = {"sum": (1, 1), "mean": (DEVICES, DEVICES), "psum of sums": (DEVICES, DEVICES)}
TYPED = {"sum": (1, 1), "mean": (DEVICES, DEVICES), "psum of sums": (1, 1)}


@pytest.mark.case(39)
@pytest.mark.case(40)
@pytest.mark.parametrize("spread", SPREAD)
def test_the_parameters_gradient_is_summed_once_by_checked_shard_map_and_elsewhere_by_the_caller(spread, rng, x64):
    x, g, scale, bias = problem(rng)
    mapping = MAPPINGS[spread]
    _, d_scale, d_bias = reference.backward(x, g, scale, bias, **SPEC)
    dx = reference.backward(x, g, scale, bias, **SPEC)[0]

    def step(x, g, scale, bias):
        results = []
        for loss in LOSSES.values():
            of_one = lambda x, scale, bias, loss=loss: loss(g * layer(x, scale, bias))  # noqa: E731
            results += jax.grad(of_one, (0, 1, 2))(x, scale, bias)
        return tuple(results)

    roles = (DATA, GRADIENT, GRADIENT) * len(LOSSES)
    found = quick_jit(mapping.wrap(step, (DATA, DATA, PARAMETER, PARAMETER), roles))(x, g, scale, bias)
    ratios = TYPED if spread == CHECKED else UNTYPED
    for i, loss in enumerate(LOSSES):
        size = x.size if loss == "mean" else 1  # on one device the mean is over all entries
        of_x, of_params = ratios[loss]
        own = found[3 * i : 3 * i + 3]
        close(own[0], of_x * dx / size)
        for share, whole in zip(own[1:], (d_scale, d_bias), strict=True):
            assert share.shape == (whole.shape if spread == CHECKED else (DEVICES, *whole.shape))
            close(mapping.whole(share, GRADIENT), of_params * whole / size)
    if spread != CHECKED:  # each share is the device's own: unreduced
        x_hat = reference.normalize(x, **{**SPEC, "names": ""})
        close(found[1], (g * x_hat).sum(1))
        close(found[2], g.sum(1))


@pytest.mark.case(41)
@pytest.mark.parametrize("derivative", ["vjp", "jvp"])
@pytest.mark.parametrize("spread", ["shard_map", "unchecked shard_map"])
def test_a_norm_of_each_device_by_itself_has_gradients_of_the_right_type_too(spread, derivative, rng, x64):
    x, g, scale, bias = problem(rng)
    mapping = MAPPINGS[spread]

    def step(x, g, scale, bias):
        def loss(x, scale, bias):
            params = nj.Affine(scale, bias, "C")
            y, _ = nj.batch_norm(x, params, layout="N C", axis_names="N", train=True, derivative=derivative)
            z, _ = nj.layer_norm(x, params, layout="N C", axis_names="C", derivative=derivative)
            return jnp.sum(g * (y + z))

        return jax.grad(loss, (0, 1, 2))(x, scale, bias)

    roles = (DATA, GRADIENT, GRADIENT)
    found = quick_jit(mapping.wrap(step, (DATA, DATA, PARAMETER, PARAMETER), roles))(x, g, scale, bias)
    parts = [reference.backward(x, g, scale, bias, **{**SPEC, "axis_names": axis}) for axis in ("N", "C")]
    for actual, role, by_batch, by_layer in zip(found, roles, *parts, strict=True):
        close(actual if role == DATA else mapping.whole(actual, role), by_batch + by_layer)


@pytest.mark.case(43)
@pytest.mark.parametrize("derivative", ["vjp", "jvp", "autodiff"])
def test_an_operand_that_vmap_leaves_unmapped_counts_once_for_each_lane(derivative, rng, x64):
    x, g = rng.normal(1.0, 2.0, (2, 5, 3))
    gs, scales, biases = g * rng.normal(size=(4, 1, 1)), *rng.normal(size=(2, 4, 3))

    def apply(x, scale, bias):
        params = nj.Affine(scale, bias, "C")
        return nj.normalize(x, params, layout="N C", axis_names="N data", derivative=derivative)

    @quick_jit
    def program(x, gs, scales, biases):
        lanes = lambda *args: jax.vmap(apply, in_axes=(None, 0, 0), axis_name="data")(*args)  # noqa: E731
        y, pullback, moments = jax.vjp(lanes, x, scales, biases, has_aux=True)
        return y, moments.count, pullback(gs)

    y, count, (dx, d_scales, d_biases) = program(x, gs, scales, biases)
    np.testing.assert_array_equal(count, np.full((4, 3), 20.0))
    spec = {"layout": "N C", "axis_names": "N", "names": "C"}
    total = 0
    for lane in range(4):
        own = gs[lane], scales[lane], biases[lane]
        close(y[lane], reference.normalize(x, *own[1:], **spec))
        part, d_scale, d_bias = reference.backward(x, *own, **spec)
        close(d_scales[lane], d_scale)
        close(d_biases[lane], d_bias)
        total = total + part
    close(dx, total)


@pytest.mark.case(43)
@pytest.mark.parametrize("derivative", ["vjp", "jvp"])
@pytest.mark.parametrize("spread", ["shard_map", "unchecked shard_map", "vmap"])
def test_collectives_inside_a_scan_of_checkpointed_steps_are_right(spread, derivative, rng, x64):
    steps = 3
    xs, gs, scale, bias = problem(rng, steps)
    mapping = MAPPINGS[spread]

    def train(xs, gs, scale, bias, mean, var):
        def loss(xs, scale, bias):
            @jax.checkpoint
            def body(state, inputs):
                x, g = inputs
                options = {"layout": "N C", "axis_names": "N data", "train": True, "derivative": derivative}
                y, state = nj.batch_norm(x, nj.Affine(scale, bias, "C"), state, **options)
                return state, jnp.sum(g * y)

            start = nj.BatchStats(mean, var, jnp.int32(0), jnp.zeros(3, jnp.float32), "C")
            state, terms = jax.lax.scan(body, start, (xs, gs))
            return jnp.sum(terms), (state.mean, state.var)

        slopes, state = jax.grad(loss, (0, 1, 2), has_aux=True)(xs, scale, bias)
        return *slopes, *state

    roles = (DATA, GRADIENT, GRADIENT, STATE, STATE)
    program = quick_jit(mapping.wrap(train, (DATA, DATA, *(PARAMETER,) * 4), roles))
    lead = lambda a: np.moveaxis(a, 1, 0)  # noqa: E731
    results = program(lead(xs), lead(gs), scale, bias, np.zeros(3), np.ones(3))
    dxs, d_scale, d_bias, mean, var = (mapping.whole(out, role) for out, role in zip(results, roles, strict=True))
    slopes = [reference.backward(x, g, scale, bias, **SPEC) for x, g in zip(xs, gs, strict=True)]
    close(np.moveaxis(dxs, 0, 1), np.stack([dx for dx, _, _ in slopes]))
    close(d_scale, sum(d for _, d, _ in slopes))
    close(d_bias, sum(d for _, _, d in slopes))
    state = np.zeros(3), np.ones(3), np.zeros(3)
    for x in xs:
        state = reference.update(*state, *reference.moments(x, layout="S N C", axis_names="S N"), rule="ema")
    close(mean, np.broadcast_to(state[0], mean.shape))
    close(var, np.broadcast_to(state[1], var.shape))


@pytest.mark.parametrize("derivative", ["jvp", "autodiff"])
@pytest.mark.parametrize("spread", SPREAD)
def test_forward_mode_is_the_transpose_of_reverse_mode(spread, derivative, rng, x64):
    x, g, scale, bias = problem(rng)
    t, _, t_scale, t_bias = problem(rng)

    def step(x, t, scale, bias, t_scale, t_bias):
        apply = lambda *primals: layer(*primals, derivative)  # noqa: E731
        return (jax.jvp(apply, (x, scale, bias), (t, t_scale, t_bias))[1],)

    program = quick_jit(MAPPINGS[spread].wrap(step, (DATA, DATA, *(PARAMETER,) * 4), (DATA,)))
    (tangent,) = program(x, t, scale, bias, t_scale, t_bias)
    slopes = reference.backward(x, g, scale, bias, **SPEC)
    inner = sum(np.sum(a * b) for a, b in zip(slopes, (t, t_scale, t_bias), strict=True))
    np.testing.assert_allclose(np.sum(g * np.asarray(tangent)), inner, rtol=1e-10)


def test_second_derivatives_through_mapped_axes_equal_those_of_one_device(rng, x64):
    x, g, scale, bias = problem(rng)

    def second(norm):
        loss = lambda x, scale, bias: jnp.sum(g * norm(x, scale, bias) ** 2)  # noqa: E731
        slope = lambda *primals: jnp.sum(g * jax.grad(loss)(*primals))  # noqa: E731
        return quick_jit(jax.grad(slope, (0, 1, 2)))(x, scale, bias)

    def textbook(x, scale, bias):
        mean = x.mean((0, 1))
        var = jnp.mean((x - mean) ** 2, (0, 1))
        return (x - mean) / jnp.sqrt(var + 1e-5) * scale + bias

    exact = second(textbook)
    for derivative in ("vjp", "jvp", "autodiff"):
        mapped = lambda *primals, how=derivative: jax.vmap(  # noqa: E731
            lambda x, scale, bias: layer(x, scale, bias, how), in_axes=(0, None, None), axis_name="data"
        )(*primals)
        for actual, wanted in zip(second(mapped), exact, strict=True):
            close(actual, wanted)


@pytest.mark.parametrize("scale", [jnp.float32, jnp.float64])
@pytest.mark.parametrize("deviation", [1e-14, 1.0, 1e14])
@pytest.mark.parametrize("spread", ["vmap, gradient inside", "checked"])
def test_small_and_large_deviations_have_the_gradients_of_one_device(spread, deviation, scale, rng, x64):
    """In float32, where r³ would not be a number; and with parameters of another dtype than x."""
    x, g = (jnp.asarray(rng.normal(size=(4, 6, 3)), jnp.float32) for _ in range(2))
    x = x * deviation
    params = nj.Affine(jnp.asarray(rng.normal(size=3), scale), jnp.asarray(rng.normal(size=3), scale), "C")

    def gradients(layout, axis_names, x, g, params, eps):
        norm = lambda *args: nj.normalize(  # noqa: E731
            args[0], args[1], layout=layout, axis_names=axis_names, eps=args[2]
        )[0]
        return jax.vjp(norm, x, params, eps)[1](g)

    eps = jnp.float32(0)
    wanted = gradients("S N C", "S N", x, g, params, eps)
    of_device = lambda x, g, params, eps: gradients("N C", "N data", x, g, params, eps)  # noqa: E731
    if spread == "checked":
        mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
        sharded = jax.shard_map(
            lambda x, g, *others: of_device(x[0], g[0], *others),
            mesh=mesh,
            in_specs=(P("data"), P("data"), P(), P()),
            out_specs=(P("data"), P(), P()),
        )
        dx, *summed = quick_jit(sharded)(x, g, params, eps)
    else:
        each = quick_jit(jax.vmap(of_device, (0, 0, None, None), axis_name="data"))
        dx, *shares = each(x, g, params, eps)
        summed = jax.tree.map(lambda leaf: leaf.sum(0), shares)
    got = (dx.reshape(x.shape), *summed)
    for ours, one in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert ours.dtype == one.dtype
        np.testing.assert_allclose(ours, one, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(one))))
