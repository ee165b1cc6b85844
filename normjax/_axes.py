"""Layout and axis_names resolved for one shape (`Spec`), and every error about axes; the grammar is _grammar.py.

A layout names every axis of an array in order, `"N H W C"`. A split axis, `"C=(G=32 K)"`, is one array axis made of
named factors; arithmetic runs on the *expanded* shape, in which each factor is an axis of its own. Statistics keep that
rank, with size 1 where axes were reduced, until they leave the library (`Spec.collapse`).
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import get_abstract_mesh

from normjax._grammar import (
    ELLIPSIS,
    Axis,
    axes_phrase,
    count_word,
    in_another_form,
    parse_layout,
    parse_names,
    quote,
)


@dataclasses.dataclass(frozen=True)
class Spec:
    """A layout and its axis_names resolved for one shape. Hashable, so it may be a static argument."""

    fn: str
    layout: str
    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    expanded: tuple[int, ...]
    names: tuple[str | None, ...]  # of the expanded axes; None: unnamed, or a split axis that was left whole
    ranges: tuple[tuple[Axis, int, int], ...]  # each array axis and where its expanded axes start and stop
    reduced: tuple[int, ...]  # expanded axes that axis_names pools
    mapped: tuple[str, ...]  # names that the layout does not have
    of: str = "x"  # what errors call the array

    @property
    def group_size(self) -> int:
        """How many entries of the array share a mean, before masks and mapped axes."""
        return math.prod(self.expanded[i] for i in self.reduced)

    @property
    def described(self) -> str:
        """For errors: `layout "N C H W", shape (8, 64, 7, 7)`."""
        return f'layout "{self.layout}", shape {self.shape}'

    def positions(self, name: str) -> tuple[int, ...]:
        """The expanded axes that a name stands for; () for a name that is not in the layout."""
        if name == ELLIPSIS:
            return tuple(i for axis, start, stop in self.ranges if axis.name == ELLIPSIS for i in range(start, stop))
        for axis, start, stop in self.ranges:
            if axis.name == name:
                return tuple(range(start, stop))
            for i in range(start, stop):
                if self.names[i] == name and axis.name != ELLIPSIS:
                    return (i,)
        return ()

    def is_reduced(self, name: str) -> bool:
        """Whether axis_names pools the axis, or any factor of it."""
        return any(i in self.reduced for i in self.positions(name))

    def is_wholly_reduced(self, name: str) -> bool:
        """Whether axis_names pools the axis with all its factors."""
        return all(i in self.reduced for i in self.positions(name))

    def expand(self, x):
        """An array of x's shape, with every split axis spread over its factors."""
        return x if self.expanded == self.shape else self._reshape(x, self.expanded, "x")

    def expand_mask(self, where):
        """A mask (each size 1 or x's), with every split axis spread over its factors."""
        sizes = []
        for size, (_, start, stop) in zip(where.shape, self._per_array_axis(), strict=True):
            sizes += [1] * (stop - start) if size == 1 else self.expanded[start:stop]
        return self._reshape(where, sizes, "where")

    def _reshape(self, array, sizes, what: str):
        try:
            return jnp.reshape(array, sizes)
        except Exception as error:
            if type(error).__name__ != "ShardingTypeError":  # JAX does not export its type
                raise
            sharding = jax.typeof(array).sharding
            axis, over = next(
                (axis, over if isinstance(over, tuple) else (over,))
                for (axis, start, stop), over in zip(self._per_array_axis(), sharding.spec, strict=True)
                if stop - start > 1 and over is not None
            )
            number = math.prod(sharding.mesh.shape[name] for name in over)
            raise ValueError(
                f"{self.fn}: layout=\"{self.layout}\": JAX does not split '{axis}' where an Explicit mesh shards that "
                f"axis of {what} over {quote(over)} ({number} devices). Make its first factor a multiple of {number}, "
                "take an Auto mesh, or jax.sharding.reshard first."
            ) from error

    def _per_array_axis(self):
        for axis, start, stop in self.ranges:
            if axis.name == ELLIPSIS:
                yield from ((axis, i, i + 1) for i in range(start, stop))
            else:
                yield axis, start, stop

    def align(self, array, names: tuple[str, ...], what: str, cure: str = ""):
        """An array that runs along `names`, with the expanded rank: broadcastable against the expanded x.

        Raises ValueError where a name is not in the layout or a size does not match; `what` says whose array it is.
        """
        for name in names:
            if not self._declares(name):
                raise ValueError(
                    f"{self.fn}: {what} runs along '{name}', which is not in layout \"{self.layout}\"."
                    f"{in_another_form(name, self._known())}"
                )
        order = [i for name in names for i in self.positions(name)]
        if twice := [name for name in dict.fromkeys(names) if any(order.count(i) > 1 for i in self.positions(name))]:
            raise ValueError(f"{self.fn}: {what} runs twice along {quote(twice)} of {self.described}.")
        wanted = [(name, size) for name in names for size in self._sizes(name)]
        if array.ndim != len(wanted):
            if names:
                named = f"its names {quote(names)} say {axes_phrase(len(wanted))}"
            else:
                likely = " ".join(self._guess(array.shape))
                named = f'it names no axis: a scalar; pass names, as in names="{likely}"'
            raise ValueError(f"{self.fn}: {what} has shape {array.shape}, but {named}.{cure}")
        for given, (name, size) in zip(array.shape, wanted, strict=True):
            if given != size:
                raise ValueError(
                    f"{self.fn}: {what} has shape {array.shape}, but axis '{name}' of {self.of} ({self.described}) "
                    f"has size {size}.{cure}"
                )
        array = jnp.reshape(array, [self.expanded[i] for i in order])
        array = jnp.transpose(array, sorted(range(len(order)), key=order.__getitem__))
        return jnp.reshape(array, [size if i in order else 1 for i, size in enumerate(self.expanded)])

    def _sizes(self, name: str) -> list[int]:
        sizes = [self.expanded[i] for i in self.positions(name)]
        return sizes if name == ELLIPSIS else [math.prod(sizes)]

    def _guess(self, shape: tuple[int, ...]) -> tuple[str, ...]:
        """The last axes of x, in order, that have these sizes; C where there are none."""
        axes = [(axis.name, math.prod(self.expanded[start:stop])) for axis, start, stop in self.ranges if axis.name]
        found: list[str] = []
        for wanted in reversed(shape):
            while axes:
                name, size = axes.pop()
                if size == wanted and name != ELLIPSIS:
                    found.insert(0, str(name))
                    break
        return tuple(found) if len(found) == len(shape) else ("C",)

    def _declares(self, name: str) -> bool:
        return name in self._known()

    def _known(self) -> list[str]:
        return [name for axis, _, _ in self.ranges for name in axis.names]

    def kept_axes(self, apart: tuple[str, ...] = ()) -> list[tuple[str, tuple[int, ...]]]:
        """The kept axes in order, each a name and its expanded axes.

        A split axis kept whole counts as one, unless `apart` names a factor of it.
        """
        kept: list[tuple[str, tuple[int, ...]]] = []
        for axis, start, stop in self.ranges:
            places = tuple(i for i in range(start, stop) if i not in self.reduced)
            factors = {name for name, _ in axis.factors}
            if not places:
                continue
            if not axis.factors or (axis.name and len(places) == stop - start and factors.isdisjoint(apart)):
                kept.append((axis.name or str(axis), places))
            else:
                kept += [(str(self.names[i]), (i,)) for i in places]
        return kept

    def collapse(self, statistic, apart: tuple[str, ...] = ()):
        """A statistic of the expanded rank as an array over the kept axes, in the order of `kept_axes`."""
        shape = []
        for name, places in self.kept_axes(apart):
            sizes = [self.expanded[i] for i in places]
            shape += sizes if name == ELLIPSIS else [math.prod(sizes)]
        full = [1 if i in self.reduced else size for i, size in enumerate(self.expanded)]
        return jnp.reshape(jnp.broadcast_to(statistic, full), shape)


def resolve(fn: str, layout: Any, axis_names: Any, shape: tuple[int, ...], only: Iterable[str] | None = None) -> Spec:
    """The Spec of a call.

    Args:
      fn: the public function, for errors.
      layout: names of the axes of x.
      axis_names: names that pool into one mean.
      shape: x's shape.
      only: where given, an axis is split only if one of these names is a factor of it (evaluation pools nothing, so
        a batch that a ghost size does not divide is no error there).
    """
    if not isinstance(layout, str):
        raise TypeError(f'{fn}: layout must be a string that names every axis, such as "N H W C"; got {layout!r}.')
    parse_layout(fn, layout)
    return _resolve(fn, layout, parse_names(fn, axis_names), tuple(shape), None if only is None else frozenset(only))


def name_axes(fn: str, layout: Any, shape: tuple[int, ...], of: str) -> Spec:
    """The Spec of an array that errors call `of`, and of which nothing pools."""
    if not isinstance(layout, str):
        raise TypeError(f"{fn}: layout must be a string that names every axis of {of}; got {layout!r}.")
    return _resolve(fn, layout, (), tuple(shape), None, of)


@functools.lru_cache(maxsize=2048)
def _resolve(
    fn: str, layout: str, axis_names: tuple[str, ...], shape: tuple, only: frozenset[str] | None, of: str = "x"
) -> Spec:
    axes = parse_layout(fn, layout)
    unnamed = _unnamed_axes(fn, layout, axes, shape, of)
    expanded: list[int] = []
    names: list[str | None] = []
    ranges = []
    remaining = iter(shape)
    for axis in axes:
        start = len(expanded)
        if axis.name == ELLIPSIS:
            expanded += [next(remaining) for _ in range(unnamed)]
            names += [None] * unnamed
        elif axis.factors and (only is None or not only.isdisjoint(name for name, _ in axis.factors)):
            expanded += _factor_sizes(fn, layout, axis, next(remaining), shape, of)
            names += [name for name, _ in axis.factors]
        else:
            expanded.append(next(remaining))
            names.append(axis.name)
        ranges.append((axis, start, len(expanded)))
    spec = Spec(fn, layout, axis_names, shape, tuple(expanded), tuple(names), tuple(ranges), (), (), of)
    return dataclasses.replace(spec, **_reduction(spec, unnamed))


def _unnamed_axes(fn: str, layout: str, axes: tuple[Axis, ...], shape: tuple, of: str) -> int:
    named = sum(axis.name != ELLIPSIS for axis in axes)
    unnamed = len(shape) - named
    if unnamed == 0 or (unnamed > 0 and named < len(axes)):
        return unnamed
    came = f'{fn}: layout="{layout}" names {axes_phrase(named)} but {of} has {count_word(len(shape))}'
    if named == 1 and len(layout.strip()) == len(shape):
        raise ValueError(f'{came}; separate names by spaces: "{" ".join(layout.strip())}".')
    raise ValueError(f"{came} (shape {shape}); name every axis once, in order, or write ... for the others.")


def _factor_sizes(fn: str, layout: str, axis: Axis, size: int, shape: tuple, of: str) -> list[int]:
    known = math.prod(factor for _, factor in axis.factors if factor is not None)
    open_ = [name for name, factor in axis.factors if factor is None]
    if size % known or (not open_ and size != known):
        if isinstance(size, int):
            mend = f", which {known} does not divide; choose a divisor of {size}." if open_ else "."
        elif open_:  # a symbolic size of jax.export
            symbol = str(size) if str(size).isidentifier() else "b"
            mend = f", which {known} does not divide for every value; write the symbolic size as {known}*{symbol}."
        else:
            mend = f", which is not {known} for every value; give {of} that size, or leave one factor's size out."
        raise ValueError(
            f"{fn}: layout=\"{layout}\": the factors of '{axis}' multiply to {known}"
            + (f" times '{open_[0]}'" if open_ else "")
            + f", but that axis of {of} has size {size} (shape {shape}){mend}"
        )
    return [size // known if factor is None else factor for _, factor in axis.factors]


def _reduction(spec: Spec, unnamed: int) -> dict[str, Any]:
    asked = f'{spec.fn}: axis_names="{" ".join(spec.axis_names)}"'
    reduced: list[int] = []
    mapped = []
    for name in spec.axis_names:
        if name == ELLIPSIS and not (spec._declares(ELLIPSIS) and unnamed):
            raise ValueError(
                f'{asked}: ... stands for the unnamed axes, but layout "{spec.layout}" leaves none unnamed here.'
            )
        if not spec._declares(name):
            mapped.append(name)
            continue
        places = spec.positions(name)
        if twice := [spec.names[i] for i in places if i in reduced]:
            raise ValueError(
                f"{asked}: {quote(str(n) for n in twice)} is given twice, by its own name and by its split axis'."
            )
        reduced += places
    return {"reduced": tuple(sorted(reduced)), "mapped": tuple(mapped)}


def unbound_error(spec: Spec, name: str) -> ValueError:
    """The error for a name that is neither an axis of the array nor a mapped axis."""
    known = [n for n in spec._known() if n != ELLIPSIS]
    asked = " ".join(spec.axis_names)
    mend = ""
    if pieces := _pieces(name, known):
        fixed = " ".join(dict.fromkeys(n for given in spec.axis_names for n in (pieces if given == name else [given])))
        mend = f'For array axes write "{fixed}". '
    elif form := in_another_form(name, known):
        mend = f"{form.strip()} "
    elif close := difflib.get_close_matches(name.casefold(), [n.casefold() for n in known], n=1):
        mend = f"Did you mean '{next(n for n in known if n.casefold() == close[0])}'? "
    manual = [] if mend else sorted(set(get_abstract_mesh().manual_axes) - set(spec.mapped) - set(known))
    if manual:
        mend = f"shard_map has {' and '.join(map(repr, manual))} here. "
    return ValueError(
        f'{spec.fn}: axis_names="{asked}": \'{name}\' is neither in layout "{spec.layout}" nor a mapped axis here. '
        f"{mend}To synchronise, call inside shard_map, pmap or vmap with the axis name '{name}'; "
        "under jit over sharded arrays the batch is already global: drop it."
    )


def _pieces(text: str, known: list[str]) -> list[str]:
    """Splits "HW" into known names ["H", "W"]; [] where that fails."""
    if text in known:
        return [text]
    for name in sorted(known, key=len, reverse=True):
        if text.startswith(name) and (rest := _pieces(text[len(name) :], known)):
            return [name, *rest]
    return []


def _as_shape(shape) -> tuple[int, ...]:
    sizes = getattr(shape, "shape", shape)
    if not isinstance(sizes, (tuple, list)) or not all(hasattr(n, "__index__") and n.__index__() >= 0 for n in sizes):
        raise TypeError(f"describe: shape must be an array or a tuple of sizes such as (8, 7, 7, 64); got {shape!r}.")
    return tuple(n.__index__() for n in sizes)


def describe(shape, *, layout: str, axis_names) -> str:
    """Says which entries of an array would share a mean: groups, their size m, shapes of statistics and parameters.

    Args:
      shape: the array's shape, or the array.
      layout: names of its axes.
      axis_names: the names that pool; one that is not in `layout` is described as a mapped axis.

    Returns:
      A few lines of text.

    Raises:
      ValueError: `layout` or `axis_names` breaks the grammar or does not fit the shape.

    Example:
      >>> print(describe((8, 7, 7, 64), layout="N H W C", axis_names="N H W"))
      layout "N H W C", shape (8, 7, 7, 64), pooled over N H W
      groups: 64, one for each C
      entries in a group: m = 392
      statistics: shape (64,), names "C"
      parameters along kept axes, as of batch and instance norm: Affine.init(C=64)
      parameters along pooled axes, as of layer and RMS norm: Affine.init(N=8, H=7, W=7)
    """
    spec = resolve("describe", layout, axis_names, _as_shape(shape))
    kept = spec.kept_axes()
    sizes = [size for i, size in enumerate(spec.expanded) if i not in spec.reduced]
    stat_shape = tuple(math.prod(spec.expanded[i] for i in places) for name, places in kept if name != ELLIPSIS)
    if any(name == ELLIPSIS for name, _ in kept):
        stat_shape = tuple(sizes)
    pooled = " ".join(spec.axis_names)
    m = f"m = {spec.group_size}" + "".join(f" × the size of mapped axis '{name}'" for name in spec.mapped)
    names = [name for name, _ in kept]

    def init(axes: list[str]) -> str:
        if not axes:
            return "none"
        if ELLIPSIS in axes:
            return f'Affine(scale, bias, names="{" ".join(axes)}")'
        sizes = (f"{name}={math.prod(spec.expanded[i] for i in spec.positions(name))}" for name in axes)
        return f"Affine.init({', '.join(sizes)})"

    return "\n".join(
        [
            f"{spec.described}, pooled over {pooled}",
            f"groups: {math.prod(sizes)}" + (f", one for each {' '.join(names)}" if names else ", all entries in one"),
            f"entries in a group: {m}",
            f'statistics: shape {stat_shape}, names "{" ".join(names)}"',
            f"parameters along kept axes, as of batch and instance norm: {init(names)}",
            "parameters along pooled axes, as of layer and RMS norm: "
            f"{init([name for name in spec.axis_names if name not in spec.mapped])}",
        ]
    )
