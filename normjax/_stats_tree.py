"""Running statistics in a tree of any framework: which leaves are a norm's, and the tree with others in their place."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from normjax._decay import path_names
from normjax._inputs import kind_of
from normjax._moments import Moments

FN = "recalibrate"
NOTHING = 2.0**-100  # the start value of means and variances: beside any batch's it is nothing, and yet not 0


FIELDS = ("mean", "var", "count", "weight")
COLLECTIONS = ("batch_stats", "batch_counts")  # of linen: the same norm has a place in each


@dataclasses.dataclass(frozen=True, eq=False)
class Norm:
    """The running statistics of one norm.

    Attributes:
      path: where it stands in the tree; "stats" where it is the tree.
      fields: which of the tree's leaves is its "mean" and "var", and its "count" and "weight" where it has them.
    """

    path: str
    fields: dict[str, int]

    @property
    def mean(self) -> int:
        """The leaf's number."""
        return self.fields["mean"]

    @property
    def var(self) -> int:
        """The leaf's number."""
        return self.fields["var"]

    @property
    def count(self) -> int | None:
        """The leaf's number, of an average that counts."""
        return self.fields.get("count") if "weight" in self.fields else None

    @property
    def weight(self) -> int | None:
        """The leaf's number, of an average that counts."""
        return self.fields.get("weight") if "count" in self.fields else None


def find_norms(tree) -> list[Norm]:
    """The places of a tree that hold a `mean` and a `var`, in the tree's order."""
    places: dict[tuple[str, ...], dict[str, int]] = {}
    for number, path in enumerate(flatten(tree)[0]):
        if path and path[-1] in FIELDS:
            place = tuple(name for name in path[:-1] if name not in COLLECTIONS)
            places.setdefault(place, {})[path[-1]] = number
    found = [(place, fields) for place, fields in places.items() if {"mean", "var"} <= set(fields)]
    return [Norm("/".join(place) or "stats", fields) for place, fields in found]


class StatsTree(NamedTuple):
    """A tree of statistics, taken apart."""

    leaves: list[Any]
    paths: list[tuple[str, ...]]
    definition: Any
    norms: list[Norm]

    @classmethod
    def read(cls, stats) -> "StatsTree":
        """Raises unless there are statistics in it that can be measured."""
        paths, leaves, definition = flatten(stats)
        norms = [norm for norm in find_norms(stats) if np.shape(leaves[norm.mean]) == np.shape(leaves[norm.var])]
        for norm in norms:
            for i in (norm.mean, norm.var):
                _check_leaf("/".join(paths[i]), leaves[i])
            for i in {norm.mean, norm.var, norm.count, norm.weight} - {None}:
                leaves[i] = jnp.asarray(leaves[i])
        if not norms:
            raise ValueError(
                f"{FN}: stats has no norm, which is a mean and a var side by side, of one shape; got {kind_of(stats)}. "
                'Pass BatchStats, linen\'s variables["batch_stats"] or nnx.state(model, nnx.BatchStat).'
            )
        return cls(leaves, paths, definition, norms)

    def below(self, layer: str) -> list[Norm]:
        """The norms at a path."""
        norms = [norm for norm in self.norms if norm.path == layer or norm.path.startswith(f"{layer}/")]
        if not norms:
            known = ", ".join(f'"{norm.path}"' for norm in self.norms)
            raise ValueError(f"{FN}: layers: no norm stands at {layer!r}; there are {known}.")
        return norms

    def whole(self):
        """The tree put together."""
        return jax.tree.unflatten(self.definition, self.leaves)

    def started(self, norms: Sequence[Norm], mean: float):
        """The tree with start values in these norms; every leaf is a copy, which step may donate."""
        leaves = [leaf.copy() if hasattr(leaf, "copy") else leaf for leaf in self.leaves]
        for norm in norms:
            values = {norm.mean: mean, norm.var: NOTHING, norm.count: 0, norm.weight: 0}
            for i, value in values.items():
                if i is not None:
                    leaves[i] = jnp.full_like(leaves[i], value)
        return jax.tree.unflatten(self.definition, leaves)

    def replaced(self, norm: Norm, moments: Moments, updates: int, weight) -> "StatsTree":
        """The tree with what a norm's inputs have; features without an entry stay as they were."""
        leaves, seen = list(self.leaves), np.asarray(moments.count) > 0
        values = {norm.mean: moments.mean, norm.var: moments.var, norm.weight: weight}
        for i, value in values.items():
            if i is not None:
                leaves[i] = jnp.asarray(np.where(seen, value, leaves[i]).astype(leaves[i].dtype))
        if norm.count is not None:
            leaves[norm.count] = jnp.full_like(leaves[norm.count], updates)
        return self._replace(leaves=leaves)


def flatten(tree) -> tuple[list[tuple[str, ...]], list[Any], Any]:
    """Paths as names, without that of an nnx variable's or a linen box's single value; leaves; the structure."""
    pairs, definition = jax.tree_util.tree_flatten_with_path(tree)
    return [tuple(map(str, path_names(keys))) for keys, _ in pairs], [leaf for _, leaf in pairs], definition


def wide(leaf) -> np.ndarray:
    """The leaf on this host, in float64 (complex128)."""
    array = np.asarray(leaf)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _check_leaf(path: str, leaf) -> None:
    if isinstance(leaf, Tracer):
        raise TypeError(f"{FN}: {path} is traced; call it outside jit, grad and vmap: it loops over data.")
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact) or jnp.finfo(dtype).bits < 32:
        came = kind_of(leaf) if dtype is None else dtype
        raise TypeError(
            f"{FN}: {path} is {came}; statistics need float32 or more: cast them, as in x.astype('float32')."
        )
