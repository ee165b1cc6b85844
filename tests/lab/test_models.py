from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from normjax import reference
from normjax.lab import models
from normjax.lab.config import FAMILIES, ModelConfig, NormConfig
from normjax.lab.models import Classifier, Norm, RunningStat

NORMS = [family for family in FAMILIES if family != "none"]


def norm_config(family: str, **options) -> NormConfig:
    return NormConfig(**({"family": family} | FAMILIES[family] | options))


@nnx.jit(static_argnames=("train", "use_batch_stats"))
def call(norm, x, *, train, use_batch_stats=False):
    return norm(x, train=train, use_batch_stats=use_batch_stats)


def images(rng, *shape: int) -> jnp.ndarray:
    return jnp.asarray(rng.normal(1, 2, shape), jnp.float32)


@pytest.mark.parametrize("family", NORMS)
def test_each_familys_norm_is_the_textbooks(family, rng):
    config = norm_config(family)
    norm = Norm(16, config)
    scale, bias = rng.normal(size=(2, 16)).astype(np.float32)
    norm.params.scale.set_value(jnp.asarray(scale))
    if config.bias:
        norm.params.bias.set_value(jnp.asarray(bias))
    x = images(rng, 4, 3, 3, 16)
    expected = reference.normalize(
        x,
        scale,
        bias if config.bias else None,
        names="C",
        layout=config.layout,
        axis_names=config.axis_names,
        center=family != "rms",
    )
    # x̂ is within 1e-6 of float64 by contract and below 12 in size here; scale and bias add a rounding each.
    np.testing.assert_allclose(call(norm, x, train=True), expected, rtol=0, atol=1e-6 * (1 + np.abs(expected).max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_only_batch_norm_keeps_running_statistics_and_only_training_moves_them(family, rng):
    norm = Norm(16, norm_config(family))
    x = images(rng, 4, 3, 3, 16)
    start = nnx.to_pure_dict(nnx.state(norm, RunningStat))
    call(norm, x, train=False)
    call(norm, x, train=False, use_batch_stats=True)
    after_evaluation = nnx.to_pure_dict(nnx.state(norm, RunningStat))
    call(norm, x, train=True)
    moved = nnx.to_pure_dict(nnx.state(norm, RunningStat))
    assert bool(moved) == (family == "batch")
    for before, between in zip(jax.tree.leaves(start), jax.tree.leaves(after_evaluation), strict=True):
        np.testing.assert_array_equal(before, between)
    if family == "batch":
        mean = np.asarray(x, np.float64).mean((0, 1, 2))
        np.testing.assert_allclose(moved["stats"]["mean"], 0.1 * mean, rtol=1e-5)
        assert moved["stats"]["count"] == 1


@pytest.mark.parametrize("layout", ["N H W C", "N=(B n=2) H W C"])
def test_the_batch_mean_is_what_the_running_mean_moves_towards(layout, rng):
    norm = Norm(4, norm_config("batch", layout=layout, axis_names="n H W" if "n=" in layout else "N H W"))
    x = images(rng, 4, 3, 3, 4)
    # Means of equal ghost batches average to the mean of all; 36 additions of numbers below 10.
    atol = 36 * np.finfo(np.float32).eps * 10
    batch_mean = jax.jit(partial(models.batch_mean, norm.config))(x)
    np.testing.assert_allclose(batch_mean, np.asarray(x, np.float64).mean((0, 1, 2)), rtol=0, atol=atol)
    call(norm, x, train=True)
    np.testing.assert_allclose(norm.stats.mean[...], 0.1 * batch_mean, rtol=1e-6, atol=atol)


def abstract_classifier(features: tuple[int, ...], family: str) -> Classifier:
    return nnx.eval_shape(lambda: Classifier(ModelConfig(features), norm_config(family), rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(("family", "conv_bias"), [("batch", False), ("rms", True), ("none", True)])
def test_a_convolution_has_a_bias_only_where_its_norm_adds_none(family, conv_bias):
    assert (abstract_classifier((4,), family).blocks[0].conv.bias is not None) == conv_bias


@pytest.mark.parametrize("features", [(2,), (2, 3), (2, 3, 4, 5)])
def test_any_number_of_blocks_gives_ten_logits_and_the_last_norms_input(features):
    model = abstract_classifier(features, "batch")
    x = jax.ShapeDtypeStruct((4, 8, 8, 1), jnp.float32)
    logits, before_norm = nnx.eval_shape(lambda model, x: model(x, train=True), model, x)
    assert logits.shape == (4, 10)
    assert before_norm.shape[-1] == features[-1]
