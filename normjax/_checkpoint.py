"""One norm's arrays out of a checkpoint, and what is said where they are none: what the readers of convert.py share."""

import difflib
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from normjax._grammar import ELLIPSIS, axes_phrase, parse_names, quote
from normjax._inputs import is_real_scalar
from normjax._normalize import Affine
from normjax._running import BatchStats

_SHOWN = 8


def axes_of(fn: str, names) -> tuple[str, ...]:
    """The axes that arrays run along."""
    axes = parse_names(fn, names, "names")
    if ELLIPSIS in axes:
        raise ValueError(f'{fn}: names="{" ".join(axes)}": each axis needs a name of its own; "..." is none.')
    return axes


def number_of(fn: str, argument: str, value) -> float:
    """A finite number of at least 0 as a float."""
    if not is_real_scalar(value):
        raise TypeError(f"{fn}: {argument} must be a number; got {value!r}.")
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{fn}: {argument}={value!r} must be at least 0 and finite.")
    return float(value)


def read(entries: Mapping[str, Any], asked: Mapping[str, bool | None], needed: set[str], counter: str, real: tuple):
    """The arrays, and what is wrong; `asked` has each key that a norm can have: False where it must not be there.

    Those of `real` must be real and at least 0; the counter may be anything.
    """
    allowed = [key for key, wish in asked.items() if wish is not False]
    problems, arrays = [], {}
    if missing := [key for key in allowed if key in needed and key not in entries]:
        problems.append(f"missing: {', '.join(missing)}")
    if unexpected := [key for key in entries if key not in allowed]:
        rest = f" and {len(unexpected) - _SHOWN} more" if len(unexpected) > _SHOWN else ""
        problems.append(f"unexpected: {', '.join(unexpected[:_SHOWN])}{rest}")
    for key in (key for key in allowed if key in entries):
        try:
            array = _as_numpy(entries[key])
        except (TypeError, ValueError, RuntimeError) as error:
            problems.append(f"{key} is no array: {error}")
            continue
        arrays[key] = array
        if key != counter:
            problems += _value_problems(key, array, key in real)
    return arrays, problems


def _value_problems(key: str, array: np.ndarray, real: bool) -> list[str]:
    if not jnp.issubdtype(array.dtype, jnp.floating if real else jnp.inexact):
        return [f"{key} must be of a floating-point dtype, not {array.dtype}"]
    problems = [f"{key} must be at least 0, not {array.min():g}"] if real and np.any(array < 0) else []
    with np.errstate(over="ignore"):
        kept = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    lost = array[np.isfinite(array) & ~np.isfinite(kept)]
    if lost.size:
        problems.append(f"{key}: {lost[0]:g} overflows {kept.dtype}; enable jax_enable_x64 to read it")
    return problems


def _as_numpy(value) -> np.ndarray:
    """An array of NumPy or JAX, a tensor of PyTorch, or an array in a box of Flax's, as NumPy's."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # which NumPy does not know; float32 holds all its values
            return np.asarray(value.float()).astype(jnp.bfloat16)
    value = value.unbox() if hasattr(value, "unbox") else value
    value = value.get_value() if hasattr(value, "get_value") else value
    array = np.asarray(value)
    if not jnp.issubdtype(array.dtype, jnp.number):
        raise TypeError(f"{type(value).__name__} of dtype {array.dtype}")
    return array


def shape_problems(fn: str, arrays: Mapping[str, np.ndarray], axes: tuple[str, ...], sizes) -> list[str]:
    """Where the shapes are not those of `axes`, not of the sizes asked for, or not all one."""
    sizes = {} if sizes is None else dict(sizes)
    if unknown := [name for name in sizes if name not in axes]:
        raise ValueError(f"{fn}: sizes has {quote(unknown)}, but names are {quote(axes)}.")
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for key, array in arrays.items():
        by_shape.setdefault(array.shape, []).append(key)
    problems = []
    for shape, keys in by_shape.items():
        has = f"{', '.join(keys)}: shape {shape}"
        if len(shape) != len(axes):
            problems.append(f'{has}, but names="{" ".join(axes)}" is {axes_phrase(len(axes))}')
            continue
        for name, size in zip(axes, shape, strict=True):
            if sizes.get(name, size) != size:
                problems.append(f"{has}, but {name} must have size {sizes[name]}")
    if len(by_shape) > 1:
        different = ", ".join(f"{' and '.join(keys)} {shape}" for shape, keys in by_shape.items())
        problems.append(f"shapes differ: {different}")
    return problems


def refuse(fn: str, prefix: str, axes: tuple[str, ...], problems: list[str]) -> None:
    """One error for all that is wrong."""
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ValueError(f'{fn}: at prefix="{prefix}" stands no norm along names="{" ".join(axes)}":{lines}')


def refuse_empty(fn: str, prefix: str, keys: list[str], separator: str) -> NoReturn:
    """The error where nothing has the prefix."""
    torch = separator == "."
    end, advice = (".", " A norm that has no arrays: affine=False and eps=1e-5, say.") if torch else ("", "")
    places = {key.rpartition(separator)[0] + end for key in keys if separator in key}
    near = sorted(place for place in places if place.endswith(prefix)) if prefix else []
    near = near or difflib.get_close_matches(prefix, sorted(places), cutoff=0.5)
    hint = f" Near it: {', '.join(map(repr, near[:_SHOWN]))}." if near else ""
    raise ValueError(f'{fn}: nothing stands at prefix="{prefix}" among {len(keys)} arrays.{hint}{advice}')


def affine_of(arrays: Mapping[str, np.ndarray], scale: str, axes: tuple[str, ...], zero_centered: bool = False):
    """The parameters, or None where there are none."""
    copies = {key: jnp.array(array) for key, array in arrays.items() if key in (scale, "bias")}
    return Affine(copies.get(scale), copies.get("bias"), axes, zero_centered) if copies else None


def state_of(
    arrays: Mapping[str, np.ndarray], keys: tuple[str, str], axes, count: int | None, *, by_updates=False, weight=None
) -> BatchStats | None:
    """The statistics as a state of float32 at least. Where nothing counted them, other than 0 and 1 are one update."""
    if keys[0] not in arrays:
        return None
    mean, var = (jnp.array(arrays[key].astype(np.promote_types(arrays[key].dtype, np.float32))) for key in keys)
    seen = max(count or 0, int(jnp.any(mean != 0) | jnp.any(var != 1)))
    if weight is None or not np.any(weight):
        weight = np.full(mean.shape, seen if by_updates else min(seen, 1))
    return BatchStats(mean, var, jnp.int32(seen), jnp.array(weight, jnp.float32), axes)


def count_of(key: str, counter: np.ndarray | None, problems: list[str]) -> int | None:
    """The number of updates, None where the checkpoint does not say."""
    if counter is None or (counter.shape == () and 0 <= counter < 2**31 and counter == int(counter)):
        return None if counter is None else int(counter)
    problems.append(f"{key} must be one integer from 0 to 2³¹ − 1, not {counter.dtype} {counter.tolist()}")
    return None
