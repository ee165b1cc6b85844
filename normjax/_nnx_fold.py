"""`fold` for nnx: a copy of the model whose batch norms are merged into the layers before them."""

import functools
from typing import Any, NamedTuple

import jax
from flax import nnx

from normjax._fold_flow import Flow, Folds, Part, fold_all, folded
from normjax._inputs import kind_of
from normjax._nnx_batch import BatchNorm, value_of
from normjax._nnx_swap import FrozenBatchNorm, become, dotted

_LAYERS = (nnx.Linear, nnx.LinearGeneral, nnx.Conv, nnx.ConvTranspose)
_NORMS = (nnx.BatchNorm, BatchNorm, FrozenBatchNorm)


class Folded(NamedTuple):
    """What `fold` returns.

    Attributes:
      model: the copy; norms that did not fold are as they were.
      report: a `Fold` for each batch norm; `str` is a table.
    """

    model: Any
    report: Folds


class FoldedBatchNorm(nnx.Module):
    """What is left of a batch norm in the layer before it: gives x as it came, whatever `.train()` and a call say."""

    def __init__(self, dtype: Any = None):
        """Without variables; `dtype` is that of y where the layer's is another one."""
        self.dtype = dtype

    def __call__(self, x, use_running_average: bool | None = None, *, mask: jax.Array | None = None):
        """Returns x, in `dtype`."""
        return x if self.dtype is None else x.astype(self.dtype)


def fold(model: Any, /, *args: Any, **kwargs: Any) -> Folded:
    """Returns a copy of an nnx model with its batch norms folded into the layers before them, and what became of each.

    The copy gives what `model.eval()` gives, to the rounding of its dtypes, without the norms' time. The model is
    traced in the mode that it is in, and the pairs are read off the program: a batch norm (of flax.nnx or normjax.nnx)
    folds where the x that it gets is what a Linear, LinearGeneral, Conv or ConvTranspose gave, and nothing else reads
    that. A layer without a bias gets one; the norm becomes a `FoldedBatchNorm`. The model given stays as it is.

    Not folded, with the reason in the report: a norm in training mode, called twice or never, after anything but a
    layer (an activation, the model's input), or of other axes than the layer's channels; a layer called twice, whose
    output or kernel is read elsewhere too, or that is a subclass.

    Args:
      model: a module with batch norms, in evaluation: call `.eval()` first.
      *args: an example of its arguments, of which only shapes and dtypes matter.
      **kwargs: the same.

    Returns:
      A named tuple (model, report), the report with a `Fold` (norm, layer, reason) for each batch norm.

    Raises:
      TypeError: model is no `nnx.Module`.
      ValueError: there is no batch norm in the model.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> rngs = nnx.Rngs(0)
      >>> model = nnx.Sequential(nnx.Linear(8, 4, use_bias=False, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.relu)
      >>> model.eval()
      >>> folded, report = fold(model, jnp.ones((1, 8)))
      >>> print(report)
      layers.1  folded into layers.0
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"fold: model must be an nnx.Module; got {kind_of(model)}.")
    watched, new = nnx.clone(model), nnx.clone(model)
    parts = _watch(watched)
    if not any(part.is_norm for part in parts):
        raise ValueError("fold: there is no batch norm of flax.nnx or normjax.nnx in the model.")
    flow = _flow(watched, args, kwargs)
    modules: dict[str, Any] = {dotted(path): node for path, node in nnx.iter_modules(new)}

    def change(norm: Part, layer: Part) -> None:
        _fold_pair(modules[norm.path], modules[layer.path], norm, layer)

    return Folded(new, fold_all(flow, parts, change))


def _fold_pair(norm: Any, layer: Any, norm_part: Part, layer_part: Part) -> None:
    """Changes both modules, or neither."""
    arrays = {name: value_of(getattr(norm, name)) for name in ("scale", "bias", "mean", "var")}
    kernel, bias = folded(norm_part, layer_part, arrays, value_of(layer.kernel), value_of(layer.bias))
    layer.kernel.set_value(kernel)
    if layer.bias is None:
        layer.bias, layer.use_bias = nnx.Param(bias), True
    else:
        layer.bias.set_value(bias)
    become(norm, FoldedBatchNorm(None if norm_part.dtype == layer_part.dtype else norm_part.dtype))


@functools.cache
def _watched(kind: type, is_norm: bool) -> type:
    """The class of a module whose `part` notes its calls."""

    class Watched(kind):
        def __call__(self, *args, **kwargs):
            call = super().__call__
            return (
                self.part.norm_called(call, *args, **kwargs) if is_norm else self.part.layer_called(call, args, kwargs)
            )

    Watched.__name__ = kind.__name__  # what its errors say
    return Watched


def _watch(model: Any) -> list[Part]:
    """Makes every layer and batch norm note its calls."""
    parts: list[Part] = []
    seen: set[int] = set()
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(model))
    for path, node in modules:
        kind = type(node)
        is_norm = issubclass(kind, _NORMS)
        if id(node) in seen or not issubclass(kind, (*_NORMS, *_LAYERS)):
            continue
        seen.add(id(node))
        known = kind in (_NORMS if is_norm else _LAYERS)
        part = Part(len(parts), dotted(path), node, is_norm, known, frozen=kind is FrozenBatchNorm)
        parts.append(part)
        object.__setattr__(node, "__class__", _watched(kind, is_norm))  # nnx's own would keep it in the graph
        node.part = part
    return parts


def _flow(model: Any, args: tuple, kwargs: dict) -> Flow:
    """The model on the example; arguments without a shape are what they are."""
    graph, state = nnx.split(model)
    variables, structure = jax.tree.flatten(state)
    leaves, given = jax.tree.flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")}

    def program(variables, arrays):
        traced = nnx.merge(graph, jax.tree.unflatten(structure, variables))
        args, kwargs = jax.tree.unflatten(given, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        return traced(*args, **kwargs), nnx.state(traced)

    numbered: Any = nnx.merge(graph, jax.tree.unflatten(structure, range(len(variables))))
    modules: list[tuple[Any, Any]] = list(nnx.iter_modules(numbered))
    for _, node in modules:
        part = getattr(node, "part", None)
        if isinstance(part, Part):
            held = (node.scale, node.bias, node.mean, node.var) if part.is_norm else (node.kernel, node.bias)
            part.inputs = tuple(variable.get_value() for variable in held if variable is not None)
    try:
        return Flow(program, variables, arrays)
    except Exception as error:
        error.add_note("fold: raised while the model was traced on the example.")
        raise
