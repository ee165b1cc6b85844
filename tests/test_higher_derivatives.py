"""Second and third derivatives, forward mode and Hessians under masks, against the plain formula's, in float64.

Without a mask they are rows of tests/test_every_transform.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract import problems
from tests.derivatives import FAMILIES, first, float64_inputs, library, near
from tests.quick import quick_jit


def curved(norm, g, counted):
    """A loss with derivatives of every order."""
    return lambda *primals: jnp.sum(jnp.where(counted, g * jnp.sin(norm(*primals)), 0))


every_family = pytest.mark.parametrize("family", FAMILIES)


@every_family
def test_second_derivatives_equal_autodiff_of_the_plain_formula(family, rng, x64):
    given = problems.problem(family, "channels last")
    values = float64_inputs(given, "NaN left out")
    full = problems.full_mask(given, values)
    counted = full | np.isfinite(values.xs[0])
    primals = first(values)
    weights = [rng.normal(size=np.shape(primal)) for primal in primals]

    def second(norm):
        loss = curved(norm, values.g, counted)
        return jax.grad(problems.projected_gradient(loss, weights, (0, 1, 2)), (0, 1, 2))

    @quick_jit
    def program(*primals):
        plain = second(lambda *p: problems.plain(given, *p, values.mean, values.var, full))(*primals)
        return plain, [second(library(given, values, derivative, full))(*primals) for derivative in ("vjp", "jvp")]

    expected, found = program(*primals)
    for slopes in found:
        for slope, wanted in zip(slopes, expected, strict=True):
            near(slope, wanted)


@functools.cache
def _third():
    """A program of x and two weights: the third derivatives by the plain formula and by the analytic rules."""
    given = problems.problem("layer", "no parameters")
    values = float64_inputs(given, "full")
    full = problems.full_mask(given, values)

    def third(norm, weights):
        loss = curved(lambda x: norm(x, None, None), values.g, True)
        for weight in weights:
            loss = problems.projected_gradient(loss, [weight], (0,))
        return jax.grad(loss)

    def program(x, weights):
        norms = {name: library(given, values, name, full) for name in ("vjp", "jvp")}
        norms["plain"] = lambda *p: problems.plain(given, *p, values.mean, values.var, full)
        return {name: third(norm, weights)(x) for name, norm in norms.items()}

    return values.xs[0], quick_jit(program)


@pytest.mark.parametrize("derivative", ["vjp", "jvp"])
def test_third_derivatives_equal_autodiff_of_the_plain_formula(derivative, rng, x64):
    x, program = _third()
    found = program(x, rng.normal(size=(2, *x.shape)))
    near(found[derivative], found["plain"])


@every_family
def test_with_jvp_the_forward_mode_is_that_of_the_plain_formula(family, rng, x64):
    given = problems.problem(family, "channels last")
    values = float64_inputs(given, "NaN left out")
    full = problems.full_mask(given, values)
    primals = first(values)
    tangents = tuple(rng.normal(size=np.shape(primal)) for primal in primals)
    lost = ~full & ~np.isfinite(primals[0])
    norm = library(given, values, "jvp", full)

    @quick_jit
    def program(primals, tangents):
        plain = lambda *p: problems.plain(given, *p, values.mean, values.var, full)  # noqa: E731
        _, expected = jax.jvp(plain, primals, tangents)
        _, tangent = jax.jvp(norm, primals, tangents)
        _, linear = jax.linearize(norm, *primals)
        return expected, tangent, linear(*tangents)

    expected, *found = program(primals, tangents)
    for tangent in found:
        # The plain formula replaces a lost entry by 0; what the library says of that entry's own output is its affair.
        near(np.where(lost, 0, tangent), np.where(lost, 0, expected))


@pytest.mark.parametrize("family", ["batch", "layer", "rms"])
def test_with_jvp_jacobians_and_hessians_are_the_same_both_ways_round(family, x64):
    given = problems.problem(family, "no parameters")
    values = float64_inputs(given, "full")
    where = values.where[:2, :2]
    options = {"layout": given.layout, "axis_names": given.axis_names, "where": where, "eps": problems.EPS}
    small = problems.dataclasses.replace(given, shape=where.shape, wide=where.shape)

    def norm(x):
        return problems.FUNCTIONS[family](x, train=True, derivative="jvp", **options)[0]

    def plain(x):
        return problems.plain(small, x, None, None, None, None, where)

    @quick_jit
    def program(x):
        loss, plain_loss = (curved(f, values.g[:2, :2], True) for f in (norm, plain))
        hessians = [jax.jacfwd(jax.jacrev(loss))(x), jax.jacrev(jax.jacfwd(loss))(x), jax.hessian(loss)(x)]
        return jax.jacrev(plain)(x), jax.jacfwd(norm)(x), jax.jacrev(jax.jacrev(plain_loss))(x), hessians

    jacobian, found, hessian, hessians = program(values.xs[0][:2, :2])
    near(found, jacobian)
    for each in hessians:
        near(each, hessian)
