"""Each fault planted in any network: what `diagnose` is given then, and the layers that it should name."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax._decay import path_names
from normjax._diagnose_layers import replaced
from normjax._stats_tree import find_norms
from tests.diagnose.models import Net, build, examples, trained


@dataclasses.dataclass
class Plant:
    """Arguments of `diagnose`."""

    forward: Callable[..., Any]
    stats: Any
    batch: Any
    params: Any
    apply: Callable[..., Any]
    options: dict = dataclasses.field(default_factory=dict)


def healthy(kind, shape, rng, *, net: Net | None = None, seed=0, side=4, size=64, updates=60, padded=False) -> Plant:
    """A network whose statistics rest on so many batches, with the means to check what a network has."""
    net = net or build(kind, shape, seed)

    def forward(stats, x, train):
        return net.apply(net.params, stats, x, train)

    stats = trained(net, rng, shape, updates, side=side, padded=padded)
    return Plant(forward, stats, examples(shape, rng, size, side, padded), net.params, net.apply)


def with_params(net: Net, name: str, edit) -> Net:
    """The network with edit(leaf) in the place of a parameter of its first layer or norm."""

    def change(keys, leaf):
        path = path_names(keys)
        place = ("one", "norm_one") if name != "kernel" else ("one",)
        return edit(leaf) if path[0] in place and path[-1] == name else leaf

    return dataclasses.replace(net, params=jax.tree_util.tree_map_with_path(change, net.params))


def with_stats(stats, edit):
    """The statistics with those of the first layer replaced by edit(mean, var) → fields."""
    leaves, structure = jax.tree.flatten(stats)
    place = find_norms(stats)[0]
    fields = edit(*(np.array(leaves[place.fields[name]]) for name in ("mean", "var")))
    return jax.tree.unflatten(structure, replaced(leaves, place, **fields))


def _first(value):
    """An edit that puts a value in the first channel."""

    def edit(array):
        array = np.array(array)
        array[..., 0] = value
        return jnp.asarray(array)

    return edit


def evaluates_with_the_batch(kind, shape, rng):
    plant = healthy(kind, shape, rng)
    right = plant.forward
    plant.forward = lambda stats, x, train: (right(stats, x, True)[0], right(stats, x, train)[1])
    return plant


def never_updated(kind, shape, rng):
    return healthy(kind, shape, rng, updates=0)


def discarded(kind, shape, rng):
    plant = healthy(kind, shape, rng)
    right = plant.forward
    plant.forward = lambda stats, x, train: (right(stats, x, train)[0], stats)
    return plant


def warmed_up_too_little(kind, shape, rng):
    return healthy(kind, shape, rng, updates=3)


def batch_of_one(kind, shape, rng):
    return healthy(kind, shape, rng, side=1, size=1)


def tiny_groups(kind, shape, rng):
    return healthy(kind, shape, rng, side=1, size=4)


def drifted(kind, shape, rng):
    plant = healthy(kind, shape, rng)
    plant.batch = 3 * plant.batch + 2
    return plant


def constant_channel(kind, shape, rng):
    return healthy(kind, shape, rng, net=with_params(build(kind, shape, 0), "kernel", _first(0)))


def eps_dominates(kind, shape, rng):
    return healthy(kind, shape, rng, net=build(kind, shape, 0, eps=5.0))


def not_finite(kind, shape, rng):
    plant = healthy(kind, shape, rng)
    plant.stats = with_stats(plant.stats, lambda mean, var: {"mean": _first(np.nan)(mean)})
    return plant


def negative_variance(kind, shape, rng):
    plant = healthy(kind, shape, rng)
    plant.stats = with_stats(plant.stats, lambda mean, var: {"var": _first(-0.1)(var)})
    return plant


def half_precision(kind, shape, rng):
    plant = healthy(kind, shape, rng)
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)  # noqa: E731
    plant.stats = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if is_float(leaf) else leaf, plant.stats)
    return plant


def batch_mates_leak(kind, shape, rng):
    plant = healthy(kind, shape, rng)
    right = plant.forward

    def contrastive(stats, x, train):
        y, new = right(stats, x, train)
        return jax.nn.log_softmax(y @ y.T), new

    plant.forward = contrastive
    return plant


def padding_pooled(kind, shape, rng):
    plant = healthy(kind, shape, rng, padded=True)
    plant.options["pad_axis"] = 1
    return plant


def replicas_differ(kind, shape, rng):
    plants = [healthy(kind, shape, np.random.default_rng(i)) for i in range(2)]
    plants[0].stats = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(plant.stats for plant in plants))
    plants[0].options["replica_axis"] = 0
    return plants[0]


def redundant_bias(kind, shape, rng):
    return healthy(kind, shape, rng, net=build(kind, shape, 0, bias=True))


def scale_near_zero(kind, shape, rng):
    return healthy(kind, shape, rng, net=with_params(build(kind, shape, 0), "scale", _first(1e-5)))


def decayed_norm(kind, shape, rng):
    plant = healthy(kind, shape, rng)
    plant.options["decay_mask"] = True
    return plant


PLANTS = {
    "batch statistics in evaluation": evaluates_with_the_batch,
    "never updated": never_updated,
    "discarded": discarded,
    "warm-up too short": warmed_up_too_little,
    "batch of one": batch_of_one,
    "tiny groups": tiny_groups,
    "drift": drifted,
    "constant channels": constant_channel,
    "eps dominates": eps_dominates,
    "not finite": not_finite,
    "negative variance": negative_variance,
    "half precision": half_precision,
    "batch-mates leak": batch_mates_leak,
    "padding pooled": padding_pooled,
    "replicas differ": replicas_differ,
    "redundant bias": redundant_bias,
    "scale near 0": scale_near_zero,
    "decayed norm": decayed_norm,
}
