"""Flax's numbers of axes as names: a layout that names every axis of x, what pools, and what parameters run along.

`axis`, `feature_axes`, `reduction_axes`, `num_groups` and `group_size` become a layout such as "axis0 axis1 axis2". A
module's own `layout` and `axis_names` take their place.
"""

import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from normjax._axes import resolve
from normjax._grammar import ELLIPSIS, Axis, count_word, parse_layout, parse_names, quote


class Axes(NamedTuple):
    """What a module's arguments say about an x of one shape."""

    layout: str
    pooled: tuple[str, ...]  # axes of x
    mapped: tuple[str, ...]  # axes of vmap, pmap or shard_map
    features: tuple[str, ...]  # the axes that parameters and running statistics run along
    shape: tuple[int, ...]  # of x along those

    @property
    def names(self) -> tuple[str, ...]:
        """axis_names: all that pools."""
        return self.pooled + self.mapped

    def local(self) -> "Axes":
        """The same without mapped axes, where that leaves anything to pool."""
        return self._replace(mapped=()) if self.pooled else self


def settled(axes: Any) -> Any:
    """Lists as tuples, however deep, so that a module's settings can be compared and hashed."""
    return tuple(map(settled, axes)) if isinstance(axes, (list, tuple, range)) else axes


def batch_axes(module: Any, shape: tuple[int, ...]) -> Axes:
    """Every axis pools but `axis`."""
    return _axes(module, shape, ("axis", module.axis), lambda named, features: set(range(len(shape))) - set(features))


def layer_axes(module: Any, shape: tuple[int, ...]) -> Axes:
    """`reduction_axes` pool."""
    reduced = ("reduction_axes", module.reduction_axes)
    return _axes(module, shape, ("feature_axes", module.feature_axes), lambda named, features: named.places(*reduced))


def instance_axes(module: Any, shape: tuple[int, ...]) -> Axes:
    """Every axis pools but the first and `feature_axes`."""

    def reduced(named, features):
        if 0 in features:
            raise ValueError(
                f"{named.fn}: feature_axes={module.feature_axes} holds the first axis, which numbers the examples; "
                'write layout="C N ...", axis_names="..." for features that come first.'
            )
        return set(range(1, len(shape))) - set(features)

    return _axes(module, shape, ("feature_axes", module.feature_axes), reduced)


def group_axes(module: Any, shape: tuple[int, ...], num_groups: int | None, group_size: int | None) -> Axes:
    """`reduction_axes` pool, and of the last of them the channels of one group; or what a layout that splits says."""

    def reduced(named, features):
        last = len(shape) - 1
        if module.reduction_axes is None:
            places = (*range(1, last), last)
        else:
            places = named.places("reduction_axes", module.reduction_axes)
        if last not in places:
            raise ValueError(
                f"{named.fn}: reduction_axes={module.reduction_axes} must hold the last axis, whose channels are "
                f"grouped; x has shape {shape}."
            )
        named.split_last(grouping(named.fn, shape[-1], num_groups, group_size)[0])
        return places

    return _axes(module, shape, None, reduced)


def grouping(fn: str, channels: int, num_groups: int | None, group_size: int | None) -> tuple[int, int]:
    """The number of groups and their size; ValueError unless one of both is given and divides the channels."""
    if (num_groups is None) == (group_size is None):
        raise ValueError(
            f"{fn}: num_groups={num_groups}, group_size={group_size}: give one of both, and None for the other "
            "(num_groups is 32 by default)."
        )
    what, given = ("num_groups", num_groups) if group_size is None else ("group_size", group_size)
    by = operator.index(given) if isinstance(given, (int, np.integer)) else 0
    if by <= 0 or channels % by:
        raise ValueError(f"{fn}: {what}={given} does not divide the {channels} channels.")
    return (by, channels // by) if group_size is None else (channels // by, by)


class _Named:
    """The axes of x by name, and what pools by a module's own layout."""

    def __init__(self, fn: str, shape: tuple[int, ...], layout, axis_names, axis_name):
        self.fn, self.shape = fn, shape
        self.mapped = () if axis_name is None else parse_names(fn, axis_name, "axis_name")
        self.pooled = None
        if (layout is None) != (axis_names is None):
            raise ValueError(
                f"{fn}: layout={layout!r}, axis_names={axis_names!r}: give both, or neither; "
                "to synchronise without a layout, write axis_name."
            )
        if layout is None:
            self.axes = [Axis(name) for name in self._fresh(len(shape), set(self.mapped))]
        else:
            self._read(layout, axis_names)

    def _fresh(self, number: int, taken: set[str]) -> list[str]:
        """Names of our own making, for axes that have none."""
        stem = "axis"
        while any(f"{stem}{i}" in taken for i in range(number)):
            stem += "_"
        return [f"{stem}{i}" for i in range(number)]

    def _read(self, layout: str, axis_names) -> None:
        names = parse_names(self.fn, axis_names)
        resolve(self.fn, layout, names, self.shape, only=())
        written = parse_layout(self.fn, layout)
        declared = {name for axis in written for name in axis.names}
        fresh = self._fresh(len(self.shape), declared | set(names) | set(self.mapped))
        self.axes, unnamed = [], []
        for axis in written:
            if axis.name == ELLIPSIS:
                missing = len(self.shape) - len(written) + 1
                unnamed = fresh[len(self.axes) : len(self.axes) + missing]
                self.axes += [Axis(name) for name in unnamed]
            else:
                self.axes.append(Axis(axis.name or fresh[len(self.axes)], axis.factors))
        pooled = [part for name in names for part in (unnamed if name == ELLIPSIS else [name])]
        self.pooled = tuple(name for name in pooled if name in declared or name in unnamed)
        beyond = [name for name in pooled if name not in self.pooled]
        self.mapped = tuple(dict.fromkeys([*beyond, *self.mapped]))

    def places(self, argument: str, given: Any) -> tuple[int, ...]:
        """Axes as positions from the front; an error unless they are in order, in range and each given once."""
        asked = f"{self.fn}: {argument}={given!r}"
        axes: list[Any] = [given]
        if isinstance(given, Iterable):
            axes = given.split() if isinstance(given, str) else list(given)
        names = [axis.name for axis in self.axes]
        places = []
        for axis in axes:
            if isinstance(axis, str) and self.pooled is not None:
                if axis not in names:
                    raise ValueError(f"{asked}: '{axis}' is no axis of x; its axes are {quote(map(str, names))}.")
                places.append(names.index(axis))
                continue
            try:
                place = operator.index(axis)  # type: ignore[arg-type]
            except TypeError:
                raise TypeError(
                    f"{asked}: axes are integers, or names where a layout is given; got {axis!r}."
                ) from None
            if not -len(names) <= place < len(names):
                raise np.exceptions.AxisError(f"{asked}: x has no axis {place}; its shape is {self.shape}.")
            places.append(place % len(names))
        if len(set(places)) < len(places):
            raise ValueError(f"{asked} names an axis of x twice; its shape is {self.shape}.")
        if places != sorted(places):
            raise ValueError(f"{asked} is out of order; write {tuple(sorted(places))}, the order of the axes of x.")
        return tuple(places)

    def grouped(self) -> tuple[int, ...]:
        """The axis of the channels of a group norm: the one that a layout splits, or the last."""
        if self.pooled is None:
            return self.places("channel axis", -1)
        split = [place for place, axis in enumerate(self.axes) if axis.factors]
        if len(split) != 1:
            raise ValueError(
                f'{self.fn}: layout="{" ".join(map(str, self.axes))}" splits {count_word(len(split))} axes; split the '
                'channels, and them alone, into groups, as in layout="N H W C=(G=32 K)", axis_names="H W K".'
            )
        return tuple(split)

    def split_last(self, groups: int) -> None:
        """Splits the last axis into groups of channels."""
        group, channel = (f"{name}_of_{self.axes[-1].name}" for name in ("group", "channel"))
        self.axes[-1] = Axis(self.axes[-1].name, ((group, groups), (channel, None)))

    def pooled_name(self, place: int) -> str:
        """The name that pools of an axis of our own: of a split one its second factor."""
        axis = self.axes[place]
        return axis.factors[1][0] if axis.factors else str(axis.name)


def _axes(module: Any, shape: tuple[int, ...], features: tuple[str, Any] | None, reduced) -> Axes:
    fn = type(module).__name__
    named = _Named(fn, tuple(shape), module.layout, module.axis_names, module.axis_name)
    where = named.places(*features) if features else named.grouped()
    pooled = named.pooled
    if pooled is None:
        pooled = tuple(named.pooled_name(place) for place in sorted(reduced(named, where)))
    layout = " ".join(map(str, named.axes))
    names = tuple(str(named.axes[place].name) for place in where)
    return Axes(layout, pooled, named.mapped, names, tuple(shape[place] for place in where))
