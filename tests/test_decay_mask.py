"""`decay_mask`: weight decay leaves scales and biases of norms alone, wherever they sit."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

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


SPARED = {"bn": {"scale": False, "bias": False}, "rms": {"scale": False}, "shift": {"bias": False}}
NESTED = SPARED | {"dense": {"kernel": True, "bias": True}, "block": {"ln": {"scale": False}, "out": {"bias": False}}}


@pytest.mark.case(86)
@pytest.mark.parametrize("sep", [None, "/", "."])
@pytest.mark.parametrize("below", [(), ("params",)])
def test_a_flattened_tree_is_masked_as_the_nested_one(sep, below):
    wanted = NESTED
    for name in below:
        wanted = {name: wanted}
    flat = flatten_dict(wanted, sep=sep)
    assert nj.decay_mask(dict.fromkeys(flat, 1.0)) == flat
    assert nj.decay_mask(jax.tree.map(lambda _: 1.0, wanted)) == wanted
    assert nj.decay_mask({"head": dict.fromkeys(flat, 1.0)}) == {"head": flat}


def test_parameters_masked_away_are_there_all_the_same():
    gone = optax.MaskedNode()
    assert nj.decay_mask({"dense": {"kernel": gone, "bias": 1.0}}) == {"dense": {"kernel": gone, "bias": True}}
    assert nj.decay_mask({"norm": {"scale": gone, "bias": 1.0}}) == {"norm": {"scale": gone, "bias": False}}
    decaying = optax.adamw(0.1, weight_decay=0.5, mask=nj.decay_mask)
    labels = {"dense": {"kernel": "fixed", "bias": "free"}, "norm": {"scale": "fixed", "bias": "free"}}
    optimiser = optax.multi_transform({"free": decaying, "fixed": optax.set_to_zero()}, labels)
    params = jax.tree.map(lambda _: jnp.ones(2), labels)
    updates, _ = optimiser.update(jax.tree.map(jnp.zeros_like, params), optimiser.init(params), params)
    assert np.all(updates["dense"]["bias"] < 0)
    np.testing.assert_array_equal(updates["norm"]["bias"], 0)


def test_a_bias_alone_beside_submodules_is_that_of_no_norm():
    dense = {"kernel": True, "bias": True}
    tree = {"head": {"bias": True, "dense": dense}, "block": {"scale": False, "bias": False, "dense": dense}}
    assert nj.decay_mask(jax.tree.map(lambda _: 1.0, tree)) == tree
    flat = flatten_dict(tree, sep="/")
    assert nj.decay_mask(dict.fromkeys(flat, 1.0)) == flat
    gone = {"head": {"bias": 1.0, "dense": {"kernel": optax.MaskedNode()}}}
    assert nj.decay_mask(gone)["head"]["bias"] is True
