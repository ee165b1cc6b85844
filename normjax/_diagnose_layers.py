"""The leaves of a tree of running statistics, as a diagnosis reads and replaces them."""

from typing import Any

import numpy as np

from normjax._stats_tree import Norm, wide


def values(layer: Norm, leaves: list) -> dict[str, np.ndarray]:
    """The layer's fields on this host."""
    return {field: wide(leaves[number]) for field, number in layer.fields.items()}


def replaced(leaves: list, layer: Norm, **fields: Any) -> list:
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


def sane(leaves: list, layers: list[Norm]) -> list:
    """The leaves, those of statistics on this host, such that a forward can take them.

    In float32 at least but for counts, finite, no variance below 0.
    """
    leaves = list(leaves)
    for layer in layers:
        for field, number in layer.fields.items():
            leaf = leaves[number] = np.asarray(leaves[number])
            if field != "count":
                leaves[number] = leaf.astype(np.promote_types(leaf.dtype, np.float32))
        for field in ("mean", "var"):
            leaf = leaves[layer.fields[field]]
            good = np.isfinite(leaf) if field == "mean" else np.isfinite(leaf) & (leaf >= 0)
            leaves[layer.fields[field]] = np.where(good, leaf, 0 if field == "mean" else 1).astype(leaf.dtype)
    return leaves
