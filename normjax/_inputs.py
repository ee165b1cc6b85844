"""What may come in: arrays, masks, numbers, flags and dtypes, and what is said of anything else."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from normjax._axes import Spec
from normjax._derivatives import DERIVATIVES

T = TypeVar("T")


def static_bool(fn: str, argument: str, value) -> bool:
    """A Python or NumPy bool as a bool; TypeError otherwise, with the cure where it is traced."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, Tracer):
        raise TypeError(
            f"{fn}: {argument} is traced, but it chooses the program: keep it out of jit's arguments, "
            f'or make it static with jax.jit(f, static_argnames="{argument}").'
        )
    raise TypeError(f"{fn}: {argument} must be a Python or NumPy bool; got {value!r}.")


def is_real_scalar(value) -> bool:
    """Whether value is one real number, traced or not; a bool is none."""
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    dtype = getattr(value, "dtype", None)
    if dtype is None or np.ndim(value):
        return False
    return jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)


def as_array(fn: str, what: str, value) -> jax.Array:
    """Numbers as a JAX array; Flax's nnx Variables are opened. TypeError for anything that holds no numbers."""
    value = value.get_value() if hasattr(value, "get_value") else value
    array, cause = None, None
    if not isinstance(value, (str, bytes)):  # JAX takes some for the name of a dtype
        try:
            array = jnp.asarray(value)
        except (TypeError, ValueError, OverflowError) as error:
            cause = error
    if array is None or not _numeric(array.dtype):
        raise TypeError(f"{fn}: {what} must be an array of numbers, not {_no_numbers(value)}.") from cause
    return array


def _no_numbers(value) -> str:
    """What it is in a value that is no array of numbers: "of dtype object", "list: it holds 'a'"."""
    kind = type(value).__name__
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return f"of dtype {value.dtype}{', which JAX lacks: convert it first' if _numeric(value.dtype) else ''}"
    if isinstance(value, (str, bytes)):
        return f"{kind}: {_short(value)}"
    if isinstance(value, int):
        return f"{kind}: it is too large for JAX; make it a float"
    if isinstance(value, (list, tuple)):
        for item in _items(value):
            if isinstance(item, int) and item.bit_length() > 31:
                return f"{kind}: it holds an integer that is too large for JAX; make it a float"
            if isinstance(item, (jax.Array, np.ndarray, np.generic)):
                if not _numeric(item.dtype):
                    return f"{kind}: it holds an array of dtype {item.dtype}"
            elif not isinstance(item, (int, float, complex)):
                return f"{kind}: it holds {_short(item)}"
        return f"{kind}: its parts differ in shape"
    return kind


def _numeric(dtype) -> bool:
    return jnp.issubdtype(dtype, np.number) or dtype == np.bool_


def _items(value) -> Iterator[Any]:
    """What nested lists and tuples hold."""
    stack = [value]
    while stack:
        top = stack.pop()
        if isinstance(top, (list, tuple)):
            stack.extend(reversed(top))
        else:
            yield top


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def kind_of(value) -> str:
    """For errors that say what came: "an array", "dict", and how to open a variable of Flax."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return "an array"
    name = type(value).__name__
    return f"{name}, a variable: pass variable.get_value()" if hasattr(value, "get_value") else name


def check_names(fn: str, what: str, names) -> None:
    """TypeError unless names is a tuple of strings, as the pytrees keep them."""
    if not (isinstance(names, tuple) and all(isinstance(name, str) for name in names)):
        raise TypeError(f'{fn}: {what}.names must be a string such as "N C" or a tuple of names; got {names!r}.')


def with_arrays(fn: str, what: str, owner: T) -> T:
    """A `Moments` or `BatchStats` whose leaves are arrays of numbers and whose names are strings."""
    check_names(fn, what, owner.names)  # type: ignore[attr-defined]
    fields = [field.name for field in dataclasses.fields(owner) if field.name != "names"]  # type: ignore[arg-type]
    arrays = {name: as_array(fn, f"{what}.{name}", getattr(owner, name)) for name in fields}
    if jnp.iscomplexobj(arrays["var"]):
        raise TypeError(f"{fn}: {what}.var is complex ({arrays['var'].dtype}); a variance is real.")
    return dataclasses.replace(owner, **arrays)  # type: ignore[type-var]


def check_one_shape(fn: str, what: str, owner, *fields: str) -> None:
    """ValueError unless the named leaves have one shape."""
    shapes = [getattr(owner, field).shape for field in fields]
    if len(set(shapes)) > 1:
        named = ", ".join(f"{field} {shape}" for field, shape in zip(fields, shapes, strict=True))
        raise ValueError(f"{fn}: the leaves of {what} must have one shape; got {named}.")


def as_input(fn: str, x) -> tuple[jax.Array, jax.Array]:
    """Returns x as an array to save, and in the statistics' dtype: float32 at least, never half precision."""
    x = as_array(fn, "x", x)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(jnp.float32)
    return x, x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)


def as_mask(spec: Spec, where):
    """`where` as a boolean array of the expanded rank; None stays None."""
    if where is None:
        return None
    where = as_array(spec.fn, "where", where)
    if where.dtype != jnp.bool_:
        raise TypeError(
            f"{spec.fn}: where must be boolean (True: the entry counts); got dtype {where.dtype} and shape "
            f"{where.shape} for x of shape {spec.shape}. Compare first, as in where=mask > 0."
        )
    fits = where.ndim == len(spec.shape) and all(w in (1, s) for w, s in zip(where.shape, spec.shape, strict=True))
    if not fits:
        raise ValueError(
            f"{spec.fn}: where has shape {where.shape}, but x has shape {spec.shape}; it needs x's rank, "
            "and each size 1 or x's."
        )
    return spec.expand_mask(where)


def as_eps(spec: Spec, eps, dtype) -> jax.Array:
    """`eps` in the statistics' dtype, with the expanded rank."""
    if not is_real_scalar(eps):
        raise TypeError(f"{spec.fn}: eps must be a real scalar; got {eps!r}.")
    if not isinstance(eps, Tracer):
        try:
            known = float(eps)
        except OverflowError:
            known = math.inf
        if not 0 <= known < math.inf:
            raise ValueError(
                f"{spec.fn}: eps={eps!r} must be at least 0 and finite; it is added to the variance, inside the root."
            )
        eps = eps if hasattr(eps, "dtype") else known
    return jnp.reshape(jnp.asarray(eps).astype(dtype), [1] * len(spec.expanded))


def as_dtype(fn: str, dtype, *, complex_too: bool = False):
    """A floating-point (or complex) dtype, as wide as JAX's x64 setting lets it be; TypeError for any other."""
    try:
        given = jax.dtypes.canonicalize_dtype(dtype)
    except TypeError:
        given = None
    if given is None or not jnp.issubdtype(given, jnp.inexact if complex_too else jnp.floating):
        kind = "floating-point or complex" if complex_too else "floating-point"
        raise TypeError(f"{fn}: dtype={(dtype if given is None else given.name)!r} must be a {kind} dtype.")
    return given


def output_dtype(fn: str, dtype, x):
    """The dtype of y: x's own by default, complex exactly where x is."""
    if dtype is None:
        return x.dtype
    if not jnp.iscomplexobj(x):
        return as_dtype(fn, dtype)
    given = as_dtype(fn, dtype, complex_too=True)
    if not jnp.issubdtype(given, jnp.complexfloating):
        raise TypeError(f"{fn}: dtype={given.name!r} must be a complex dtype, since x is {x.dtype}.")
    return given


def check_sizes(fn: str, sizes: dict[str, Any]) -> tuple[int, ...]:
    """The shape that keyword sizes give; TypeError for a size that is no non-negative integer."""
    for name, size in sizes.items():
        if not name.isidentifier():
            raise ValueError(f"{fn}: {name!r} is not a name; each axis is an argument of its own, as in N=8, C=64.")
        if isinstance(size, bool) or not hasattr(size, "__index__") or size.__index__() < 0:
            raise TypeError(f"{fn}: {name}={size!r}: the size of an axis must be a non-negative integer.")
    return tuple(size.__index__() for size in sizes.values())


def check_derivative(fn: str, derivative: str, x) -> str:
    """The rule to use: complex input always takes the plain formula."""
    if not isinstance(derivative, str) or derivative not in DERIVATIVES:
        raise ValueError(f"{fn}: derivative={derivative!r} is not one of {', '.join(map(repr, DERIVATIVES))}.")
    return "autodiff" if jnp.iscomplexobj(x) else derivative
