"""Cases of derivatives: forward mode, second and third order, traced numbers, gradient checks that can fail.

tests/test_every_transform.py has forward mode, Hessians and third derivatives in general.
"""

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
    each_family,
)
from tests.quick import checking_leaks, quick_jit


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


# --- 57: forward mode


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

    @quick_jit
    def gradients(eps, x, scale):
        def gradient(apply):
            loss = lambda eps, x, scale: jnp.sum(apply(x, scale, bias, eps=eps) * g)  # noqa: E731
            return jax.grad(loss, argnums=(0, 1, 2))(eps, x, scale)

        ways = ("vjp", "jvp", "autodiff")
        return gradient(small.plain), [gradient(functools.partial(norm, derivative=way)) for way in ways]

    expected, found = gradients(0.1, x, scale)
    assert abs(expected[0]) > 1e-3
    for actual in found:
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

    @quick_jit
    def step(x, scale, eps, new_weight, where):
        traces.append(derivative)

        def loss(x, scale, eps, new_weight):
            y, new = norm.pair(
                x, scale, bias, state, eps=eps, where=where, running=nj.Ema(new_weight), derivative=derivative
            )
            return jnp.sum(y * g) + jnp.sum(new.mean), new

        return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(x, scale, eps, new_weight)

    with checking_leaks():
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
    y = quick_jit(lambda x: nj.batch_norm(x, params, layout="N C L", axis_names=axis_names, train=True)[0])(x)
    close(y, 2 * reference.normalize(x, layout="N C L", axis_names="N L") + 1)


# --- 59: third derivatives at a constant, Hessian-vector products with state


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

    @quick_jit
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

    @quick_jit
    def products(x, v):
        own = jax.grad(loss, has_aux=True)
        plain = jax.grad(lambda x: jnp.sum(small.plain(x, scale, bias, where=where) ** 4))
        return [jax.jvp(slope, (x,), (v,))[1] for slope in (lambda x: own(x)[0], plain)]

    to_float64(*products(x, v))


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
