"""Norms out of other frameworks' checkpoints: `from_torch`, `from_flax`, and back again with `to_flax`.

A checkpoint holds arrays, but neither momentum nor eps. These are arguments here, with the name, the meaning and the
default that they have in the framework; what comes back has normjax's: `Imported(params, state, running, eps)`.
"""

import os
from collections.abc import Iterable, Mapping
from types import EllipsisType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from normjax._checkpoint import (
    affine_of,
    axes_of,
    count_of,
    number_of,
    read,
    refuse,
    refuse_empty,
    shape_problems,
    state_of,
)
from normjax._extras import require
from normjax._inputs import as_array, kind_of, static_bool
from normjax._normalize import Affine
from normjax._running import BatchStats, Cumulative, Ema, check_state

_STATISTICS = ("running_mean", "running_var")
_COUNTER = "num_batches_tracked"
_TORCH = ("weight", "bias", *_STATISTICS, _COUNTER)
_FLAX = ("scale", "bias", "mean", "var")
_COUNTS = ("count", "weight")
_COLLECTIONS = ("params", "batch_stats", "batch_counts")


class Imported(NamedTuple):
    """One norm of a checkpoint: what to pass to `batch_norm`, `layer_norm` and the others. Not for jit's arguments.

    Attributes:
      params: `Affine` of the checkpoint's dtype, or None where the norm has no parameters.
      state: `BatchStats` of float32 at least, or None where the norm keeps no statistics.
      running: how the framework moves the statistics, with its variance estimator; `batch_norm` takes it.
      eps: a float.
    """

    params: Affine | None
    state: BatchStats | None
    running: Ema | Cumulative
    eps: float


def from_torch(
    tensors: Mapping[str, Any] | str | os.PathLike,
    *,
    prefix: str = "",
    names: str | Iterable[str] = "C",
    momentum: float | None = 0.1,
    eps: float | EllipsisType | None = ...,
    affine: bool | None = None,
    bias: bool | None = None,
    track_running_stats: bool | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Imported:
    """Returns one norm of a PyTorch `state_dict`: batch, layer, group, instance or RMS norm.

    Training goes on as in PyTorch: `num_batches_tracked` becomes the state's count (1 where nothing counted and the
    statistics are not 0 and 1) and, with momentum=None, its weight.

    Args:
      tensors: a `state_dict` of arrays (PyTorch's tensors are read without importing it), or the path of a
        `.safetensors` file, of which this norm alone is read.
      prefix: what the norm's keys begin with, such as "layer1.0.bn1."; other keys are left alone.
      names: the axes that the arrays run along, in order: "C", or "H W C" for LayerNorm((H, W, C)).
      momentum: weight of the new batch; None averages over all updates. (InstanceNorm takes its None for 0: pass 0.)
      eps: 1e-5 by default. None, RMSNorm's default, is the spacing of float32 at 1, of float64 for a float64 weight.
        Must be given where neither bias nor statistics tell RMSNorm from the others.
      affine: whether weight and bias must be there (LayerNorm's and RMSNorm's `elementwise_affine`); None: as found.
      bias: whether bias must be there, if not as `affine` says: False for RMSNorm.
      track_running_stats: whether running statistics must be there; None: as found.
      sizes: what size each of some names must have, such as {"C": 64}.

    Returns:
      `Imported`, with copies on the default device. Parameters keep their dtype (float64 only under x64).

    Raises:
      ValueError: no key begins with prefix; or, in one error, all keys that are missing or unexpected, and all shapes,
        sizes, dtypes and values that break a rule.
      TypeError: an argument of another type.
      ModuleNotFoundError: a path is given, but safetensors is not installed.

    Example:
      >>> checkpoint = {"fc.weight": np.ones((2, 3)), "bn.weight": np.ones(2), "bn.bias": np.zeros(2),
      ...               "bn.running_mean": np.array([1.0, 2.0]), "bn.running_var": np.ones(2),
      ...               "bn.num_batches_tracked": np.array(7)}
      >>> params, state, running, eps = from_torch(checkpoint, prefix="bn.", momentum=0.1)
      >>> print(state.mean, state.count, running.new_weight, running.unbiased, eps)
      [1. 2.] 7 0.1 True 1e-05
    """
    fn = "from_torch"
    axes = axes_of(fn, names)
    running = Ema.torch(None if momentum is None else number_of(fn, "momentum", momentum))
    entries, others = _torch_entries(fn, tensors, prefix)
    if not entries and (affine is not False or track_running_stats):
        refuse_empty(fn, prefix, others, ".")
    has_bias = affine if bias is None or affine is False else bias
    track = track_running_stats
    asked: dict[str, bool | None] = dict(zip(_TORCH, (affine, has_bias, track, track, track), strict=True))
    arrays, problems = read(entries, asked, _torch_needs(entries, asked, momentum), _COUNTER, ("running_var",))
    if prefix and (dotted := [key for key in entries if key.startswith(".")]):
        problems.append(f'the prefix lacks its dot: prefix="{prefix}." has {", ".join(key[1:] for key in dotted)}')
    counter = arrays.pop(_COUNTER, None)
    problems += shape_problems(fn, arrays, axes, sizes)
    count = count_of(_COUNTER, counter, problems)
    state = None if problems else state_of(arrays, _STATISTICS, axes, count, by_updates=momentum is None)
    if state is not None and momentum is None and state.count != count:
        problems.append(
            f"{_COUNTER} is 0, but the statistics are not 0 and 1: with momentum=None BatchNorm would forget them at "
            "its next update, while InstanceNorm (which never counts) would keep them for ever: pass momentum=0 for it"
        )
    eps = _torch_eps(fn, eps, entries, arrays, problems)
    refuse(fn, prefix, axes, problems)
    return Imported(affine_of(arrays, "weight", axes), state, running, eps)


def _torch_entries(fn: str, tensors, prefix: str) -> tuple[dict[str, Any], list[str]]:
    """What stands under the prefix, keyed by the rest of its key, and the keys that stand elsewhere."""
    if not isinstance(prefix, str):
        raise TypeError(f'{fn}: prefix must be a string such as "layer1.0.bn1."; got {prefix!r}.')
    if isinstance(tensors, (str, os.PathLike)):
        tensors = _open_safetensors(fn, os.fspath(tensors), [prefix + key for key in _TORCH])
    if not isinstance(tensors, Mapping) or not all(isinstance(key, str) for key in tensors):
        raise TypeError(
            f"{fn}: tensors must be a state_dict, with a string for each array, or the path of a .safetensors file; "
            f"got {kind_of(tensors)}."
        )
    inside = {key[len(prefix) :]: value for key, value in tensors.items() if key.startswith(prefix)}
    return inside, [key for key in tensors if not key.startswith(prefix)]


def _open_safetensors(fn: str, path: str, wanted: list[str]) -> dict[str, Any]:
    """All keys of a file, the wanted ones with their arrays and the others with None."""
    if not path.endswith(".safetensors"):
        raise ValueError(
            f"{fn}: {path!r} is no .safetensors file. What torch.save wrote is read by torch.load(path, "
            "weights_only=True): pass the state_dict in it."
        )
    require(f"{fn} of a .safetensors file", "lab", "safetensors")
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return {key: file.get_tensor(key) if key in wanted else None for key in file.keys()}  # noqa: SIM118


def _torch_needs(entries: Mapping[str, Any], asked: Mapping[str, bool | None], momentum: float | None) -> set[str]:
    """The keys that must be there: those asked for, and those that others are nothing without."""
    needed = {key for key, wish in asked.items() if wish and key != _COUNTER}
    if "bias" in entries:
        needed.add("weight")
    if not entries.keys().isdisjoint((*_STATISTICS, _COUNTER)):
        # Checkpoints from before PyTorch 0.4.1 lack the counter, and only the average over updates rests on it.
        needed |= {*_STATISTICS} if momentum is not None else {*_STATISTICS, _COUNTER}
    return needed


def _torch_eps(fn: str, eps, entries: Mapping[str, Any], arrays: Mapping[str, np.ndarray], problems: list[str]):
    """The eps that the layer has in PyTorch, as a float."""
    may_be_rms = entries.keys() <= {"weight"}
    if eps is ... and may_be_rms:
        problems.append(
            "eps must be given: without bias and statistics this may be RMSNorm, whose default is eps=None, or another "
            "norm, whose default is eps=1e-5"
        )
    if eps is None and not may_be_rms:
        problems.append("eps=None is a default of RMSNorm, which has neither bias nor statistics")
    if eps is None:  # PyTorch takes the spacing of the dtype that it computes in: float32 for half precision
        double = "weight" in arrays and arrays["weight"].dtype == np.float64
        return float(np.finfo(np.float64 if double else np.float32).eps)
    return 1e-5 if eps is ... else number_of(fn, "eps", eps)


def from_flax(
    variables: Mapping[Any, Any],
    *,
    prefix: str | Iterable[Any] = "",
    names: str | Iterable[str] = "C",
    momentum: float = 0.99,
    eps: float | None = None,
    sizes: Mapping[str, int] | None = None,
    zero_centered: bool = False,
) -> Imported:
    """Returns one norm of a Flax checkpoint: batch, layer, group, instance or RMS norm of linen or nnx.

    Args:
      variables: linen's variables, {"params": …, "batch_stats": …}; or an `nnx.State`, or nested dicts, in which scale,
        bias, mean and var of a norm stand together. Boxes of metadata are opened. What normjax's modules count is read
        too: linen's "batch_counts", count and weight of nnx.
      prefix: the path of the norm within each collection, such as "Encoder_0/BatchNorm_0", or its parts in a tuple.
      names: the axes that the arrays run along, in order.
      momentum: the share of the old value that is kept.
      eps: by default Flax's own `epsilon`: 1e-5 where there are statistics (BatchNorm), 1e-6 where there are none. For
        a BatchNorm pass its statistics too, or eps.
      sizes: what size each of some names must have, such as {"C": 64}.
      zero_centered: whether the scale is stored as γ − 1, as normjax's modules do with zero_centered=True.

    Returns:
      `Imported`, with copies on the default device. Parameters keep their dtype. Flax does not count its updates: the
      count is 1, or 0 where the statistics are still 0 and 1. Where normjax's modules counted them, go on with the
      `running` that they were built with, not the one that comes back, which is Flax's.

    Raises:
      ValueError: nothing stands at prefix; or, listed in one error, what is missing or unexpected there, and the
        shapes, sizes, dtypes and values that break a rule.
      TypeError: an argument of another type.

    Example:
      >>> variables = {"params": {"bn": {"scale": jnp.ones(2), "bias": jnp.zeros(2)}},
      ...              "batch_stats": {"bn": {"mean": jnp.ones(2), "var": jnp.ones(2)}}}
      >>> params, state, running, eps = from_flax(variables, prefix="bn", momentum=0.75)
      >>> print(state.mean, running.new_weight, running.unbiased, eps)
      [1. 1.] 0.25 False 1e-05
    """
    fn = "from_flax"
    axes = axes_of(fn, names)
    running, zero_centered = (
        Ema.flax(number_of(fn, "momentum", momentum)),
        static_bool(fn, "zero_centered", zero_centered),
    )
    if not isinstance(variables, Mapping):
        raise TypeError(
            f'{fn}: variables must be a mapping such as {{"params": …, "batch_stats": …}} or nnx.state(model); '
            f"got {kind_of(variables)}."
        )
    path = tuple(prefix.strip("/").split("/")) if isinstance(prefix, str) else tuple(prefix)
    path, shown = tuple(part for part in path if part != ""), "/".join(map(str, path))
    collections = [variables[key] for key in _COLLECTIONS if isinstance(variables.get(key), Mapping)]
    entries: dict[str, Any] = {}
    for tree in collections or [variables]:
        entries |= {str(key): value for key, value in _descend(tree, path).items()}
    if not entries:
        refuse_empty(fn, shown, [key for tree in collections or [variables] for key in _paths(tree)], "/")
    tracked = not entries.keys().isdisjoint(("mean", "var"))
    counts = _COUNTS if tracked and not entries.keys().isdisjoint(_COUNTS) else ()
    needed = {"mean", "var", *counts} if tracked else set()
    arrays, problems = read(entries, dict.fromkeys((*_FLAX, *counts)), needed, "count", ("var", "weight"))
    count = count_of("count", arrays.pop("count", None), problems)
    problems += shape_problems(fn, arrays, axes, sizes)
    eps = (1e-5 if tracked else 1e-6) if eps is None else number_of(fn, "eps", eps)
    refuse(fn, shown, axes, problems)
    state = state_of(arrays, ("mean", "var"), axes, count, weight=arrays.get("weight"))
    return Imported(affine_of(arrays, "scale", axes, zero_centered), state, running, eps)


def _descend(tree: Mapping[Any, Any], path: tuple) -> Mapping[Any, Any]:
    """What stands at the path; nothing where it leads nowhere. nnx numbers the members of a list."""
    for part in path:
        if part not in tree and isinstance(part, str) and part.isdecimal():
            part = int(part)
        tree = tree[part] if part in tree and isinstance(tree[part], Mapping) else {}
    return tree


def _paths(tree: Mapping[Any, Any], path: str = "") -> list[str]:
    """The paths of all leaves."""
    below = [(f"{path}/{key}".lstrip("/"), value) for key, value in tree.items()]
    return [leaf for own, value in below for leaf in (_paths(value, own) if isinstance(value, Mapping) else [own])]


def to_flax(params: Affine | None = None, state: BatchStats | None = None, *, prefix: str = "") -> dict[str, Any]:
    """Returns Flax's variables for one norm: {"params": {"scale", "bias"}, "batch_stats": {"mean", "var"}}.

    What is None is left out. Flax counts no updates, so count and weight do not come along; nor do momentum and eps,
    which are `momentum = 1 - new_weight` and `epsilon` of its layer.

    Args:
      params: `Affine`. Where it is zero-centred Flax's scale is 1 + stored, in float32 at least.
      state: `BatchStats`.
      prefix: the path to put the norm at within each collection, such as "Encoder_0/BatchNorm_0".

    Returns:
      Nested dicts of arrays, copied, of the dtypes given.

    Raises:
      TypeError: params or state of another type, or a state below float32.

    Example:
      >>> import normjax as nj
      >>> variables = to_flax(nj.Affine.init(C=2), nj.BatchStats.init(C=2))
      >>> print(variables["params"]["scale"], variables["batch_stats"]["var"])
      [1. 1.] [1. 1.]
    """
    fn = "to_flax"
    if params is not None and not isinstance(params, Affine):
        raise TypeError(f"{fn}: params must be a normjax.Affine or None; got {kind_of(params)}.")
    given = {} if params is None else {"scale": params.scale, "bias": params.bias}
    arrays = {key: jnp.array(as_array(fn, f"params.{key}", value)) for key, value in given.items() if value is not None}
    if params is not None and params.zero_centered and "scale" in arrays:
        arrays["scale"] = 1 + arrays["scale"].astype(np.promote_types(arrays["scale"].dtype, np.float32))
    state = None if state is None else check_state(fn, state)
    statistics = {} if state is None else {"mean": jnp.array(state.mean), "var": jnp.array(state.var)}
    variables: dict[str, Any] = {"params": arrays, "batch_stats": statistics}
    for part in reversed([part for part in prefix.split("/") if part]):
        variables = {key: {part: value} if value else {} for key, value in variables.items()}
    return {key: value for key, value in variables.items() if value}
