"""What `replace` is made of: finding norms in an nnx model, and making one of them another.

A norm stays the object that it is and takes on another class and other settings. So whatever refers to it (a list, a
tuple, a second parent, a closure) has the new one, and its variables are those that a checkpoint or an optimiser knows.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from normjax._nnx_batch import BatchNorm, Norm

_KINDS = ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")
FLAX = {kind: getattr(nnx, kind) for kind in _KINDS}
_COUNTS = ("count", "weight")
_VARIABLES = ("scale", "bias", "mean", "var", *_COUNTS)


@nnx.register_variable_name("frozen_params")
class FrozenParam(nnx.Variable):
    """A parameter that is not trained: no `nnx.Param`, so that `wrt=nnx.Param` leaves it out."""


class FrozenBatchNorm(BatchNorm):
    """Batch norm that always evaluates: by its running statistics, which never move, in training and in calls too."""

    def __call__(self, x, use_running_average: bool | None = None, *, mask: jax.Array | None = None):
        """Returns x normalised by the running statistics, whatever `use_running_average` and `.train()` say."""
        return super().__call__(x, True, mask=mask)


def ours() -> dict[str, type]:
    """Our norms, by the names of Flax's; looked up late, since normjax.nnx imports this module."""
    from normjax import nnx as ours

    return {kind: getattr(ours, kind) for kind in _KINDS}


def find(model, to, only) -> dict[tuple, Any]:
    """The norms that are asked for, by path, each object once; ValueError where there is none."""
    kinds: Any = (*FLAX.values(), Norm) if to is None else (nnx.BatchNorm, BatchNorm)
    found: dict[int, tuple] = {}
    for path, node in nnx.iter_modules(model):
        if isinstance(node, kinds):
            found.setdefault(id(node), (path, node))
    wanted = nnx.filterlib.to_predicate(only)
    norms = {path: norm for path, norm in found.values() if wanted(path, norm)}
    if not norms:
        what = "norm" if to is None else "batch norm"
        left_out = (
            f"; only={only!r} leaves out {', '.join(dotted(path) for path, _ in found.values())}" if found else ""
        )
        raise ValueError(f"replace: to={to!r}: there is no {what} of flax.nnx or normjax.nnx in the model{left_out}.")
    return norms


def dotted(path: tuple) -> str:
    return ".".join(map(str, path)) or "(the model)"


def features(norm) -> int:
    """Flax's group norm does not keep it."""
    return norm.num_features if hasattr(norm, "num_features") else norm.num_groups * norm.group_size


# --- making one of them another


def _arguments(kind: type) -> list[str]:
    return list(inspect.signature(kind.__init__).parameters)


def rebuilt(norm, kind: type, **changes) -> Any:
    """A norm of that class with the settings and the variables of the given one."""
    settings = {name: getattr(norm, name) for name in _arguments(kind) if hasattr(norm, name)}
    settings |= {"num_features": features(norm), **changes}
    if "num_groups" in settings:
        settings["group_size"] = None  # Flax keeps both
    new = kind(**settings, rngs=nnx.Rngs(0))
    for name in _VARIABLES:
        if hasattr(new, name) and hasattr(norm, name) and not (name in _COUNTS and getattr(norm, name) is None):
            _set(new, name, getattr(norm, name))
    return new


def become(norm, new) -> None:
    """Makes a norm the other, in all but identity; attributes that no norm knows stay."""
    given = {*_arguments(type(norm)), *_VARIABLES}
    for name in given & (vars(norm).keys() - vars(new).keys()):
        delattr(norm, name)
    object.__setattr__(norm, "__class__", type(new))  # nnx's own would keep it as an attribute of the graph
    for name, value in vars(new).items():
        if not name.startswith("_"):
            _set(norm, name, value)


def _set(norm, name: str, value) -> None:
    setattr(norm, name, nnx.data(None) if value is None and name in _VARIABLES else value)


def never_moved(norm) -> bool:
    """Whether mean and variance are still 0 and 1; not where nobody can know."""
    return _all_are(norm.mean, 0) and _all_are(norm.var, 1)


def _all_are(variable, number: int) -> bool:
    value = variable.get_value()
    if isinstance(value, (Tracer, jax.ShapeDtypeStruct)) or not getattr(value, "is_fully_addressable", True):
        return False
    return bool(np.all(np.asarray(value) == number))


def count_as_one(norm) -> None:
    """Makes moved statistics that nothing counted, such as Flax's, rest on one update where `running` needs counts."""
    if getattr(norm, "weight", None) is not None and _all_are(norm.weight, 0) and not never_moved(norm):
        for name in _COUNTS:
            variable = getattr(norm, name)
            variable.set_value(jnp.ones_like(variable.get_value()))


def fix_parameters(norm, fixed: dict[int, FrozenParam]) -> None:
    """Makes scale and bias `FrozenParam`; what norms share they go on sharing."""
    for name in ("scale", "bias"):
        variable = getattr(norm, name)
        if isinstance(variable, nnx.Variable) and not isinstance(variable, FrozenParam):
            twin = FrozenParam.from_metadata(variable.get_value(), variable.get_metadata())
            setattr(norm, name, fixed.setdefault(id(variable), twin))
