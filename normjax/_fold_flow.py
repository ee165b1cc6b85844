"""Which batch norms of a model fold into which layer: found on one traced evaluation, never from attributes.

Whoever calls a layer or a norm marks what goes in and what comes out (`marked`). `Flow` is the traced program as a list
of steps in the order in which they ran, without those of which nothing comes. A norm folds where the value that it gets
is what a layer gave, nothing else reads that, and nothing but one call of the layer reads its kernel and bias.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

from normjax import _flax_axes
from normjax._flax import statistics
from normjax._grammar import parse_layout
from normjax._normalize import Affine
from normjax.fold import fold

_TAG = "normjax.fold"
# Calls whose body runs once, with the values that the call is given.
_ONCE = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "remat",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
}
# Functions in the place of JAX's own, which need not be linear in the kernel.
_OWN = ("dot_general", "dot_general_cls", "conv_general_dilated", "conv_general_dilated_cls", "promote_dtype")


class Fold(NamedTuple):
    """What became of one batch norm.

    Attributes:
      norm: where it sits in the model, such as "blocks.0.norm".
      layer: the layer that it was folded into; "" where it was not.
      reason: why it was not; "" where it was.
    """

    norm: str
    layer: str
    reason: str


class Folds(tuple[Fold, ...]):
    """What became of every batch norm of a model, in its order; `str` is a table."""

    __slots__ = ()

    @property
    def folded(self) -> tuple[Fold, ...]:
        """Those that are gone."""
        return tuple(row for row in self if not row.reason)

    @property
    def refused(self) -> tuple[Fold, ...]:
        """Those that stayed."""
        return tuple(row for row in self if row.reason)

    def __str__(self) -> str:
        width = max((len(row.norm) for row in self), default=0)
        return "\n".join(
            f"{row.norm.ljust(width)}  {f'not folded: {row.reason}' if row.reason else f'folded into {row.layer}'}"
            for row in self
        )


def marked(tree, number: int, edge: str):
    """The tree with its arrays named as what part `number` was given ("in") or gave ("out")."""
    name = f"{_TAG} {number} {edge}"
    return jax.tree.map(lambda x: checkpoint_name(x, name) if isinstance(x, (jax.Array, np.ndarray)) else x, tree)


class _Step(NamedTuple):
    what: str  # the primitive, and the function around it, in the words of a reason
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    shape: tuple[int, ...]  # of what it writes first
    mark: tuple[int, str] | None  # part and edge
    inside: frozenset[int]  # parts that are called in a loop, a branch or a shard_map that it runs
    acts: bool  # whether it does something besides what it writes


class Flow:
    """The steps of a program of which something comes; values are numbers, its inputs the first of them."""

    def __init__(self, program: Callable, variables: list, arrays: Any):
        """Of `program(variables, arrays) -> (outputs, the variables afterwards)`; the first inputs are `variables`."""
        closed, (outputs, _) = jax.make_jaxpr(program, return_shape=True)(variables, arrays)
        self._count, steps = 0, []
        inputs = self._new(len(closed.jaxpr.invars))
        given = self._run(closed.jaxpr, inputs, steps)
        own = len(jax.tree.leaves(outputs))
        self.outputs = {*given[:own], *(set(given[own:]) - set(inputs))}
        needed = set(self.outputs)
        self.steps: list[_Step] = []
        for step in reversed(steps):
            if step.acts or needed.intersection(step.writes):
                needed.update(step.reads)
                self.steps.insert(0, step)
        self.looped = {part: step.what for step in self.steps for part in step.inside}

    def _new(self, number: int) -> list[int]:
        self._count += number
        return list(range(self._count - number, self._count))

    def _run(self, jaxpr, given: Iterable[int], steps: list[_Step], within: str = "") -> list[int]:
        """Appends the steps of a jaxpr, those of calls in their place, and returns what it gives.

        `within` is the innermost function with a name that the jaxpr is of: JAX's `relu` tells more than its `max`.
        """
        values = dict(zip(jaxpr.invars, given, strict=True))
        values |= dict(zip(jaxpr.constvars, self._new(len(jaxpr.constvars)), strict=True))
        value = lambda atom: self._new(1)[0] if isinstance(atom, jex.Literal) else values[atom]  # noqa: E731
        for eqn in jaxpr.eqns:
            reads, what = [value(atom) for atom in eqn.invars], eqn.primitive.name
            bodies = list(jex.jaxprs_in_params(eqn.params))
            if what in _ONCE and len(bodies) == 1 and len(bodies[0].invars) == len(reads):
                writes = self._run(bodies[0], reads, steps, str(eqn.params.get("name") or within))
            elif what == "name" and _mark(eqn) is None:
                writes = reads  # a name that the model gives for itself
            else:
                writes, inside = self._new(len(eqn.outvars)), frozenset(_marks(bodies))
                shape = tuple(eqn.outvars[0].aval.shape) if eqn.outvars else ()
                said = f"`{what}` in `{within}`" if within.isidentifier() and within != what else f"`{what}`"
                step = _Step(said, tuple(reads), tuple(writes), shape, _mark(eqn), inside, bool(eqn.effects))
                steps.append(step)
            values |= dict(zip(eqn.outvars, writes, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def edges(self, part: "Part", edge: str) -> list[int]:
        """Where, among the steps, a part is called ("in") or has answered ("out")."""
        return [i for i, step in enumerate(self.steps) if step.mark == (part.number, edge)]

    def readers(self, value: int) -> list[int]:
        """The steps that read a value."""
        return [i for i, step in enumerate(self.steps) if value in step.reads]

    def source(self, value: int) -> _Step | None:
        """The step that made a value; None for an input."""
        return next((step for step in self.steps if value in step.writes), None)


def _mark(eqn) -> tuple[int, str] | None:
    name = eqn.params.get("name")
    if eqn.primitive.name != "name" or not str(name).startswith(_TAG):
        return None
    _, number, edge = name.split(" ")
    return int(number), edge


def _marks(bodies) -> set[int]:
    """The parts that are called in programs within a step."""
    found = set()
    for body in bodies:
        for eqn in body.eqns:
            found |= {mark[0]} if (mark := _mark(eqn)) else _marks(jex.jaxprs_in_params(eqn.params))
    return found


@dataclasses.dataclass(eq=False)
class Part:
    """A layer or a batch norm, and its last call."""

    number: int
    path: str
    module: Any
    is_norm: bool
    known: bool  # whether its class is one of those that fold knows, and no subclass
    inputs: tuple[int, ...] = ()  # which inputs of the program its kernel and bias, or parameters and statistics, are
    shape: tuple[int, ...] = ()  # of a layer what it gave, of a norm what it was given
    dtype: Any = None  # of what it gave
    frozen: Any = False  # of a norm: whether it used the running statistics

    def layer_called(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        """Makes the call of a layer, with marks."""
        args, kwargs = marked((args, kwargs), self.number, "in")
        y = call(*args, **kwargs)
        self.shape, self.dtype = getattr(y, "shape", ()), getattr(y, "dtype", None)
        return marked(y, self.number, "out")

    def norm_called(self, call: Callable, x, use_running_average=None, *, mask=None) -> jax.Array:
        """Makes the call of a norm, with marks."""
        self.shape, own = x.shape, getattr(self.module, "use_running_average", None)
        self.frozen = self.frozen or (own if use_running_average is None else use_running_average)
        y = call(marked(x, self.number, "in"), use_running_average, mask=mask)
        self.dtype = y.dtype
        return marked(y, self.number, "out")


class Refusal(Exception):
    """Why a norm does not fold."""


def fold_all(flow: Flow, parts: list[Part], change: Callable[[Part, Part], None]) -> Folds:
    """Calls `change(norm, layer)`, which may refuse too, for each norm that folds, and reports on all."""
    rows = []
    for norm in (part for part in parts if part.is_norm):
        try:
            layer = _layer_of(flow, parts, norm)
            change(norm, layer)
            rows.append(Fold(norm.path, layer.path, ""))
        except Refusal as refusal:
            rows.append(Fold(norm.path, "", str(refusal)))
    return Folds(rows)


def _layer_of(flow: Flow, parts: list[Part], norm: Part) -> Part:
    """The layer that a norm folds into."""
    _check_norm(flow, norm)
    x = flow.steps[flow.edges(norm, "in")[0]].reads[0]
    step = flow.source(x)
    if step is None:
        raise Refusal("its x is an input of the model, with no layer before it")
    layer = parts[step.mark[0]] if step.mark else None
    if layer is None or layer.is_norm:
        what = step.what if layer is None else layer.path
        raise Refusal(f"its x comes from {what}, not straight from a dense layer or a convolution")
    if not layer.known:
        raise Refusal(f"{layer.path} is a {type(layer.module).__name__}, which is no layer that fold knows")
    if (calls := len(flow.edges(layer, "out"))) > 1:
        raise Refusal(f"{layer.path} is called {calls} times")
    if step.shape != layer.shape or step.shape != norm.shape:
        raise Refusal(f"it or {layer.path} is called under vmap")
    others = [_reader(flow.steps[i], parts) for i in flow.readers(x) if flow.steps[i].mark != (norm.number, "in")]
    if x in flow.outputs:
        others.append("whoever calls the model")
    if others:
        raise Refusal(f"what {layer.path} gives is read by {' and '.join(dict.fromkeys(others))} too")
    _check_layer(flow, layer)
    return layer


def _check_norm(flow: Flow, norm: Part) -> None:
    """Refuses a norm for what it is, or for its calls."""
    if not norm.known:
        raise Refusal(f"{type(norm.module).__name__} is a subclass of BatchNorm, and what it adds would be lost")
    if norm.number in flow.looped:
        raise Refusal(f"it is called inside {flow.looped[norm.number]}")
    calls = len(flow.edges(norm, "out"))
    if calls != 1:
        raise Refusal(f"it is called {calls} times" if calls else "it is not called, or nothing comes of it")
    if not norm.frozen:
        raise Refusal("it is in training mode, and normalises by the batch")
    if _read_outside(flow, norm):
        raise Refusal("its parameters or statistics are read outside its call too")


def _check_layer(flow: Flow, layer: Part) -> None:
    """Refuses a layer that is called once, for its kernel or for how it computes."""
    if _read_outside(flow, layer):
        raise Refusal(f"the kernel or bias of {layer.path} is read outside its call too")
    if not layer.inputs or not all(map(flow.readers, layer.inputs)):
        raise Refusal(f"{layer.path} does not compute with the kernel that it holds")
    defaults = inspect.signature(type(layer.module).__init__).parameters
    for name in _OWN:
        if name in defaults and getattr(layer.module, name) is not defaults[name].default:
            raise Refusal(f"{layer.path} has a {name} of its own, which need not be linear")
    if any(getattr(layer.module, name, None) not in (None, (), {}) for name in ("batch_axis", "batch_dims")):
        raise Refusal(f"{layer.path} has a kernel for each entry of a batch axis")


def _read_outside(flow: Flow, part: Part) -> bool:
    """Whether anything but the one call of a part reads its variables."""
    begin, end = min(flow.edges(part, "in"), default=0), flow.edges(part, "out")[0]
    read = [i for value in part.inputs for i in flow.readers(value)]
    return not flow.outputs.isdisjoint(part.inputs) or any(not begin < i < end for i in read)


def _reader(step: _Step, parts: list[Part]) -> str:
    return parts[step.mark[0]].path if step.mark else step.what


def folded(norm: Part, layer: Part, arrays: dict[str, Any], kernel, bias) -> tuple[jax.Array, jax.Array]:
    """Kernel and bias of a layer with its norm, whose `arrays` are scale, bias, mean and var."""
    layout, channels = _kernel_axes(layer.module, np.ndim(kernel))
    rank = len(norm.shape)
    axes, given = _norm_axes(norm.module, norm.shape), tuple(range(rank - len(channels), rank))
    if axes != given:
        raise Refusal(
            f"it normalises along {_numbered(axes)}, but {layer.path} has its channels along {_numbered(given)}"
        )
    sizes = [norm.shape[axis] for axis in axes]
    shaped: dict[str, Any] = {n: None if array is None else jnp.reshape(array, sizes) for n, array in arrays.items()}
    held = {name: shaped[name].astype(np.promote_types(shaped[name].dtype, jnp.float32)) for name in ("mean", "var")}
    stats = dataclasses.replace(statistics(held), names=channels)
    params = Affine(shaped["scale"], shaped["bias"], channels, getattr(norm.module, "zero_centered", False))
    try:
        new = fold(kernel, bias, params, stats, layout=layout, eps=norm.module.epsilon)
    except (TypeError, ValueError) as error:
        raise Refusal(str(error)) from error
    if not all(isinstance(array, Tracer) or jnp.all(jnp.isfinite(array)) for array in new):
        raise Refusal(f"{layer.path} with it would not be finite in {new[0].dtype}")
    return new


def _numbered(axes: tuple[int, ...]) -> str:
    return f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(map(str, axes))}"


def _kernel_axes(layer, rank: int) -> tuple[str, tuple[str, ...]]:
    """The layout of a kernel, and the names of its output channels, in order."""
    features = getattr(layer, "out_features", None) or layer.features
    channels = tuple(f"C{i}" for i in range(len(features) if isinstance(features, (tuple, list)) else 1))
    others = tuple(f"I{i}" for i in range(rank - len(channels)))
    names = (*others[:-1], *channels, others[-1]) if getattr(layer, "transpose_kernel", False) else (*others, *channels)
    return " ".join(names), channels


def _norm_axes(norm, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of x that a batch norm keeps."""
    if hasattr(norm, "layout"):
        axes = _flax_axes.batch_axes(norm, shape)
        names = [axis.name for axis in parse_layout("fold", axes.layout)]
        return tuple(names.index(name) for name in axes.features)
    axes = norm.axis if isinstance(norm.axis, (tuple, list)) else (norm.axis,)
    return tuple(sorted(axis % len(shape) for axis in axes))
