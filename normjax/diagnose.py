"""What is wrong with a model's running statistics, found on one batch: `diagnose`.

Works from the outside, on forward(stats, batch, train) → (y, stats) of any framework: see _diagnose_measure.py for how.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax import _diagnose_faults as faults
from normjax._diagnose_faults import FAULTS, finding
from normjax._diagnose_layers import replaced, values
from normjax._diagnose_measure import COUPLED, EMPTY, Forward, Measured, couple, measure
from normjax._diagnose_params import decayed, redundant_biases, zero_scales
from normjax._diagnose_report import SEVERITIES, Finding, Report
from normjax._diagnose_warmup import find_warming
from normjax._inputs import kind_of
from normjax._running import Cumulative, Ema
from normjax._stats_tree import find_norms

__all__ = ["FAULTS", "Finding", "Report", "diagnose"]

SHIFTS = (1, 2, 5)  # of the examples against each other
RANDOM = 4  # times what three other draws change
AGREE = 1e-3  # standard deviations: what rounding and another order of summation change stays far below


def diagnose(
    forward: Callable[[Any, Any, bool], tuple[Any, Any]],
    stats,
    batch,
    *,
    running: Ema | Cumulative | None = None,
    params=None,
    decay_mask: Any = None,
    pad_axis: int | None = None,
    replica_axis: int | None = None,
) -> Report:
    """Returns what is wrong with a model's normalisation, as far as one batch shows it.

    Calls forward some fifty times and changes nothing. What it was not given the means to check is listed in the
    report. Example i of every array of the batch belongs together: they are resampled, to know by how much statistics
    differ by chance.

    Args:
      forward: forward(stats, batch, train) → (y, stats after the call), which runs the model exactly as your training
        and evaluation do and closes over the parameters: a function without side effects that can be traced. y may be
        any pytree; its arrays with a leading axis of N show whether examples depend on each other.
      stats: pytree that holds the running statistics, as `BatchStats`, dicts of `mean` and `var` (Flax's `batch_stats`,
        with `batch_counts` or without), or nnx's states.
      batch: pytree of arrays with a leading axis of N examples of the data that the model is for, as many as in
        training: by their noise it is seen whether groups are too small.
      running: the `Ema` or `Cumulative` that moves the statistics. By default it is measured; tell it where the update
        rests on what the tree does not hold.
      params: the parameters that forward closes over, the very arrays: for biases right before a norm, and scales
        near 0.
      decay_mask: the optimiser's mask of weight decay, as optax takes it: a pytree of bools like params (True alone:
        all decay) or a function that makes one.
      pad_axis: the axis of the batch's arrays that has padding at its end. It is made twice as long, with zeros (False
        in masks) in every array that has an axis of this size there.
      replica_axis: the axis of the statistics' arrays that numbers replicas; forward is then called with the first.

    Returns:
      `Report`.

    Raises:
      ValueError: arrays of the batch differ in their number of examples; forward returns other statistics; pad_axis or
        replica_axis is out of range.
      TypeError: an argument of another type.

    Example:
      >>> import jax
      >>> import normjax as nj
      >>> from normjax.diagnose import diagnose
      >>> x = jax.random.normal(jax.random.key(0), (64, 3))
      >>> def forward(stats, x, train):
      ...     return nj.batch_norm(x, None, stats, layout="N C", axis_names="N", train=train)
      >>> for finding in diagnose(forward, nj.BatchStats.init(C=3), x).findings:
      ...     print(finding.severity, finding.fault, finding.evidence)
      error never updated count 0
    """
    fn = "diagnose"
    if not callable(forward):
        raise TypeError(f"{fn}: forward must be a function (stats, batch, train) → (y, stats); got {kind_of(forward)}.")
    if not isinstance(running, (Ema, Cumulative, type(None))):
        raise TypeError(f"{fn}: running must be an Ema, a Cumulative or None; got {kind_of(running)}.")
    findings, skipped = [], []
    if replica_axis is None:
        skipped.append("replicas that differ: pass replica_axis=, with the statistics of every device")
    else:
        findings += _replicas(stats, replica_axis)
        stats = _first_replica(stats, replica_axis)
    called = Forward(forward, stats, batch)
    found = measure(called, running)
    strength = couple(called)
    if jax.tree.leaves(stats) and not found:
        skipped.append("running statistics: stats holds none, which are a mean and a var side by side")
    if idle := [each for each in found if each.idle and not strength > COUPLED]:
        skipped.append(f"{', '.join(each.name for each in idle)}: forward does not call it")
        found = [each for each in found if each not in idle]
    beyond = faults.limit(found, called.size) if called.size > 1 else np.inf
    warming = find_warming(found)
    for each in found:
        dtypes = [jnp.asarray(called.given[each.layer.fields[field]]).dtype for field in ("mean", "var")]
        findings += faults.of_layer(each, dtypes, beyond, called.size, warming)
    for more, why_not in (
        _eps(called, found),
        _coupling(strength, found),
        _what_was_too_little(called, found),
    ):
        findings, skipped = findings + more, skipped + why_not
    more, why_not = _of_params(called, found, findings, params, decay_mask)
    findings, skipped = findings + more, skipped + why_not
    more, why_not = _padding(called, found, pad_axis)
    findings, skipped = findings + more, skipped + why_not
    findings.sort(key=lambda one: -SEVERITIES.index(one.severity))
    return Report(
        tuple(findings),
        tuple(skipped),
        tuple(each.name for each in found),
        tuple(_distances(each) for each in found),
        tuple(beyond for _ in found),
        tuple(each.noise for each in found),
    )


def _distances(each: Measured) -> np.ndarray:
    return np.array([]) if each.shift is None else np.fmax(each.shift, each.stretch).ravel()


def _eps(forward: Forward, found: list[Measured]) -> tuple[list[Finding], list[str]]:
    answers = [faults.of_eps(forward, each) for each in found]
    return (
        [one for answer in answers if not isinstance(answer, str) for one in answer],
        [answer for answer in answers if isinstance(answer, str)],
    )


def _coupling(strength: float, found: list[Measured]) -> tuple[list[Finding], list[str]]:
    """Examples that meet in evaluation: through statistics that should be the running ones, or in the outputs."""
    if np.isnan(strength):
        why = "pass two examples or more, and let y hold an array with a leading axis of examples"
        return [], [f"batch statistics in evaluation, batch-mates leak: {why}"]
    if strength <= COUPLED:
        return [], []
    evidence = f"outputs move by {strength:.1g} of their size with batch-mates"
    unused = [each for each in found if not each.used and not each.trains_frozen]
    if unused or not found:
        names = [each.name for each in unused] or ["the whole forward"]
        told = f"{evidence}, not with the running statistics"
        return [finding("batch statistics in evaluation", name, told) for name in names], []
    if not any(each.moved for each in found):
        return [], []
    return [finding("batch-mates leak", "the outputs", f"{evidence}, in evaluation too")], []


def _what_was_too_little(forward: Forward, found: list[Measured]) -> tuple[list[Finding], list[str]]:
    """What the batch or the layer's behaviour left open."""
    skipped = []
    if frozen := [each.name for each in found if each.trains_frozen]:
        skipped.append(f"drift of {', '.join(frozen)}: trained frozen; pass a forward whose training uses the batch")
    if found and forward.size < faults.FEW_EXAMPLES:
        few = "tiny groups, drift" if forward.size == 1 else "drift"
        skipped.append(f"{few}: pass a batch of {faults.FEW_EXAMPLES} examples or more, for a standard error")
    unknown = [each.name for each in found if each.moved and np.isnan(each.start)]
    if unknown:
        skipped.append(
            f"updates of {', '.join(unknown)}: nothing counts them, so a short warm-up is told from its traces alone"
        )
    return [], skipped


def _of_params(
    forward: Forward, found: list[Measured], so_far: list[Finding], params, mask
) -> tuple[list[Finding], list[str]]:
    if params is None:
        return [], ["redundant bias, scale near 0: pass params=", "decayed norm: pass params= and decay_mask="]
    findings, skipped = zero_scales(params, forward, found), []
    if mask is None:
        skipped.append("decayed norm: pass decay_mask=, the optimiser's (True where all parameters decay)")
    else:
        findings += decayed(params, mask)
    if found and not any(one.fault == "batch of one" for one in so_far):  # there every gradient is 0
        biases = redundant_biases(params, forward, found)
        if isinstance(biases, str):
            skipped.append(biases)
        else:
            findings += biases
    return findings, skipped


def _padding(forward: Forward, found: list[Measured], axis: int | None) -> tuple[list[Finding], list[str]]:
    if axis is None:
        return [], ["padding pooled: pass pad_axis="] if found else []
    longer = _extended(forward.batch, axis)
    leaves = list(forward.leaves)
    for each in found:
        if each.moved:
            leaves = replaced(leaves, each.layer, **EMPTY)
    _, short = forward.train(leaves)
    try:
        _, long = forward.train(leaves, batch=longer)
    except (ValueError, TypeError) as error:
        return [], [f"padding pooled: forward refuses twice the padding ({str(error).splitlines()[0]})"]
    # Examples in another order change nothing, unless training draws at random, which another length changes too.
    turned = [forward.train(leaves, np.roll(np.arange(forward.size), -shift))[1] for shift in SHIFTS]
    findings, skipped = [], []
    for each in found:
        at = forward.layers.index(each.layer)
        moved = _apart(each, short[at], long[at]) if each.moved else 0.0
        random = max(_apart(each, short[at], other[at]) for other in turned) if each.moved else 0.0
        if moved <= AGREE:
            continue
        if moved <= RANDOM * random:
            skipped.append(f"padding pooled in {each.name}: pass a forward whose training is not random (dropout)")
            continue
        evidence = f"twice the length moves the batch's moments by {moved:.2g} standard deviations"
        findings.append(finding("padding pooled", each.name, evidence))
    return findings, skipped


def _apart(each: Measured, one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """How far two batches' moments are apart at most, in standard deviations."""
    with np.errstate(all="ignore"):
        mean = np.abs(one["mean"] - other["mean"]) / np.sqrt(each.var) / each.fresh
        var = np.abs(one["var"] - other["var"]) / each.var / each.fresh
    return float(np.max(np.nan_to_num(np.fmax(mean, var)), initial=0))


def _extended(batch, axis: int):
    """The batch with the axis twice as long: zeros follow."""
    sizes = [jnp.shape(leaf)[axis] for leaf in jax.tree.leaves(batch) if -jnp.ndim(leaf) <= axis < jnp.ndim(leaf)]
    if axis == 0 or not sizes:
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
        raise ValueError(
            f"diagnose: pad_axis={axis} must be an axis of the batch's arrays other than that of the examples; they "
            f"have shapes {shapes}."
        )

    def longer(leaf):
        leaf = jnp.asarray(leaf)
        if not -leaf.ndim <= axis < leaf.ndim or leaf.shape[axis] != sizes[0]:
            return leaf
        return jnp.concatenate([leaf, jnp.zeros_like(leaf)], axis)

    return jax.tree.map(longer, batch)


def _replicas(stats, axis: int) -> list[Finding]:
    """Compares the replicas that an axis of the statistics numbers."""
    leaves, findings = jax.tree.leaves(stats), []
    for layer in find_norms(stats):
        found = values(layer, leaves)
        if not -found["mean"].ndim <= axis < found["mean"].ndim:
            raise ValueError(
                f"diagnose: replica_axis={axis} must be an axis of the statistics; {layer.path}'s mean has shape "
                f"{found['mean'].shape}."
            )
        mean, var = (np.moveaxis(found[field], axis, 0) for field in ("mean", "var"))
        broken = np.any(~np.isfinite(mean) | ~np.isfinite(var) | (var < 0), tuple(range(1, var.ndim)))
        if np.any(broken[1:]):  # the first is looked at with everything else
            number = 1 + int(np.argmax(broken[1:]))
            fault = "negative variance" if np.all(np.isfinite([mean[number], var[number]])) else "not finite"
            findings.append(finding(fault, layer.path, f"in replica {number} of {len(var)}"))
            continue
        with np.errstate(all="ignore"):
            std = np.sqrt(np.mean(var, 0))
            apart = np.fmax(np.ptp(np.real(mean), 0) / std, np.ptp(var, 0) / std**2)
        worst = float(np.max(np.nan_to_num(apart), initial=0))
        if worst > AGREE:
            evidence = f"{len(var)} replicas, up to {worst:.2g} standard deviations apart"
            findings.append(finding("replicas differ", layer.path, evidence))
    return findings


def _first_replica(stats, axis: int):
    return jax.tree.map(lambda leaf: jnp.take(leaf, 0, axis) if jnp.ndim(leaf) > max(axis, -axis - 1) else leaf, stats)
