"""What the three pytrees (`Affine`, `BatchStats`, `Moments`) share: registration, static names, a readable repr."""

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np
from jax import export

T = TypeVar("T")

_classes: list[type] = []
_known_to_flax: set[type] = set()


@dataclass_transform(frozen_default=True, eq_default=False)
def pytree(static: Iterable[str]) -> Callable[[type[T]], type[T]]:
    """Returns a decorator: a frozen dataclass registered with JAX and `jax.export`; `static` fields are no leaves.

    Nothing is validated when an instance is built or unflattened, since a transform may put anything in a leaf
    (tracers, None, the ints of `in_axes`, PartitionSpecs); shapes and names are checked where they are used.
    """
    static = tuple(static)

    def decorate(cls: type[T]) -> type[T]:
        cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
        data = [field.name for field in dataclasses.fields(cls) if field.name not in static]  # type: ignore[arg-type]
        jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=list(static))
        export.register_pytree_node_serialization(
            cls,
            serialized_name=f"normjax.{cls.__name__}",
            serialize_auxdata=lambda aux: json.dumps(aux).encode(),
            deserialize_auxdata=lambda raw: _as_static(json.loads(raw)),
        )
        _classes.append(cls)
        return cls

    return decorate


def _as_static(aux: list) -> tuple:
    return tuple(tuple(part) if isinstance(part, list) else part for part in aux)


def as_names(names: Any) -> Any:
    """`"N C"` or an iterable of names as a tuple; anything else as it came (checked at use)."""
    if isinstance(names, str):
        return tuple(names.split())
    return tuple(names) if isinstance(names, Iterable) else names


def settle(self: Any) -> None:
    """Ends the construction of an instance: its names become a tuple, and Flax, once imported, learns its class."""
    object.__setattr__(self, "names", as_names(self.names))
    if type(self) not in _known_to_flax:
        teach_flax()


def teach_flax() -> None:
    """Registers the pytrees with `flax.serialization` where Flax is imported; importing it here would cost a second."""
    serialization = sys.modules.get("flax.serialization")
    if serialization is None or not hasattr(serialization, "register_serialization_state"):
        return
    for cls in _classes:
        if cls not in _known_to_flax:
            _known_to_flax.add(cls)
            serialization.register_serialization_state(cls, _to_state_dict, _from_state_dict, override=True)


def _present(instance: Any) -> list[str]:
    """The names of the leaf fields that hold something: a scale or bias that a layer lacks is None."""
    children, _ = jax.tree_util.tree_flatten_with_path(instance, is_leaf=lambda node: node is not instance)
    return [path[0].name for path, child in children if child is not None]


def _to_state_dict(instance: Any) -> dict[str, Any]:
    from flax import serialization

    return {name: serialization.to_state_dict(getattr(instance, name)) for name in _present(instance)}


def _from_state_dict(instance: Any, state: dict[str, Any]) -> Any:
    from flax import serialization

    expected, given = set(_present(instance)), set(state)
    if expected != given:
        raise ValueError(
            f"{type(instance).__name__}: the state dict to restore has the fields {sorted(given)}, "
            f"but the target has {sorted(expected)}; build the target as the saved one was built."
        )
    restored = {
        name: serialization.from_state_dict(getattr(instance, name), value, name=name) for name, value in state.items()
    }
    return dataclasses.replace(instance, **restored)


def _show_array(array: Any) -> str:
    """`float32[64]`, and a scalar that can be read `int32(3)`."""
    if array.shape == () and isinstance(array, (jax.Array, np.ndarray, np.generic)):
        try:
            return f"{array.dtype}({np.asarray(array)!s})"
        except (RuntimeError, TypeError, ValueError):  # traced, deleted, random keys, on other processes
            pass
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def show(self: Any) -> str:
    """One line with each leaf's dtype and shape, a scalar's value, and the names."""
    parts = []
    for field in dataclasses.fields(self):
        value = getattr(self, field.name)
        if field.name == "names":
            parts.append(f"names={' '.join(map(str, value))!r}" if isinstance(value, tuple) else f"names={value!r}")
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            parts.append(f"{field.name}={_show_array(value)}")
        else:
            parts.append(f"{field.name}={value!r}")
    return f"{type(self).__name__}({', '.join(parts)})"
