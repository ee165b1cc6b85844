"""What a forward does with its running statistics, found by calling it.

In training y does not depend on the running statistics r, and new = r + a (b − r) for the batch's moments b. So r = 0
gives a·b, and a large r gives a; the moments of batches of resampled examples (the bootstrap) give the standard error
of b, whatever pools what before the layer. In evaluation, moving one layer's statistics shows whether they are used.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normjax._diagnose_layers import replaced, sane, values
from normjax._inputs import kind_of
from normjax._running import Cumulative, Ema
from normjax._stats_tree import Norm, find_norms, flatten, wide

SEED = 150203167  # one that users' data are not drawn from
RESAMPLES = 32  # a standard error from so many is itself known to 1/√(2·31), 13 %
COUPLED = 1e-4  # of the outputs' root mean square: rounding is below, one example of a million in a mean above
EMPTY: dict[str, Any] = {"count": 0, "weight": 0}
LARGE = 1024.0  # times the batch's moments: r that a is read from
ROUNDINGS = 4  # of one blend and one division, in units of eps · |moment| / a


class Forward:
    """The user's forward on the flattened statistics, compiled once for each mode and shape.

    Attributes:
      layers: of the statistics.
      paths: of their leaves.
      size: how many examples the batch has.
      leaves: the statistics' leaves, mended so that they can be computed with.
      given: the leaves as they came.
    """

    def __init__(self, forward: Callable[..., Any], stats, batch):
        # A jitted forward hides what it closes over; compiling is done here.
        self.forward = getattr(forward, "__wrapped__", forward) if hasattr(forward, "lower") else forward
        self.given, self.structure = jax.tree.flatten(stats)
        self.layers, paths = find_norms(stats), flatten(stats)[0]
        self.paths = [paths[i] for layer in self.layers for i in layer.fields.values()]
        self.leaves = sane(self.given, self.layers)
        self.batch = batch
        self.size = _size(batch)
        self._train = jax.jit(lambda leaves, batch, index: self.call(leaves, take(batch, index), train=True))
        self._evaluate = jax.jit(lambda leaves, batch, index: self.call(leaves, take(batch, index), train=False)[0])

    def call(self, leaves: list, batch, *, train: bool):
        """The outputs' leaves, and the fields of every layer after the call; traceable."""
        returned = self.forward(jax.tree.unflatten(self.structure, leaves), batch, train)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(f"diagnose: forward must return a pair, (y, stats); got {kind_of(returned)}.")
        y, new = returned
        found = {layer.path: layer for layer in find_norms(new)}
        paths, fresh, _ = flatten(new)
        if missing := [path for path in self.paths if path not in paths]:
            raise ValueError(
                f"diagnose: forward must return (y, stats) with stats like those it was given; what it returned has "
                f"nothing at {'/'.join(missing[0])!r} (for linen pass the collections, "
                '{"batch_stats": variables["batch_stats"]}, as mutable returns them).'
            )
        fields = [{field: fresh[n] for field, n in found[layer.path].fields.items()} for layer in self.layers]
        return jax.tree.leaves(y), fields

    def train(self, leaves: list, index=None, batch=None) -> tuple[list[np.ndarray], list[dict[str, np.ndarray]]]:
        """One training call on the batch's examples `index`, on this host."""
        index = np.arange(self.size) if index is None else index
        with jax.debug_nans(False):
            y, fields = self._train(leaves, self.batch if batch is None else batch, index)
        return _floats(y), [{name: wide(leaf) for name, leaf in each.items()} for each in fields]

    def evaluate(self, leaves: list, index=None) -> list[np.ndarray]:
        """The outputs of one evaluation call, on this host."""
        with jax.debug_nans(False):
            return _floats(self._evaluate(leaves, self.batch, np.arange(self.size) if index is None else index))


def take(batch, index):
    """The examples `index` of every array."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[index] if jnp.ndim(leaf) else leaf, batch)


def _floats(y) -> list[np.ndarray]:
    return [wide(leaf) for leaf in y if jnp.issubdtype(leaf.dtype, jnp.inexact)]


def _size(batch) -> int:
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)}
    if len(sizes) != 1:
        raise ValueError(
            f"diagnose: the arrays of batch need one leading axis of examples, of the same size; got sizes "
            f"{sorted(sizes)}. Let forward close over what all examples share."
        )
    return sizes.pop()


@dataclasses.dataclass(eq=False)
class Measured:
    """What was found of one layer; arrays are float64, along the layer's own axes.

    Attributes:
      layer: its place.
      running: its fields as they came.
      moved: whether training moved its statistics.
      share: a, the weight of the new batch at the present count; NaN where nothing moved.
      fresh: the same where nothing was counted yet.
      start: the share of the start values that is left; NaN where it cannot be known.
      mean: of the batch; NaN where nothing moved.
      var: of the batch, as the average would store it.
      mean_error: standard error of mean, from resampled examples; None for a batch of one.
      var_error: the same for log var; NaN where a resampled one is 0.
      still: whether no resampling moves the mean, but for rounding.
      resampled: means and variances of all resampled batches.
      rounding: of mean and var, as a share of their size.
      shift: |batch − running mean| in units of its standard error; NaN where either cannot be used.
      stretch: the same for log var.
      noise: standard error of a mean in standard deviations, over the layer; that of m independent entries is 1/√m.
      used: whether evaluation looks at the statistics.
      trains_frozen: whether training does.
    """

    layer: Norm
    running: dict[str, np.ndarray]
    moved: bool = False
    share: float = np.nan
    fresh: float = np.nan
    start: float = np.nan
    mean: Any = None
    var: Any = None
    mean_error: Any = None
    var_error: Any = None
    still: Any = None
    resampled: Any = None
    rounding: float = 0.0
    shift: Any = None
    stretch: Any = None
    noise: float = np.nan
    used: bool = True
    trains_frozen: bool = False

    @property
    def idle(self) -> bool:
        """Whether nothing comes of the statistics, and nothing comes to them."""
        return not (self.moved or self.used or self.trains_frozen)

    @property
    def name(self) -> str:
        """The layer's path."""
        return self.layer.path


def measure(forward: Forward, running: Ema | Cumulative | None) -> list[Measured]:
    """Everything that calls of the forward tell about each layer."""
    found = [Measured(layer, values(layer, forward.given)) for layer in forward.layers]
    if not found:
        return found
    _find_moments(forward, found, running)
    _find_errors(forward, found)
    base, outputs = forward.evaluate(forward.leaves), None
    for each in found:
        pushed = _pushed(forward.leaves, each.layer)
        each.used = differ(base, forward.evaluate(pushed))
        if not each.moved:
            outputs = forward.train(forward.leaves)[0] if outputs is None else outputs
            each.trains_frozen = differ(outputs, forward.train(pushed)[0])
    return found


def differ(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    """Whether any output changed at all."""
    return not all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


def _pushed(leaves: list, layer: Norm) -> list:
    """Another mean and variance in one layer."""
    mean, var = (leaves[layer.fields[field]] for field in ("mean", "var"))
    return replaced(leaves, layer, mean=mean + np.sqrt(var) + 1, var=2 * var + 1)


def _find_moments(forward: Forward, found: list[Measured], running) -> None:
    """Fills in what one batch does."""
    kept = _probe(forward, found, {})
    emptied = _probe(forward, found, EMPTY) if any("weight" in each.running for each in found) else kept
    for each, (moved, share, _), (_, fresh, batch) in zip(found, kept, emptied, strict=True):
        each.moved, each.share, each.fresh = moved, share, fresh
        if not moved:
            continue
        plain = np.isclose(share, fresh, rtol=1e-3) and share < 1  # an average that counts starts with 1
        if plain and isinstance(running, Ema) and not running.debias:
            each.share = each.fresh = float(running.new_weight)
        each.mean, each.var = batch["mean"] / each.fresh, np.real(batch["var"]) / each.fresh
        precision = np.finfo(forward.leaves[each.layer.fields["var"]].dtype).eps
        each.rounding = ROUNDINGS * float(precision) / each.fresh
        if not plain or isinstance(running, Cumulative) or (isinstance(running, Ema) and running.debias):
            each.start = 0.0
        elif "count" in each.running:
            each.start = float((1 - each.share) ** np.max(each.running["count"]))


def _probe(forward: Forward, found: list[Measured], emptied: dict) -> list[tuple[bool, float, dict]]:
    """For each layer: whether its statistics move, the weight a of a batch, and a times the batch's moments.

    Layers that do not move keep theirs, since they may be what training normalises with.
    """
    still: set[int] = set()
    while True:
        zeros, large = list(forward.leaves), list(forward.leaves)
        at = [i for i in range(len(found)) if i not in still]
        for i in at:
            zeros = replaced(zeros, found[i].layer, mean=0, var=0, **emptied)
        low = forward.train(zeros)[1]
        sizes = [max(1.0, LARGE * float(np.nanmax(np.abs([each["mean"], each["var"]]), initial=0))) for each in low]
        for i in at:
            large = replaced(large, found[i].layer, mean=sizes[i], var=sizes[i], **emptied)
        high = forward.train(large)[1]
        with np.errstate(all="ignore"):
            shares = [
                1 - _median(np.real(h["mean"] - lo["mean"]) / size)
                for h, lo, size in zip(high, low, sizes, strict=True)
            ]
        stopped = {
            i for i in at if np.all(low[i]["mean"] == 0) and np.all(low[i]["var"] == 0) and abs(shares[i]) < 1e-6
        }
        if not stopped:
            return [(i not in still, shares[i] if i in at else np.nan, low[i]) for i in range(len(found))]
        still |= stopped


def _median(numbers: np.ndarray) -> float:
    finite = numbers[np.isfinite(numbers)]
    return float(np.median(finite)) if finite.size else np.nan


def _find_errors(forward: Forward, found: list[Measured]) -> None:
    """Standard errors of the batch's moments from resampled examples, and how far the running ones are away."""
    size, moving = forward.size, [i for i, each in enumerate(found) if each.moved]
    if size < 2 or not moving:
        return
    leaves = forward.leaves
    for i in moving:
        leaves = replaced(leaves, found[i].layer, mean=0, var=0, **EMPTY)
    rng = np.random.default_rng(SEED)
    drawn = [forward.train(leaves, rng.integers(size, size=size))[1] for _ in range(RESAMPLES)]
    bessel = np.sqrt(size / (size - 1))  # the bootstrap divides by N where N − 1 is right
    for i in moving:
        each = found[i]
        means = np.stack([new[i]["mean"] for new in drawn]) / each.fresh
        each.resampled = means, np.real(np.stack([new[i]["var"] for new in drawn])) / each.fresh
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log(each.resampled[1])
            logs = np.where(np.isfinite(logs), logs, np.nan)
        each.mean_error = bessel * np.std(means, 0, ddof=1)
        seen = np.sum(np.isfinite(logs), 0) == RESAMPLES
        each.var_error = np.where(seen, bessel * np.std(np.where(seen, logs, 0), 0, ddof=1), np.nan)
        each.still = each.mean_error <= each.rounding * each.fresh * np.abs(each.mean)
        _widen(each)
        _compare(each)
        each.noise /= bessel  # variances divide by the number of entries


def _widen(each: Measured) -> None:
    """Finds the noise, and makes errors no smaller than the running variance and the layer's other channels have them.

    A batch that by chance lacks the rare entries of a sparse feature or of a tail does not show how much others vary.
    """
    varies = each.var > 1e-30
    with np.errstate(all="ignore"):
        relative = np.mean((each.mean_error**2 / each.var)[varies]) if np.any(varies) else np.nan
        each.noise = float(np.minimum(np.sqrt(relative), 1))  # that of one entry
        each.mean_error = np.fmax(each.mean_error, each.noise * np.sqrt(each.running["var"]))
    known = each.var_error[np.isfinite(each.var_error)]
    if known.size:
        each.var_error = np.maximum(each.var_error, np.sqrt(np.mean(known**2)))


def _compare(each: Measured) -> None:
    """The distance of running from batch moments."""
    mean, var = each.running["mean"], each.running["var"]
    varies = each.var > 1e-30
    usable = np.isfinite(mean) & np.isfinite(var) & (var > 0) & varies & np.isfinite(each.mean)
    # The running average is itself an average of batches like this one, as noisy as `share` of one.
    both = np.sqrt(1 + min(each.share, 1.0))
    with np.errstate(all="ignore"):
        off = np.abs(each.mean - mean)
        each.shift = off / np.hypot(both * each.mean_error, each.rounding * np.abs(each.mean))
        apart = np.abs(np.log(each.var / var))
        inexact = each.rounding * (1 + np.abs(each.mean) ** 2 / each.var)  # E[x²] − E[x]² where a framework takes it
        each.stretch = apart / np.hypot(both * each.var_error, inexact)
    each.shift, each.stretch = (np.where(usable, z, np.nan) for z in (each.shift, each.stretch))


def couple(forward: Forward) -> float:
    """How far evaluation outputs of half the batch move when the other half becomes a copy of it.

    Over the root mean square of the outputs; NaN where there is one example or no output has an axis of examples.
    """
    size, half = forward.size, forward.size // 2
    base = forward.evaluate(forward.leaves)
    rows = [i for i, y in enumerate(base) if y.ndim and y.shape[0] == size]
    if not rows or half == 0:
        return np.nan
    other = forward.evaluate(forward.leaves, np.arange(size) % half)
    moved = [np.abs(other[i][:half] - base[i][:half]) for i in rows]
    scale = [np.sqrt(np.mean(np.abs(base[i]) ** 2)) for i in rows]
    return float(max(np.max(m, initial=0) / s if s > 0 else 0.0 for m, s in zip(moved, scale, strict=True)))
