"""One gradient for each example, alone, in chunks and clipped, against a Python loop over the examples."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import per_example
from normjax.linen import BatchNorm as LinenBatchNorm
from normjax.linen import GroupNorm as LinenGroupNorm
from normjax.nnx import BatchNorm as NnxBatchNorm
from normjax.nnx import LayerNorm as NnxLayerNorm
from tests.quick import quick_jit

EXAMPLES, POSITIONS, CHANNELS = 7, 5, 4
X3 = jnp.array([0.25, 0.25, 3.0])
AFFINE = {"layout": "S C", "axis_names": "C"}
FROZEN = nj.BatchStats(jnp.full(CHANNELS, 0.3), jnp.full(CHANNELS, 2.0), jnp.int32(1), jnp.ones(CHANNELS), "C")
REFERENCE = nj.Moments(jnp.full(CHANNELS, 0.3), jnp.full(CHANNELS, 2.0), jnp.full(CHANNELS, 9.0), ("C",))
NORMS = {
    "layer": lambda x, p: nj.layer_norm(x, p, **AFFINE)[0],
    "rms": lambda x, p: nj.rms_norm(x, p, **AFFINE)[0],
    "instance": lambda x, p: nj.instance_norm(x, p, layout="S C", axis_names="S")[0],
    "group": lambda x, p: nj.group_norm(x, p, layout="S C=(G=2 K)", axis_names="S K")[0],
    "frozen batch": lambda x, p: nj.batch_norm(x, p, FROZEN, layout="S C", axis_names="S", train=False)[0],
    "batch by reference statistics": lambda x, p: nj.normalize(x, p, layout="S C", axis_names="S", moments=REFERENCE)[
        0
    ],
}


def pure(name):
    """A loss of one example and parameters in float64."""

    def loss(params, x, target):
        h = NORMS[name](x @ params["in"], params["norm"])
        return jnp.mean((jnp.tanh(h) @ params["out"] - target) ** 2)

    return loss


def problem(rng):
    params = {
        "in": rng.normal(size=(3, CHANNELS)),
        "norm": nj.Affine(rng.normal(size=CHANNELS), rng.normal(size=CHANNELS), "C"),
        "out": rng.normal(size=(CHANNELS, 2)),
    }
    batch = rng.normal(size=(EXAMPLES, POSITIONS, 3)), rng.normal(size=(EXAMPLES, POSITIONS, 2))
    return jax.tree.map(jnp.asarray, params), *map(jnp.asarray, batch)


def looped(loss, params, *batch):
    gradient = quick_jit(jax.grad(loss))
    rows = [gradient(params, *(array[i] for array in batch)) for i in range(len(batch[0]))]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def close(got, wanted, rtol=1e-10):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), got, wanted)


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("norm", NORMS)
def test_each_gradient_is_that_of_a_loop_whatever_the_chunk(norm, chunk_size, rng, x64):
    params, *batch = problem(rng)
    got = quick_jit(partial(per_example.per_example_grads, pure(norm), chunk_size=chunk_size))(params, *batch)
    wanted = looped(pure(norm), params, *batch)
    assert jax.tree.structure(got) == jax.tree.structure(params)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(wanted))
    close(got, wanted)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(LinenGroupNorm(num_groups=2)(nn.Conv(4, (3, 3))(x)))
        x = LinenBatchNorm(use_running_average=True)(nn.Conv(4, (3, 3))(x))
        return nn.Dense(3)(nn.relu(x).mean((1, 2)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Conv(1, 4, (3, 3), rngs=rngs), nnx.Conv(4, 4, (3, 3), rngs=rngs)
        self.layer, self.batch = NnxLayerNorm(4, rngs=rngs), NnxBatchNorm(4, use_running_average=True, rngs=rngs)
        self.last = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        x = self.batch(self.second(nnx.relu(self.layer(self.first(x)))))
        return self.last(nnx.relu(x).mean((1, 2)))


def of_linen():
    model = Linen()
    variables = model.init(jax.random.key(0), jnp.zeros((1, 6, 6, 1)))

    def loss(params, image, label):
        logits = model.apply({**variables, "params": params}, image[None])
        return optax.softmax_cross_entropy_with_integer_labels(logits, label[None])[0]

    return loss, variables["params"]


def of_nnx():
    graph, params, rest = nnx.split(Nnx(nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, image, label):
        logits = nnx.merge(graph, params, rest)(image[None])
        return optax.softmax_cross_entropy_with_integer_labels(logits, label[None])[0]

    return loss, params


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("model", [of_linen, of_nnx])
def test_models_of_flax_have_one_gradient_for_each_example(model, chunk_size, rng):
    loss, params = model()
    images = jnp.asarray(rng.normal(size=(EXAMPLES, 6, 6, 1)), jnp.float32)
    labels = jnp.arange(EXAMPLES) % 3
    each = quick_jit(lambda p: per_example.per_example_grads(loss, p, images, labels, chunk_size=chunk_size))
    close(each(params), looped(loss, params, images, labels), rtol=2e-5)


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("check", [False, True])
def test_on_several_devices_each_has_its_own_examples(check, chunk_size, rng, x64):
    loss, (params, x, target) = pure("layer"), problem(rng)
    x, target = x[:6], target[:6]
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    @quick_jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P("data"), P()), check_vma=check
    )
    def both(params, x, target):
        rows = per_example.per_example_grads(loss, params, x, target, chunk_size=chunk_size)
        total = per_example.clipped_grad(loss, params, x, target, l2_norm=0.1, chunk_size=chunk_size)
        return rows, jax.lax.psum(total, "data")

    rows, total = both(params, x, target)
    close(rows, looped(loss, params, x, target))
    close(total, per_example.clipped_grad(loss, params, x, target, l2_norm=0.1))


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("chunk_size", [None, 1, 3, 7])
@pytest.mark.parametrize("l2_norm", [1e-3, 0.5, 1e6])
def test_clipped_gradients_add_up_to_those_of_the_materialised_rows(l2_norm, chunk_size, average, rng, x64):
    params, *batch = problem(rng)
    clipped = partial(per_example.clipped_grad, pure("group"), l2_norm=l2_norm, chunk_size=chunk_size, average=average)
    got = quick_jit(clipped)(params, *batch)
    rows = looped(pure("group"), params, *batch)
    leaves = jax.tree.leaves(rows)
    norms = np.sqrt(sum(np.sum(np.square(leaf), axis=tuple(range(1, leaf.ndim))) for leaf in leaves))
    share = np.minimum(1, l2_norm / norms) / (EXAMPLES if average else 1)
    close(got, jax.tree.map(lambda leaf: np.tensordot(share, leaf, 1), rows))


@pytest.mark.parametrize("size", [1e-30, 1e25, 4e37])
def test_gradients_too_large_to_square_and_gradients_of_zero_are_clipped_right(size):
    rows = jnp.array([[3 * size, 4 * size], [0, 0]], jnp.float32)
    got = per_example.clipped_grad(lambda w, x: w @ x, jnp.zeros(2), rows, l2_norm=5.0)
    np.testing.assert_allclose(got, np.array([3.0, 4.0]) * min(1, size), rtol=1e-6)


@pytest.mark.parametrize(("size", "l2_norm"), [(6e37, 2.0), (6e37, 1e-3), (1e30, 1e-12)])
def test_a_share_too_small_for_float32_is_no_zero(size, l2_norm):
    x = jnp.array([[3.0, 4.0], [0.0, 0.0]]) * np.float32(size)
    got = per_example.clipped_grad(lambda w, x: w @ x, jnp.zeros(2), x, l2_norm=l2_norm)
    np.testing.assert_allclose(got, [0.6 * l2_norm, 0.8 * l2_norm], rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_half_precision_passes_strict_promotion(dtype):
    w, x = jnp.ones(3, dtype), jnp.arange(12.0).reshape(4, 3).astype(dtype)
    with jax.numpy_dtype_promotion("strict"):
        got = per_example.clipped_grad(lambda w, x: jnp.sum(w * x), w, x, l2_norm=1.0, chunk_size=3)
        coupling = per_example.example_coupling(lambda x: x * x, x)
    rows = np.asarray(x, np.float64)
    wanted = np.sum(rows / np.maximum(1, np.linalg.norm(rows, axis=1, keepdims=True)), 0)
    np.testing.assert_allclose(np.asarray(got, np.float64), wanted, rtol=float(jnp.finfo(dtype).eps) * 2)
    np.testing.assert_array_equal(np.asarray(coupling) > 0, np.eye(4, dtype=bool))


def test_a_traced_bound_that_is_no_number_makes_the_sum_nan():
    clipped = jax.jit(lambda most: per_example.clipped_grad(lambda w, x: w * x, jnp.float32(1), X3, l2_norm=most))
    assert np.isnan(clipped(np.nan))
    np.testing.assert_allclose(clipped(0.5), 1.0)


def test_a_nan_in_one_example_makes_the_clipped_sum_nan():
    got = per_example.clipped_grad(lambda w, x: w * x, jnp.float32(1), jnp.array([1.0, jnp.nan]), l2_norm=1.0)
    assert np.isnan(got)


def test_the_sum_is_taken_in_float32_and_returned_in_the_parameters_dtype():
    ones = jnp.ones(4096, jnp.bfloat16)  # a sum in bfloat16 would stall at 256
    got = per_example.clipped_grad(lambda w, x: w * x, jnp.bfloat16(1), ones, l2_norm=2.0, chunk_size=1)
    assert got.dtype == jnp.bfloat16
    assert got == 4096


def test_chunks_of_a_quarter_need_at_most_two_fifths_of_the_temporaries(rng):
    """256 examples of a convolutional net; from the memory analysis of the compiled programs."""
    loss, params = of_linen()
    images = jnp.asarray(rng.normal(size=(256, 8, 8, 1)), jnp.float32)
    labels = jnp.arange(256) % 3

    def temporaries(fn):
        return jax.jit(fn).lower(params, images, labels).compile().memory_analysis().temp_size_in_bytes

    whole = temporaries(jax.vmap(jax.grad(loss), (None, 0, 0)))
    chunked = temporaries(lambda *args: per_example.clipped_grad(loss, *args, l2_norm=1.0, chunk_size=64))
    assert chunked <= 0.4 * whole


def batch_loss(norm):
    def losses(params, x):
        h = norm(x @ params["in"], params["norm"])
        return jnp.sum(jnp.tanh(h) @ params["out"], (1, 2)) ** 3

    return losses


COUPLED = {
    "batch": lambda x, p: nj.batch_norm(x, p, layout="N S C", axis_names="N S", train=True)[0],
    "ghost": lambda x, p: nj.batch_norm(x, p, layout="(B=2 n) S C", axis_names="n S", train=True)[0],
    "layer": lambda x, p: nj.layer_norm(x, p, layout="N S C", axis_names="C")[0],
}


@pytest.mark.case(55)
@pytest.mark.parametrize("norm", COUPLED)
def test_coupled_rows_are_the_jacobians_and_add_up_to_the_batch_gradient(norm, rng, x64):
    params, x, _ = problem(rng)
    x, losses = x[:6], batch_loss(COUPLED[norm])
    rows = quick_jit(partial(per_example.coupled_grads, losses))(params, x)
    close(rows, quick_jit(jax.jacrev(losses))(params, x))
    close(jax.tree.map(lambda leaf: leaf.sum(0), rows), quick_jit(jax.grad(lambda p: losses(p, x).sum()))(params))
    of_one = quick_jit(jax.grad(lambda p, i: losses(p, x)[i]))
    alone = [of_one(params, i)["in"] for i in range(6)]
    close(rows["in"], jnp.stack(alone))


@pytest.mark.parametrize("leaves", [1, 2])
def test_clipped_sums_are_differentiable_where_an_example_s_gradient_is_zero(leaves, x64):
    rows = jnp.array([[0.0, 0.0], [3.0, 4.0], [0.3, 0.4]])

    def total(scale):
        loss = lambda w, x: scale * sum(jnp.sum(part * x) for part in w)  # noqa: E731
        return sum(per_example.clipped_grad(loss, [jnp.zeros(2)] * leaves, rows, l2_norm=2.0)).sum()

    # A gradient of zero and one within the bound move with the scale; what is cut off at the bound does not.
    np.testing.assert_allclose(jax.grad(total)(1.0), leaves * 0.7, rtol=1e-12)
    np.testing.assert_allclose(jax.jvp(total, (1.0,), (1.0,))[1], leaves * 0.7, rtol=1e-12)


@pytest.mark.case(55)
def test_a_bare_vmap_of_grad_gives_zeros_which_nobody_can_catch():
    def loss(w, x):
        y, _ = nj.batch_norm((w * x)[None], layout="N C", axis_names="N", train=True)
        return jnp.sum(y**3)

    got = jax.vmap(jax.grad(loss), (None, 0))(jnp.ones(2), jnp.arange(6.0).reshape(3, 2))
    np.testing.assert_array_equal(got, np.zeros((3, 2)))
