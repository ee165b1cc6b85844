"""The running statistics of the modules in training, in evaluation, frozen, accumulated; and weight decay."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors
from flax import linen as flax_linen
from flax import nnx as flax_nnx

import normjax as nj
from normjax import linen, nnx
from tests.flax import models

frameworks = pytest.mark.parametrize("framework", ["linen", "nnx"])


class Held:
    """A batch norm of either framework that keeps what it learns."""

    def __init__(self, framework: str, features: int, **settings):
        self.settings, self.variables = settings, None
        self.norm = nnx.BatchNorm(features, **settings, rngs=flax_nnx.Rngs(0)) if framework == "nnx" else None

    def __call__(self, x, frozen: bool = False):
        if self.norm is not None:
            return self.norm(x, use_running_average=frozen)
        module = linen.BatchNorm(**self.settings)
        if self.variables is None:
            self.variables = module.init(jax.random.key(0), x, use_running_average=True)
        y, new = module.apply(self.variables, x, use_running_average=frozen, mutable=["batch_stats", "batch_counts"])
        self.variables = {**self.variables, **new}
        return y

    @property
    def stats(self):
        if self.norm is not None:
            return self.norm.mean[...], self.norm.var[...]
        return self.variables["batch_stats"]["mean"], self.variables["batch_stats"]["var"]


@pytest.mark.case(75)
@frameworks
def test_one_entry_with_an_unbiased_variance_is_refused(framework, rng):
    held = Held(framework, 3, axis=1, running=nj.Ema.torch(0.1))
    with pytest.raises(ValueError, match="m = 1 here"):
        held(jnp.ones((1, 3)))
    held(jnp.asarray(rng.normal(size=(1, 3, 4, 4)), jnp.float32))
    assert np.isfinite(held.stats).all()


@pytest.mark.case(76)
@frameworks
def test_evaluation_before_training_divides_by_one(framework):
    np.testing.assert_allclose(Held(framework, 2)(jnp.ones((4, 2)), frozen=True), 1 / np.sqrt(1.00001), rtol=1e-6)


@pytest.mark.case(78)
@frameworks
def test_a_frozen_norm_in_a_training_step_moves_nothing_but_its_parameters(framework, rng):
    x, g = jnp.asarray(rng.normal(size=(2, 8, 3)), jnp.float32)
    held = Held(framework, 3)
    held(x)
    mean, var = held.stats
    y = held(x, frozen=True)
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(var + 1e-5), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(held.stats, (mean, var))
    if framework == "nnx":
        held.norm.eval()
        grads = flax_nnx.to_pure_dict(flax_nnx.grad(lambda norm: jnp.sum(norm(x) * g))(held.norm))
    else:
        frozen = linen.BatchNorm(use_running_average=True)
        apply = lambda params: frozen.apply({**held.variables, "params": params}, x)  # noqa: E731
        grads = jax.grad(lambda params: jnp.sum(apply(params) * g))(held.variables["params"])
    np.testing.assert_allclose(grads["scale"], np.sum(np.asarray(y) * g, 0), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grads["bias"], np.sum(g, 0), rtol=1e-5, atol=1e-5)


@pytest.mark.case(79)
@frameworks
def test_four_micro_batches_are_four_updates(framework):
    held = Held(framework, 1, momentum=0.9)
    for _ in range(4):
        held(jnp.ones((4, 1)))
    np.testing.assert_allclose(held.stats[0], 1 - 0.9**4, rtol=1e-6)


@pytest.mark.case(80)
@frameworks
def test_a_cumulative_average_weighs_batches_by_their_entries(framework):
    held = Held(framework, 1, running=nj.Cumulative())
    for batch in ([0.0], [3.0], [6.0, 6.0]):
        held(jnp.array(batch)[:, None])
    np.testing.assert_allclose(held.stats[0], 3.75, rtol=1e-6)
    np.testing.assert_allclose(held.stats[1], 0.0, atol=1e-6)  # of the entries about their own batch's mean


COUNTING = [nj.Cumulative(), nj.Cumulative("updates"), nj.Ema(0.25, debias=True)]


@pytest.mark.parametrize("running", COUNTING)
def test_linen_evaluates_statistics_that_nothing_counted(running):
    """A checkpoint of Flax's has no batch_counts, and evaluation needs none."""
    x, flax_s = jnp.arange(6.0).reshape(3, 2), flax_linen.BatchNorm()
    variables = flax_s.init(jax.random.key(0), x, use_running_average=True)
    variables["batch_stats"]["mean"] += 1.0
    norm = linen.BatchNorm(running=running)
    wanted = flax_s.apply(variables, x, use_running_average=True)
    np.testing.assert_allclose(norm.apply(variables, x, use_running_average=True), wanted, rtol=1e-6)
    y, new = norm.apply(variables, x, use_running_average=True, mutable=["batch_stats", "batch_counts"])
    np.testing.assert_allclose(y, wanted, rtol=1e-6)
    assert "batch_counts" not in new
    assert "batch_counts" in norm.init(jax.random.key(0), x, use_running_average=True)
    with pytest.raises(errors.ScopeCollectionNotFound) as raised:
        norm.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
    assert 'jax.tree.map(jnp.ones_like, model.init(…)["batch_counts"])' in " ".join(raised.value.__notes__)


def test_an_average_given_after_the_norm_was_made_has_no_counts_and_says_so():
    norm = nnx.BatchNorm(2, rngs=flax_nnx.Rngs(0))
    norm.running = nj.Cumulative()
    with pytest.raises(ValueError, match=r"BatchNorm: running=.* needs count and weight, which are made with the norm"):
        norm(jnp.ones((3, 2)))
    norm(jnp.ones((3, 2)), use_running_average=True)


@pytest.mark.case(86)
@frameworks
def test_weight_decay_leaves_the_norms_alone(framework):
    if framework == "linen":
        params = models.linen_variables("normjax", jnp.zeros(models.SHAPE))["params"]
    else:
        params = flax_nnx.state(models.Nnx("normjax", rngs=flax_nnx.Rngs(3)), flax_nnx.Param)
    optimiser = optax.adamw(0.1, weight_decay=0.1, mask=nj.decay_mask)
    updates, _ = optimiser.update(jax.tree.map(jnp.zeros_like, params), optimiser.init(params), params)
    updates = updates if framework == "linen" else flax_nnx.to_pure_dict(updates)
    for path, update in jax.tree_util.tree_flatten_with_path(updates)[0]:
        layer, leaf = path[0].key, path[-1].key
        assert np.any(update) == (leaf == "kernel"), (layer, leaf)
