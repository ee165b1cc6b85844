"""Cases of variance 0: constants, groups of one entry, and their gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.cases.common import (
    EPS32,
    FAMILY,
    HOW,
    ROW,
    Norm,
    close,
    each_centred,
    each_derivative,
    each_family,
    each_how,
    rounded_once,
    same,
)
from tests.quick import quick_jit

# --- 4: constants


CONSTANTS = [7.5e10, 1e6, 0.1, 1.5678, -3e-7]


@pytest.mark.case(4)
@pytest.mark.parametrize(
    ("length", "how"), [(3, "jit"), (7, "eager"), (7, "jit"), (7, "vmap"), (8, "jit"), (1000, "jit")]
)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_equal_values_have_variance_0_and_give_the_bias(length, masked, how):
    x = np.repeat(np.asarray(CONSTANTS, np.float32)[:, None], length, 1)
    where = np.arange(length)[None] % 3 != 1
    params = nj.Affine(np.full(length, 2, np.float32), np.linspace(-1, 1, length, dtype=np.float32), "D")

    def function(x):
        y, moments = nj.normalize(x, params, where=where if masked else None, **ROW)
        return y, moments.mean, moments.var

    y, mean, var = HOW[how](function)(x)
    same(var, np.zeros(len(CONSTANTS), np.float32))
    same(mean, x[:, 0])
    same(y, np.broadcast_to(params.bias, x.shape))


def constant_groups(norm, constants, dtype):
    """An x whose groups are constant: a bias along the kept axes spread over zeros."""
    kept = jax.eval_shape(lambda x: nj.moments(x, **norm.axes), np.zeros(norm.shape, dtype)).names
    return reference.normalize(np.zeros(norm.shape), None, constants, names=kept, **norm.axes).astype(dtype)


@pytest.mark.case(4)
@pytest.mark.parametrize(
    ("dtype", "derivative"),
    [(np.float32, "vjp"), (np.float32, "jvp"), (np.float32, "autodiff"), (jnp.bfloat16, "vjp"), (np.float16, "vjp")],
)
@each_centred
def test_constant_groups_give_the_bias_and_no_gradient_of_scale(norm, dtype, derivative, rng):
    _, g, scale, bias = norm.problem(rng, dtype)
    x = constant_groups(norm, rng.choice([0.1, 1.5678, 3e4, -7.7], norm.groups), dtype)
    y, _, d_scale, d_bias, _ = norm.vjp(x, g, scale, bias, derivative=derivative)
    same(y, norm.exact(x, scale, bias).astype(dtype))
    same(d_scale, np.zeros_like(scale))
    rounded_once(d_bias, norm.exact_cotangents(x, g, scale, bias)[2], m=x.size)


@pytest.mark.case(4)
@pytest.mark.parametrize("shards", [3, 50], ids=["few shards", "many shards"])
def test_constants_spread_over_a_mapped_axis_give_the_bias(shards):
    x = np.broadcast_to(np.asarray(CONSTANTS, np.float32), (shards, 7, len(CONSTANTS)))
    normalise = lambda x: nj.normalize(x, layout="N C", axis_names="N data")  # noqa: E731
    y, moments = jax.jit(jax.vmap(normalise, axis_name="data"))(x)
    same(y, np.zeros_like(x))
    same(moments.var, np.zeros((shards, len(CONSTANTS)), np.float32))


# --- 11: one entry in a group


ONE_ENTRY = {
    "layer": Norm(nj.layer_norm, (5, 1), "N D", "D", "D", (1,), (5,)),
    "groups of one channel": Norm(nj.group_norm, (7, 27), "N C=(G=27 K)", "K", "C", (27,), (7, 27)),
    "instance": Norm(nj.instance_norm, (2, 1, 1, 3), "N H W C", "H W", "C", (3,), (2, 3)),
    "batch": Norm(nj.batch_norm, (1, 3), "N C", "N", "C", (3,), (3,)),
    "ghost": Norm(nj.batch_norm, (4, 3), "N=(B n=1) C", "n", "C", (3,), (4, 3)),
}


@pytest.mark.case(11)
@pytest.mark.parametrize(
    ("name", "derivative", "how"),
    [
        *((name, "vjp", "jit") for name in ONE_ENTRY),
        *(("layer", way, "jit") for way in ("jvp", "autodiff")),
        ("layer", "vjp", "eager"),
        ("batch", "vjp", "vmap"),
        ("batch", "jvp", "jit"),
    ],
)
def test_a_group_of_one_entry_gives_exactly_the_bias_and_no_gradient(name, how, derivative, rng):
    norm = ONE_ENTRY[name]
    x, g = np.asarray(rng.standard_normal((2, *norm.shape)) * 1e6, np.float32)
    scale, bias = np.full(norm.sizes, 2, np.float32), np.full(norm.sizes, 3, np.float32)
    y, dx, d_scale, _, _ = norm.vjp(x, g, scale, bias, how=how, derivative=derivative)
    same(y, np.full_like(x, 3))
    same(d_scale, np.zeros_like(scale))
    same(dx, np.zeros_like(x))


def first_of_each_group(norm):
    """A mask with one entry of each group: the first."""
    places = np.arange(math.prod(norm.shape)).reshape(norm.shape)
    mask = np.zeros(norm.shape, bool)
    # The group of an entry is told by the mean of a random table, which no two groups share.
    table = np.random.default_rng(0).random(norm.shape)
    mean, _, _ = reference.moments(table, **norm.axes)
    kept = jax.eval_shape(lambda x: nj.moments(x, **norm.axes), table).names
    group = reference.normalize(np.zeros(norm.shape), None, mean, names=kept, **norm.axes)
    for value in np.unique(group):
        mask.flat[places[group == value].min()] = True
    return mask


@pytest.mark.case(11)
@each_derivative
@each_centred
def test_a_group_that_the_mask_leaves_one_entry_gives_it_the_bias(norm, derivative, rng):
    x, g, scale, bias = norm.problem(rng, mean=1e6)
    first = first_of_each_group(norm)
    assert first.sum() == math.prod(norm.groups)
    g = np.where(first, g, np.float32(0))
    y, dx, d_scale, _, _ = norm.vjp(x, g, scale, bias, where=first, derivative=derivative)
    same(np.asarray(y)[first], norm.exact(np.zeros(norm.shape), scale, bias).astype(np.float32)[first])
    same(d_scale, np.zeros_like(scale))
    # The entry's own u·r less the group's: two roundings, or one where the compiler fuses them.
    assert np.max(np.abs(dx)) <= EPS32 * np.max(np.abs(scale)) * np.max(np.abs(g)) / np.sqrt(1e-5)


# --- 12: gradients where the deviation is 0


@pytest.mark.case(12)
@each_derivative
@each_how
def test_the_gradient_of_a_constant_pair_is_finite_and_right(how, derivative):
    x, g = np.ones((1, 2), np.float32), np.array([[1, 0]], np.float32)
    apply = lambda x: nj.layer_norm(x, derivative=derivative, **ROW)[0]  # noqa: E731
    dx = HOW[how](lambda x, g: jax.vjp(apply, x)[1](g)[0])(x, g)
    np.testing.assert_allclose(dx, 316.2278 * np.array([[0.5, -0.5]]), rtol=1e-6)


@pytest.mark.case(12)
@each_derivative
@each_family
def test_constant_groups_have_the_gradients_of_the_reference(norm, derivative, rng):
    _, g, scale, bias = norm.problem(rng)
    x = np.full(norm.shape, 0.7 if norm.center else 0, np.float32)
    actual = norm.vjp(x, g, scale, bias, derivative=derivative)[1:4]
    for a, e in zip(actual, norm.exact_cotangents(x, g, scale, bias), strict=True):
        close(a, e, m=x.size)


@pytest.mark.case(12)
@each_derivative
@each_family
def test_with_eps_0_a_group_of_variance_0_gives_the_bias_and_zero_gradient(norm, derivative, rng):
    _, g, scale, bias = norm.problem(rng)
    x = np.full(norm.shape, 0.7 if norm.center else 0, np.float32)
    y, dx, d_scale, d_bias, d_eps = norm.vjp(x, g, scale, bias, eps=0, derivative=derivative)
    same(y, norm.exact(x, scale, bias, eps=0).astype(np.float32))
    for cotangent in (dx, d_scale, d_eps):
        same(cotangent, np.zeros(cotangent.shape, np.float32))
    close(d_bias, norm.exact_cotangents(x, g, scale, bias, eps=0)[2], m=x.size)


@pytest.mark.case(12)
@pytest.mark.parametrize("derivative", ["vjp", "jvp"])
@pytest.mark.parametrize("family", ["batch", "layer"])
def test_with_eps_0_the_second_derivative_at_variance_0_is_zero_too(family, derivative, rng):
    norm = FAMILY[family]
    _, g, scale, bias = norm.problem(rng)
    x = np.full(norm.shape, 0.7 if norm.center else 0, np.float32)
    slope = jax.grad(lambda x: jnp.sum(norm(x, scale, bias, eps=0.0, derivative=derivative) * g))
    same(quick_jit(jax.grad(lambda x: jnp.sum(slope(x) ** 2)))(x), np.zeros_like(x))


@pytest.mark.case(12)
@each_derivative
def test_evaluation_with_a_running_variance_of_0_and_eps_0_gives_the_bias_and_zero_gradient(derivative):
    params = nj.Affine(np.full(2, 2, np.float32), np.full(2, 3, np.float32), "C")
    state = nj.BatchStats(np.zeros(2, np.float32), np.float32([0, 4]), np.int32(1), np.ones(2, np.float32), "C")

    @quick_jit
    def program(x, g):
        options = {"layout": "N C", "axis_names": "N", "train": False, "eps": 0.0, "derivative": derivative}
        y, pullback = jax.vjp(lambda x: nj.batch_norm(x, params, state, **options)[0], x)
        return y, pullback(g)[0]

    y, dx = program(np.ones((2, 2), np.float32), np.float32([[1, 2], [3, 4]]))
    close(y, [[3, 4], [3, 4]])
    close(dx, [[0, 2], [0, 4]])


@pytest.mark.case(12)
@pytest.mark.parametrize("eps", [-1e-5, -1, float("nan")])
@each_family
def test_a_negative_eps_is_refused(norm, eps):
    with pytest.raises(ValueError, match=rf"{norm.fn.__name__}: eps={eps!r} must be at least 0"):
        jax.eval_shape(lambda x: norm(x, eps=eps), np.ones(norm.shape, np.float32))
