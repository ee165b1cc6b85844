"""Running statistics as immutable state: `BatchStats`, how they move (`Ema`, `Cumulative`), `update`, `pool_stats`.

One step:  r ← r + (a/w′) (batch − r).   Plain Ema: a = α, w′ = 1.   Debiased: a = α, w′ = (1−α) w + α.
Cumulative by entries: a = m, w′ = w + m;  by updates: a = 1, w′ = w + 1.   What is stored is what evaluation uses.
A feature that saw no entry stays as it was.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from normjax import _mapped
from normjax._axes import Spec
from normjax._grammar import in_another_form, parse_names, quote
from normjax._inputs import as_dtype, check_one_shape, check_sizes, is_real_scalar, kind_of, static_bool, with_arrays
from normjax._moments import Moments, checked_moments
from normjax._pytree import pytree, settle, show
from normjax._sharding import placed_as


@pytree(static=["names"])
class BatchStats:
    """Running statistics of a batch norm: a pytree, state rather than parameters.

    Attributes:
      mean: running mean along `names`, float32 at least.
      var: running variance, shape of mean.
      count: int32 scalar, the updates that saw at least one entry.
      weight: float32, shape of mean: what the averages rest on (0: nothing yet).
      names: the layout axes that mean runs along, in order (static).
    """

    mean: Any
    var: Any
    count: Any
    weight: Any
    names: tuple[str, ...] = ()

    __post_init__ = settle
    __repr__ = show

    @classmethod
    def init(cls, *, dtype=jnp.float32, **sizes: int) -> "BatchStats":
        """Returns mean 0, variance 1, count 0, weight 0.

        Args:
          dtype: of the mean (the variance has its real dtype); float32 at least.
          **sizes: the axes in order, such as C=64.

        Raises:
          TypeError: a dtype below float32, or a size that is no integer.

        Example:
          >>> BatchStats.init(C=64)
          BatchStats(mean=float32[64], var=float32[64], count=int32(0), weight=float32[64], names='C')
        """
        fn = "BatchStats.init"
        shape, dtype = check_sizes(fn, sizes), as_dtype(fn, dtype, complex_too=True)
        _check_precision(fn, "dtype", dtype)
        return cls(
            jnp.zeros(shape, dtype),
            jnp.ones(shape, jnp.finfo(dtype).dtype),
            jnp.zeros((), jnp.int32),
            jnp.zeros(shape, jnp.float32),
            tuple(sizes),
        )


_KEPT = "it is the share of the old value that is kept, one minus the weight of the new batch"


def _check_share(fn: str, argument: str, value, meaning: str) -> None:
    """Raises unless value is a number between 0 and 1; one that is traced is taken as it is."""
    if isinstance(value, Tracer):
        return
    if not is_real_scalar(value):
        raise TypeError(f"{fn}: {argument} must be a number between 0 and 1; got {value!r}.")
    if not 0 <= np.asarray(value) <= 1:
        raise ValueError(f"{fn}: {argument}={value!r} must lie between 0 and 1; {meaning}.")


@dataclasses.dataclass(frozen=True)
class Ema:
    """Exponential moving average.

    Attributes:
      new_weight: α, the weight of the new batch (PyTorch's momentum, one minus Flax's); may be traced.
      unbiased: stores m/(m−1) times the batch variance, m over all devices; the forward never does.
      debias: divides by 1 − (1−α)^t at every step, so that the start values weigh nothing.
    """

    new_weight: Any = 0.1
    unbiased: bool = False
    debias: bool = False

    def __post_init__(self):
        static_bool("Ema", "unbiased", self.unbiased)
        static_bool("Ema", "debias", self.debias)
        _check_share("Ema", "new_weight", self.new_weight, "it is the weight of the new batch")

    @classmethod
    def torch(cls, momentum: float | None = 0.1) -> "Ema | Cumulative":
        """PyTorch's `momentum`: the weight of the new batch, unbiased variance; None averages over all updates."""
        if momentum is None:
            return Cumulative(by="updates", unbiased=True)
        _check_share("Ema.torch", "momentum", momentum, "in PyTorch it is the weight of the new batch")
        return cls(momentum, unbiased=True)

    @classmethod
    def flax(cls, momentum: float = 0.99) -> "Ema":
        """Flax's `momentum`: the share of the old value that is kept."""
        _check_share("Ema.flax", "momentum", momentum, _KEPT)
        return cls(1 - momentum)

    @classmethod
    def keras(cls, momentum: float = 0.99) -> "Ema":
        """Keras' `momentum`: the share of the old value that is kept."""
        _check_share("Ema.keras", "momentum", momentum, _KEPT)
        return cls(1 - momentum)

    @classmethod
    def haiku(cls, decay_rate: float = 0.999) -> "Ema":
        """Haiku's `decay_rate`: the share of the old value that is kept, with zero debiasing."""
        _check_share("Ema.haiku", "decay_rate", decay_rate, _KEPT)
        return cls(1 - decay_rate, debias=True)


@dataclasses.dataclass(frozen=True)
class Cumulative:
    """Average over everything seen so far.

    Attributes:
      by: "entries" weighs each batch by how many entries it pooled, "updates" weighs all alike.
      unbiased: as for `Ema`.
    """

    by: str = "entries"
    unbiased: bool = False

    def __post_init__(self):
        static_bool("Cumulative", "unbiased", self.unbiased)
        if self.by not in ("entries", "updates"):
            raise ValueError(f'Cumulative: by={self.by!r} must be "entries" or "updates".')


def _check_precision(fn: str, what: str, dtype) -> None:
    if not jnp.issubdtype(dtype, jnp.inexact) or jnp.finfo(dtype).bits < 32:
        raise TypeError(
            f"{fn}: {what} is {dtype}; running statistics need float32 or more, since small steps are lost below. "
            "Use BatchStats.init(dtype=jnp.float32)."
        )


_MADE_BY = 'Start from BatchStats.init(C=64), or wrap arrays as BatchStats(mean, var, count, weight, names="C").'


def check_state(fn: str, state, what: str = "state") -> BatchStats:
    """The state with array leaves; raises unless it is a `BatchStats` of float32 or more of one shape."""
    if not isinstance(state, BatchStats):
        pair = isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], BatchStats)
        raise TypeError(
            f"{fn}: {what} must be a normjax.BatchStats; got {kind_of(state)}. "
            + ("It is what a norm returns, y and the state: pass the second." if pair else _MADE_BY)
        )
    state = with_arrays(fn, what, state)
    for name in ("mean", "var", "weight"):
        _check_precision(fn, f"{what}.{name}", getattr(state, name).dtype)
    check_one_shape(fn, what, state, "mean", "var", "weight")
    return state


def stack_cure(state: BatchStats) -> str:
    """What to do with a state that has one axis more than its names: replicas stacked by pmap, say."""
    if state.mean.ndim != len(state.names) + 1:
        return ""
    names = " ".join(("device", *state.names))
    return (
        " If the further axis holds replicas (restored from pmap, say), pool them: "
        f'pool_stats(BatchStats(mean, var, count, weight, names="{names}"), "device"); to train them on inside '
        "shard_map, take each device's own: jax.tree.map(lambda leaf: leaf[0], state)."
    )


def _says(names: tuple[str, ...]) -> str:
    """What a shape should agree with, and the cure where names were forgotten."""
    return f"its names are {quote(names)}" if names else 'it names no axis: a scalar (pass names, as in names="C")'


def check_kept(spec: Spec, state: BatchStats) -> None:
    """Raises ValueError where the state runs along an axis that is pooled."""
    if pooled := [name for name in state.names if spec.is_reduced(name)]:
        raise ValueError(
            f'{spec.fn}: state runs along {quote(pooled)}, which axis_names="{" ".join(spec.axis_names)}" pools; '
            "running statistics run along kept axes."
        )


def check_unbiased(fn: str, running, m: int | None) -> None:
    """Raises ValueError where m is known to be 1 and an unbiased variance is asked for."""
    if not isinstance(running, (Ema, Cumulative)):
        raise TypeError(
            f"{fn}: running must be an Ema or a Cumulative; got {kind_of(running)}. "
            "Write the weight of the new batch as Ema(0.1), Flax's momentum as Ema.flax(0.9)."
        )
    if running.unbiased and m == 1:
        raise ValueError(
            f"{fn}: running={running}: the unbiased variance m/(m-1) needs more than one entry in a group, "
            "but m = 1 here. Pool more axes, use larger batches, or unbiased=False."
        )


def update(state: BatchStats, moments: Moments, *, running: Ema | Cumulative = Ema(0.1)) -> BatchStats:
    """Returns the running statistics after one batch: what `batch_norm` does to its state.

    Args:
      state: `BatchStats`.
      moments: `Moments` of the batch; axes that the state lacks are averaged, weighted by their counts.
      running: how the statistics move.

    Returns:
      `BatchStats` of the same names and dtypes, under stop_gradient. Features that saw no entry are unchanged.

    Raises:
      ValueError: the state runs along a name that the moments lack, or shapes differ.
      TypeError: a state below float32, or arguments of other types.

    Example:
      >>> state = update(BatchStats.init(), Moments(10.0, 4.0, 8.0), running=Ema(0.1))
      >>> print(state.mean, state.var, state.count)
      1.0 1.3 1
    """
    return updated("update", state, moments, running)


def updated(fn: str, state: BatchStats, moments: Moments, running: Ema | Cumulative) -> BatchStats:
    """`update`, whose errors speak in the name of `fn`."""
    state, moments = check_state(fn, state), checked_moments(fn, moments)
    check_unbiased(fn, running, None)
    if state.count.ndim:
        cure = stack_cure(state) or (
            " If it alone has the axis of replicas (restored from pmap, say), take the largest count, as pool_stats "
            "does: dataclasses.replace(state, count=state.count.max())."
        )
        raise ValueError(f"{fn}: state.count has shape {state.count.shape} but must be a scalar.{cure}")
    if jnp.iscomplexobj(moments.mean) and not jnp.iscomplexobj(state.mean):
        raise TypeError(
            f"{fn}: state.mean is {state.mean.dtype} but the batch's mean is {moments.mean.dtype}; "
            f"start from BatchStats.init(dtype=jnp.{moments.mean.dtype})."
        )
    mean, var, m = _batch_values(fn, state, moments, running.unbiased)
    return _step(state, mean, var, m, running)


def _batch_values(fn: str, state: BatchStats, moments: Moments, unbiased: bool):
    """The batch's mean, variance and count along the state's names, in its order."""
    moments = jax.tree.map(lax.stop_gradient, moments)
    if missing := [name for name in state.names if name not in moments.names]:
        raise ValueError(
            f"{fn}: state runs along {quote(missing)}, but the moments run along {quote(moments.names) or 'no axis'}. "
            + (
                'Give the moments their names, as in names="C".'
                if moments.mean.ndim and not moments.names
                else 'For a factor of a split axis take the moments with that axis unnamed: layout "(G=2 K)", not '
                f'"C=(G=2 K)".{in_another_form(missing[0], moments.names)}'
            )
        )
    mean, var = moments.mean, moments.var
    m = moments.count.astype(var.dtype)
    unnamed = mean.ndim - len(moments.names) + 1
    names, wanted = _numbered(moments.names, unnamed), _numbered(state.names, unnamed)
    if mean.ndim != len(names):
        raise ValueError(f"{fn}: moments.mean has shape {mean.shape}, but {_says(moments.names)}.")
    if unbiased:
        var = var * jnp.where(m > 1, m / jnp.where(m > 1, m - 1, 1), 1)
    extra = tuple(i for i, name in enumerate(names) if name not in wanted)
    total = jnp.sum(m, extra, keepdims=True)
    share = m / jnp.maximum(total, 1)
    first = jnp.sum(share * mean, extra, keepdims=True)
    mean = jnp.squeeze(first + jnp.sum(share * (mean - first), extra, keepdims=True), extra)
    var = jnp.sum(share * var, extra)
    kept = [name for name in names if name in wanted]
    order = [kept.index(name) for name in wanted]
    mean, var, m = (jnp.transpose(array, order) for array in (mean, var, jnp.squeeze(total, extra)))
    if mean.shape != state.mean.shape:
        raise ValueError(
            f"{fn}: state.mean has shape {state.mean.shape}, but {_says(state.names)}, along which the moments "
            f"have shape {mean.shape}.{stack_cure(state)}"
        )
    return mean, var, m


def _numbered(names: tuple[str, ...], unnamed: int) -> list[str]:
    """The names with "..." as so many names of its own."""
    return [n for name in names for n in ([f"...{i}" for i in range(unnamed)] if name == "..." else [name])]


def _step(state: BatchStats, mean, var, m, running: Ema | Cumulative) -> BatchStats:
    old = jax.tree.map(lax.stop_gradient, state)
    mean, var, m = (placed_as(jax.typeof(old.mean), array) for array in (mean, var, m))
    weight = old.weight.astype(m.dtype)
    if isinstance(running, Ema):
        amount = jnp.asarray(lax.stop_gradient(running.new_weight)).astype(m.dtype)
        new_weight = (1 - amount) * weight + amount if running.debias else jnp.ones_like(weight)
    else:
        amount = m if running.by == "entries" else jnp.ones_like(m)
        new_weight = weight + amount
    seen = m > 0
    ratio = amount / jnp.where(new_weight > 0, new_weight, 1)

    def blend(kept, batch):
        dtype = np.promote_types(kept.dtype, batch.dtype)
        r, b = kept.astype(dtype), batch.astype(dtype)
        share = ratio.astype(dtype)
        moved = (1 - share) * r + share * b  # not r + share (b - r): it would round a small b away beside r
        if not jnp.iscomplexobj(moved):
            moved = jnp.clip(moved, jnp.minimum(r, b), jnp.maximum(r, b))  # a convex combination, rounding or not
        moved = jnp.where(share == 1, b, jnp.where(share == 0, r, moved))  # 0 times an infinite one is not 0
        return jnp.where(seen, moved, r).astype(kept.dtype)

    return BatchStats(
        blend(old.mean, mean),
        blend(old.var, var),
        old.count + jnp.any(seen).astype(old.count.dtype),
        jnp.where(seen, new_weight, weight).astype(old.weight.dtype),
        state.names,
    )


def pool_stats(state: BatchStats, axis_names) -> BatchStats:
    """Returns one state for un-synchronised replicas: the mean of the means, and E[var] + Var[mean].

    Args:
      state: `BatchStats`; a name in `state.names` is an axis of its arrays, any other one a mapped axis.
      axis_names: the names of the replicas' axes, as a string or a tuple.

    Returns:
      `BatchStats` without those axes, the same on every device. Replicas are weighted by their `weight`, so one that
      saw nothing changes nothing; count and weight are the largest of any replica. Under stop_gradient.

    Raises:
      ValueError: a name that is neither in `state.names` nor bound.

    Example:
      >>> replicas = BatchStats(jnp.array([0.0, 2.0]), jnp.ones(2), jnp.array([1, 1]), jnp.ones(2), names="device")
      >>> pooled = pool_stats(replicas, "device")
      >>> print(pooled.mean, pooled.var, pooled.count)
      1.0 2.0 1
    """
    fn = "pool_stats"
    names = parse_names(fn, axis_names)
    state = jax.tree.map(lax.stop_gradient, check_state(fn, state))
    if state.mean.ndim != len(state.names):
        raise ValueError(f"{fn}: state.mean has shape {state.mean.shape}, but {_says(state.names)}.{stack_cure(state)}")
    axes = tuple(i for i, name in enumerate(state.names) if name in names)
    mapped = tuple(name for name in names if name not in state.names)
    for name in mapped:
        _require_bound(fn, state, name)
    kept = tuple(name for name in state.names if name not in names)
    return _pooled(state, axes, mapped, kept)


def _require_bound(fn: str, state: BatchStats, name: str) -> None:
    try:
        lax.axis_size(name)
    except NameError:
        raise ValueError(
            f"{fn}: '{name}' is neither in the state's names {quote(state.names)} nor a mapped axis here; "
            f"call inside shard_map, pmap or vmap with the axis name '{name}'.{in_another_form(name, state.names)}"
        ) from None


def _pooled(state: BatchStats, axes: tuple[int, ...], mapped: tuple[str, ...], kept: tuple[str, ...]) -> BatchStats:
    def over(array, local, collective):
        array = local(array, axes) if axes else array
        return collective("pool_stats", array, mapped) if mapped else array

    largest = lambda array: over(array, jnp.max, _mapped.pmax)  # noqa: E731
    total = lambda array: over(array, jnp.sum, _mapped.psum)  # noqa: E731
    spread = lambda array: jnp.expand_dims(array, axes)  # noqa: E731
    weight = largest(state.weight)
    heavy = spread(weight)
    w = jnp.where(heavy > 0, state.weight / jnp.where(heavy > 0, heavy, 1), 1).astype(state.var.dtype)
    n = total(w)
    mean = total(w * state.mean) / n
    square = jnp.square(jnp.abs(state.mean - spread(mean)))
    var = total(w * (state.var + square)) / n
    count = state.count if state.count.ndim == 0 else jnp.max(state.count)
    if mapped:
        count = _mapped.pmax("pool_stats", count, mapped)
    return BatchStats(mean, var, count, weight, kept)
