"""`decay_mask`: weight decay leaves scales and biases of norms alone, wherever they sit."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import normjax as nj
from tests.trees import same


def decayed(params):
    """Which leaves one step of adamw with zero gradients changes, by path."""
    optimiser = optax.adamw(0.1, weight_decay=0.5, mask=nj.decay_mask)

    @jax.jit
    def step(params):
        return optimiser.update(jax.tree.map(jnp.zeros_like, params), optimiser.init(params), params)[0]

    updates = step(params)
    return jax.tree.map(lambda update: bool(np.any(update)), updates)


def ones_like(tree):
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), tree)


@pytest.mark.case(86)
def test_weight_decay_leaves_scales_and_biases_of_pure_trees_alone():
    norm = nj.Affine.init(N=2, C=3)  # two axes: a rule by rank would decay it
    params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "norm": norm, "blocks": [(norm, jnp.ones(2))]}
    changed = decayed(ones_like(params))
    spared = nj.Affine(False, False, "N C")
    same(changed, {"dense": {"kernel": True, "bias": True}, "norm": spared, "blocks": [(spared, True)]})


@pytest.mark.case(86)
def test_weight_decay_leaves_a_bare_affine_alone():
    same(nj.decay_mask(nj.Affine.init(C=3, bias=False)), nj.Affine(False, None, "C"))
    same(decayed(nj.Affine.init(C=3)), nj.Affine(False, False, "C"))


@pytest.mark.case(86)
def test_weight_decay_leaves_the_norms_of_linen_alone():
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Dense(4, name="dense")(x)
            x = linen.LayerNorm(name="layer")(x)
            x = linen.RMSNorm(name="rms")(x)
            x = linen.BatchNorm(use_running_average=True, use_scale=False, name="batch")(x)
            return linen.Dense(2, use_bias=False, name="head")(linen.GroupNorm(2, name="group")(x))

    params = jax.eval_shape(Model().init, jax.random.key(0), jnp.ones((2, 3)))["params"]
    both, none = {"scale": False, "bias": False}, {"kernel": True, "bias": True}
    same(
        decayed(ones_like(params)),
        {
            "dense": none,
            "layer": both,
            "rms": {"scale": False},
            "batch": {"bias": False},
            "group": both,
            "head": {"kernel": True},
        },
    )


@pytest.mark.case(86)
def test_weight_decay_leaves_the_norms_of_nnx_alone():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(3, 4, rngs=rngs)
            self.layer = nnx.LayerNorm(4, rngs=rngs)
            self.rms = nnx.RMSNorm(4, rngs=rngs)
            self.ours = nnx.data(jax.tree.map(nnx.Param, nj.Affine.init(C=4)))

    mask = nj.decay_mask(nnx.state(Model(nnx.Rngs(0)), nnx.Param))
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(mask)}
    got = {path: leaf.get_value() for path, leaf in flat.items() if "ours" not in path}
    assert got == {
        "dense.kernel": True,
        "dense.bias": True,
        "layer.scale": False,
        "layer.bias": False,
        "rms.scale": False,
    }
    assert jax.tree.leaves(mask["ours"]) == [False, False]
