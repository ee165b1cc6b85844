"""Where running statistics sit in a pytree: `BatchStats`, linen's collections, nnx's states, plain dicts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax._decay import path_names

FIELDS = ("mean", "var", "count", "weight")
COLLECTIONS = ("batch_stats", "batch_counts")  # of linen: the same layer has a place in each


@dataclasses.dataclass(frozen=True)
class Layer:
    """The running statistics of one norm.

    Attributes:
      name: its path in the tree.
      fields: which leaf of the flattened tree is its "mean" and "var", and its "count" and "weight" where it has them.
    """

    name: str
    fields: dict[str, int]


def find_layers(stats) -> list[Layer]:
    """The places of a tree that hold a `mean` and a `var`, in the tree's order."""
    places: dict[tuple, dict[str, int]] = {}
    for number, (keys, _) in enumerate(jax.tree_util.tree_flatten_with_path(stats)[0]):
        path = path_names(keys)
        if path and path[-1] in FIELDS:
            place = path[1:-1] if path[0] in COLLECTIONS else path[:-1]
            places.setdefault(place, {})[path[-1]] = number
    return [
        Layer("/".join(map(str, place)) or "stats", fields)
        for place, fields in places.items()
        if {"mean", "var"} <= set(fields)
    ]


def wide(leaf) -> np.ndarray:
    """The leaf on this host, in float64 (complex128)."""
    array = np.asarray(leaf)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def values(layer: Layer, leaves: list) -> dict[str, np.ndarray]:
    """The layer's fields on this host."""
    return {field: wide(leaves[number]) for field, number in layer.fields.items()}


def replaced(leaves: list, layer: Layer, **fields: Any) -> list:
    """The leaves with fields of one layer taken anew, where it has them; each keeps its shape and dtype."""
    leaves = list(leaves)
    for field, value in fields.items():
        if field in layer.fields:
            old = leaves[layer.fields[field]]
            leaves[layer.fields[field]] = np.broadcast_to(np.asarray(value), old.shape).astype(old.dtype)
    return leaves


def is_start(found: dict[str, np.ndarray]) -> bool:
    """Whether these are start values: by the count where there is one, else mean 0 and variance 1 throughout."""
    if "count" in found:
        return bool(np.all(found["count"] == 0))
    return bool(np.all(found["mean"] == 0) and np.all(found["var"] == 1))


def sane(leaves: list, layers: list[Layer]) -> list:
    """The leaves, those of statistics on this host, such that a forward can take them.

    In float32 at least but for counts, finite, no variance below 0.
    """
    leaves = list(leaves)
    for layer in layers:
        for field, number in layer.fields.items():
            leaf = leaves[number] = np.asarray(leaves[number])
            if field != "count":
                leaves[number] = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        for field in ("mean", "var"):
            leaf = leaves[layer.fields[field]]
            good = np.isfinite(leaf) if field == "mean" else np.isfinite(leaf) & (leaf >= 0)
            leaves[layer.fields[field]] = np.where(good, leaf, 0 if field == "mean" else 1).astype(leaf.dtype)
    return leaves
