"""A model with every norm: the parameters, the checkpoints and the training of Flax's, on one device and on eight."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx, serialization, traverse_util
from jax.sharding import PartitionSpec as P

from tests.closeness import close
from tests.flax import models
from tests.quick import quick_jit
from tests.sync.mappings import make_mesh
from tests.trees import same

STEPS = 4
LIBRARIES = ("normjax", "flax")


def start(framework: str, library: str):
    """The variables of a new model as a nested dict of arrays."""
    if framework == "linen":
        return models.linen_variables(library, jnp.zeros(models.SHAPE))
    return nnx.to_pure_dict(nnx.state(models.Nnx(library, rngs=nnx.Rngs(3))))


def evaluate(framework: str, library: str, variables, x):
    if framework == "linen":
        return models.Linen(library).apply(variables, x, train=False)
    model = models.Nnx(library, rngs=nnx.Rngs(0))
    model.eval()
    nnx.update(model, variables)
    return model(x)


def trained(variables):
    """As if trained: every leaf differs from what it started as, and variances are positive."""
    return jax.tree.map(
        lambda leaf: leaf + 0.125 + 0.25 * jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape) / leaf.size,
        variables,
    )


every_framework = pytest.mark.parametrize("framework", ["linen", "nnx"])


@every_framework
def test_the_initial_parameters_are_those_of_flax_bit_for_bit(framework):
    mine, theirs = (start(framework, library) for library in LIBRARIES)
    same(mine, theirs)
    leaves = {path[-1].key for path, _ in jax.tree_util.tree_flatten_with_path(mine)[0]}
    assert leaves == {"kernel", "bias", "scale", "mean", "var"}


def by_serialization(variables, target, folder):
    return serialization.from_bytes(target, serialization.to_bytes(variables))


def by_orbax(variables, target, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", variables)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "checkpoint", target)


def by_safetensors(variables, target, folder):
    safetensors = pytest.importorskip("safetensors.numpy")
    flat = traverse_util.flatten_dict(variables, sep=".")
    safetensors.save_file({name: np.asarray(leaf) for name, leaf in flat.items()}, folder / "model.safetensors")
    restored = traverse_util.unflatten_dict(safetensors.load_file(folder / "model.safetensors"), sep=".")
    assert jax.tree.structure(restored) == jax.tree.structure(target)
    return restored


@pytest.mark.parametrize("there_and_back", [by_serialization, by_orbax, by_safetensors])
@pytest.mark.parametrize(("saved_by", "loaded_by"), [("flax", "normjax"), ("normjax", "flax")])
@every_framework
def test_a_checkpoint_loads_unchanged(framework, saved_by, loaded_by, there_and_back, rng, tmp_path):
    x, _ = models.problem(rng)
    saved = trained(start(framework, saved_by))
    loaded = there_and_back(saved, start(framework, loaded_by), tmp_path)
    same(loaded, saved)
    one, other = _evaluations(framework, saved_by, loaded_by)(saved, jax.tree.map(jnp.asarray, loaded), x)
    close(one, other, m=x.size)  # the last of five norms in a row has the roundings of all of them


@functools.cache
def _evaluations(framework: str, *libraries: str):
    def both(saved, loaded, x):
        return [evaluate(framework, lib, each, x) for lib, each in zip(libraries, (saved, loaded), strict=True)]

    return quick_jit(both)


def losses_by_linen(library: str, x, target, step=models.linen_step, **more):
    state, losses = models.linen_state(library, x, **more), []
    step = quick_jit(step)
    for _ in range(STEPS):
        state, loss = step(state, x, target)
        losses.append(float(loss))
    return losses, {"params": state.params, "batch_stats": state.batch_stats}


def losses_by_nnx(library: str, x, target, step=models.nnx_step, **more):
    model, optimizer = models.nnx_model(library, **more)
    step = nnx.jit(step)
    losses = [float(step(model, optimizer, x, target)) for _ in range(STEPS)]
    return losses, nnx.to_pure_dict(nnx.state(model))


LOSSES = {"linen": losses_by_linen, "nnx": losses_by_nnx}


def alike(one, other, m: int):
    """Losses and variables after a few steps, each of which may multiply the roundings of the last by a few."""
    np.testing.assert_allclose(one[0], other[0], rtol=1e-4)
    for mine, theirs in zip(jax.tree.leaves(one[1]), jax.tree.leaves(other[1]), strict=True):
        close(mine, theirs, m=m, k=16 * STEPS)


@every_framework
def test_a_model_trains_as_flax_s_does(framework, rng):
    x, target = models.problem(rng)
    mine, theirs = (LOSSES[framework](library, x, target) for library in LIBRARIES)
    alike(mine, theirs, x.size)
    assert mine[0][-1] < mine[0][0]


def mean_over(tree):
    return jax.lax.pmean(tree, "data")


def shard_mapped(step):
    """A step of pytrees over eight devices: data in shards, everything else whole."""
    return jax.shard_map(
        step, mesh=make_mesh(("data",), (8,)), in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=False
    )


def linen_by_shard_map(state, x, target):
    return shard_mapped(functools.partial(models.linen_step, reduce=mean_over))(state, x, target)


def linen_by_pmap(state, x, target):
    shards = [array.reshape(8, -1, *array.shape[1:]) for array in (x, target)]
    step = jax.pmap(functools.partial(models.linen_step, reduce=mean_over), "data", in_axes=(None, 0, 0), out_axes=None)
    return step(state, *shards)


def nnx_by_shard_map(model, optimizer, x, target):
    graph, state = nnx.split((model, optimizer))

    def step(state, x, target):
        merged = nnx.merge(graph, state)
        loss = models.nnx_step(*merged, x, target, reduce=mean_over)
        return nnx.state(merged), loss

    state, loss = shard_mapped(step)(state, x, target)
    nnx.update((model, optimizer), state)
    return loss


@pytest.mark.parametrize(
    ("framework", "step"), [("linen", linen_by_shard_map), ("linen", linen_by_pmap), ("nnx", nnx_by_shard_map)]
)
def test_a_model_trains_on_eight_devices_as_on_one(framework, step, rng):
    x, target = models.problem(rng)
    one = LOSSES[framework]("normjax", x, target)
    eight = LOSSES[framework]("normjax", x, target, step, axis_name="data")
    alike(eight, one, x.size)
