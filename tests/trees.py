"""`Affine`, `BatchStats` and `Moments` to take apart and to train, for the tests of what trees must bear."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference

SPEC = {"layout": "N C", "axis_names": "N"}
TREES = {
    "Affine": lambda: nj.Affine.init(N=2, C=3, zero_centered=True, scale_init=1.5),
    "Affine without bias": lambda: nj.Affine.init(C=3, bias=False),
    "BatchStats": lambda: nj.BatchStats.init(C=3),
    "Moments": lambda: nj.Moments.init(N=2, C=3),
}
every_tree = pytest.mark.parametrize("make", TREES.values(), ids=TREES.keys())


def same(actual, expected):
    """Two trees are equal in structure (names included), values and dtypes."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
        assert jnp.result_type(one) == jnp.result_type(other)


def filled(rng, features=3):
    """Parameters and running statistics away from where they start."""
    scale, bias, mean = (jnp.asarray(rng.normal(size=features), jnp.float32) for _ in range(3))
    var = jnp.asarray(rng.uniform(0.5, 2.0, features), jnp.float32)
    return nj.Affine(scale, bias, "C"), nj.BatchStats(mean, var, jnp.int32(4), jnp.ones(features), "C")


def replicas_of(state):
    """The state of each of two devices that keep the same."""
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), nj.BatchStats(*jax.tree.leaves(state), "device C"))


def problem(rng):
    """Batch, cotangent and start: with the loss Σ g·y, dγ and dβ do not depend on γ and β, so two steps are known."""
    x, g = (rng.normal(size=(8, 3)).astype(np.float32) for _ in range(2))
    params, state = filled(rng)
    _, d_scale, d_bias = reference.backward(x, g, params.scale, params.bias, names="C", **SPEC)
    expected = params.scale - 2 * 0.1 * d_scale, params.bias - 2 * 0.1 * d_bias
    return x, g, params, state, expected


def loss_of(params, state, x, g):
    y, state = nj.batch_norm(x, params, state, train=True, **SPEC)
    return jnp.sum(g * y), state
