"""Statistics across mapped axes: names of `vmap`, `pmap` or `shard_map` instead of axes of the array.

Every device brings (K, e, v, count) of its own entries. Counts are summed, never averaged, so masked and unequal shards
are right and an empty one is harmless. The collectives are plain JAX between two local rules (see _derivatives.py):
their transposes are the backward's collectives, and the gradient may be taken inside or outside the mapping.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from normjax._axes import Spec, unbound_error
from normjax._derivatives import Statistics, abs_square, at_least_zero

# Up to here one psum carries every device's statistics; beyond, its payload grows with the axis, and a pmax and a psum
# of sums move less (a vmap over a whole batch is such an axis: its slots would take N² memory).
MOST_SLOTS = 32


def axis_size(spec: Spec, name: str) -> int:
    """The size of a mapped axis; raises ValueError where the name is not bound."""
    try:
        return lax.axis_size(name)
    except NameError:
        raise unbound_error(spec, name) from None


def total_size(spec: Spec, groups: Sequence[Sequence[int]] | None) -> int | None:
    """Over how many devices a mean runs; None where `axis_index_groups` differ in size."""
    if groups is not None:
        check_groups(spec, groups)
        sizes = {len(group) for group in groups}
        return sizes.pop() if len(sizes) == 1 else None
    return math.prod(axis_size(spec, name) for name in spec.mapped)


def check_groups(spec: Spec, groups: Sequence[Sequence[int]]) -> None:
    """Raises ValueError unless the groups hold every index of the one mapped axis exactly once."""
    if len(spec.mapped) != 1:
        raise ValueError(
            f"{spec.fn}: axis_index_groups subdivides exactly one mapped axis, but axis_names="
            f'"{" ".join(spec.axis_names)}" has {len(spec.mapped)} with layout "{spec.layout}".'
        )
    size = axis_size(spec, spec.mapped[0])
    try:
        indices = sorted(operator.index(index) for group in groups for index in group)
    except TypeError:
        indices = None
    if indices != list(range(size)):
        raise ValueError(
            f"{spec.fn}: axis_index_groups={groups} must be lists of indices that hold each index of mapped axis "
            f"'{spec.mapped[0]}' (size {size}) exactly once."
        )


def varying(x) -> frozenset:
    """The axes of a checked shard_map over which x varies; empty everywhere else."""
    kind = jax.typeof(x)
    typed = getattr(kind, "manual_axis_type", None)
    return typed.varying if typed is not None else getattr(kind, "vma", frozenset())


def _cast(x, axes):
    missing = tuple(sorted(axes - varying(x), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(tree: Any) -> Any:
    """Marks every array of a tree as varying over the axes that any of them varies over, so a rule may combine them."""
    leaves = jax.tree.leaves(tree)
    axes = frozenset().union(*(varying(leaf) for leaf in leaves))
    return jax.tree.map(lambda leaf: _cast(leaf, axes), tree) if axes else tree


def psum(tree, names: tuple[str, ...]):
    """`lax.psum` over vmap names, unchecked and checked manual axes together, which JAX refuses to mix in one call."""
    return _over_mixed(lax.psum, tree, names)


def pmax(tree, names: tuple[str, ...]):
    """`lax.pmax` over the same mixture of names."""
    return _over_mixed(lax.pmax, tree, names)


def _over_mixed(collective, tree, names: tuple[str, ...]):
    checked = frozenset(name for name in names if name in varying(lax.axis_index(name)))
    if rest := tuple(name for name in names if name not in checked):
        tree = collective(tree, rest)
    if checked:
        tree = collective(jax.tree.map(lambda leaf: _cast(leaf, checked), tree), tuple(sorted(checked)))
    return tree


def pool(spec: Spec, stats: Statistics, group_size: int, groups: Sequence[Sequence[int]] | None) -> Statistics:
    """The statistics over all devices of the mapped axes, each by its own count; `groups` passed `check_groups`."""
    sizes = [axis_size(spec, name) for name in spec.mapped]
    count = stats.count
    if count is None:
        count = jnp.full([1] * stats.var.ndim, group_size, stats.var.dtype)
    stats = vary_alike(stats._replace(count=count))
    slots = math.prod(sizes)
    if slots > MOST_SLOTS and groups is None:
        return _pool_by_sums(stats, spec.mapped)
    index = jnp.zeros((), jnp.int32)
    for name, size in zip(spec.mapped, sizes, strict=True):
        index = index * size + lax.axis_index(name).astype(jnp.int32)
    stacked = _gather(stats, spec.mapped, slots, index)
    if groups is not None:
        of = np.empty(slots, np.int32)
        for number, group in enumerate(groups):
            of[list(group)] = number
        mine = jnp.asarray(of)[index] == jnp.asarray(of)
        mine = jnp.reshape(mine, [slots] + [1] * stats.var.ndim)
        stacked = stacked._replace(count=jnp.where(mine, stacked.count, 0))
    return merge_stacked(stacked)


def _gather(stats: Statistics, names: tuple[str, ...], slots: int, index) -> Statistics:
    """Every device's statistics stacked on a new leading axis, by one psum of arrays that are zero but in one slot."""
    arrays, structure = jax.tree.flatten(stats)
    dtype = functools.reduce(np.promote_types, [array.dtype for array in arrays])
    flat = jnp.concatenate([jnp.ravel(array).astype(dtype) for array in arrays])
    own = jnp.arange(slots, dtype=jnp.int32)[:, None] == index
    table = psum(jnp.where(own, flat[None], 0), names)
    ends = np.cumsum([array.size for array in arrays])[:-1].tolist()
    parts = jnp.split(table, ends, axis=1)
    return jax.tree.unflatten(
        structure,
        [
            (part if jnp.iscomplexobj(array) else part.real).astype(array.dtype).reshape(slots, *array.shape)
            for part, array in zip(parts, arrays, strict=True)
        ],
    )


def _pool_by_sums(stats: Statistics, names: tuple[str, ...]) -> Statistics:
    """As `merge_stacked`, by a pmax that finds the middle of all shifts, and a psum of sums about it.

    The middle is exact where all shards agree, so constant groups stay exact; where one shard of D lies apart, the
    variance loses up to log₂(D/4) bits.
    """
    used = stats.count > 0
    if stats.shift is None:
        count, square = psum((stats.count, stats.count * stats.var), names)
        return Statistics(None, None, square / jnp.maximum(count, 1), count)
    shift = _middle(lax.stop_gradient(stats.shift), used, lambda ends: pmax(ends, names))
    d = jnp.where(used, (stats.shift - shift) + stats.offset, 0)
    count, offset, square = psum((stats.count, stats.count * d, stats.count * (stats.var + abs_square(d))), names)
    m = jnp.maximum(count, 1)
    offset, square = offset / m, square / m
    return Statistics(shift, offset, at_least_zero(square - abs_square(offset)), count)


def _middle(shifts, used, largest):
    """Halfway between the smallest and the largest used shift: that very value where they are equal, 0 without any."""
    if jnp.iscomplexobj(shifts):
        return lax.complex(_middle(shifts.real, used, largest), _middle(shifts.imag, used, largest))
    ends = largest(jnp.where(used, jnp.stack([shifts, -shifts]), -jnp.inf))
    high, low = ends[0], -ends[1]
    middle = jnp.where(high == low, high, 0.5 * high + 0.5 * low)
    return jnp.where(high == -jnp.inf, 0, middle)


def merge_stacked(stacked: Statistics) -> Statistics:
    """Pools statistics stacked on a leading axis, exactly (Chan, Golub, LeVeque 1979), weighted by their counts."""
    total = jnp.sum(stacked.count, 0)
    m = jnp.maximum(total, 1).astype(stacked.var.dtype)
    used = stacked.count > 0
    weight = stacked.count.astype(stacked.var.dtype) / m[None]
    var = jnp.where(used, stacked.var, 0)
    if stacked.shift is None:
        return Statistics(None, None, jnp.sum(weight * var, 0), total)
    shifts = lax.stop_gradient(jnp.where(used, stacked.shift, 0))
    anchor = _middle(shifts, used, lambda ends: jnp.max(ends, 1))
    shift = anchor + jnp.sum(weight * jnp.where(used, shifts - anchor[None], 0), 0)
    d = jnp.where(used, (stacked.shift - shift[None]) + stacked.offset, 0)
    offset = jnp.sum(weight * d, 0)
    return Statistics(shift, offset, jnp.sum(weight * (var + abs_square(d - offset[None])), 0), total)
