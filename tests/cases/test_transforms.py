"""Cases of derivatives of every order and direction, traced arguments, scan, checkpoint, eval_shape."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import normjax as nj
from normjax import reference
from tests.cases.common import (
    EPS64,
    FAMILY,
    HOW,
    Norm,
    close,
    each_batch_like,
    each_derivative,
    each_family,
    same,
)

COLUMN = {"layout": "N C", "axis_names": "N"}


@dataclasses.dataclass(frozen=True)
class Small:
    """A norm told twice: by names for the library, by axis numbers for the plain formula."""

    norm: Norm
    wide: tuple[int, ...]  # x with one axis for each factor
    axes: tuple[int, ...]  # what is reduced, numbered in wide
    affine: tuple[int, ...]  # the shape of scale and bias against wide

    def plain(self, x, scale, bias, eps=1e-5, where=None):
        """The formula as one would write it down, for jax.grad."""
        x = x.reshape(self.wide)
        where = None if where is None else where.reshape(self.wide)
        mean = jnp.mean(x, self.axes, where=where, keepdims=True) if self.norm.center else 0.0
        var = jnp.mean((x - mean) ** 2, self.axes, where=where, keepdims=True)
        y = scale.reshape(self.affine) * (x - mean) / jnp.sqrt(var + eps) + bias.reshape(self.affine)
        return y.reshape(self.norm.shape)


SMALL = {
    "layer": Small(Norm(nj.layer_norm, (4, 3), "N D", "D", "D", (3,), (4,)), (4, 3), (1,), (3,)),
    "batch": Small(Norm(nj.batch_norm, (4, 2), "N C", "N", "C", (2,), (2,)), (4, 2), (0,), (2,)),
    "group": Small(Norm(nj.group_norm, (2, 6), "N C=(G=2 K)", "K", "C", (6,), (2, 2)), (2, 2, 3), (2,), (2, 3)),
    "rms": Small(Norm(nj.rms_norm, (4, 3), "N D", "D", "D", (3,), (4,), center=False), (4, 3), (1,), (3,)),
}
each_small = pytest.mark.parametrize("small", SMALL.values(), ids=SMALL)


def to_float64(actual, expected, k=1e4):
    """Relative 1e-10 and better: the second and third derivatives multiply some hundred rounded numbers."""
    close(actual, expected, eps=EPS64, k=k)


# --- 57: forward mode and second order


@pytest.mark.case(57)
@pytest.mark.parametrize("derivative", ["jvp", "autodiff"])
@each_small
def test_forward_mode_gives_the_jacobian_of_the_plain_formula(small, derivative, rng, x64):
    norm = small.norm
    x, t, scale, bias = norm.problem(rng, np.float64)

    @jax.jit
    def function(x, t, scale, bias):
        apply = lambda x, scale, bias: norm(x, scale, bias, derivative=derivative)  # noqa: E731
        y, tangent = jax.jvp(apply, (x, scale, bias), (t, bias, scale))
        _, linear = jax.linearize(apply, x, scale, bias)
        return y, tangent, linear(t, bias, scale), jax.jacfwd(apply, argnums=(0, 1, 2))(x, scale, bias)

    @jax.jit
    def plain(x, t, scale, bias):
        y, tangent = jax.jvp(small.plain, (x, scale, bias), (t, bias, scale))
        return y, tangent, tangent, jax.jacfwd(small.plain, argnums=(0, 1, 2))(x, scale, bias)

    for actual, expected in zip(
        jax.tree.leaves(function(x, t, scale, bias)), jax.tree.leaves(plain(x, t, scale, bias)), strict=True
    ):
        to_float64(actual, expected)


@pytest.mark.case(57)
@pytest.mark.parametrize("family", ["layer", "batch", "rms"])
def test_the_hessian_is_the_same_by_every_road(family, rng, x64):
    small = SMALL[family]
    norm = small.norm
    x, g, scale, bias = norm.problem(rng, np.float64)

    def loss(apply):
        return lambda x: jnp.sum(apply(x, scale, bias) ** 3 * g)

    @jax.jit
    def hessians(x):
        vjp = loss(functools.partial(norm, derivative="vjp"))
        jvp = loss(functools.partial(norm, derivative="jvp"))
        return jax.hessian(vjp)(x), jax.jacrev(jax.jacrev(vjp))(x), jax.hessian(jvp)(x), jax.jacfwd(jax.jacfwd(jvp))(x)

    expected = jax.jit(jax.hessian(loss(small.plain)))(x)
    for actual in hessians(x):
        to_float64(actual, expected)


@pytest.mark.case(57)
@pytest.mark.parametrize(("family", "how"), [("batch", "jit"), ("layer", "eager"), ("ghost", "vmap")])
def test_float32_tangents_equal_the_reference_s_by_symmetry(family, how, rng):
    norm = FAMILY[family]
    x, g, _, _ = norm.problem(rng)
    t, _, _, _ = norm.problem(rng)
    push = HOW[how](lambda x, t: jax.jvp(lambda x: norm(x, derivative="jvp"), (x,), (t,))[1])
    # <g, J t> = <Jᵀ g, t>
    dx, _, _ = norm.exact_cotangents(x, g)
    exact = np.sum(dx * t)
    np.testing.assert_allclose(np.sum(np.float64(g) * np.float64(push(x, t))), exact, atol=1e-5 * np.abs(dx * t).sum())


# --- 58: arrays where numbers are expected


@pytest.mark.case(58)
@each_small
def test_eps_may_be_traced_and_has_its_true_gradient(small, rng, x64):
    norm = small.norm
    x, g, scale, bias = norm.problem(rng, np.float64)

    def gradient(apply):
        return jax.jit(jax.grad(lambda eps, x, scale: jnp.sum(apply(x, scale, bias, eps=eps) * g), argnums=(0, 1, 2)))

    expected = gradient(small.plain)(jnp.array(0.1), x, scale)
    assert abs(expected[0]) > 1e-3
    for derivative in ("vjp", "jvp", "autodiff"):
        actual = gradient(functools.partial(norm, derivative=derivative))(jnp.array(0.1), x, scale)
        for a, e in zip(actual, expected, strict=True):
            to_float64(a, e)


@pytest.mark.case(58)
@pytest.mark.parametrize(
    ("family", "derivative"), [("batch", "vjp"), ("batch", "jvp"), ("batch", "autodiff"), ("ghost", "vjp")]
)
def test_eps_averaging_weight_and_mask_are_ordinary_arguments_that_leak_nowhere(family, derivative, rng):
    norm = FAMILY[family]
    x, g, scale, bias = norm.problem(rng)
    where = rng.random(norm.shape) < 0.8
    state = nj.BatchStats.init(C=norm.sizes[0])
    traces = []

    @jax.jit
    def step(x, scale, eps, new_weight, where):
        traces.append(derivative)

        def loss(x, scale, eps, new_weight):
            y, new = norm.pair(
                x, scale, bias, state, eps=eps, where=where, running=nj.Ema(new_weight), derivative=derivative
            )
            return jnp.sum(y * g) + jnp.sum(new.mean), new

        return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(x, scale, eps, new_weight)

    with jax.checking_leaks():
        for eps, weight in ((1e-5, 0.1), (1e-2, 0.5)):
            (dx, d_scale, _, d_weight), new = step(x, scale, np.float32(eps), np.float32(weight), where)
            exact_dx, exact_d_scale, _ = norm.exact_cotangents(x, g, scale, bias, eps=eps, where=where)
            close(dx, exact_dx, m=norm.m)
            close(d_scale, exact_d_scale, m=x.size)
            assert d_weight == 0  # the new state is under stop_gradient
            mean, var, count = reference.moments(x, where=where, **norm.axes)
            extra = tuple(range(mean.ndim - 1))
            expected = reference.update(
                np.zeros(norm.sizes), np.ones(norm.sizes), np.zeros(norm.sizes), mean, var, count,
                rule="ema", new_weight=weight, extra_axes=extra,
            )  # fmt: skip
            close(new.mean, expected[0])
            close(new.var, expected[1])
    assert len(traces) == 1


@pytest.mark.case(58)
@pytest.mark.parametrize(
    ("axis_names", "names"),
    [("N L", "C"), (("N", "L"), ("C",)), (["N", "L"], ["C"]), (["L", "N"], "C"), ({"N": 0, "L": 1}, {"C": 0})],
    ids=repr,
)
def test_names_may_be_a_string_or_any_iterable(axis_names, names, rng):
    x = np.asarray(rng.standard_normal((4, 3, 6)), np.float32)
    params = nj.Affine(np.full(3, 2, np.float32), np.ones(3, np.float32), names)
    y = jax.jit(lambda x: nj.batch_norm(x, params, layout="N C L", axis_names=axis_names, train=True)[0])(x)
    close(y, 2 * reference.normalize(x, layout="N C L", axis_names="N L") + 1)


# --- 59: third derivatives and Hessian-vector products


def third(apply, g):
    """The derivative of v·H·w by x, of a loss that is no polynomial of low degree."""

    def program(x, v, w):
        slope = jax.grad(lambda x: jnp.sum(apply(x) ** 4 * g))
        curve = jax.grad(lambda x: jnp.sum(slope(x) * v))
        return jax.grad(lambda x: jnp.sum(curve(x) * w))(x)

    # It runs once, on a dozen numbers: to compile it well would take longer.
    return jax.jit(program, compiler_options={"xla_backend_optimization_level": 0})


@pytest.mark.case(59)
@pytest.mark.parametrize("family", ["layer", "batch", "rms"])
def test_third_derivatives_are_those_of_the_plain_formula(family, rng, x64):
    small = SMALL[family]
    x, g, scale, bias = small.norm.problem(rng, np.float64)
    v, w = rng.standard_normal((2, *x.shape))
    apply = lambda x, derivative: small.norm(x, scale, bias, derivative=derivative)  # noqa: E731
    expected = third(lambda x: small.plain(x, scale, bias), g)(x, v, w)
    assert np.max(np.abs(expected)) > 1e-2
    for derivative in ("vjp", "jvp"):
        to_float64(third(functools.partial(apply, derivative=derivative), g)(x, v, w), expected)


ROWS = {"layout": "N C", "axis_names": "N", "eps": 1.0}


def at_once(x, derivative):
    return nj.normalize(x, derivative=derivative, **ROWS)[0]


def over_shards(x, derivative):
    """The same groups, in forty parts of one row each over a mapped axis."""
    norm = lambda x: nj.normalize(x, layout="C", axis_names="data", eps=1.0, derivative=derivative)[0]  # noqa: E731
    return jax.vmap(norm, axis_name="data")(x)


def through_merge(x, derivative):
    parts = [nj.moments(part, layout="N C", axis_names="N") for part in (x[:3], x[3:])]
    return nj.normalize(x, moments=nj.merge(*parts), derivative=derivative, **ROWS)[0]


@pytest.mark.case(59)
@pytest.mark.parametrize(
    ("norm", "rows", "derivative"),
    [
        *((at_once, 4, derivative) for derivative in ("vjp", "jvp", "autodiff")),
        (through_merge, 6, "vjp"),
        (over_shards, 40, "vjp"),
    ],
)
def test_third_derivatives_at_a_constant_are_those_of_the_plain_formula(norm, rows, derivative, rng, x64):
    # Where the variance is 0, a clamp at 0 would halve its second derivative.
    weight, direction = rng.standard_normal((2, rows, 2))

    def plain(x):
        return (x - x.mean(0)) / jnp.sqrt(jnp.var(x, 0) + 1.0)

    def thrice(apply, start):
        slope = lambda s: jnp.sum(weight * apply(start + s * direction))  # noqa: E731
        for _ in range(3):
            slope = jax.grad(slope)
        return slope

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def program(start, s):
        return thrice(plain, start)(s), thrice(functools.partial(norm, derivative=derivative), start)(s)

    for start in (0.0, 3.0):
        expected, actual = program(start, 0.0)
        assert abs(expected) > 1e-2
        to_float64(actual, expected)


@pytest.mark.case(59)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("derivative", ["vjp", "jvp"])
def test_hessian_vector_products_pass_through_a_batch_norm_with_state(derivative, masked, rng, x64):
    small = SMALL["batch"]
    x, v, scale, bias = small.norm.problem(rng, np.float64)
    where = rng.random(x.shape).argsort(0) < 3 if masked else None
    state = nj.BatchStats.init(C=2)

    def loss(x):
        y, new = small.norm.pair(x, scale, bias, state, where=where, derivative=derivative)
        return jnp.sum(y**4), new

    def product(loss, **options):
        slope = jax.grad(loss, **options)
        return jax.jit(lambda x, v: jax.jvp(lambda x: slope(x)[0] if options else slope(x), (x,), (v,))[1])

    expected = product(lambda x: jnp.sum(small.plain(x, scale, bias, where=where) ** 4))(x, v)
    to_float64(product(loss, has_aux=True)(x, v), expected)


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

    @jax.jit
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


# --- 62: scan


@pytest.mark.case(62)
@pytest.mark.parametrize("transform", ["scan", "scan of grad", "vmap of scan", "loop"])
def test_over_three_batches_the_state_is_threaded_in_order(transform, rng):
    batches = np.asarray(rng.standard_normal((3, 8, 4)) + 5, np.float32)

    def step(state, x):
        y, state = nj.batch_norm(x, None, state, train=True, running=nj.Ema.flax(0.9), **COLUMN)
        return state, y

    def with_gradient(state, x):
        slope, state = jax.grad(lambda x: (jnp.sum(step(state, x)[1] ** 3), step(state, x)[0]), has_aux=True)(x)
        return state, slope

    state = nj.BatchStats.init(C=4)
    if transform == "loop":
        for x in batches:
            state, _ = step(state, x)
    elif transform == "vmap of scan":
        stacked = np.stack([batches, -batches])
        states, _ = jax.jit(jax.vmap(lambda batches: jax.lax.scan(step, state, batches)))(stacked)
        same(states.mean[1], -states.mean[0])
        state = jax.tree.map(lambda leaf: leaf[0], states)
    else:
        body = step if transform == "scan" else with_gradient
        state, _ = jax.jit(lambda state, batches: jax.lax.scan(body, state, batches))(state, batches)
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

    y, states = jax.jit(lambda x, layers: jax.lax.scan(layer, x, layers))(x, layers)
    h = np.asarray(x, np.float64)
    for i in range(3):
        h = np.tanh(h)
        close(states.mean[i], 0.1 * h.mean(0))
        close(states.var[i], 0.9 + 0.1 * h.var(0))
        h = reference.normalize(h, scales[i], biases[i], names="C", **COLUMN)
    close(y, h, k=64)  # three layers, each of which may multiply the error of the one before


# --- 64: gradient checks that can fail


@pytest.mark.case(64)
@each_family
def test_a_cotangent_of_ones_shows_nothing_and_a_random_one_everything(norm, rng):
    x, g, _, _ = norm.problem(rng)
    ones = np.ones_like(x)
    if norm.center:
        # The sum of a standardised group is constant: what is left is rounding, of terms of size |x̂| / r.
        close(norm.vjp(x, ones)[1], np.zeros_like(x), m=norm.m)
    dx, exact = norm.vjp(x, g)[1], norm.exact_cotangents(x, g)[0]
    assert np.max(np.abs(exact)) > 0.1
    close(dx, exact, m=norm.m)
    # The check above notices a backward without its last term; with ones nothing would.
    _, var, _ = reference.moments(x, center=norm.center, **norm.axes)
    kept = jax.eval_shape(lambda x: nj.moments(x, **norm.axes), x).names
    r = reference.normalize(np.zeros_like(x), None, 1 / np.sqrt(var + 1e-5), names=kept, **norm.axes)
    mean_of_g = reference.normalize(
        np.zeros_like(x), None, reference.moments(g, **norm.axes)[0] * norm.center, names=kept, **norm.axes
    )
    assert np.max(np.abs(r * (g - mean_of_g) - exact)) > 1e-3


@pytest.mark.case(64)
@pytest.mark.parametrize("derivative", ["vjp", "jvp"])
@pytest.mark.parametrize("family", ["batch", "layer", "rms"])
def test_numerical_gradients_along_random_directions_agree(family, derivative, rng, x64):
    norm = SMALL[family].norm
    x, g, scale, bias = norm.problem(rng, np.float64)
    apply = jax.jit(lambda x, scale, bias: norm(x, scale, bias, derivative=derivative) * g)
    modes = ["fwd", "rev"] if derivative == "jvp" else ["rev"]
    check_grads(apply, (x, scale, bias), order=1, modes=modes, atol=1e-6, rtol=1e-6)


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
