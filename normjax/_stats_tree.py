"""Running statistics in a tree of any framework: which leaves are a norm's, and the tree with others in their place."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from normjax._inputs import kind_of
from normjax._moments import Moments

FN = "recalibrate"
NOTHING = 2.0**-100  # the start value of means and variances: beside any batch's it is nothing, and yet not 0


@dataclasses.dataclass(frozen=True)
class Norm:
    """Where a norm's statistics stand among the leaves; count and weight only where its average has them."""

    path: str
    mean: int
    var: int
    count: int | None
    weight: int | None


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
        place = {path: i for i, path in enumerate(paths)}
        norms = []
        for path, mean in place.items():
            if "mean" not in path:
                continue
            at = len(path) - 1 - path[::-1].index("mean")
            var = place.get(_renamed(path, at, "var"))
            if var is None or np.shape(leaves[var]) != np.shape(leaves[mean]):
                continue
            count, weight = (_counter(place, path, at, name) for name in ("count", "weight"))
            if count is None or weight is None:
                count = weight = None
            norms.append(Norm("/".join(path[:at]) or "stats", mean, var, count, weight))
            for i in (mean, var):
                _check_leaf("/".join(paths[i]), leaves[i])
            for i in {mean, var, count, weight} - {None}:
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
    """Paths as names, without those of what holds a single value (nnx's variables, linen's boxes); leaves; the rest."""
    pairs, definition = jax.tree_util.tree_flatten_with_path(tree)
    paths = [tuple(map(_name, path)) for path, _ in pairs]
    return [tuple(name for name in path if name != "value") for path in paths], [leaf for _, leaf in pairs], definition


def _name(key) -> str:
    return str(next(getattr(key, field) for field in ("key", "name", "idx") if hasattr(key, field)))


def _renamed(path: tuple[str, ...], at: int, name: str) -> tuple[str, ...]:
    return (*path[:at], name, *path[at + 1 :])


def _counter(place: dict[tuple[str, ...], int], path: tuple[str, ...], at: int, name: str) -> int | None:
    """Beside the mean, or where normjax.linen keeps it."""
    beside = _renamed(path, at, name)
    apart = tuple("batch_counts" if part == "batch_stats" else part for part in beside)
    return place.get(beside, place.get(apart))


def _check_leaf(path: str, leaf) -> None:
    if isinstance(leaf, Tracer):
        raise TypeError(f"{FN}: {path} is traced; call it outside jit, grad and vmap: it loops over data.")
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact) or jnp.finfo(dtype).bits < 32:
        came = kind_of(leaf) if dtype is None else dtype
        raise TypeError(
            f"{FN}: {path} is {came}; statistics need float32 or more: cast them, as in x.astype('float32')."
        )
