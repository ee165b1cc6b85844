"""Cases of folding: which axis is scaled, what becomes of the bias, and where eps stands."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen
from flax import nnx as flax_nnx

import normjax as nj
from normjax import nnx, reference
from normjax.fold import fold
from tests.closeness import close, close64
from tests.fold.layers import stats_of
from tests.quick import quick_jit

# --- 88: a transposed convolution scaled along its input axis, which shows only where the sizes differ


@pytest.mark.case(88)
@pytest.mark.parametrize("features", [3, 5])
@pytest.mark.parametrize(("transpose_kernel", "layout"), [(False, "h w I C"), (True, "h w C I")])
@pytest.mark.parametrize("use_bias", [True, False])
def test_a_transposed_convolution_of_flax_is_scaled_along_its_output(layout, transpose_kernel, features, use_bias, rng):
    module = linen.ConvTranspose(
        features, (3, 3), (2, 2), transpose_kernel=transpose_kernel, use_bias=use_bias, param_dtype=jnp.float32
    )
    kernel = np.asarray(rng.normal(size=(3, 3, features, 3) if transpose_kernel else (3, 3, 3, features)), np.float32)
    bias, gamma, beta, mean = np.asarray(rng.normal(size=(4, features)), np.float32)
    x, var = np.asarray(rng.normal(size=(2, 4, 4, 3)), np.float32), np.float32(0.5) + gamma**2
    params = {"kernel": kernel, "bias": bias} if use_bias else {"kernel": kernel}
    z = quick_jit(module.apply)({"params": params}, x)
    wanted = reference.normalize(z, gamma, beta, names="C", layout="N H W C", axis_names="N H W", mean=mean, var=var)
    folded, shift = fold(
        kernel, bias if use_bias else None, nj.Affine(gamma, beta, "C"), stats_of(mean, var), layout=layout
    )
    with_bias = module.clone(use_bias=True)
    close(quick_jit(with_bias.apply)({"params": {"kernel": folded, "bias": shift}}, x), wanted, m=27)


@pytest.mark.case(88)
@pytest.mark.parametrize("features", [3, 5])
@pytest.mark.parametrize("transpose_kernel", [False, True])
def test_so_it_is_in_a_model(transpose_kernel, features, rng):
    conv = flax_nnx.ConvTranspose(3, features, (3, 3), transpose_kernel=transpose_kernel, rngs=flax_nnx.Rngs(0))
    model = flax_nnx.Sequential(conv, nnx.BatchNorm(features, use_running_average=True, rngs=flax_nnx.Rngs(0)))
    model.layers[1].var.set_value(jnp.arange(1.0, 1 + features))
    x = np.asarray(rng.normal(size=(2, 4, 4, 3)), np.float32)
    folded, report = nnx.fold(model, x)
    assert [row.layer for row in report.folded] == ["layers.0"]
    close(folded(x), model(x), m=27)


# --- 89, 90: the bias is scaled as the kernel is, and made where there is none

ONE = {"params": nj.Affine(np.float32([4]), np.float32([1]), "C"), "stats": stats_of(np.float32([5]), np.float32([4]))}


def one_by_one(bias, dtype="float32", run=lambda f: f):
    kernel = jnp.full((1, 1, 1, 1), 2, dtype)
    bias = None if bias is None else jnp.full(1, bias, dtype)
    function = run(lambda kernel, bias: fold(kernel, bias, *ONE.values(), layout="h w I C", eps=0))
    return function(kernel, bias)


@pytest.mark.case(89)
@pytest.mark.parametrize("run", [lambda f: f, quick_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_bias_is_scaled_as_the_kernel_is(dtype, run):
    kernel, bias = one_by_one(3, dtype, run)
    assert (float(kernel[0, 0, 0, 0]), float(bias[0])) == (4, -3)


@pytest.mark.case(89)
@pytest.mark.parametrize("bias", [-100.0, 0.0, 3.0, 1e4])
def test_any_bias_before_the_norm_is_normalised_with_the_rest(bias, rng, x64):
    kernel, (gamma, beta, mean) = rng.normal(size=(3, 2)), rng.normal(size=(3, 2))
    var, x = rng.random(2), rng.normal(size=(5, 3))
    wanted = reference.normalize(
        x @ kernel + bias, gamma, beta, names="C", layout="N C", axis_names="N", mean=mean, var=var
    )
    folded, shift = fold(kernel, np.full(2, bias), nj.Affine(gamma, beta, "C"), stats_of(mean, var), layout="I C")
    close64(x @ folded + shift, wanted, m=3)


@pytest.mark.case(90)
@pytest.mark.parametrize("run", [lambda f: f, quick_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_bias_is_made_where_there_is_none(dtype, run):
    kernel, bias = one_by_one(None, dtype, run)
    assert (float(kernel[0, 0, 0, 0]), float(bias[0])) == (4, -9)
    assert bias.dtype == dtype


@pytest.mark.case(90)
@pytest.mark.parametrize("library", [nnx, flax_nnx], ids=["normjax", "flax"])
def test_so_it_is_in_a_model_of_one_convolution(library):
    conv = flax_nnx.Conv(1, 1, (1, 1), use_bias=False, rngs=flax_nnx.Rngs(0))
    norm = library.BatchNorm(1, epsilon=0, use_running_average=True, rngs=flax_nnx.Rngs(0))
    for variable, value in zip((conv.kernel, norm.scale, norm.bias, norm.mean, norm.var), (2, 4, 1, 5, 4), strict=True):
        variable.set_value(jnp.full_like(variable.get_value(), value))
    folded, _ = nnx.fold(flax_nnx.Sequential(conv, norm), jnp.ones((1, 2, 2, 1)))
    assert float(folded.layers[0].bias[0]) == -9
    assert conv.bias is None


# --- 91: a layer that scales its bias


class ScaledBias(flax_nnx.Linear):
    """y = x W + 2 b."""

    def __call__(self, inputs):
        return inputs @ self.kernel.get_value() + 2 * self.bias.get_value()


@pytest.mark.case(91)
@pytest.mark.parametrize("multiplier", [0.5, 2.0])
def test_what_the_layer_adds_is_folded_and_its_multiplier_dropped(multiplier, rng, x64):
    kernel, (b, gamma, beta, mean) = rng.normal(size=(3, 2)), rng.normal(size=(4, 2))
    var, x = rng.random(2), rng.normal(size=(5, 3))
    folded, bias = fold(
        kernel, multiplier * b, nj.Affine(gamma, beta, "C"), stats_of(mean, var), layout="I C", eps=1e-3
    )
    s = gamma / np.sqrt(var + 1e-3)
    close64(bias, (multiplier * b - mean) * s + beta)
    wanted = reference.normalize(
        x @ kernel + multiplier * b,
        gamma, beta, names="C", layout="N C", axis_names="N", mean=mean, var=var, eps=1e-3,
    )  # fmt: skip
    close64(x @ folded + bias, wanted, m=3)


@pytest.mark.case(91)
def test_a_model_whose_layer_does_so_is_not_folded_wrongly():
    layer = ScaledBias(3, 2, rngs=flax_nnx.Rngs(0))
    layer.bias.set_value(jnp.array([1.0, 2.0]))
    model = flax_nnx.Sequential(layer, nnx.BatchNorm(2, use_running_average=True, rngs=flax_nnx.Rngs(0)))
    folded, report = nnx.fold(model, jnp.ones((1, 3)))
    assert not report.folded
    assert report.refused[0].reason == "layers.0 is a ScaledBias, which is no layer that fold knows"
    np.testing.assert_array_equal(folded(jnp.ones((1, 3))), model(jnp.ones((1, 3))))


# --- 94: eps stands inside the root


@pytest.mark.case(94)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("run", [lambda f: f, quick_jit], ids=["eager", "jit"])
def test_the_scale_of_a_vanishing_variance_is_finite(run, dtype):
    gamma, var = np.float32([1, 3]), np.float32([0, 1e-8])
    params = nj.Affine(gamma, None, "C")
    kernel, bias = run(lambda k: fold(k, None, params, stats_of(np.zeros(2, "f"), var), layout="I C", eps=1e-5))(
        jnp.ones((1, 2), dtype)
    )
    exact = np.float64(gamma) / np.sqrt(np.float64(var) + 1e-5)
    assert np.all(np.isfinite(np.asarray(kernel, np.float32)))
    # Rounded once from float64.
    np.testing.assert_allclose(np.float64(kernel[0]), exact, rtol=float(jnp.finfo(dtype).eps) / 2 * 1.0001)
    np.testing.assert_array_equal(bias, 0)


@pytest.mark.case(94)
@pytest.mark.parametrize("eps", [1e-5, 1e-3, 1.0])
def test_a_folded_layer_has_the_eps_of_its_norm(eps, rng):
    norm = nnx.BatchNorm(2, epsilon=eps, use_running_average=True, rngs=flax_nnx.Rngs(0))
    norm.var.set_value(jnp.array([0.0, 1e-8]))
    model = flax_nnx.Sequential(flax_nnx.Linear(3, 2, rngs=flax_nnx.Rngs(0)), norm)
    folded, _ = nnx.fold(model, jnp.ones((1, 3)))
    wanted = np.asarray(model.layers[0].kernel.get_value(), np.float64) / np.sqrt([eps, 1e-8 + eps])
    np.testing.assert_allclose(folded.layers[0].kernel.get_value(), wanted, rtol=2e-7)
