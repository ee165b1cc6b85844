"""`replace`: the norms of an nnx model by ours, by group norms, synchronised or frozen; and what it refuses."""

import itertools
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes

from normjax._flax_axes import settled
from normjax._grammar import count_word, parse_names
from normjax._inputs import kind_of
from normjax._nnx_batch import BatchNorm, Norm
from normjax._nnx_swap import (
    FLAX,
    FrozenBatchNorm,
    FrozenParam,
    become,
    count_as_one,
    dotted,
    features,
    find,
    fix_parameters,
    never_moved,
    ours,
    rebuilt,
)
from normjax._running import Ema


class Change(NamedTuple):
    """One norm that `replace` changed.

    Attributes:
      path: where it sits in the model, such as "blocks.0.norm"; of several places the first.
      before: its class and settings.
      after: the same afterwards.
    """

    path: str
    before: str
    after: str


class Replaced(tuple[Change, ...]):
    """What `replace` changed, in the order of the model; `str` is a table."""

    __slots__ = ()

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self, strict=True)]
        rows = ([cell.ljust(width) for cell, width in zip(change, widths, strict=True)] for change in self)
        return "\n".join(f"{path}  {before} -> {after}".rstrip() for path, before, after in rows)


def replace(
    model: Any,
    to: str | None = None,
    *,
    axis_name: Any = None,
    num_groups: int = 32,
    example: tuple | None = None,
    train_params: bool = True,
    only: Any = ...,
) -> Replaced:
    """Changes the norms of an nnx model in place, all or none of them, and returns what it changed.

    Scale and bias stay the same variables, so that checkpoints load as before and an `nnx.Optimizer` goes on (not so
    for `train_params=False`); epsilon stays, too. `to` says what the norms become:

      None: Flax's five norms become normjax's, with the same settings and variables.
      "group": batch norms become group norms with the largest number of groups that divides the channels and is at most
        `num_groups`. Their running statistics go.
      "sync": batch norms pool over `axis_name` too.
      "frozen": batch norms become `FrozenBatchNorm`, which normalises by the running statistics and never moves them,
        whatever `.train()` or a call says.

    Running statistics that nothing counted, such as Flax's, and that are not 0 and 1 count as one update where
    `running` needs counts. Norms that are so already stay as they are, and with a `to` all but batch norms. Inside
    `nnx.jit`, a model that is its argument cannot be changed: replace before.

    Args:
      model: a module, or any list or dict of modules.
      to: None, "group", "sync" or "frozen".
      axis_name: for "sync": the mapped axis, or several.
      num_groups: for "group": as many groups as there may be.
      example: for "group": positional arguments for a call of the model, of which only shapes and dtypes matter. The
        model is traced on them in evaluation, and each norm judged by the x that it gets. Without it no more is taken
        for granted than an axis of examples and one of channels.
      train_params: for "frozen": False makes scale and bias `FrozenParam`, so that an optimiser with `wrt=nnx.Param`
        leaves them alone; make it afterwards.
      only: which norms: a filter as in `nnx.view`, such as `nnx.PathContains("head")` or a function of path and norm.

    Returns:
      A `Replaced`: one `Change` for each norm that changed.

    Raises:
      ValueError: there is no norm to replace, or one would come to mean something else than asked; all of these are
        listed, and nothing is changed. For "group": one entry in a group, channels that are not the last axis, a
        mapped axis, a layout, a frozen norm. For "sync": another axis name than it has, a frozen norm. For "frozen":
        statistics that have never moved, or parameters that others share. Always: a subclass of a norm, settings that
        only Flax takes, a `GroupNorm` of Flax's whose `reduction_axes` keep several axes (its numbers are wrong).
      TypeError: `to` or `num_groups` is none of those.

    Example:
      >>> from flax import nnx
      >>> model = nnx.Sequential(nnx.Linear(8, 48, rngs=nnx.Rngs(0)), nnx.BatchNorm(48, rngs=nnx.Rngs(0)))
      >>> print(replace(model, "group", num_groups=32))
      layers.1  flax.nnx.BatchNorm(48) -> normjax.nnx.GroupNorm(48, num_groups=24)
    """
    _check_arguments(to, axis_name, num_groups, example)
    axis_name = settled(axis_name)
    norms = find(model, to, only)
    calls = _calls(model, example) if to == "group" and example is not None else {}
    problems, changes = [], []
    for path, norm in norms.items():
        reasons = _reasons(norm, to, axis_name, num_groups, calls.get(path, []))
        if to == "frozen" and not train_params:
            reasons += _shared(model, norm, norms.values())
        problems += [f"  - {dotted(path)}: {reason}" for reason in reasons]
        if not reasons:
            changes.append((path, norm, _successor(norm, to, axis_name, num_groups)))
    if problems:
        raise ValueError("\n".join([f"replace: to={to!r} is refused, and nothing changed:", *problems]))
    for norm in norms.values():
        norm.epsilon = norm.epsilon  # of another trace: raises before anything is changed
    done, fixed = [], {}
    for path, norm, new in changes:
        before = _words(norm)
        if new is not None:
            become(norm, new)
            count_as_one(norm)
        if to == "frozen" and not train_params:
            fix_parameters(norm, fixed)
        if before != (after := _words(norm)):
            done.append(Change(dotted(path), before, after))
    return Replaced(done)


def _check_arguments(to, axis_name, num_groups, example) -> None:
    if to not in (None, "group", "sync", "frozen"):
        raise TypeError(f'replace: to must be None, "group", "sync" or "frozen"; got {to!r}.')
    if (to == "sync") != (axis_name is not None):
        raise ValueError(
            f'replace: to={to!r}, axis_name={axis_name!r}: give axis_name for to="sync", which needs the name of the '
            "mapped axis to pool over, and for nothing else."
        )
    if isinstance(num_groups, bool) or not isinstance(num_groups, (int, np.integer)) or num_groups < 1:
        raise TypeError(f"replace: num_groups must be a positive integer; got {num_groups!r}.")
    if example is not None and not isinstance(example, tuple):
        raise TypeError(f"replace: example must be a tuple of the arguments, such as (x,); got {kind_of(example)}.")
    if axis_name is not None:
        parse_names("replace", axis_name, "axis_name")


def _words(norm: Any) -> str:
    """The class of a norm, and the settings that replacing changes."""
    library = "normjax" if isinstance(norm, Norm) else "flax"
    arguments = [str(features(norm))]
    for name in ("num_groups", "axis_name"):
        if getattr(norm, name, None) is not None:
            arguments.append(f"{name}={getattr(norm, name)!r}")
    if any(isinstance(getattr(norm, name, None), FrozenParam) for name in ("scale", "bias")):
        arguments.append("train_params=False")
    return f"{library}.nnx.{type(norm).__name__}({', '.join(arguments)})"


# --- what each batch norm gets


class _Calls:
    """What a norm was called with: shapes, and whether a mode was given. An object, to be a static attribute."""

    def __init__(self):
        self.seen: list[tuple[tuple, bool]] = []


class _Recorder(FrozenBatchNorm):
    """A batch norm that notes its calls. It evaluates, and so touches no mapped axis."""

    calls: Any

    def __call__(self, x, use_running_average: bool | None = None, *, mask: jax.Array | None = None):
        self.calls.seen.append((x.shape, use_running_average is not None))
        return super().__call__(x, mask=mask)


_Recorder.__name__ = "BatchNorm"  # what its errors say


def _calls(model, example: tuple) -> dict[tuple, list]:
    """For each batch norm, by path, its calls while a copy of the model is traced in evaluation."""
    copy = nnx.clone(model)
    calls = {}
    for path, norm in find(copy, "group", ...).items():
        become(norm, rebuilt(norm, _Recorder))
        norm.calls = calls[path] = _Calls()
    leaves, structure = jax.tree.flatten(example)
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")}

    def call(copy, arrays):
        return copy(*jax.tree.unflatten(structure, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]))

    try:
        copy.eval()
        nnx.eval_shape(call, copy, arrays)
    except Exception as error:
        error.add_note("replace: raised while the model was traced in evaluation on `example`.")
        raise
    return {path: noted.seen for path, noted in calls.items()}


# --- what is refused


def _reasons(norm: Any, to, axis_name, num_groups: int, calls) -> list[str]:
    """Why a norm cannot become that."""
    known = (*FLAX.values(), *ours().values(), FrozenBatchNorm)
    if type(norm) not in known:
        if to is None and isinstance(norm, Norm):
            return []
        return [f"{type(norm).__qualname__} is a subclass, and what it adds would be lost; leave it out with `only`."]
    if reasons := [] if isinstance(norm, Norm) else _only_flax(norm):
        return reasons
    if to == "group":
        return _no_group(norm, _divisor(features(norm), num_groups), calls)
    if to == "sync":
        return _no_sync(norm, axis_name)
    if to == "frozen" and not _is_frozen(norm) and never_moved(norm):
        return ["its running statistics are still 0 and 1: train, or load a checkpoint, before it is frozen."]
    return []


def _only_flax(norm: Any) -> list[str]:
    """The settings that Flax's norm takes, and ours refuses once it is called, or takes for something else."""
    reasons = []
    for name in ("axis", "reduction_axes", "feature_axes"):
        axes = settled(getattr(norm, name, None))
        if axes == () and name == "reduction_axes":
            reasons.append("has reduction_axes=(), which pools nothing: y is the bias.")
        elif axes is not None and not _in_order(axes if isinstance(axes, tuple) else (axes,)):
            reasons.append(f"has {name}={axes}; here axes are in the order of x, and each once.")
    if norm.epsilon < 0:
        reasons.append(f"has epsilon={norm.epsilon!r}; it must be at least 0.")
    try:
        if norm.axis_name is not None:
            parse_names("replace", norm.axis_name, "axis_name")
        Ema.flax(getattr(norm, "momentum", 0.0))
    except (TypeError, ValueError) as error:
        reasons.append(str(error))
    if isinstance(norm, nnx.GroupNorm) and norm.reduction_axes is not None and not reasons:
        reasons += _group_norm_of_flax(norm)
    return reasons


def _in_order(axes: tuple) -> bool:
    """Whether x has a rank at which the axes increase."""
    most = max(map(abs, axes), default=0)
    ranks = (rank for rank in range(1, 2 * most + 2) if all(-rank <= axis < rank for axis in axes))
    return any(all(a % rank < b % rank for a, b in itertools.pairwise(axes)) for rank in ranks)


def _group_norm_of_flax(norm: Any) -> list[str]:
    """Whether Flax's numbers are wrong: it repeats each group's statistics along axis 1 of those, not along the last.

    That is the same where the axes from there on hold one entry, and none to repeat where a group has one channel.
    """
    axes = settled(norm.reduction_axes)
    axes = axes if isinstance(axes, tuple) else (axes,)
    if norm.group_size == 1:
        return []
    has = f"has reduction_axes={axes}"
    if min(axes) < 0:
        return [
            f"{has}: whether Flax's numbers are right hangs on how many axes x has; count all of them from the front."
        ]
    kept = max(axes) + 1 - len(axes)  # the last axis of x is among the axes, or ours raises
    if kept < 2 or (kept == 2 and norm.num_groups == 1):
        return []
    return [
        f"{has}, which keeps {count_word(kept)} axes: Flax spreads the statistics of its groups over the wrong "
        "entries, so y would change. Leave it out with `only`, or build a normjax.nnx.GroupNorm for what was asked."
    ]


def _is_frozen(norm) -> bool:
    return isinstance(norm, FrozenBatchNorm)


def _divisor(channels: int, most: int) -> int:
    return max(groups for groups in range(1, min(channels, most) + 1) if channels % groups == 0)


def _no_group(norm: Any, groups: int, calls) -> list[str]:
    channels, reasons = features(norm), []
    if _is_frozen(norm):
        reasons.append("is frozen: its statistics are fixed, those of a group norm are each example's.")
    if getattr(norm, "layout", None) is not None:
        reasons.append(f"has layout={norm.layout!r}; write its group norm by hand, with a layout that splits channels.")
    if norm.axis_name is not None:
        reasons.append(
            f"pools over the mapped axis {norm.axis_name!r}: if that splits the batch, set its axis_name to None "
            "first; if it splits an example, or is that of vmap over them, write its group norm by hand."
        )
    if norm.promote_dtype is not dtypes.promote_dtype:
        reasons.append("has a promote_dtype of its own, which a group norm would call with other arguments.")
    if not calls and norm.axis != -1:
        reasons.append(
            f"has axis={norm.axis}; of a group norm the channels are last: axis=-1, or show it in `example`."
        )
    elif not calls and groups == channels:
        reasons.append(_one_entry(channels, "unless x has positions, which `example` would show"))
    for shape, mode_given in calls:
        if mode_given:
            reasons.append("is called with use_running_average, which a group norm lacks; use .train() and .eval().")
        if len(shape) < 2 or norm.axis not in (-1, len(shape) - 1):
            reasons.append(
                f"has axis={norm.axis} and x of shape {shape}; of a group norm examples are first and channels last."
            )
        elif math.prod(shape[1:]) == groups:
            reasons.append(_one_entry(channels, f"x has shape {shape}"))
    return list(dict.fromkeys(reasons))


def _one_entry(channels: int, where: str) -> str:
    """For as many groups as channels; a divisor below that leaves more."""
    fewer = f"; num_groups={_divisor(channels, channels // 2)} gives more" if channels > 1 else ""
    return f"{channels} channels in {channels} groups are groups of one entry, whose y is the bias: {where}{fewer}."


def _no_sync(norm: Any, axis_name) -> list[str]:
    reasons = []
    if _is_frozen(norm):
        reasons.append("is frozen, and pools nothing.")
    had = () if norm.axis_name is None else parse_names("replace", norm.axis_name, "axis_name")
    if not set(had) <= set(parse_names("replace", axis_name, "axis_name")):
        reasons.append(f"pools over the mapped axis {norm.axis_name!r} already; name that in axis_name, too.")
    if norm.axis_name is None and norm.axis_index_groups is not None:
        reasons.append("has axis_index_groups and no axis_name: they would begin to count.")
    if norm.axis_index_groups is not None and len(parse_names("replace", axis_name, "axis_name")) > 1:
        reasons.append("has axis_index_groups, which are of one mapped axis; set them to None, or name that one alone.")
    return reasons


def _shared(model, norm, norms) -> list[str]:
    """Parameters of the norm that modules hold which are not among those to be frozen."""
    own = {id(variable): name for name in ("scale", "bias") if (variable := getattr(norm, name)) is not None}
    others = ((path, node) for path, node in nnx.iter_modules(model) if all(node is not other for other in norms))
    return [
        f"its {own[id(value)]} is also {dotted((*path, name))}, which would go on training; untie them first."
        for path, node in others
        for name, value in vars(node).items()
        if id(value) in own
    ]


# --- the change


def _successor(norm: Any, to, axis_name, num_groups: int) -> Any:
    """What the norm is to become, or None where it is that already."""
    already, kind, changes = isinstance(norm, Norm), type(norm), {}
    if to is None:
        kind = ours().get(kind.__name__, kind)
    elif to == "group":
        already, kind = False, ours()["GroupNorm"]
        changes = {"num_groups": _divisor(features(norm), num_groups), "axis_index_groups": None}
    elif to == "sync":
        already, kind, changes = norm.axis_name == axis_name and already, BatchNorm, {"axis_name": axis_name}
    else:
        already, kind = _is_frozen(norm), FrozenBatchNorm
    return None if already else rebuilt(norm, kind, **changes)
