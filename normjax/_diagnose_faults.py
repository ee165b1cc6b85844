"""The faults: what each one is called, what brings it about and what cures it; and those that one layer shows alone."""

from typing import Any, NamedTuple

import numpy as np

from normjax._diagnose_layers import is_start, replaced
from normjax._diagnose_measure import RESAMPLES, Forward, Measured, differ
from normjax._diagnose_report import Finding
from normjax._diagnose_warmup import WARM_UP, Warming, confirms_count, is_alike, offset_due, share_left

FALSE_ALARMS = 1e-5  # healthy reports in which chance alone names a channel, over all channels and both moments
DRIFT = 0.25  # standard deviations: less moves outputs by no more than what batches of 16 do to each other
WRONG = 1.0  # standard deviations: evaluation's outputs are then off by as much as they vary
TINY = 8  # entries: the mean's own noise is then 1/√8 = 0.35 standard deviations
UNSURE = 1 + 1 / np.sqrt(2 * (RESAMPLES - 1))  # that noise is itself known to 13 %
FEW_EXAMPLES = 4  # below, resampling makes too few different batches for a standard error
TOGETHER = 6  # times the largest mean square of the resampled batches
VARIED = 0.01  # of the layer's median variance: what Ema(0.1) holds of a start of 1 after 44 updates
HUGE = 1e30  # a variance beyond any eps
CONSTANT = 16  # float32 roundings of mean²: what E[x²] − E[x]² leaves of a variance of 0


class Kind(NamedTuple):
    """What a fault means."""

    severity: str
    cause: str
    cure: str


FAULTS = {
    "batch statistics in evaluation": Kind(
        "error",
        "evaluation normalises by the batch at hand: outputs depend on what else is in it, a single example gives β",
        "evaluate with train=False (Flax: use_running_average=True, model.eval()) and no use_batch_stats",
    ),
    "never updated": Kind(
        "error",
        "the statistics are at their start values, so evaluation does not normalise: nothing ran in training mode, or "
        "the training loop dropped what came back",
        "keep the state that each training step returns, and give evaluation the newest; recalibrate mends a trained "
        "model",
    ),
    "discarded": Kind(
        "error",
        "forward itself returns its statistics unchanged in training: the updated ones are dropped inside it",
        "return the new state (linen: mutable=['batch_stats']; nnx: nnx.state(model) after the call), then recalibrate",
    ),
    "warm-up too short": Kind(
        "warning",
        "too few updates for this weight of the new batch: the averages still hold much of their start values",
        "train longer, give new batches more weight (Ema(0.1), Flax's momentum=0.9), use debias=True, or recalibrate",
    ),
    "batch of one": Kind(
        "error",
        "a group has one entry: its variance is 0 and every output equals β, whatever the input",
        "pool more: a larger batch, synchronised devices, positions; or layer or group norm",
    ),
    "tiny groups": Kind(
        "warning",
        f"fewer than {TINY} independent entries share a mean: the statistics are noise, and accuracy falls",
        "a larger batch, statistics synchronised over devices, or group norm",
    ),
    "drift": Kind(
        "warning",
        "the running statistics come from other data than this batch, or from other weights (training that still moves "
        "them fast)",
        "recalibrate on the data that the model is for, or train on with the statistics moving",
    ),
    "constant channels": Kind(
        "warning",
        "a channel is the same in every entry: it is normalised to β and carries nothing",
        "look for dead units or constant inputs before the layer",
    ),
    "eps dominates": Kind(
        "warning",
        "eps is no smaller than the variance: the channel is not brought to variance 1 but scaled by about 1/√eps",
        "a smaller eps, or inputs of a larger scale",
    ),
    "not finite": Kind(
        "error",
        "NaN or Inf came in with some batch, or an overflow; an average never forgets it",
        "find the batch (jax_debug_nans), mask its entries with where=, restart from sound statistics or recalibrate",
    ),
    "negative variance": Kind(
        "error",
        "no average of variances is negative: E[x²] − E[x]² rounded, or arithmetic on the statistics themselves",
        "restart from sound statistics or recalibrate; leave the averaging to the norm",
    ),
    "half precision": Kind(
        "error",
        "the statistics are stored in half precision, which rounds away the small steps of an average",
        "store mean and variance in float32, whatever the dtype of x and of the parameters",
    ),
    "batch-mates leak": Kind(
        "warning",
        "outputs compare examples, and in training the network can read its neighbours through batch statistics",
        "layer or group norm, statistics synchronised over devices or shuffled among them, or frozen statistics",
    ),
    "padding pooled": Kind(
        "error",
        "padding counts as entries, or layers that mix positions carry it among the real ones: the statistics depend "
        "on how long it is",
        "pass the mask of real entries as where= (Flax: mask=) to every norm, and blank padding again before a "
        "convolution",
    ),
    "replicas differ": Kind(
        "error",
        "each device keeps the statistics of its own examples: evaluation depends on whose are used",
        "synchronise: add the mapped axis to axis_names (Flax: axis_name); pool_stats makes one of those there are",
    ),
    "redundant bias": Kind(
        "warning",
        "a constant added right before batch norm is subtracted again: in training its gradient is 0",
        "leave the bias out (use_bias=False); the norm's own bias does its work",
    ),
    "scale near 0": Kind(
        "warning",
        "γ is about 0: the channel gives β whatever the input, and lets hardly any gradient through",
        "spare γ from weight decay; prune the channel, or start γ anew",
    ),
    "decayed norm": Kind(
        "warning",
        "weight decay pulls a norm's γ or β towards 0",
        "give the optimiser mask=normjax.decay_mask",
    ),
}


def finding(fault: str, layer: str, evidence: str, *, severity: str | None = None) -> Finding:
    """A fault in the words of the table."""
    kind = FAULTS[fault]
    return Finding(fault, layer, evidence, kind.cause, kind.cure, severity or kind.severity)


def limit(layers: list[Measured], size: int) -> float:
    """Standard errors that no channel of a healthy model is likely to be beyond (Student's t, Bonferroni)."""
    from scipy.special import stdtrit

    tests = sum(2 * each.shift.size for each in layers if each.shift is not None)
    freedom = min(size, RESAMPLES) - 1
    return float(-stdtrit(freedom, FALSE_ALARMS / 2 / max(tests, 1)))


def of_layer(each: Measured, dtypes: list[Any], beyond: float, size: int, warming: Warming | None) -> list[Finding]:
    """What the numbers of one layer show; a fault that explains another one stands in its place."""
    found = _of_what_is_stored(each, dtypes)
    if each.mean is not None and not np.all(np.isfinite(each.mean) & np.isfinite(each.var)):
        bad = int(np.sum(~(np.isfinite(each.mean) & np.isfinite(each.var))))
        return [*found, finding("not finite", each.name, f"{bad} of {each.mean.size} channels of this batch")]
    single = _of_one_entry(each, size)
    found += single or _of_the_batch(each, size)
    return found + (_of_the_average(each, beyond, warming) if not single else [])


def _of_what_is_stored(each: Measured, dtypes: list[Any]) -> list[Finding]:
    mean, var = each.running["mean"], each.running["var"]
    found = []
    if bad := int(np.sum(~(np.isfinite(mean) & np.isfinite(var)))):
        found.append(finding("not finite", each.name, f"{bad} of {mean.size} channels of the running statistics"))
    if bad := int(np.sum(np.real(var) < 0)):
        found.append(
            finding("negative variance", each.name, f"{bad} of {var.size} channels, down to {np.min(var):.2g}")
        )
    weight = each.running.get("weight")
    if weight is not None and not np.all(np.isfinite(weight)):
        found.append(finding("not finite", each.name, "the weight that the averages rest on"))
    if half := sorted({str(dtype) for dtype in dtypes if dtype.itemsize < 4}):
        found.append(finding("half precision", each.name, f"stored in {', '.join(half)}"))
    return found


def _of_one_entry(each: Measured, size: int) -> list[Finding]:
    """Every variance exactly 0 though the batch's mean is not that of a constant."""
    if each.mean is None or np.any(each.var != 0) or (size > 1 and np.all(_constant(each))):
        return []
    return [finding("batch of one", each.name, f"variance 0 in all of {each.var.size} channels, in a batch of {size}")]


def _constant(each: Measured) -> np.ndarray:
    """Which channels have one value: a variance that is 0 but for rounding, and a mean that no resampling moves."""
    return each.var == 0 if each.still is None else (each.var <= _rounded(each.mean)) & each.still


def _rounded(mean: np.ndarray) -> np.ndarray:
    """What a variance of 0 may come to."""
    return CONSTANT * float(np.finfo(np.float32).eps) * np.abs(mean) ** 2


def _varied(each: Measured) -> np.ndarray:
    """Which channels had other values in other batches, by a running variance that the start does not explain."""
    var = np.real(each.running["var"])
    of_start = VARIED * float(np.median(var)) if np.isnan(each.start) else 2 * each.start
    return var > np.maximum(of_start, _rounded(each.running["mean"]))


def _of_the_batch(each: Measured, size: int) -> list[Finding]:
    if each.mean is None:
        return []
    found = []
    if flat := int(np.sum(_constant(each) & ~_varied(each))):
        found.append(finding("constant channels", each.name, f"{flat} of {each.var.size} channels have variance 0"))
    if each.noise > UNSURE / np.sqrt(TINY):
        evidence = (
            f"a mean of {size} examples errs by {each.noise:.2f} std, as one of {each.noise**-2:.1f} entries does"
        )
        found.append(finding("tiny groups", each.name, evidence))
    return found


def _of_the_average(each: Measured, beyond: float, warming: Warming | None) -> list[Finding]:
    """Never moved, moved too little, or moved by other data: the first that holds."""
    start = is_start(each.running)
    if not each.moved and not each.trains_frozen:
        return [finding("discarded", each.name, "training returned mean and variance bit for bit as they were")]
    if start:
        count = "count 0" if "count" in each.running else "mean 0 and variance 1 in every channel"
        return [finding("never updated", each.name, count)]
    if zeros := _of_zeros(each):
        return zeros
    if each.start > WARM_UP and confirms_count(each):
        updates = int(np.max(each.running["count"]))
        evidence = f"{each.start:.0%} of the start values left after {updates} updates of weight {each.share:.3g}"
        return [finding("warm-up too short", each.name, evidence, severity=_severity(_offsets(each)))]
    if each.shift is None:
        return []
    offsets, errors = _offsets(each), np.stack([each.shift, each.stretch])
    grave = (errors > beyond) & (offsets > DRIFT)  # a distance that is certain, and that matters
    together = _together(each, errors) & (np.median(offsets.reshape(2, -1), 1) > DRIFT)
    share, explained = share_left(each)
    if explained and (np.any(grave) or np.isnan(each.start)) and (due := offset_due(each, share)) > DRIFT:
        evidence = f"about {share:.2g} of the start values left, which explains a distance of {due:.1f} std"
        return [finding("warm-up too short", each.name, evidence, severity=_severity(due))]
    if not np.any(grave) and not np.any(together):
        return []
    worst = float(np.max(offsets, where=grave | together[:, None], initial=0))
    severity = _severity(worst)
    if np.isnan(each.start) and warming is not None and is_alike(each, share, warming.share):
        evidence = f"about as much of the start values left as in {warming.layer}: a distance of {worst:.1f} std"
        return [finding("warm-up too short", each.name, evidence, severity=severity)]
    off, distance = int(np.sum(np.any(grave, 0))), float(np.max(errors, where=grave, initial=0))
    evidence = f"{off} of {offsets[0].size} channels off, by up to {distance:.0f} standard errors, {worst:.1f} std"
    if not off:
        evidence = f"no channel off for certain, but all together, by up to {worst:.1f} std"
    return [finding("drift", each.name, evidence, severity=severity)]


def _together(each: Measured, errors: np.ndarray) -> np.ndarray:
    """Whether all channels' means, and their variances, are further away than chance takes them together.

    Resampled batches know how far that is, however the channels are correlated.
    """
    means, variances = each.resampled
    with np.errstate(all="ignore"):
        drawn = np.abs(means - each.mean) / each.mean_error, np.log(variances / each.var) / each.var_error
    found = []
    for distance, chance in zip(errors, drawn, strict=True):
        known = np.isfinite(distance)
        squares = [np.sum(np.nan_to_num(one[known], posinf=0, neginf=0) ** 2) for one in chance]
        found.append(np.sum(distance[known] ** 2) > TOGETHER * max(*squares, np.sum(known)))
    return np.array(found)


def _of_zeros(each: Measured) -> list[Finding]:
    """Running variances of 0 where the batch varies: a checkpoint filled with zeros, if they are everywhere."""
    if each.mean is None:
        return []
    lost = (each.running["var"] == 0) & (each.var > 0) & ~_constant(each)
    if np.all(lost) and not np.any(each.running["mean"]):
        return [finding("never updated", each.name, "mean 0 and variance 0 in every channel")]
    if not np.any(lost):
        return []
    evidence = f"a running variance of 0 in {int(np.sum(lost))} of {lost.size} channels, which vary in this batch"
    return [finding("drift", each.name, evidence, severity="error")]


def _offsets(each: Measured) -> np.ndarray:
    """How far evaluation's standardised values are off by mean and by scale, in their own standard deviations.

    0 where that is unknown.
    """
    with np.errstate(all="ignore"):
        mean = np.abs(each.mean - each.running["mean"]) / np.sqrt(each.running["var"])
        scale = np.abs(np.log(each.var / each.running["var"])) / 2
    offsets = np.stack([mean, scale])
    return np.where(np.isfinite(offsets) & (each.var > 0), offsets, 0)


def _severity(offset: np.ndarray | float) -> str | None:
    return "error" if np.max(offset, initial=0) >= WRONG else None


def of_eps(forward: Forward, each: Measured) -> list[Finding] | str:
    """Whether eps is at least a channel's variance v, told by evaluating with −v: does √(−v + eps) make sense or not?

    Needs no knowledge of how eps is given. A text says why it could not be told.
    """
    var = each.running["var"] if each.var is None else each.var
    if each.var is not None:
        var = np.where(_varied(each), np.fmax(var, each.running["var"]), var)
    constant = np.zeros(var.shape, bool) if each.mean is None else _constant(each)
    real = np.isfinite(var) & (var > 0) & ~constant
    if not each.used or not np.any(real):
        return []
    stored = np.asarray(forward.leaves[each.layer.fields["var"]])
    smallest = np.unravel_index(np.argmin(np.where(real, var, np.inf)), var.shape)

    def outputs(variance: float) -> list[np.ndarray]:
        changed = stored.copy()
        changed[smallest] = variance
        return forward.evaluate(replaced(forward.leaves, each.layer, var=changed))

    # Compared with what certainly makes no sense, not tested for NaN: XLA's maximum may turn NaN into 0.
    broken, least = outputs(-HUGE), float(var[smallest])
    if not differ(broken, outputs(least)):
        return f"eps of {each.name}: pass a batch in which the channel of the smallest variance reaches the outputs"
    if not differ(broken, outputs(-least)):
        return []
    low, high = least, HUGE
    while high / low > 1.05:
        middle = float(np.sqrt(low * high))
        low, high = (middle, high) if differ(broken, outputs(-middle)) else (low, middle)
    count = int(np.sum(real & (var <= low)))
    return [finding("eps dominates", each.name, f"eps is {low:.1e}, the variance {least:.1e} ({count} channels)")]
