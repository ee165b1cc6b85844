"""`fold` for linen: variables whose batch norms are merged into the layers before them, and how to apply them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta, unfreeze

from normjax._fold_flow import Flow, Folds, Part, Refusal, fold_all, folded
from normjax._inputs import kind_of

_LAYERS = (nn.Dense, nn.DenseGeneral, nn.Conv, nn.ConvTranspose)
Path = tuple[str, ...]


class Folded(NamedTuple):
    """What `fold` returns.

    Attributes:
      apply: `apply(variables, *args, **kwargs)`, the arguments of the module's own `apply`; with what did not fold.
      variables: those of the layers with the norms in them; the norms' own are gone.
      report: a `Fold` for each batch norm; `str` is a table.
    """

    apply: Callable[..., Any]
    variables: dict[str, Any]
    report: Folds


def fold(module: nn.Module, variables: Mapping[str, Any], /, *args: Any, **kwargs: Any) -> Folded:
    """Returns a linen model's variables with batch norms folded into the layers before them, and how to apply them.

    `folded.apply(folded.variables, x)` gives what `module.apply(variables, x)` gives in evaluation, to the rounding of
    its dtypes, without the norms' time. The model is traced as it is called here, and the pairs are read off the
    program: a batch norm (of flax.linen or normjax.linen) folds where the x that it gets is what a Dense, DenseGeneral,
    Conv or ConvTranspose gave, and nothing else reads that. What does not fold is in the report with its reason: a norm
    in training mode, called twice, after anything but a layer (an activation, the model's input), or of other axes than
    the layer's channels; a layer called twice, whose output or kernel is read elsewhere too, or that is a subclass.

    A linen module says itself which layers have a bias and where the norms are, so the variables alone cannot tell it:
    `apply` leaves out the norms and adds the new biases, by `flax.linen.intercept_methods`, whatever mode a call asks
    for. Nothing of the module or the variables given is changed.

    Args:
      module: a module with batch norms.
      variables: its variables.
      *args: an example of the arguments of `module.apply`, of which only shapes and dtypes matter.
      **kwargs: the same, such as train=False, `method` or `rngs`.

    Returns:
      A named tuple (apply, variables, report), the report with a `Fold` (norm, layer, reason) for each batch norm.

    Raises:
      TypeError: module is no `nn.Module`.
      ValueError: no batch norm is called.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> model = nn.Sequential([nn.Dense(4, use_bias=False), nn.BatchNorm(use_running_average=True), nn.relu])
      >>> variables = model.init(jax.random.key(0), jnp.ones((1, 8)))
      >>> apply, variables, report = fold(model, variables, jnp.ones((1, 8)))
      >>> print(report, sorted(variables["params"]["layers_0"]))
      layers_1  folded into layers_0 ['bias', 'kernel']
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fold: module must be a linen module; got {kind_of(module)}.")
    held = unfreeze(dict(variables))  # type: ignore[arg-type]
    parts: dict[Path, Part] = {}
    kinds: dict[Path, set[type]] = {}
    flow = _flow(module, held, parts, kinds, args, kwargs)
    if not any(part.is_norm for part in parts.values()):
        raise ValueError("fold: no batch norm of flax.linen or normjax.linen is called here.")
    new = jax.tree.map(lambda leaf: leaf, held)
    places = {part.number: path for path, part in parts.items()}
    gone: dict[Path, Any] = {}
    biased: set[Path] = set()

    def change(norm: Part, layer: Part) -> None:
        for part in (norm, layer):
            if others := kinds[places[part.number]] - {type(part.module)}:
                raise Refusal(f"{part.path} shares its scope with a {others.pop().__name__} (nn.share_scope)")
        _fold_pair(held, new, places[norm.number], places[layer.number], norm, layer)
        gone[places[norm.number]] = None if norm.dtype == layer.dtype else norm.dtype
        biased.add(places[layer.number])

    report = fold_all(flow, list(parts.values()), change)
    return Folded(_applied(module, gone, biased), new, report)


def _norms() -> tuple[type, ...]:
    """Looked up late, since normjax.linen imports this module."""
    from normjax.linen import BatchNorm

    return (nn.BatchNorm, BatchNorm)


def _fold_pair(held: dict, new: dict, norm_at: Path, layer_at: Path, norm: Part, layer: Part) -> None:
    """Changes the new variables, or leaves them."""
    own = {**_at(held.get("params", {}), norm_at), **_at(held["batch_stats"], norm_at)}
    arrays = {name: meta.unbox(own.get(name)) for name in ("scale", "bias", "mean", "var")}
    params = _at(held["params"], layer_at)
    result = folded(norm, layer, arrays, *(meta.unbox(params.get(name)) for name in ("kernel", "bias")))
    changed = _at(new["params"], layer_at)
    for name, array in zip(("kernel", "bias"), result, strict=True):
        box = params.get(name)
        changed[name] = box.replace_boxed(array) if isinstance(box, meta.AxisMetadata) else array
    for collection in list(new):
        _remove(new, collection, *norm_at)


def _at(tree: Mapping, path: Path) -> Any:
    for name in path:
        tree = tree.get(name, {})
    return tree


def _remove(tree: dict, name: str, *below: str) -> None:
    """Takes a branch out, and what holds nothing without it."""
    if name in tree:
        if below:
            _remove(tree[name], *below)
        if not below or not tree[name]:
            del tree[name]


def _applied(module: nn.Module, gone: dict[Path, Any], biased: set[Path]) -> Callable[..., Any]:
    """The module's `apply` without the norms at `gone`, and with a bias in the layers at `biased`."""

    def interceptor(call, args, kwargs, context):
        called = context.module
        if context.method_name != "__call__" or called.scope is None:
            return call(*args, **kwargs)
        if called.path in gone:
            x, dtype = args[0] if args else kwargs["x"], gone[called.path]
            return x if dtype is None else jnp.asarray(x, dtype)
        if called.path in biased and not called.use_bias:
            layer = called.clone(parent=None, name=None, use_bias=True)
            return layer.apply({"params": called.variables["params"]}, *args, **kwargs)
        return call(*args, **kwargs)

    def apply(variables, *args, **kwargs):
        with nn.intercept_methods(interceptor):
            return module.apply(variables, *args, **kwargs)

    return apply


def _flow(
    module: nn.Module, variables: dict, parts: dict[Path, Part], kinds: dict[Path, set[type]], args: tuple, kwargs: dict
) -> Flow:
    """The model on the example; arguments without a shape are what they are.

    `parts` are filled as they are called, and `kinds` with the classes of all modules at a path.
    """
    held, structure = jax.tree.flatten(variables)
    numbered = meta.unbox(jax.tree.unflatten(structure, range(len(held))))
    leaves, given = jax.tree.flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")}
    norms = _norms()

    def interceptor(call, args, kwargs, context):
        called, kind = context.module, type(context.module)
        if called.scope is not None:
            kinds.setdefault(called.path, set()).add(kind)
        if context.method_name != "__call__" or not isinstance(called, (*_LAYERS, *norms)):
            return call(*args, **kwargs)
        is_norm = isinstance(called, norms)
        if called.path not in parts:
            known = kind in (norms if is_norm else _LAYERS)
            own = _at(numbered.get("params", {}), called.path)
            if is_norm:
                own = {**own, **_at(numbered.get("batch_stats", {}), called.path)}
            names = ("scale", "bias", "mean", "var") if is_norm else ("kernel", "bias")
            inputs = tuple(own[name] for name in names if name in own)
            parts[called.path] = Part(
                len(parts), "/".join(called.path) or "(the model)", called, is_norm, known, inputs
            )
        part = parts[called.path]
        part.module = called
        return part.norm_called(call, *args, **kwargs) if is_norm else part.layer_called(call, args, kwargs)

    def program(held, arrays):
        args, kwargs = jax.tree.unflatten(given, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)])
        kwargs["mutable"] = [name for name in variables if name != "params"]
        with nn.intercept_methods(interceptor):
            return module.apply(jax.tree.unflatten(structure, held), *args, **kwargs)

    try:
        return Flow(program, held, arrays)
    except Exception as error:
        error.add_note("fold: raised while the model was traced on the example.")
        raise
