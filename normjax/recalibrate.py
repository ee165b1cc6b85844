"""Exact population statistics over a data set, for any framework's running statistics: `recalibrate`.

A training-mode pass returns r' = (1 − a) r + a b, where only the framework knows a, and the batch's own b does not
depend on r. Two calls on one batch, from r₁ = 2⁻¹⁰⁰ and r₂ = 2⁶⁰, tell both: 1 − a = (r₂' − r₁')/(r₂ − r₁), where b is
nothing beside r₂, and b = (r₁' − (1 − a) r₁)/a, where nothing cancels. So one further call measures a, two whether the
variance has divisor m or m − 1, and then each batch needs one. Averages that count start at 0, so that a = 1. What
comes back exactly as it was given saw no entry. The b of all batches are `Moments`, which `merge` adds up.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import numpy as np

from normjax._inputs import is_real_scalar, kind_of, static_bool
from normjax._moments import Moments, merge
from normjax._stats_tree import FN, NOTHING, Norm, StatsTree, flatten, wide

HUGE = 2.0**60
ROUNDINGS = 8  # of the squares in E[x²] − E[x]², which some frameworks subtract
RANDOM = 8  # times what another order of the examples changes
TOO_ROUGH = 0.05  # of a variance: with more noise nothing is told from it


def recalibrate(
    step: Callable[..., Any],
    stats,
    batches: Iterable[Any],
    *,
    layers: Sequence[str] | None = None,
    entries: Callable[[Any], Any] | None = None,
    unbiased: bool | None = None,
):
    """Returns `stats` with the mean and biased variance that each norm's inputs have over all batches together.

    In one pass, as other libraries do it, every norm is fed by norms that use the statistics of the batch. The result
    is that of the network as it trains: exact for a norm with no batch norm before it, and for one batch; of any later
    norm evaluation feeds other numbers, by the order of 1/√m. Layer by layer every norm is fed by norms that evaluate
    with their final statistics, so the result is exactly what evaluation has; it takes as many passes as layers.

    Args:
      step: step(stats, batch) → the statistics after one training-mode pass; any framework, jitted or not. It is called
        with start values of ours, keeps its own average (any weight of the new batch), and is called once a batch and
        some more times on the first (once with `unbiased=False`). It calls each norm once: of two views or
        micro-batches one average has only a mixture, which cannot be told apart (`BatchStats` count, so for them this
        is an error).
      stats: the statistics, alone or anywhere in a tree: `BatchStats`, linen's `batch_stats` (with `batch_counts`), an
        nnx state. A norm is what has a `mean` and a `var` side by side, of float32 at least. It is only read.
      batches: of anything that step takes, of equal or unequal sizes; with `layers` iterated once for each.
      layers: paths of norms in `stats`, such as "blocks/0/norm", in the order in which the data pass them; all norms
        below a path go together. Then step(stats, batch, layer) has the norms at `layer` train and all others evaluate.
      entries: entries(batch) → how many entries it pools, in any unit. By default every example counts alike, so that
        batches differ in the leading axis of their arrays alone; lengths or a mask of numbers among them are not known
        for such: there pass this.
        Averages that count entries (`Cumulative()`) say it themselves, masked ones left out.
      unbiased: whether step stores m/(m−1) times the variance (`Ema.torch`; Flax's norms never do). By default that is
        measured, and m with it, by passing half of the first batch once and twice over. Where step refuses that or is
        random (dropout), or groups have one size however many examples there are (ghost batches), the variance is
        taken for biased. True raises in the first two cases, and tells 1/m from the rounding of a large mean. Averages
        that count entries know m.

    Returns:
      A tree like `stats`, of its dtypes; merged in float64. Variances have divisor m whatever step stores. A count is
      the number of batches that had entries, a weight what the average rests on. Statistics that step leaves alone
      (frozen norms) stay as they were. Ghost batches and per-example statistics are averaged by the norm before
      step returns them: the variance between groups of one batch is not in the result.

    Raises:
      ValueError: no batches, nothing moved, something that cannot be known (the message says what to pass), layers
        that are none, are out of order or do not evaluate.
      TypeError: statistics below float32, traced ones, a step that is no function or returns something else, batches
        that are none.

    Example:
      >>> import jax.numpy as jnp
      >>> import normjax as nj
      >>> from normjax.recalibrate import recalibrate
      >>> step = lambda stats, x: nj.batch_norm(x, None, stats, layout="N", axis_names="N", train=True)[1]
      >>> stats = recalibrate(step, nj.BatchStats.init(), [jnp.array([0.0]), jnp.array([3.0]), jnp.array([6.0, 6.0])])
      >>> print(stats.mean.round(4), stats.var.round(4), stats.count)
      3.75 6.1875 3

    References:
      Izmailov et al. (2018), Averaging Weights Leads to Wider Optima and Better Generalization, section 3.2.
    """
    if not callable(step):
        raise TypeError(f"{FN}: step must be a function (stats, batch) → stats; got {kind_of(step)}.")
    if not isinstance(batches, Iterable) or hasattr(batches, "dtype"):
        raise TypeError(
            f"{FN}: batches must be an iterable of batches, such as a list; got {kind_of(batches)}. (An array might be "
            "one batch; for its rows write list(array).)"
        )
    if layers is not None and (isinstance(layers, str) or not len(layers)):
        raise ValueError(f"{FN}: layers must be a list of the norms' paths; got {layers!r}.")
    unbiased = None if unbiased is None else static_bool(FN, "unbiased", unbiased)
    tree = StatsTree.read(stats)
    sizes = _Sizes(entries)
    if layers is None:
        found = _measure(tree, tree.norms, step, _watched(batches, FN), sizes, unbiased)
        if not found:
            raise ValueError(f"{FN}: step moved no statistics; it must be a pass in training mode that returns them.")
        return _replaced(tree, found).whole()
    return _layer_by_layer(tree, layers, step, batches, sizes, unbiased).whole()


def _layer_by_layer(tree: StatsTree, layers, step, batches, sizes: "_Sizes", unbiased: bool | None) -> StatsTree:
    if iter(batches) is batches:
        raise ValueError(f"{FN}: batches is used up after one layer; with layers pass a list, or what iterates anew.")
    firsts = []
    for layer in layers:

        def training(stats, batch, layer=layer):
            return step(stats, batch, layer)

        norms = tree.below(layer)
        found = _measure(tree, norms, training, _watched(batches, f"{FN} {layer}"), sizes, unbiased)
        if still := [norm.path for norm in norms if norm not in found]:
            raise ValueError(f'{FN}: in the pass for layer "{layer}" step left "{still[0]}" as it was: it must train.')
        first = next(iter(batches))
        firsts.append((layer, training, first, _call(tree, norms, training, first)))
        tree = _replaced(tree, found)
    for layer, training, first, before in firsts[:-1]:
        for norm, new in _call(tree, list(before), training, first).items():
            old, span = before[norm], np.sqrt(np.abs(before[norm].var)) + np.abs(before[norm].mean)
            # The same program on the same numbers, unless an earlier norm has changed; some devices add up anew.
            if np.any(np.abs(new.mean - old.mean) > 1e-3 * span) or np.any(np.abs(new.var - old.var) > 1e-3 * old.var):
                raise ValueError(
                    f'{FN}: layers={list(layers)}: the inputs of "{layer}" changed when later ones were set; give '
                    "layers in the order in which the data pass them."
                )
    return tree


def _replaced(tree: StatsTree, found: "dict[Norm, _Population]") -> StatsTree:
    for norm, population in found.items():
        tree = tree.replaced(norm, population.total, population.updates, population.weight)
    return tree


class _Moved(NamedTuple):
    """What step made of one norm's start values, in float64; weight 1 where the average has none."""

    mean: np.ndarray
    var: np.ndarray
    weight: np.ndarray

    @property
    def seen(self) -> np.ndarray:
        """Where there was an entry."""
        return (self.mean != NOTHING) | (self.var != NOTHING)


class _Population:
    """What the batches so far say of the inputs of one norm."""

    def __init__(self, path: str, dtype, first: _Moved, from_huge: _Moved):
        """Measures the average on the first batch that moves it."""
        self.eps = float(np.finfo(dtype).eps)
        self.new_weight = _new_weight(path, np.real(from_huge.mean - first.mean)[first.seen] / HUGE, dtype)
        # An average that takes the first batch whole and then rests on more than 1 rests on entries.
        self.counted = self.new_weight == 1 and bool(np.any(first.weight > 1))
        self.inverse_m = 0.0  # times a batch's size, where step stores the unbiased variance
        self.updates, self.weight = 0, 0.0
        zeros = np.zeros(first.mean.shape)
        self.total = Moments(zeros.astype(first.mean.dtype), zeros, zeros)

    def moments(self, moved: _Moved, size: Callable[[], float]) -> Moments:
        """Of one batch."""
        a, seen, weight = self.new_weight, moved.seen, moved.weight
        mean, var = (np.where(seen, (r - (1 - a) * NOTHING) / a, 0) for r in (moved.mean, moved.var))
        var = np.maximum(var, 0)  # a constant channel's, after rounding
        self.counted |= a == 1 and bool(np.any(weight > 1))
        counts = a == 1 and bool(np.all(weight[seen] >= 1))
        self.weight = self.weight + np.where(seen, weight, 0) if counts else 1.0
        self.updates += 1
        m = weight if self.counted else size()
        if self.inverse_m:
            var = var * (1 - (np.where(m > 1, 1 / np.maximum(m, 1), 0) if self.counted else self.inverse_m / m))
        return Moments(mean, var, np.where(seen, m, 0.0))


def _measure(tree: StatsTree, norms, step, batches, sizes: "_Sizes", unbiased: bool | None) -> dict[Norm, _Population]:
    """The population of each norm that step moves, in one pass."""
    found: dict[Norm, _Population] = {}
    empty = "batches holds none"
    for batch in batches:
        if sizes.is_empty(batch):
            empty = empty and ("no batch has an example" if sizes.entries is None else "entries(batch) is 0 in all")
            continue
        empty = ""
        moved = {norm: one for norm, one in _call(tree, norms, step, batch).items() if np.any(one.seen)}
        if new := [norm for norm in moved if norm not in found]:
            from_huge = _call(tree, norms, step, batch, mean=HUGE)
            for norm in new:
                found[norm] = _Population(norm.path, tree.leaves[norm.mean].dtype, moved[norm], from_huge[norm])
            if unbiased is not False:
                _find_divisors(tree, norms, {norm: found[norm] for norm in new}, step, batch, sizes, bool(unbiased))
        each = [found[norm].moments(one, functools.partial(sizes, batch)) for norm, one in moved.items()]
        with jax.enable_x64(True):
            merged = _merged([found[norm].total for norm in moved], each)
        for norm, total in zip(moved, merged, strict=True):
            found[norm].total = jax.tree.map(np.asarray, total)
    if empty:
        raise ValueError(f"{FN}: {empty}.")
    return found


@jax.jit
def _merged(totals: list[Moments], batch: list[Moments]) -> list[Moments]:
    return [merge(*pair) for pair in zip(totals, batch, strict=True)]


def _call(tree: StatsTree, norms: Sequence[Norm], step, batch, mean: float = NOTHING) -> dict[Norm, _Moved]:
    """What step makes of start values in these norms; all others must come back as they are."""
    returned = step(tree.started(norms, mean), batch)
    paths, leaves, _ = flatten(returned)
    place: dict[tuple[str, ...], Any] = dict(zip(paths, leaves, strict=True))
    moved = {}
    for norm in tree.norms:
        pair = [place.get(tree.paths[i]) for i in (norm.mean, norm.var)]
        if any(leaf is None or np.shape(leaf) != np.shape(tree.leaves[norm.mean]) for leaf in pair):
            raise TypeError(
                f'{FN}: step returned {kind_of(returned)} without the mean and var of "{norm.path}"; it must return a '
                "tree like stats: not y besides, and from linen the collections that were given."
            )
        new_mean, new_var = map(wide, pair)
        if norm in norms:
            weight = None if norm.weight is None else place.get(tree.paths[norm.weight])
            count = None if norm.count is None else place.get(tree.paths[norm.count])
            moved[norm] = _Moved(new_mean, new_var, np.ones(new_var.shape) if weight is None else wide(weight))
            if count is not None and np.max(count) > 1:
                raise ValueError(f'{FN}: step moved "{norm.path}" twice; one call must be one pass over one batch.')
        else:
            old = [wide(tree.leaves[i]) for i in (norm.mean, norm.var)]
            if not all(map(functools.partial(np.array_equal, equal_nan=True), old, (new_mean, new_var))):
                raise ValueError(
                    f'{FN}: step moved "{norm.path}" in the pass for another layer; there it must evaluate.'
                )
    return moved


def _new_weight(path: str, kept: np.ndarray, dtype) -> float:
    """1 − kept, of the shortest decimal that the dtype rounds to kept: 0.99, whose float32 is off by 1e-6 of 0.01."""
    kind = np.finfo(dtype).dtype.type
    kept = kept[np.isfinite(kept)]
    middle = kind(np.median(kept)) if kept.size else kind(0)
    decimal = float(str(middle))
    spread = np.max(np.abs(kept - middle), initial=0)
    if not -1e-6 < decimal < 1 or spread > 1e-5:
        raise ValueError(
            f'{FN}: "{path}" kept {np.min(kept):.7g} to {np.max(kept):.7g} of its old mean; an average keeps '
            "one share, from 0 up to 1, whatever the batch."
        )
    digits = len(np.format_float_positional(middle).partition(".")[2])
    if digits > 6 and np.finfo(kind).eps / 4 > 5e-7 * (1 - decimal):
        raise ValueError(
            f'{FN}: "{path}" gives the new batch a weight of about {1 - decimal:.3g}, which in {kind.__name__} cannot '
            "be measured to 1e-6. Give the norms in step a larger one, such as 0.1 (Flax's momentum=0.9): what they "
            "compute in training does not depend on it."
        )
    return float(kind(1 - decimal))


class _Sizes:
    """How many entries a batch has, beside the first one that was asked about."""

    def __init__(self, entries: Callable[[Any], Any] | None):
        self.entries = entries
        self.first: list[tuple[int, ...]] | None = None

    def __call__(self, batch) -> float:
        """Raises where that cannot be known."""
        if self.entries is not None:
            size = self.entries(batch)
            if not is_real_scalar(size) or not 0 <= float(size) < math.inf:
                raise ValueError(f"{FN}: entries(batch) must be a number of at least 0; got {size!r}.")
            return float(size)
        arrays = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
        shapes = [np.shape(leaf) for leaf in arrays]
        self.first = self.first or shapes
        alike = [shape[1:] for shape in shapes] == [shape[1:] for shape in self.first]
        ratios = {
            size / first if first else math.nan for (size, *_), (first, *_) in zip(shapes, self.first, strict=False)
        }
        if not alike or len(ratios) != 1 or any(str(getattr(leaf, "dtype", "")).endswith("bool") for leaf in arrays):
            raise ValueError(
                f"{FN}: how many entries a batch has cannot be seen in arrays of shapes {shapes} (the first batch: "
                f"{self.first}; a boolean one may be a mask). Pass entries=lambda batch: ..., or let the norms count: "
                "running=Cumulative()."
            )
        return ratios.pop()

    def is_empty(self, batch) -> bool:
        """Whether nothing in it counts: the caller says so, or there are no examples."""
        if self.entries is not None:
            return self(batch) == 0
        leading = [np.shape(leaf)[0] for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
        return bool(leading) and not any(leading)


def _find_divisors(
    tree: StatsTree, norms, found: dict[Norm, _Population], step, batch, sizes: _Sizes, sure: bool
) -> None:
    """Finds 1/m, times a batch's size, of those norms that store the unbiased variance; all `norms` move."""
    count, left, refused, taken = _examples(batch), dict(found), None, False

    def call(rows):
        return _call(tree, norms, step, _rows(batch, count, rows))

    for number in (count // 2 if count >= 4 else count, count):
        rows = np.arange(number)
        try:
            once, twice, turned = call(rows), call(np.tile(rows, 2)), None
        except Exception as error:  # a number of examples that step does not take
            refused = error
            continue
        taken = True
        for norm, population in list(left.items()):
            used = _varied(population, once[norm])
            if not np.any(used):
                continue
            del left[norm]
            inverse_m = _inverse_m(norm.path, population, once[norm], twice[norm], used, sure)
            if inverse_m and not sure:
                turned = call(np.roll(rows, 1)) if turned is None else turned
                random = np.median(np.abs(turned[norm].var / once[norm].var - 1)[used])
                inverse_m = inverse_m if inverse_m > RANDOM * random else 0.0
            if inverse_m and not population.counted:
                inverse_m *= (
                    sizes(batch) * number / count if sizes.entries is None else sizes(_rows(batch, count, rows))
                )
            population.inverse_m = inverse_m
        if not left:
            return
    if sure and not taken:
        raise ValueError(
            f"{FN}: unbiased=True: m cannot be measured, since step takes neither half of a batch nor one twice over "
            f"({refused})."
        ) from refused


def _examples(batch) -> int:
    """How many examples a batch has: the leading axis of its largest array."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(batch) if np.ndim(leaf)]
    return max(shapes, key=math.prod)[0] if shapes else 0


def _rows(batch, count: int, rows):
    """The batch of these examples; arrays without them (a random key, say) stay."""
    return jax.tree.map(lambda leaf: leaf[rows] if np.ndim(leaf) and np.shape(leaf)[0] == count else leaf, batch)


def _varied(population: _Population, moved: _Moved) -> np.ndarray:
    """Which channels have a variance that is more than rounding: not those of dead units."""
    a = population.new_weight
    mean, var = (np.abs(r - (1 - a) * NOTHING) / a for r in (moved.mean, moved.var))
    return moved.seen & (var > np.maximum(ROUNDINGS * population.eps * mean**2, NOTHING))


def _inverse_m(path: str, population: _Population, once: _Moved, twice: _Moved, used: np.ndarray, sure: bool) -> float:
    """1/m, from a batch that twice over has the same mean and biased variance, and 2m entries.

    The unbiased variances are as m/(m − 1) to 2m/(2m − 1), which is 1 + d with d = 1/(2 (m − 1)): 1/m = 2d/(1 + 2d).
    """
    if np.any(np.abs(twice.mean - once.mean)[used] > 1e-3 * (np.sqrt(once.var) + np.abs(once.mean))[used]):
        if not sure:
            return 0.0
        raise ValueError(
            f'{FN}: "{path}" has another mean on the first batch twice over, so m cannot be measured. Make step '
            "deterministic (no dropout), or give its norms an average without unbiased."
        )
    with np.errstate(all="ignore"):
        d = once.var / twice.var - 1
        rounded = population.eps * (1 + np.abs(once.mean) ** 2 / population.new_weight / once.var)
    clear = used & (rounded <= 2 * np.min(rounded[used]))  # the channels with the smallest means
    d = float(np.median(d[clear]))
    noise = ROUNDINGS * np.max(rounded[clear])
    if not sure and (d <= noise or noise > TOO_ROUGH):
        return 0.0
    return 2 * max(d, 0.0) / (1 + 2 * max(d, 0.0))


def _watched(batches: Iterable[Any], what: str) -> Iterator[Any]:
    """The batches, with a bar on standard error where that is a terminal: rich's if it is installed."""
    total = len(batches) if hasattr(batches, "__len__") else None  # type: ignore[arg-type]
    if not sys.stderr.isatty():
        yield from batches
    elif find_spec("rich"):
        from rich.console import Console
        from rich.progress import track

        yield from track(batches, what, total=total, console=Console(stderr=True))
    else:
        for number, batch in enumerate(batches, 1):
            print(f"\r{what}: batch {number}{f' of {total}' if total else ''}", end="", file=sys.stderr, flush=True)
            yield batch
        print(file=sys.stderr)
