"""`normjax.fold.fold`: one layer that does what the layer and its norm in evaluation do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import reference
from normjax.fold import fold
from tests.closeness import close, close64
from tests.fold.layers import LAYERS, stats_of
from tests.quick import quick_jit
from tests.sync.mappings import make_mesh

DENSE = {"layout": "I C"}


def rounded_once(actual, exact):
    """The float64 numbers (to 8 roundings), cast once to actual's dtype."""
    exact = np.asarray(exact, np.float64)
    info = jnp.finfo(actual.dtype)
    allowed = (0.5 * float(info.eps) + 8 * np.finfo(np.float64).eps) * np.abs(exact) + float(info.smallest_subnormal)
    assert np.all(np.abs(np.asarray(actual, np.float64) - exact) <= allowed)


def by_hand(kernel, bias, params, stats, eps=1e-5):
    """Both in NumPy float64, of a kernel whose channel is last."""
    kernel, mean, var = (np.asarray(array, np.float64) for array in (kernel, stats.mean, stats.var))
    scale = np.float64(1) if params is None or params.scale is None else np.asarray(params.scale, np.float64)
    if params is not None and params.zero_centered:
        scale = 1 + scale
    shift = 0 if params is None or params.bias is None else np.asarray(params.bias, np.float64)
    scale = scale / np.sqrt(var + eps)
    return kernel * scale, ((0 if bias is None else np.asarray(bias, np.float64)) - mean) * scale + shift


# --- the map


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_folded_layer_gives_what_the_layer_and_its_norm_give(layer, rng, x64):
    x, kernel, bias, params, stats = layer.problem(rng, np.float64)
    apply = quick_jit(layer.apply)
    for given in (bias, None):
        z = apply(x, kernel) + (0 if given is None else layer.spread(given))
        options = {"layout": layer.y, "axis_names": layer.pooled, "names": layer.names}
        wanted = reference.normalize(z, params.scale, params.bias, mean=stats.mean, var=stats.var, **options)
        folded, shift = fold(kernel, given, params, stats, layout=layer.layout, channel=layer.channel)
        assert folded.shape == kernel.shape
        close64(apply(x, folded) + layer.spread(shift), wanted, m=layer.terms)


@pytest.mark.parametrize("name", ["2-D", "depthwise, its multiplier an axis"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_without_x64_the_numbers_are_those_of_float64_rounded_once(dtype, name, rng):
    layer = LAYERS[name]
    _, kernel, bias, params, stats = layer.problem(rng)
    kernel = jnp.asarray(kernel, dtype)
    exact = by_hand(np.reshape(np.asarray(kernel, np.float64), (-1, *layer.sizes)), bias, params, stats)
    for run in (lambda f: f, quick_jit):
        found = run(lambda kernel, stats: fold(kernel, bias, params, stats, layout=layer.layout, channel=layer.channel))
        folded, shift = found(kernel, stats)
        assert (folded.dtype, shift.dtype) == (dtype, jnp.float32)
        rounded_once(np.reshape(folded, (-1, *layer.sizes)), exact[0])
        rounded_once(shift, exact[1])


def test_a_new_bias_has_the_dtype_of_the_kernel_and_an_old_one_its_own(rng):
    _, kernel, bias, params, stats = LAYERS["dense"].problem(rng)
    half = jnp.asarray(kernel, jnp.bfloat16)
    assert [array.dtype for array in fold(half, None, params, stats, **DENSE)] == [jnp.bfloat16, jnp.bfloat16]
    assert [array.dtype for array in fold(half, bias, params, stats, **DENSE)] == [jnp.bfloat16, jnp.float32]
    assert [array.dtype for array in fold(np.float64(kernel), bias, params, stats, **DENSE)] == [jnp.float32] * 2


@pytest.mark.parametrize(
    "make",
    [
        lambda gamma, beta: None,
        lambda gamma, beta: nj.Affine(None, beta, "C"),
        lambda gamma, beta: nj.Affine(gamma, None, "C"),
        lambda gamma, beta: nj.Affine(gamma, beta, "C", zero_centered=True),
        lambda gamma, beta: nj.Affine(0 * gamma, beta, "C"),
        lambda gamma, beta: nj.Affine(-abs(gamma), beta, "C"),
        lambda gamma, beta: nj.Affine(np.float32(2), np.float32(3)),
        lambda gamma, beta: nj.Affine(None, None, "C"),
    ],
    ids=["none", "no scale", "no bias", "zero-centred", "γ = 0", "γ < 0", "scalars", "neither"],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_norm_of_any_parameters_folds(make, has_bias, rng):
    _, kernel, bias, params, stats = LAYERS["dense"].problem(rng)
    params, bias = make(params.scale, params.bias), bias if has_bias else None
    for found, exact in zip(
        fold(kernel, bias, params, stats, **DENSE), by_hand(kernel, bias, params, stats), strict=True
    ):
        rounded_once(found, np.broadcast_to(exact, found.shape))


def test_one_statistic_of_all_channels_folds_along_the_parameters(rng):
    _, kernel, bias, params, _ = LAYERS["dense"].problem(rng)
    stats = stats_of(np.float32(0.3), np.float32(2), "")
    for found, exact in zip(
        fold(kernel, bias, params, stats, **DENSE), by_hand(kernel, bias, params, stats), strict=True
    ):
        rounded_once(found, exact)


def test_parameters_may_run_along_the_channels_in_another_order_or_along_some(rng):
    layer = LAYERS["dense into two axes"]
    _, kernel, bias, params, stats = layer.problem(rng)
    wanted = fold(kernel, bias, params, stats, layout=layer.layout)
    turned = nj.Affine(params.scale.T, params.bias.T, "D H")
    for found, exact in zip(fold(kernel, bias, turned, stats, layout=layer.layout), wanted, strict=True):
        np.testing.assert_array_equal(found, exact)
    some = nj.Affine(params.scale[0], None, "D")
    for found, exact in zip(
        fold(kernel, bias, some, stats, layout=layer.layout), by_hand(kernel, bias, some, stats), strict=True
    ):
        rounded_once(found, exact)


@pytest.mark.parametrize("var", [0.0, 1e-45, 1e-12, 3e38])
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5])
def test_a_variance_at_either_end_gives_what_evaluation_gives(var, eps, x64):
    kernel, stats = np.ones((1, 1)), stats_of(np.array([0.5]), np.array([var]))
    params = nj.Affine(np.array([2.0]), np.array([7.0]), "C")
    x = np.array([[0.5], [0.75]])
    wanted, _ = nj.batch_norm(x, params, stats, layout="N C", axis_names="N", train=False, eps=eps)
    folded, bias = fold(kernel, None, params, stats, eps=eps, **DENSE)
    # s x − s μ cancels where s is large: each term is rounded.
    np.testing.assert_allclose(
        x @ folded + bias, wanted, rtol=0, atol=4 * np.finfo(float).eps * (7 + abs(folded[0, 0]))
    )
    if var == eps == 0:
        assert (folded[0, 0], bias[0]) == (0, 7)


def test_what_evaluation_answers_with_nan_is_nan():
    stats = stats_of(np.zeros(3, np.float32), np.array([np.inf, np.nan, -1], np.float32))
    folded, bias = fold(np.ones((2, 3), np.float32), None, None, stats, **DENSE)
    assert np.isnan(folded).all()
    assert np.isnan(bias).all()


def test_complex_kernels_and_means_fold(rng, x64):
    kernel, mean = (rng.normal(size=shape) + 1j * rng.normal(size=shape) for shape in ((3, 2), (2,)))
    x, stats = rng.normal(size=(4, 3)), stats_of(mean, np.array([0.5, 2.0]))
    wanted, _ = nj.batch_norm(x @ kernel, None, stats, layout="N C", axis_names="N", train=False)
    folded, bias = fold(kernel, None, None, stats, **DENSE)
    close64(np.abs(x @ folded + bias - wanted), np.zeros((4, 2)), m=3)


# --- under transforms


def test_gradients_are_those_of_the_layer_and_its_norm(rng, x64):
    layer = LAYERS["grouped"]
    x, kernel, bias, params, stats = layer.problem(rng, np.float64)
    g = rng.normal(size=layer.apply(x, kernel).shape)

    def loss(y):
        return jnp.sum(g * jnp.tanh(y))

    def apart(kernel, bias, params, mean, var, eps):
        z, held = layer.apply(x, kernel) + bias, stats_of(mean, var)
        return loss(nj.batch_norm(z, params, held, layout=layer.y, axis_names=layer.pooled, train=False, eps=eps)[0])

    def folded(kernel, bias, params, mean, var, eps):
        kernel, bias = fold(kernel, bias, params, stats_of(mean, var), layout=layer.layout, eps=eps)
        return loss(layer.apply(x, kernel) + bias)

    given = (kernel, bias, params, stats.mean, stats.var, 1e-3)
    wanted, found = (quick_jit(jax.grad(f, tuple(range(6))))(*given) for f in (apart, folded))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        close64(one, other, m=g.size)


def test_gradients_without_x64_come_back_in_each_dtype_and_are_zero_at_variance_zero(rng):
    _, kernel, bias, params, stats = LAYERS["dense"].problem(rng)
    half, mean, var = jnp.asarray(kernel, jnp.bfloat16), jnp.asarray(stats.mean), jnp.asarray([0, 1, 2, 3], jnp.float32)

    def total(kernel, bias, params, mean, var):
        kernel, bias = fold(kernel, bias, params, stats_of(mean, var), eps=0, **DENSE)
        return jnp.sum(kernel.astype(jnp.float32) ** 2) + jnp.sum(bias**2)

    given = (half, bias, params, mean, var)
    grads = jax.grad(total, tuple(range(5)))(*given)
    for grad, primal in zip(jax.tree.leaves(grads), jax.tree.leaves(given), strict=True):
        assert (grad.dtype, grad.shape) == (primal.dtype, primal.shape)
        assert np.all(np.isfinite(np.asarray(grad, np.float32)))
    assert grads[4][0] == grads[3][0] == 0
    assert np.all(grads[4][1:] != 0)


def test_an_ensemble_folds_under_vmap_and_a_traced_eps_under_jit(rng):
    problems = [LAYERS["dense"].problem(rng)[1:] for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *problems)
    found = quick_jit(jax.vmap(lambda *one: fold(*one[0], eps=one[1], **DENSE), (0, None)))(stacked, 1e-3)
    for i, (kernel, bias, params, stats) in enumerate(problems):
        for got, exact in zip(found, by_hand(kernel, bias, params, stats, np.float32(1e-3)), strict=True):
            rounded_once(got[i], exact)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_sharded_kernel_folds_where_it_lies(axis_type, rng):
    _, kernel, bias, params, stats = LAYERS["grouped"].problem(rng)
    mesh = make_mesh(("model",), (2,), axis_type)
    with jax.set_mesh(mesh):
        placed = jax.device_put(kernel, jax.NamedSharding(mesh, P(None, None, None, "model")))
        folded, shift = fold(placed, bias, params, stats, layout="h w I C")
        assert folded.sharding.spec == placed.sharding.spec
    for found, exact in zip((folded, shift), by_hand(kernel, bias, params, stats), strict=True):
        rounded_once(np.asarray(found), exact)


def test_the_variables_of_flax_are_opened_and_nothing_given_is_changed(rng):
    from flax import nnx

    _, kernel, bias, params, stats = LAYERS["dense"].problem(rng)
    before = jax.tree.map(np.array, (kernel, bias, params, stats))
    fold(nnx.Param(jnp.asarray(kernel)), nnx.Param(jnp.asarray(bias)), params, stats, **DENSE)
    for one, other in zip(jax.tree.leaves((kernel, bias, params, stats)), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(one, other)


def test_float32_data_through_a_folded_layer_differ_by_rounding(rng):
    layer = LAYERS["2-D"]
    x, kernel, bias, params, stats = layer.problem(rng)
    z = layer.apply(x, kernel) + layer.spread(bias)
    wanted, _ = nj.batch_norm(z, params, stats, layout=layer.y, axis_names=layer.pooled, train=False)
    folded, shift = fold(kernel, bias, params, stats, layout=layer.layout)
    close(layer.apply(x, folded) + layer.spread(shift), wanted, m=layer.terms)
