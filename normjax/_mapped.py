"""Statistics across mapped axes: names of `vmap`, `pmap` or `shard_map` instead of axes of the array.

Every device brings (K, e, v) and the count n of its own entries (see _derivatives.py). Counts are summed, never
averaged, so masked and unequal shards are right and an empty one is harmless. With w = n/Σn and μ = K + e:

    μ = Σ w μ_d,    v = Σ w (v_d + (μ_d − μ)²)        dμ = Σ w dμ_d,    dv = Σ w (dv_d + 2 (μ_d − μ) dμ_d)

The forward is one psum. Each device writes μ_d and n into a slot of its own; what is left, Σ n v_d, the psum adds up.
One float does not hold a mean of 10⁴ to 10⁻⁶, so μ_d goes as its rounded value and what rounding left, in 20 bits, of
which six fit into five floats; n goes where there are masks. For C groups on D devices that is D (2C − ⌊C/6⌋) + C
numbers, and D more where a mask has one n for all of them, DC where each has its own. The tangent is one psum of 2C
numbers, and its transpose, the backward's one collective, too; both are plain JAX between two local rules, so the
gradient may be taken inside or outside the mapping.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from normjax._axes import Spec, unbound_error
from normjax._derivatives import STATS_NAME, Statistics, abs_square, at_least_zero
from normjax._grammar import quote
from normjax._sharding import sharded_axes

# Up to here one psum carries every device's statistics; beyond, its payload grows with the axis, and a pmax and a psum
# of sums move less (a vmap over a whole batch is such an axis: its slots would take N² memory). Beyond the second
# number, one further psum keeps their digits.
MOST_SLOTS = 32
MOST_SHARDS = 1024
HALF = 2**19  # of the integers that stand for what rounding left out of a mean
EXAMPLE = "example"  # the mapped axis that per_example_grads binds
ALONE = "normjax.per_example"  # and one beside it, of size 1, that tells it from an "example" of the caller's own


def is_bound(name: str) -> bool:
    """Whether a mapped axis of this name is in scope."""
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def axis_size(spec: Spec, name: str) -> int:
    """The size of a mapped axis; raises ValueError where the name is not bound."""
    try:
        return lax.axis_size(name)
    except NameError:
        raise unbound_error(spec, name) from None


def fewest_devices(spec: Spec, groups: Sequence[Sequence[int]] | None) -> int:
    """Over how many devices a mean runs: in the smallest group where `axis_index_groups` differ in size."""
    if groups is not None:
        check_groups(spec, groups)
        return min(len(group) for group in groups if len(group))
    return math.prod(axis_size(spec, name) for name in spec.mapped)


def check_groups(spec: Spec, groups: Sequence[Sequence[int]]) -> None:
    """Raises ValueError unless the groups (no iterators) hold every index of the one mapped axis exactly once."""
    if len(spec.mapped) != 1:
        raise ValueError(
            f"{spec.fn}: axis_index_groups subdivides exactly one mapped axis, but axis_names="
            f'"{" ".join(spec.axis_names)}" has {len(spec.mapped)} with layout "{spec.layout}".'
        )
    size = axis_size(spec, spec.mapped[0])
    try:
        once = any(iter(part) is part for part in (groups, *groups))
        found = (-1 if isinstance(i, bool) else operator.index(i) for group in groups for i in group)
        indices = None if once else sorted(found)
    except TypeError:
        indices = None
    if indices != list(range(size)):
        halves = [list(range(size // 2)), list(range(size // 2, size))]
        raise ValueError(
            f"{spec.fn}: axis_index_groups={groups} must be lists of indices that hold each index of mapped axis "
            f"'{spec.mapped[0]}' (size {size}) exactly once, such as {halves}."
        )


def varying(x) -> frozenset:
    """The axes of a checked shard_map over which x varies; empty everywhere else."""
    kind = jax.typeof(x)
    typed = getattr(kind, "manual_axis_type", None)
    return typed.varying if typed is not None else getattr(kind, "vma", frozenset())


def _cast(x, axes):
    missing = tuple(sorted(axes - varying(x), key=str))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_alike(tree: Any, also: frozenset = frozenset()) -> Any:
    """Marks all arrays of a tree as varying over the axes that any varies over, and `also`: a rule may combine them."""
    leaves = jax.tree.leaves(tree)
    axes = also.union(*(varying(leaf) for leaf in leaves))
    return jax.tree.map(lambda leaf: _cast(leaf, axes), tree) if axes else tree


def psum(fn: str, tree, names: tuple[str, ...]):
    """`lax.psum` over vmap names, unchecked and checked manual axes together, which JAX refuses to mix in one call."""
    return _over_mixed(fn, lax.psum, tree, names)


def pmax(fn: str, tree, names: tuple[str, ...]):
    """`lax.pmax` over the same mixture of names."""
    return _over_mixed(fn, lax.pmax, tree, names)


def _over_mixed(fn: str, collective, tree, names: tuple[str, ...]):
    checked = frozenset(name for name in names if name in varying(lax.axis_index(name)))
    if rest := tuple(name for name in names if name not in checked):
        try:
            tree = collective(tree, rest)
        except AssertionError as error:
            raise ValueError(
                f"{fn}: {quote(rest)} is an axis of vmap inside shard_map with check_vma=True, where JAX has no "
                "collectives over it. Use check_vma=False, or make it an axis of the array and name it in layout."
            ) from error
    if checked:
        tree = collective(jax.tree.map(lambda leaf: _cast(leaf, checked), tree), tuple(sorted(checked)))
    return tree


class Over(NamedTuple):
    """What a mean runs over besides axes of the array: all static."""

    fn: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]  # of devices; without axis_index_groups one of all
    group_size: Any  # entries that share a mean on one device, before masks; may be symbolic
    masked: bool  # whether devices may count otherwise

    @property
    def devices(self) -> int:
        """How many devices there are along all names."""
        return math.prod(self.sizes)

    def most(self, stats: Statistics):
        """The largest count that any group can have: counts are summed as shares of it, which cannot overflow."""
        size = jnp.full([1] * stats.var.ndim, self.group_size, stats.var.dtype)
        return jnp.maximum(size * self.devices, 1)

    def place(self):
        """This device's number among all, the last name's index counting fastest."""
        index = jnp.zeros((), jnp.int32)
        for name, size in zip(self.names, self.sizes, strict=True):
            index = index * size + lax.axis_index(name).astype(jnp.int32)
        return index

    def own_group(self):
        """Whether each device is of this one's group, and the number of that group; None and 0 for one group."""
        if len(self.groups) == 1:
            return None, 0
        numbers = np.empty(self.devices, np.int32)
        for number, group in enumerate(self.groups):
            numbers[list(group)] = number
        own = jnp.asarray(numbers)[self.place()]
        return numbers == own, own


def pool(spec: Spec, stats: Statistics, group_size: int, groups: Sequence[Sequence[int]] | None) -> Statistics:
    """The statistics over all devices of the mapped axes, each by its own count; `groups` passed `check_groups`."""
    if EXAMPLE in spec.mapped and is_bound(ALONE):
        raise ValueError(
            f"{spec.fn}: axis_names=\"{' '.join(spec.axis_names)}\" pools 'example', the axis of per_example_grads and "
            "clipped_grad, whose rows would be gradients of all losses in a chunk by one example's copy of the "
            "parameters. For the gradient of each loss in the whole batch call normjax.per_example.coupled_grads."
        )
    sizes = tuple(axis_size(spec, name) for name in spec.mapped)
    every = [range(math.prod(sizes))] if groups is None else groups
    static = tuple(tuple(operator.index(i) for i in group) for group in every if len(group))
    count = stats.count
    over = Over(spec.fn, spec.mapped, sizes, static, group_size, count is not None)
    if count is None:
        count = jnp.full([1] * stats.var.ndim, group_size, stats.var.dtype)
    return _pooled(over, vary_alike(stats._replace(count=count)))


def _pool(over: Over, stats: Statistics) -> Statistics:
    if stats.shift is None:
        pooled = _pool_squares(over, stats)
    elif over.devices > MOST_SLOTS and len(over.groups) == 1:
        pooled = _pool_by_sums(over, stats)
    else:
        pooled = _pool_by_slots(over, stats)
    return jax.tree.map(lambda array: checkpoint_name(array, STATS_NAME), pooled)


_pooled = jax.custom_jvp(_pool, nondiff_argnums=(0,))


@_pooled.defjvp
def _pooled_jvp(over: Over, primals, tangents):
    (stats,), (d_stats,) = primals, tangents
    out = _pool(over, stats)
    weight = stats.count / jnp.maximum(out.count, 1)
    d_count = jnp.zeros_like(out.count)
    if stats.shift is None:
        _, (d_var,) = _exchange(over, (), (weight * d_stats.var,))
        return out, Statistics(None, None, d_var, d_count)
    apart = jnp.where(stats.count > 0, (stats.shift - out.shift) + (stats.offset - out.offset), 0)
    d_var = d_stats.var + 2 * (jnp.conj(apart) * d_stats.offset).real
    _, (d_offset, d_var) = _exchange(over, (), (weight * d_stats.offset, weight * d_var))
    return out, Statistics(jnp.zeros_like(out.shift), d_offset, d_var, d_count)


def _exchange(over: Over, each: Sequence, added: Sequence):
    """By one psum: some arrays of every device, stacked on a new leading axis, and the group's sums of others.

    What is stacked travels in a table that is zero but for the own row; sums do so too where there are several groups.
    """
    dtype = functools.reduce(np.promote_types, [array.dtype for array in (*each, *added)])
    _, number = over.own_group()
    slots = _in_row(over.devices, over.place(), _flat(each, dtype))
    sums = _in_row(len(over.groups), number, _flat(added, dtype))
    whole = psum(over.fn, jnp.concatenate([jnp.ravel(slots), jnp.ravel(sums)]), over.names)
    slots, sums = jnp.reshape(whole[: slots.size], slots.shape), jnp.reshape(whole[slots.size :], sums.shape)
    if len(over.groups) > 1:
        sums = jnp.sum(jnp.where(jnp.arange(len(sums))[:, None] == number, sums, 0), 0, keepdims=True)
    return _unflat(slots, each), [array[0] for array in _unflat(sums, added)]


def _flat(arrays: Sequence, dtype):
    """One row of all."""
    return jnp.concatenate([jnp.zeros(0, dtype), *(jnp.ravel(_gathered(array)).astype(dtype) for array in arrays)])


def _gathered(array):
    """The array; what an Explicit mesh shards over a further axis is gathered, since only like parts join."""
    return jax.sharding.reshard(array, P()) if sharded_axes(array) else array


def _in_row(rows: int, row, flat):
    return flat[None] if rows == 1 else jnp.where(jnp.arange(rows)[:, None] == row, flat[None], 0)


def _unflat(table, arrays: Sequence) -> list:
    parts = jnp.split(table, np.cumsum([0, *(array.size for array in arrays)])[1:-1].tolist(), axis=1) if arrays else []
    return [
        (part if jnp.iscomplexobj(array) else part.real).astype(array.dtype).reshape(-1, *array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


def _pool_squares(over: Over, stats: Statistics) -> Statistics:
    """Mean squares, which have no mean to be exact about."""
    most = over.most(stats)
    _, (square, count) = _exchange(over, (), (stats.count / most * stats.var, stats.count))
    return Statistics(None, None, square * (most / jnp.maximum(count, 1)), count)


def _pool_by_slots(over: Over, stats: Statistics) -> Statistics:
    most = over.most(stats)
    within = stats.count / most * stats.var
    if jnp.iscomplexobj(stats.shift):
        parts, joined = lambda z: jnp.stack([z.real, z.imag]), lambda parts: lax.complex(parts[:, 0], parts[:, 1])
    else:
        parts, joined = lambda z: z[None], lambda parts: parts[:, 0]
    mean, left = _rounded(parts(stats.shift), parts(stats.offset))
    counts = [stats.count] if over.masked else []
    (means, left, *counts), (within,) = _exchange(over, (mean, _six_in_five(left), *counts), (within,))
    count = counts[0] if counts else jnp.full([over.devices] + [1] * stats.var.ndim, over.group_size, stats.var.dtype)
    left = jnp.reshape(_five_to_six(left, mean.size), means.shape)
    mine, _ = over.own_group()
    if mine is not None:
        count = jnp.where(jnp.reshape(mine, [-1] + [1] * stats.var.ndim), count, 0)
    shift, offset = joined(means), joined((left - HALF) * _unit(means))
    pooled = merge_stacked(Statistics(shift, offset, jnp.zeros_like(shift.real), count))
    return pooled._replace(var=within * (most / jnp.maximum(pooled.count, 1)) + pooled.var)


def _rounded(shift, offset):
    """The mean K + e as one float, and what it lacks as an integer of 20 bits: `HALF` and so many of its `_unit`."""
    # Compilers make one instruction of a product and a sum, here e's last product and K + e, where nothing else wants
    # the product; elsewhere they round it first, and there were two means. A selection between keeps them apart.
    most = float(jnp.finfo(shift.dtype).max)
    shift, offset = (jnp.where(jnp.abs(part) <= most, part, part + part) for part in (shift, offset))
    mean = shift + offset
    back = mean - shift  # with it the remainder is exact, whichever of the two is larger (Knuth)
    lacks = ((shift - (mean - back)) + (offset - back)) / _unit(mean)
    return mean, jnp.clip(jnp.round(jnp.where(jnp.isfinite(lacks), lacks, 0)), -HALF, HALF - 1) + HALF


def _unit(mean):
    """2⁻¹⁹ of the largest rounding error; a mean that is nothing beside any deviation it can have needs none."""
    info = jnp.finfo(mean.dtype)
    least = 8 * float(info.tiny) ** 0.5
    return jnp.maximum(jnp.abs(mean), least) * (float(info.eps) / (2 * HALF))


def _six_in_five(left):
    """Integers of 20 bits in a row of floats, which hold 24 bits exactly: every sixth rides on five others."""
    flat = jnp.ravel(_gathered(left)).astype(jnp.int32)
    sixes = flat.size // 6 * 6
    *bearers, rider = jnp.reshape(flat[:sixes], (6, -1))
    loaded = [bearer + ((rider >> 4 * i) % 16 << 20) for i, bearer in enumerate(bearers)]
    return jnp.concatenate([*loaded, flat[sixes:]]).astype(left.dtype)


def _five_to_six(rows, size: int):
    """The integers of each row of `_six_in_five`, `size` of them."""
    bearers, rest = jnp.split(rows.astype(jnp.int32), [size // 6 * 5], axis=1)
    loaded = jnp.reshape(bearers, (len(rows), 5, -1))
    rider = sum((loaded[:, i] >> 20) << 4 * i for i in range(5))
    return jnp.concatenate([jnp.reshape(loaded % 2**20, bearers.shape), rider, rest], 1).astype(rows.dtype)


def _pool_by_sums(over: Over, stats: Statistics) -> Statistics:
    """As by slots, by a pmax that finds the ends of all shifts, and a psum of sums about each of both and the middle.

    Of the three the nearest to the mean is taken; all are exact where all shards agree, so constant groups stay exact.
    Where shards of D lie apart on either side of the others, the variance loses up to log₂(D/32) bits; beyond
    `MOST_SHARDS`, which are lanes of vmap, a second psum is of sums about the mean that the first one found.
    """
    used, most = stats.count > 0, over.most(stats)
    share = stats.count / most

    def about(shifts) -> Statistics:
        d = jnp.where(used, (stats.shift - shifts) + stats.offset, 0)
        _, sums = _exchange(over, (), (share * d, share * (stats.var + abs_square(d)), stats.count))
        offsets, squares = (part * (most / jnp.maximum(sums[2], 1)) for part in sums[:2])
        nearest = jnp.argmin(abs_square(lax.stop_gradient(offsets)), 0, keepdims=True)
        shift, offset, square = (jnp.take_along_axis(part, nearest, 0)[0] for part in (shifts, offsets, squares))
        return Statistics(shift, offset, at_least_zero(square - abs_square(offset)), sums[2])

    pooled = about(jnp.stack(_ends(lax.stop_gradient(stats.shift), used, lambda ends: pmax(over.fn, ends, over.names))))
    return pooled if over.devices <= MOST_SHARDS else about(lax.stop_gradient(pooled.mean)[None])


def _ends(shifts, used, largest) -> tuple:
    """The smallest used shift, halfway, and the largest: the same number thrice where they are equal, 0 without any."""
    if jnp.iscomplexobj(shifts):
        parts = zip(_ends(shifts.real, used, largest), _ends(shifts.imag, used, largest), strict=True)
        return tuple(lax.complex(*part) for part in parts)
    ends = largest(jnp.where(used, jnp.stack([shifts, -shifts]), -jnp.inf))
    high, low = ends[0], -ends[1]
    middle = jnp.where(high == low, high, 0.5 * high + 0.5 * low)
    return tuple(jnp.where(high == -jnp.inf, 0, end) for end in (low, middle, high))


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
    _, anchor, _ = _ends(shifts, used, lambda ends: jnp.max(ends, 1))
    shift = anchor + jnp.sum(weight * jnp.where(used, shifts - anchor[None], 0), 0)
    d = jnp.where(used, (stacked.shift - shift[None]) + stacked.offset, 0)
    offset = jnp.sum(weight * d, 0)
    return Statistics(shift, offset, jnp.sum(weight * (var + abs_square(d - offset[None])), 0), total)
