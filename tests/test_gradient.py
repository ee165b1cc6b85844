"""The gradient: three derivatives against the reference's backward, `jax.grad` of the plain formula and differences.

Fourth-order differences with h = 1e-4 leave about 1e-10 of rounding and 1e-16·f⁽⁵⁾ of truncation: 1e-8. Every cotangent
is random: the outputs of a group sum to a constant, so a cotangent of ones has no gradient to check.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import normjax as nj
from normjax import reference
from tests.contract import problems
from tests.derivatives import DERIVATIVES, FAMILIES, dear, first, float64_inputs, library, near
from tests.quick import quick_jit

KINDS = {
    "scale and bias": "channels last",
    "scale alone": "signal, scale alone",
    "zero-centred": "sequence, zero-centred",
    "conditional": "conditional parameters",
    "scalar": "scalar parameters",
    "none": "no parameters",
    "of a split axis": "split axes",
}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_derivative = pytest.mark.parametrize("derivative", DERIVATIVES)


@functools.cache
def _all_cotangents(family: str, layout: str, masked: bool, derivatives: tuple[str, ...]):
    """One program for a family and layout: the cotangents by each derivative and by the plain formula."""
    given = problems.problem(family, layout)

    def program(g, where, mean, var, *primals):
        state = nj.BatchStats(mean, var, jnp.int32(0), jnp.zeros(given.stat_shape, jnp.float32), given.state)
        mask = where if masked else None
        found = {}
        for derivative in derivatives:
            norm = problems.library(given, derivative)
            found[derivative] = jax.vjp(lambda *p, f=norm: f(*p, state, mask)[0], *primals)[1](g)
        found["plain"] = jax.vjp(lambda *p: problems.plain(given, *p, mean, var, where), *primals)[1](g)
        return found

    return given, quick_jit(program)


def check_cotangents(family, layout, mask, derivatives=DERIVATIVES):
    given, program = _all_cotangents(family, layout, mask != "none", derivatives)
    values = float64_inputs(given, mask)
    where = np.array(problems.full_mask(given, values))
    found = program(values.g, where, values.mean, values.var, *first(values))
    x, scale, bias = first(values)
    expected = problems.cotangents(given, values, x, values.g, scale, bias)
    for name, slopes in found.items():
        for slope, wanted in zip(slopes, expected, strict=True):
            assert (slope is None) == (wanted is None), name
            if wanted is not None:
                near(slope, wanted)


@pytest.mark.parametrize("mask", ["none", "full", "empties a group", "NaN left out"])
@every_family
def test_under_each_mask_three_derivatives_equal_the_reference_s_backward_and_jax_grad(family, mask, x64):
    check_cotangents(family, "channels last", mask)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "scale and bias"])
@pytest.mark.parametrize("family", ["batch", "layer", "rms"])
def test_for_each_kind_of_parameters_the_analytic_rules_equal_the_reference_s_backward_and_jax_grad(family, kind, x64):
    # One program serves every mask of x's own shape.
    for mask in ("full", "empties a group", "NaN left out"):
        check_cotangents(family, KINDS[kind], mask, ("vjp", "jvp"))


@pytest.mark.parametrize("family", ["batch", "batch_eval"])
def test_with_ghost_batches_the_analytic_rules_equal_the_reference_s_backward_and_jax_grad(family, x64):
    for mask in ("full", "empties a group"):
        check_cotangents(family, "ghost batches", mask, ("vjp", "jvp"))


@pytest.mark.parametrize("mean", [0.0, 10.0])
@dear(lambda family, mask: mask == "full" or family == "layer", family=FAMILIES, mask=["none", "full"])
def test_gradients_equal_fourth_order_central_differences(family, mean, mask, x64):
    values, where, program = _differences(family, mask)
    x, scale, bias = first(values)
    slopes, differences = program(values.g, (x - 1.5 + mean, scale, bias), where)
    near(slopes, differences, 1e-8)


@functools.cache
def _differences(family, mask):
    given = problems.problem(family, "channels last")
    values = float64_inputs(given, mask)
    where = None if mask == "none" else jnp.asarray(values.where)
    h = 1e-4

    def program(g, primals, where):
        flat, unflatten = ravel_pytree(primals)
        norm = library(given, values, "vjp", where)
        loss = lambda flat: jnp.sum(g * norm(*unflatten(flat)))  # noqa: E731

        def slope(direction):
            at = lambda steps: loss(flat + steps * h * direction)  # noqa: E731
            return (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * h)

        return jax.grad(loss)(flat), jax.vmap(slope)(jnp.eye(flat.size))

    return values, where, quick_jit(program)


# --- through moments, state and eps


@every_derivative
@pytest.mark.parametrize("center", [True, False])
def test_gradients_flow_through_the_moments_that_normalize_returns(center, derivative, rng, x64):
    x, g, where = rng.normal(1.0, 2.0, (5, 4)), rng.normal(size=(5, 4)), rng.random((5, 4)) < 0.7
    a, b = rng.normal(size=(2, 4))
    axes = {"layout": "N C", "axis_names": "N", "where": where, "center": center}

    def loss(x):
        y, found = nj.normalize(x, derivative=derivative, **axes)
        return jnp.sum(g * y) + jnp.sum(a * found.mean + b * found.var**2)

    def plain(x):
        mean = jnp.mean(x, 0, where=where) if center else jnp.zeros(4)
        var = jnp.mean((x - mean) ** 2, 0, where=where)
        return jnp.sum(g * (x - mean) / jnp.sqrt(var + 1e-5)) + jnp.sum(a * mean + b * var**2)

    near(*quick_jit(lambda x: (jax.grad(loss)(x), jax.grad(plain)(x)))(x))


def test_gradients_flow_through_moments_and_their_merge(rng, x64):
    x, (a, b) = rng.normal(3.0, 2.0, (6, 4)), rng.normal(size=(2, 4))

    def loss(x):
        parts = [nj.moments(part, layout="N C", axis_names="N") for part in (x[:2], x[2:3], x[3:])]
        whole = nj.merge(*parts)
        return jnp.sum(a * whole.mean + b * whole.var**2)

    def plain(x):
        return jnp.sum(a * jnp.mean(x, 0) + b * jnp.var(x, 0) ** 2)

    near(*quick_jit(lambda x: (jax.grad(loss)(x), jax.grad(plain)(x)))(x))


@every_derivative
def test_gradients_flow_through_moments_given_to_normalize(derivative, rng, x64):
    x, g = rng.normal(1.0, 2.0, (2, 5, 4))
    mean, var = rng.normal(size=4), rng.uniform(0.5, 2.0, 4)

    def loss(mean, var, x):
        given = nj.Moments(mean, var, jnp.full(4, 5.0), "C")
        return jnp.sum(g * nj.normalize(x, layout="N C", axis_names="N", moments=given, derivative=derivative)[0])

    def plain(mean, var, x):
        return jnp.sum(g * (x - mean) / jnp.sqrt(var + 1e-5))

    both = quick_jit(lambda *primals: [jax.grad(f, (0, 1, 2))(*primals) for f in (loss, plain)])
    for slope, wanted in zip(*both(mean, var, x), strict=True):
        near(slope, wanted)


@every_derivative
@pytest.mark.parametrize("layout", ["channels last", "split axes"])
def test_the_state_given_to_evaluation_is_an_ordinary_differentiable_input(layout, derivative, x64):
    given = problems.problem("batch_eval", layout)
    values = float64_inputs(given, "none")
    norm, full = problems.library(given, derivative), problems.full_mask(given, values)

    @quick_jit
    def program(mean, var):
        def loss(mean, var):
            state = nj.BatchStats(mean, var, jnp.int32(1), jnp.ones(given.stat_shape), given.state)
            return jnp.sum(values.g * norm(*first(values), state, None)[0])

        def plain(mean, var):
            return jnp.sum(values.g * problems.plain(given, *first(values), mean, var, full))

        return jax.grad(loss, (0, 1))(mean, var), jax.grad(plain, (0, 1))(mean, var)

    for slope, wanted in zip(*program(values.mean, values.var), strict=True):
        near(slope, wanted)


@dear(
    lambda family, derivative: derivative == "vjp" or family in ("batch_eval", "layer"),
    family=FAMILIES,
    derivative=DERIVATIVES,
)
def test_the_gradient_by_eps_is_that_of_the_plain_formula(family, derivative, x64):
    given = problems.problem(family, "no parameters")
    values = float64_inputs(given, "full")
    primals, full = first(values), problems.full_mask(given, values)

    @quick_jit
    def program(eps):
        def loss(eps):
            state = problems.stats(given, values)
            return jnp.sum(values.g * problems.library(given, derivative, eps)(*primals, state, full)[0])

        def plain(eps):
            return jnp.sum(values.g * problems.plain(given, *primals, values.mean, values.var, full, eps))

        return jax.grad(loss)(eps), jax.grad(plain)(eps)

    near(*program(1e-2))


# --- dtypes and state


@functools.cache
def _half_precision_cotangents(family):
    """A program of x, scale, bias and a cotangent: their gradients by each derivative, which share most of it."""

    def program(g, *primals):
        def norm(derivative, x, scale, bias):
            axes = {"layout": "N C", "axis_names": "N" if family == "batch" else "C"}
            options = {"train": True, "derivative": derivative, **axes}
            return problems.FUNCTIONS[family](x, nj.Affine(scale, bias, "C"), **options)[0]

        return {name: jax.vjp(functools.partial(norm, name), *primals)[1](g) for name in DERIVATIVES}

    return jax.jit(program)


@every_derivative
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["batch", "layer", "rms"])
def test_each_gradient_has_its_primal_s_dtype_and_is_accumulated_in_float32(family, x_dtype, derivative, rng):
    x_dtype = jnp.dtype(x_dtype)
    x, g = (rng.normal(1.0, 2.0, (300, 4)).astype(x_dtype) for _ in range(2))
    scale, bias = rng.normal(size=4).astype(jnp.bfloat16), rng.normal(size=4).astype(np.float16)
    slopes = _half_precision_cotangents(family)(g, x, scale, bias)[derivative]
    wide = [np.asarray(array, np.float64) for array in (x, g, scale, bias)]
    axis_names, center = "N" if family == "batch" else "C", family != "rms"
    expected = reference.backward(*wide, names="C", layout="N C", axis_names=axis_names, center=center)
    eps32 = float(np.finfo(np.float32).eps)
    for slope, wanted, primal in zip(slopes, expected, (x, scale, bias), strict=True):
        assert slope.dtype == primal.dtype
        # Sums of 300 in float32, then one rounding to the primal's dtype.
        sums = 16 * eps32 * np.sqrt(300) * np.max(np.abs(wanted))
        last = float(jnp.finfo(primal.dtype).eps)
        np.testing.assert_allclose(np.asarray(slope, np.float64), wanted, rtol=last, atol=sums)


@every_derivative
def test_the_new_state_carries_no_gradient(derivative, rng):
    x = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)
    a, b, c = rng.normal(size=(3, 3)).astype(np.float32)

    def loss(x, params, mean, var):
        state = nj.BatchStats(mean, var, jnp.int32(0), jnp.zeros(3), "C")
        axes = {"layout": "N C", "axis_names": "N", "train": True, "derivative": derivative}
        _, new = nj.batch_norm(x, params, state, running=nj.Ema(0.1, debias=True), **axes)
        return jnp.sum(a * new.mean + b * new.var + c * new.weight)

    slopes = quick_jit(jax.grad(loss, (0, 1, 2, 3)))(x, nj.Affine.init(C=3), jnp.zeros(3), jnp.ones(3))
    for slope in jax.tree.leaves(slopes):
        np.testing.assert_array_equal(slope, 0)
