"""Batch norm, synchronised or not: its checks, then running statistics or the one core; no arithmetic."""

import jax

from normjax import _mapped
from normjax._axes import Spec, resolve
from normjax._family import params_run_along
from normjax._inputs import as_input, as_mask, check_derivative, static_bool
from normjax._normalize import Affine, check_params, given_statistics, normalize_by, normalized
from normjax._running import (
    BatchStats,
    Cumulative,
    Ema,
    check_kept,
    check_state,
    check_unbiased,
    stack_cure,
    updated,
)


def batch_norm(
    x,
    params: Affine | None = None,
    state: BatchStats | None = None,
    *,
    layout: str,
    axis_names,
    train: bool,
    where=None,
    eps=1e-5,
    dtype=None,
    running: Ema | Cumulative = Ema(0.1),  # noqa: B008
    use_batch_stats: bool = False,
    axis_index_groups=None,
    derivative: str = "vjp",
) -> tuple[jax.Array, BatchStats | None]:
    """Returns x normalised over examples (and positions), and the new running statistics.

    Args:
      x: array of any float, complex, integer or boolean dtype; statistics are accumulated in float32 at least.
      params: `Affine` along at least one kept axis, or scalar, or None.
      state: `BatchStats` along kept axes, or None.
      layout: names of x's axes, such as "N H W C", or "N=(B n=32) H W C" for ghost batches.
      axis_names: the names that pool into one mean, such as "N H W"; a name that `layout` lacks is a mapped axis
        (synchronised batch norm), touched only where batch statistics are computed.
      train: True normalises by the batch and updates the state; False normalises by the state. Static.
      where: boolean mask of x's rank, each size 1 or x's: entries that do not count.
      eps: real scalar ≥ 0, added to the variance inside the root; may be traced.
      dtype: of y; by default x's (float32 for integers).
      running: how the running statistics move.
      use_batch_stats: with train=False, normalise by the batch all the same and leave the state alone.
      axis_index_groups: as in `jax.lax.psum`, for one mapped axis; sizes may differ.
      derivative: "vjp", "jvp" (forward mode needs it: jax.jvp, jax.jacfwd) or "autodiff" (the plain formula).

    Returns:
      y of x's shape, and the new state (None stays None), under stop_gradient. Over mapped axes one collective in the
      forward (two where they are larger than 32 together) and one in the backward; none in evaluation.

    Raises:
      ValueError: axes, shapes, eps or derivative break their rule; evaluation without a state; a mapped name that is
        not bound; m = 1 with an unbiased running variance.
      TypeError: train is traced or no bool; params, state, running, where or dtype is of the wrong type.

    Example:
      >>> import jax.numpy as jnp
      >>> import normjax as nj
      >>> x, params, state = jnp.array([[1.0], [7.0]]), nj.Affine.init(C=1), nj.BatchStats.init(C=1)
      >>> y, state = nj.batch_norm(x, params, state, layout="N C", axis_names="N", train=True)
      >>> print(y[:, 0].round(2), state.mean, state.var)
      [-1.  1.] [0.4] [1.8]

    References:
      Ioffe and Szegedy (2015), Batch Normalization, algorithm 1 and section 3.1.
    """
    return _batch_norm("batch_norm", **locals())


def sync_batch_norm(
    x,
    params: Affine | None = None,
    state: BatchStats | None = None,
    *,
    layout: str,
    axis_names,
    train: bool,
    where=None,
    eps=1e-5,
    dtype=None,
    running: Ema | Cumulative = Ema(0.1),  # noqa: B008
    use_batch_stats: bool = False,
    axis_index_groups=None,
    derivative: str = "vjp",
) -> tuple[jax.Array, BatchStats | None]:
    """Returns what `batch_norm` returns, and insists that a mapped axis is pooled.

    Arguments, results and errors are `batch_norm`'s.

    Raises:
      ValueError: also where every name of `axis_names` is an axis of the array.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import normjax as nj
      >>> norm = lambda x: nj.sync_batch_norm(x, layout="N", axis_names="N data", train=True)[0]
      >>> print(jax.vmap(norm, axis_name="data")(jnp.array([[1.0, 1.0], [7.0, 7.0]])).round(2))
      [[-1. -1.]
       [ 1.  1.]]
    """
    return _batch_norm("sync_batch_norm", **locals())


def _batch_norm(
    fn,
    x,
    params,
    state,
    *,
    layout,
    axis_names,
    train,
    where,
    eps,
    dtype,
    running,
    use_batch_stats,
    axis_index_groups,
    derivative,
):
    train, frozen = _mode(fn, train, use_batch_stats)
    check_unbiased(fn, running, None)
    x, wide = as_input(fn, x)
    used = None
    if frozen:
        used = [name for owner in (params, state) for name in getattr(owner, "names", ())]
    spec = resolve(fn, layout, axis_names, x.shape, only=used)
    check_params(spec, params)
    params_run_along(spec, params, kept=True)
    if fn == "sync_batch_norm" and not spec.mapped:
        raise ValueError(
            f'{fn}: axis_names="{" ".join(spec.axis_names)}" holds no mapped axis, only axes of layout "{layout}"; '
            "add the name of the vmap, pmap or shard_map axis to synchronise over, or call batch_norm."
        )
    statistics = None
    if state is not None:
        held = check_state(fn, state)
        check_kept(spec, held)
        statistics = given_statistics(spec, held, "state", wide.dtype, stack_cure(held))
    if frozen:
        if statistics is None:
            raise ValueError(
                f"{fn}: train=False normalises by running statistics, but state=None; pass the BatchStats that "
                "training returned, or use_batch_stats=True to normalise by this batch."
            )
        options = {"where": as_mask(spec, where), "eps": eps, "dtype": dtype}
        options["derivative"] = check_derivative(fn, derivative, x)
        y = normalized(spec, spec.expand(x), spec.expand(wide), params, statistics, **options)
        return y, state
    _refuse_single_examples(spec, params, state)
    if running.unbiased and train and where is None and spec.group_size == 1:
        check_unbiased(fn, running, _mapped.fewest_devices(spec, axis_index_groups))
    options = {"where": where, "eps": eps, "dtype": dtype, "derivative": derivative}
    apart = () if state is None else state.names
    y, moments = normalize_by(spec, x, wide, params, axis_index_groups=axis_index_groups, apart=apart, **options)
    if train and state is not None:
        state = updated(fn, state, moments, running)
    return y, state


def _mode(fn: str, train, use_batch_stats) -> tuple[bool, bool]:
    """Whether it trains, and whether it normalises by running statistics."""
    train, use_batch_stats = static_bool(fn, "train", train), static_bool(fn, "use_batch_stats", use_batch_stats)
    if train and use_batch_stats:
        raise ValueError(
            f"{fn}: train=True already normalises by the batch; use_batch_stats=True is for inference with batch "
            "statistics. Write train=True alone to train, or train=False with it to leave the state alone."
        )
    return train, not (train or use_batch_stats)


def _refuse_single_examples(spec: Spec, params, state) -> None:
    """Raises ValueError where batch statistics would be those of one example, as under `per_example_grads`."""
    alone = _mapped.EXAMPLE not in spec.mapped and _mapped.is_bound(_mapped.EXAMPLE)
    if not alone or _keeps_the_example(spec, params, state):
        return
    raise ValueError(
        f"{spec.fn}: the mapped axis 'example' (of per_example_grads and clipped_grad) has each example alone, so that "
        "by batch statistics every example would be a batch of one. Use the running statistics (train=False; in the "
        "modules use_running_average=True); statistics of reference examples (y, _ = normalize(x, params, "
        "moments=...)); normjax.per_example.coupled_grads, which differentiates each loss in the whole batch (and is "
        "not private); or a norm that does not pool examples: layer, group, instance or RMS norm."
    )


def _keeps_the_example(spec: Spec, params, state) -> bool:
    """Whether the axis of one example, as in image[None], is kept: tracked instance norm pools no examples.

    It has size 1 and is none of those that parameters or state run along; where a pooled one has size 1 too, who knows.
    """
    channels = {i for owner in (params, state) for name in getattr(owner, "names", ()) for i in spec.positions(name)}
    whole = {i for axis, start, stop in spec.ranges if not axis.factors for i in range(start, stop)}
    single = {i for i in whole - channels if spec.expanded[i] == 1}
    return bool(channels and single) and single.isdisjoint(spec.reduced)
