"""Cases of weight decay, which spares the parameters of norms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import normjax as nj
from tests.cases.common import close, same
from tests.quick import quick_jit

# --- 86: weight decay


def decayed(params, rate=0.1, learning_rate=0.5):
    """The parameters after one step of AdamW with gradients of zero: only the decay moves them."""
    optimiser = optax.adamw(learning_rate, weight_decay=rate, mask=nj.decay_mask)
    updates, _ = optimiser.update(jax.tree.map(jnp.zeros_like, params), optimiser.init(params), params)
    return optax.apply_updates(params, updates)


decayed_at_once = quick_jit(lambda *trees: [decayed(tree) for tree in trees])


NORM_PARAMETERS = {
    "per channel": nj.Affine.init(C=4),
    "over several axes": nj.Affine.init(H=2, W=3, C=4),
    "kept as (1, 1, C)": nj.Affine(jnp.ones((1, 1, 4)), jnp.zeros((1, 1, 4)), "H W C"),
    "scalar": nj.Affine.init(),
    "scale alone": nj.Affine.init(C=4, bias=False),
    "bias alone": nj.Affine(None, np.full(4, 2, np.float32), "C"),  # a bias of 0 would not show a decay
    "zero-centred": nj.Affine.init(C=4, scale_init=1.5, zero_centered=True),
    "conditional": nj.Affine.init(N=2, C=4, scale_init=2.0),
}


@pytest.mark.case(86)
@pytest.mark.parametrize("affine", NORM_PARAMETERS.values(), ids=NORM_PARAMETERS)
def test_weight_decay_reaches_kernels_and_no_scale_or_bias_of_a_norm(affine):
    kernel, bias = np.full((3, 4), 2, np.float32), np.full(4, 2, np.float32)
    params = {
        "dict": {"norm": affine, "dense": {"kernel": kernel, "bias": bias}},
        "list": [kernel, affine, (bias, affine)],
        "deep": {"block": [{"conv": {"kernel": kernel, "bias": bias}, "norm": {"affine": affine}}]},
    }
    bare, new = decayed_at_once(affine, params)
    same(bare, affine)
    is_affine = lambda node: isinstance(node, nj.Affine)  # noqa: E731
    for before, after in zip(
        jax.tree.leaves(params, is_leaf=is_affine), jax.tree.leaves(new, is_leaf=is_affine), strict=True
    ):
        if is_affine(before):
            same(after, before)
        else:
            close(after, np.asarray(before) * (1 - 0.5 * 0.1))


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4)(x)
        x = linen.BatchNorm(use_running_average=True, use_bias=False)(x)
        x = linen.LayerNorm(reduction_axes=(-2, -1), feature_axes=(-2, -1))(x)
        return linen.RMSNorm()(x)


class NnxModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(4, rngs=rngs), nnx.BatchNorm(4, use_bias=False, rngs=rngs)])


@pytest.mark.case(86)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_the_norms_of_flax_are_spared_as_well(kind):
    if kind == "linen":
        params = jax.eval_shape(LinenModel().init, jax.random.key(0), np.ones((2, 5, 3), np.float32))["params"]
    else:
        params = nnx.to_pure_dict(nnx.state(nnx.eval_shape(NnxModel), nnx.Param))
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 2, np.float32), params)
    seen = {"norm": 0, "dense": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(*decayed_at_once(params)):
        dense = "dense" in jax.tree_util.keystr(path).lower()
        seen["dense" if dense else "norm"] += 1
        close(leaf, np.full(leaf.shape, 2.0 * (1 - 0.5 * 0.1) if dense else 2.0))
    assert seen["dense"] == 2
    assert seen["norm"] >= 3


@pytest.mark.case(86)
def test_the_usual_rule_by_rank_would_decay_what_the_mask_spares():
    affine = NORM_PARAMETERS["kept as (1, 1, C)"]
    by_rank = jax.tree.map(lambda leaf: leaf.ndim > 1, affine)
    mask = nj.decay_mask(affine)
    assert jax.tree.leaves(by_rank) == [True, True]
    assert jax.tree.leaves(mask) == [False, False]
    assert jax.tree.structure(mask) == jax.tree.structure(affine)
    assert jax.tree.leaves(nj.decay_mask({"w": jnp.ones(4), "b": jnp.ones(())})) == [True, True]
