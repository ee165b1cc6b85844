"""What the Flax modules of linen.py and nnx.py share: their arguments in the words of the pure functions.

A module is anything with Flax's attributes (`epsilon`, `dtype`, `axis_index_groups`, …) and ours.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.dtypes import canonicalize_dtype
from jax import lax
from jax.core import Tracer

from normjax._axes import resolve, unbound_error
from normjax._batch_norm import batch_norm
from normjax._flax_axes import Axes
from normjax._grammar import quote
from normjax._inputs import static_bool
from normjax._normalize import Affine, normalize
from normjax._running import BatchStats, Cumulative, Ema, check_unbiased


class UnboundAxisError(ValueError, NameError):
    """A mapped axis that is not bound: NameError is what Flax raises."""


class FeatureShapeError(ValueError, TypeError):
    """Parameters or statistics of another size than the features of x: TypeError is what Flax raises."""


def output_dtype(x, scale, bias, dtype):
    """The dtype of y by Flax's rule: the one asked for, or what x and the parameters promote to."""
    return canonicalize_dtype(x, scale, bias, dtype=dtype)


def promoted_dtype(promote, x, *others, dtype):
    """The same where a function of the user's promotes: it is asked for dtypes alone, and no value is cast by it."""

    def ask(given):
        promoted = promote(given, dtype=dtype)
        return jnp.zeros((), output_dtype(promoted[0], promoted[-2], promoted[-1], dtype))

    return jax.eval_shape(ask, (x, *others)).dtype


def _input(x, out, asked):
    """x, widened where the answer is asked for in float64 or is complex: half precision is widened in the core."""
    x = jnp.asarray(x)
    complex_too = jnp.issubdtype(out, jnp.complexfloating) and not jnp.iscomplexobj(x)
    return x.astype(out) if complex_too or (asked is not None and jnp.finfo(out).bits > 32) else x


def _where(fn: str, mask, shape: tuple[int, ...]):
    """A mask as the core takes it: boolean, and of the rank of x. Flax's may have fewer axes, and be of integers."""
    if mask is None:
        return None
    mask = jnp.asarray(mask)
    if not (mask.dtype == jnp.bool_ or jnp.issubdtype(mask.dtype, jnp.integer)):
        raise TypeError(
            f"{fn}: mask must be boolean, or integers 0 and 1; got {mask.dtype} of shape {mask.shape} for x of shape "
            f"{shape}. Entries count or they do not, without weights: compare first, as in mask > 0."
        )
    sizes = (1,) * (len(shape) - mask.ndim) + mask.shape
    if len(sizes) > len(shape) or any(m not in (1, s) for m, s in zip(sizes, shape, strict=True)):
        raise ValueError(f"{fn}: mask of shape {mask.shape} does not broadcast to x of shape {shape}.")
    return jnp.reshape(mask.astype(jnp.bool_), sizes)


def _along(fn: str, axes: Axes, what: str, array):
    if array is None or array.shape == axes.shape:
        return array
    if array.size != math.prod(axes.shape):
        raise FeatureShapeError(
            f"{fn}: {what} has shape {array.shape}, but x has sizes {axes.shape} along its features "
            f'{quote(axes.features)} (layout "{axes.layout}").'
        )
    return jnp.reshape(array, axes.shape)


def _affine(fn: str, axes: Axes, scale, bias, zero_centered: bool) -> Affine:
    scale, bias = _along(fn, axes, "scale", scale), _along(fn, axes, "bias", bias)
    return Affine(scale, bias, axes.features, zero_centered)


def centred(initializer):
    """An initialiser of γ as one of the stored γ − 1; boxes with metadata keep it."""

    @functools.wraps(initializer)
    def init(*args, **kwargs):
        return jax.tree.map(lambda gamma: gamma - 1, initializer(*args, **kwargs))

    return init


def less_one(gamma):
    """The stored γ − 1."""
    return gamma - 1


def _check_pooled(fn: str, axes: Axes, shape: tuple[int, ...]) -> None:
    if not axes.names:
        raise ValueError(
            f"{fn}: x of shape {shape} has no axis left to pool: every entry would be a group of its own, and y the "
            "bias. Call it on a batch, or name the mapped axis to pool as axis_name."
        )
    for name in axes.mapped:
        try:
            lax.axis_size(name)
        except NameError:
            spec = resolve(fn, axes.layout, axes.names, shape)
            raise UnboundAxisError(str(unbound_error(spec, name))) from None


def plain_bool(fn: str, value) -> bool:
    """use_running_average; a traced one is a TypeError."""
    return static_bool(fn, "use_running_average", value) if isinstance(value, Tracer) else bool(value)


# --- running statistics


def moved_by(module: Any) -> Ema | Cumulative:
    """How the running statistics move: by `running`, or else by Flax's `momentum`."""
    if module.running is None:
        return Ema.flax(module.momentum)
    check_unbiased(type(module).__name__, module.running, None)
    return module.running


def needs_counts(module: Any) -> bool:
    """Whether the running statistics rest on what they have seen."""
    running = moved_by(module)
    return isinstance(running, Cumulative) or running.debias


def first_statistics(shape, dtype, out) -> BatchStats:
    """Mean 0, variance 1 and nothing seen: of `dtype`, in float32 at least; the mean is complex where y is."""
    dtype = jnp.promote_types(jnp.float32, dtype)
    if jnp.issubdtype(out, jnp.complexfloating):
        dtype = jnp.promote_types(jnp.complex64, dtype)
    start = BatchStats.init(dtype=dtype, features=math.prod(shape))
    along = lambda leaf: jnp.reshape(leaf, shape)  # noqa: E731
    return BatchStats(along(start.mean), along(start.var), start.count, along(start.weight))


def missing_statistics(collections) -> str:
    """What a linen module adds to Flax's error where it finds no statistics."""
    cure = (
        " A checkpoint of Flax's has no batch_counts; to count its statistics as one update, add "
        'jax.tree.map(jnp.ones_like, model.init(…)["batch_counts"]).'
    )
    return (
        f"normjax.linen.BatchNorm keeps its statistics in the collections {', '.join(collections)}: pass what init or "
        f"training returned, and make them mutable in training.{cure if 'batch_counts' in collections else ''}"
    )


def statistics(arrays: dict[str, Any]) -> BatchStats:
    """What a module holds as `BatchStats`, nothing seen where it keeps no counts."""
    return BatchStats(
        **{"count": jnp.zeros((), jnp.int32), "weight": jnp.zeros(arrays["mean"].shape, jnp.float32), **arrays}
    )


def _running(fn: str, axes: Axes, x, held: BatchStats) -> BatchStats:
    """The statistics that a module keeps, in float32 at least (a checkpoint may hold less), complex where x is."""
    mean, var = (jnp.asarray(array) for array in (held.mean, held.var))
    mean, var = (array.astype(np.promote_types(array.dtype, np.float32)) for array in (mean, var))
    if jnp.iscomplexobj(x):
        mean = mean.astype(np.promote_types(mean.dtype, np.complex64))
    arrays = {"mean": mean, "var": var, "weight": held.weight}
    arrays = {name: _along(fn, axes, name, array) for name, array in arrays.items()}
    return BatchStats(**arrays, count=held.count, names=axes.features)


# --- the two calls


def normalized(module: Any, axes: Axes, x, scale, bias, mask, out, *, center: bool = True):
    """`normalize` as the module says, for every norm but batch norm."""
    fn = type(module).__name__
    _check_pooled(fn, axes, x.shape)
    y, _ = normalize(
        _input(x, out, module.dtype),
        _affine(fn, axes, scale, bias, module.zero_centered),
        layout=axes.layout,
        axis_names=axes.names,
        center=center,
        where=_where(fn, mask, x.shape),
        eps=module.epsilon,
        dtype=out,
        axis_index_groups=module.axis_index_groups if axes.mapped else None,
        derivative=module.derivative,
    )
    return y


def batch_normalized(
    module: Any, axes: Axes, x, scale, bias, held: BatchStats, mask, out, *, frozen, starting: bool = False
) -> tuple[jax.Array, BatchStats]:
    """`batch_norm` as the module says; also the new statistics, with the shapes of those held.

    While a module is initialised, no mapped axis is touched and the statistics stay as they are.
    """
    fn = type(module).__name__
    frozen = plain_bool(fn, frozen)
    if starting:
        axes, frozen = axes.local(), frozen or not axes.pooled
    if not frozen:
        _check_pooled(fn, axes, x.shape)
    x = _input(x, out, module.dtype)
    y, state = batch_norm(
        x,
        _affine(fn, axes, scale, bias, module.zero_centered),
        _running(fn, axes, x, held),
        layout=axes.layout,
        axis_names=axes.names or ("example",),  # not looked at in evaluation, but the grammar wants one
        train=not (frozen or starting),
        use_batch_stats=starting and not frozen,
        where=_where(fn, mask, x.shape),
        eps=module.epsilon,
        dtype=out,
        running=moved_by(module),
        axis_index_groups=module.axis_index_groups if axes.mapped and not frozen else None,
        derivative=module.derivative,
    )
    if frozen or starting or state is None:
        return y, held
    mean, var, weight = (jnp.reshape(leaf, held.mean.shape) for leaf in (state.mean, state.var, state.weight))
    return y, BatchStats(mean, var, state.count, weight)
