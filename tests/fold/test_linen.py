"""`normjax.linen.fold`: the same in linen, where the module says itself what it is made of."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.core import freeze, meta

from normjax import linen
from tests.closeness import close
from tests.quick import quick_jit

X, ROWS = (2, 6, 5, 3), (4, 3)


class Model(nn.Module):
    """`call(x, train)` in a compact method."""

    call: Callable

    @nn.compact
    def __call__(self, x, train: bool = False):
        return self.call(x, train)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.relu(norm(train)(nn.Conv(4, (3, 3), use_bias=False)(x)))


class SetUp(nn.Module):
    """Its submodules in reverse order, and methods."""

    def setup(self):
        self.norm, self.layer = linen.BatchNorm(use_running_average=True), nn.Dense(4, use_bias=False)

    def __call__(self, x):
        return self.encode(x)

    def encode(self, x):
        return self.norm(x=self.layer(x))


def norm(train=False, kind=linen.BatchNorm, **settings):
    return kind(use_running_average=not train, **settings)


def filled(module, x, rng, **kwargs):
    """Variables that are not what they start as."""
    started = jax.eval_shape(lambda: module.init(jax.random.key(0), x, **kwargs))

    def draw(path, leaf):
        value = rng.normal(size=leaf.shape)
        return jnp.asarray(value**2 + 0.1 if getattr(path[-1], "key", None) == "var" else value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, started)


def boxed(leaf):
    return isinstance(leaf, meta.AxisMetadata)


def lifted(lift):
    return lambda x, train: lift(Block, static_argnums=(2,))(name="block")(x, train)


def dense_into_two(x, train):
    return norm(train, axis=(-2, -1))(nn.DenseGeneral((2, 4), use_bias=False)(x))


# what it is: call, x, [(norm, layer)]
FOLDED = {
    "convolution": (lambda x, train: norm(train)(nn.Conv(4, (3, 3))(x)), X, [("BatchNorm_0", "Conv_0")]),
    "of flax, no bias": (
        lambda x, train: norm(train, nn.BatchNorm)(nn.Conv(4, (3,), use_bias=False)(x)),
        X,
        [("BatchNorm_0", "Conv_0")],
    ),
    "dense, no parameters": (
        lambda x, train: norm(train, use_scale=False, use_bias=False)(nn.Dense(4, use_bias=False)(x)),
        ROWS,
        [("BatchNorm_0", "Dense_0")],
    ),
    "dense into two axes": (dense_into_two, ROWS, [("BatchNorm_0", "DenseGeneral_0")]),
    "depthwise with a multiplier": (
        lambda x, train: norm(train)(nn.Conv(6, (3, 3), feature_group_count=3)(x)), X, [("BatchNorm_0", "Conv_0")]
    ),
    "transposed, the kernel too": (
        lambda x, train: norm(train, zero_centered=True)(nn.ConvTranspose(3, (3, 3), transpose_kernel=True)(x)),
        X,
        [("BatchNorm_0", "ConvTranspose_0")],
    ),
    "two blocks": (
        lambda x, train: Block(name="second")(Block(name="first")(x, train), train),
        X,
        [("first/BatchNorm_0", "first/Conv_0"), ("second/BatchNorm_0", "second/Conv_0")],
    ),
    "remat": (lifted(nn.remat), X, [("block/BatchNorm_0", "block/Conv_0")]),
    "a layer under remat": (
        lambda x, train: norm(train)(nn.remat(nn.Dense)(4, use_bias=False)(x)),
        ROWS,
        [("BatchNorm_0", "CheckpointDense_0")],
    ),
    "jit": (lifted(nn.jit), X, [("block/BatchNorm_0", "block/Conv_0")]),
    "a boxed kernel": (
        lambda x, train: norm(train)(
            nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))(x)
        ),
        ROWS,
        [("BatchNorm_0", "Dense_0")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "shape", "pairs"), FOLDED.values(), ids=FOLDED)
def test_a_pair_folds_and_the_module_applies_it(call, shape, pairs, rng):
    module, x = Model(call), jnp.asarray(rng.normal(size=shape), jnp.float32)
    variables = filled(module, x, rng)
    before = jax.tree.map(np.array, variables)
    wanted = quick_jit(module.apply)(variables, x)
    apply, folded, report = linen.fold(module, variables, x, train=False)
    assert [(row.norm, row.layer) for row in report] == pairs
    # As many products as two kernels have entries, at most.
    close(quick_jit(apply)(folded, x), wanted, m=300)
    assert np.abs(wanted).max() > 0.1
    jax.tree.map(np.testing.assert_array_equal, variables, before)
    names = {key.key for path, _ in jax.tree_util.tree_leaves_with_path(folded) for key in path if hasattr(key, "key")}
    assert not [name for name in names if "BatchNorm" in name]
    assert "batch_stats" not in folded
    boxes = [[leaf for leaf in jax.tree.leaves(tree, is_leaf=boxed) if boxed(leaf)] for tree in (folded, variables)]
    assert [len(boxes[0]), *(box.names for box in boxes[0])] == [len(boxes[1]), *(box.names for box in boxes[1])]


def tied(x, train):
    layer = nn.Dense(4, name="layer")
    y = norm(train)(layer(x))
    return y @ layer.variables["params"]["kernel"].T


def weight_normed(x, train):
    return norm(train)(nn.WeightNorm(nn.Dense(4), variable_filter={"kernel"})(x))


class Sharing(nn.Module):
    """Its parameters are those of its norm."""

    def setup(self):
        self.layer, self.norm = nn.Dense(4), norm()
        nn.share_scope(self, self.norm)

    def __call__(self, x):
        return nn.relu(self.norm(self.layer(x)))


class Mine(nn.Dense):
    pass


class Stacked(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return norm()(nn.Dense(3)(x)), None


def scanned(x, train):
    return nn.scan(Stacked, variable_axes={"params": 0, "batch_stats": 0}, split_rngs={"params": True}, length=2)()(
        x, None
    )[0]


# what it is: call, x, arguments, reason
REFUSED = {
    "training": (lambda x, train: norm(train)(nn.Dense(4)(x)), ROWS, {"train": True}, "it is in training mode"),
    "an activation between": (lambda x, train: norm()(nn.relu(nn.Dense(4)(x))), ROWS, {}, "its x comes from `max`"),
    "a norm before a padded convolution": (
        lambda x, train: nn.Conv(4, (3, 3))(norm()(x)), X, {}, "its x is an input of the model"
    ),
    "a residual branch": (
        lambda x, train: (z := nn.Dense(4)(x)) + norm()(z), ROWS, {}, "what Dense_0 gives is read by `add` too"
    ),
    "a layer used twice": (
        lambda x, train: norm()((layer := nn.Dense(3))(x)) + layer(2 * x), ROWS, {}, "Dense_0 is called 2 times"
    ),
    "a norm used twice": (
        lambda x, train: (n := norm())(nn.Dense(4)(x)) + n(nn.Dense(4)(x)), ROWS, {}, "it is called 2 times"
    ),
    "other axes": (
        lambda x, train: norm(axis=1)(nn.Conv(4, (3, 3))(x)), X, {}, "it normalises along axis 1, but Conv_0"
    ),
    "a kernel that is read elsewhere": (tied, ROWS, {}, "the kernel or bias of layer is read outside its call too"),
    "weight norm": (weight_normed, ROWS, {}, "the kernel or bias of Dense_0 is read outside its call too"),
    "local convolution": (
        lambda x, train: norm()(nn.ConvLocal(4, (3, 3))(x)), X, {}, "its x comes from `add`, not straight"
    ),
    "a subclass": (
        lambda x, train: norm()(Mine(4)(x)), ROWS, {}, "Mine_0 is a Mine, which is no layer that fold knows"
    ),
    "a scan": (scanned, ROWS, {}, "it is called inside `scan`"),
    "a scope that a module shares with its norm": (
        lambda x, train: Sharing()(x), ROWS, {}, "Sharing_0 shares its scope with a Sharing (nn.share_scope)"
    ),
    "a kernel for each example": (
        lambda x, train: norm()(nn.DenseGeneral(4, batch_dims=0, use_bias=False)(x)),
        ROWS,
        {},
        "DenseGeneral_0 has a kernel for each entry of a batch axis",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "shape", "kwargs", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_must_not_fold_stays_with_a_reason(call, shape, kwargs, reason, rng):
    module, x = Model(call), jnp.asarray(rng.normal(size=shape), jnp.float32)
    variables = filled(module, x, rng)
    _, folded, report = linen.fold(module, variables, x, **kwargs)
    assert len(report) == 1
    assert report[0].layer == ""
    assert report[0].reason.startswith(reason)
    jax.tree.map(np.testing.assert_array_equal, folded, variables)


def test_submodules_of_setup_and_other_methods_fold(rng):
    module, x = SetUp(), jnp.asarray(rng.normal(size=ROWS), jnp.float32)
    variables = filled(module, x, rng)
    apply, folded, report = linen.fold(module, freeze(variables), x, method="encode")
    assert str(report) == "norm  folded into layer"
    assert jax.tree.map(jnp.shape, folded) == {"params": {"layer": {"bias": (4,), "kernel": (3, 4)}}}
    close(apply(folded, x, method="encode"), module.apply(variables, x), m=3)


def test_a_norm_of_another_dtype_and_a_call_in_training_mode_are_as_in_evaluation(rng):
    def call(x, train):
        return norm(train, dtype=jnp.float32)(nn.Dense(4, dtype=jnp.bfloat16)(x))

    module, x = Model(call), jnp.asarray(rng.normal(size=ROWS), jnp.float32)
    variables = filled(module, x, rng)
    apply, folded, _ = linen.fold(module, variables, x)
    wanted, found = module.apply(variables, x), apply(folded, x, train=True)
    assert found.dtype == wanted.dtype == jnp.float32
    bound = 4 * float(jnp.finfo(jnp.bfloat16).eps) * np.sqrt(3) * np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=0, atol=bound)


def test_gradients_flow_through_the_folded_variables(rng):
    module, x = Model(FOLDED["convolution"][0]), jnp.asarray(rng.normal(size=X), jnp.float32)
    apply, folded, _ = linen.fold(module, filled(module, x, rng), x)
    grads = quick_jit(jax.grad(lambda v: jnp.sum(apply(v, x) ** 2)))(folded)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


def test_a_module_without_batch_norm_and_one_that_fails_say_so():
    dense = nn.Dense(4)
    variables = dense.init(jax.random.key(0), jnp.ones(ROWS))
    with pytest.raises(ValueError, match=r"^fold: no batch norm of flax.linen or normjax.linen is called here\.$"):
        linen.fold(dense, variables, jnp.ones(ROWS))
    with pytest.raises(Exception) as raised:  # noqa: PT011
        linen.fold(dense, variables, jnp.ones((4, 5)))
    assert "fold: raised while the model was traced on the example." in raised.value.__notes__
