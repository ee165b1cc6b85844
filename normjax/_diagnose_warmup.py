"""How much of its start values, mean 0 and variance 1, a running average still holds: known from a count, or fitted."""

from typing import NamedTuple

import numpy as np

from normjax._diagnose_measure import Measured

WARM_UP = 0.05  # share of the start values: what Ema(0.1) still holds after 28 updates
CLEAR = 3  # times the noise: of less no share is fitted
SURE = 6  # standard errors: chance in no more than one of a million fits
MISFIT = 1e-4  # true shares that chance makes look wrong
REST = 0.25  # of what the batches brought, in the median channel: inputs of twice the scale leave 0.4 of the variances
NOISY = 1.5  # the running average has noise too, that of a third of a batch where three are in it
ALIKE = 0.5  # of a share of start values: weights that moved in the meantime blur it


class Warming(NamedTuple):
    """A layer whose distance from the batch is that of start values which are left, and their share."""

    layer: str
    share: float


def confirms_count(each: Measured) -> bool:
    """Whether the start values that should be left by the count are in the running statistics.

    The count may be that of another average, or of batches over which the statistics were estimated anew. Where the
    batch is so like the start that it cannot tell, a count of less than a half-time is believed.
    """
    if each.shift is None:
        return True
    share, error = _start_left(each)
    return share > each.start / 2 if error < each.start / 3 else each.start > 0.5


def _start_left(each: Measured) -> tuple[float, float]:
    """The share s of mean 0 and variance 1 that is left in the running statistics, and its standard error.

    By least squares of r − b = s (start − b) over all channels' means and variances, in their standard errors. Both
    sides hold the noise of b, whose share of the sums is their expected value, one for each number (and one more for
    each resampled batch, by which the error is known however the channels are correlated).
    """

    def fitted(mean, var, noises: int) -> float:
        towards = np.stack([-np.real(mean), 1 - var]) / errors
        away = np.stack([np.real(each.running["mean"] - mean), each.running["var"] - var]) / errors
        fine = np.isfinite(towards) & np.isfinite(away)
        noise = noises * int(np.sum(fine))
        told = float(np.sum(towards[fine] ** 2)) - noise
        return (float(np.sum(towards[fine] * away[fine])) - noise) / told if told > CLEAR * noise else np.nan

    with np.errstate(all="ignore"):
        # A variance that is small by chance seems certain: the running one says what is usual.
        errors = np.stack([each.mean_error, np.fmax(each.var, each.running["var"]) * each.var_error])
        share = fitted(each.mean, each.var, 1)
        drawn = [fitted(mean, var, 2) for mean, var in zip(*each.resampled, strict=True)]
    error = float(np.std(drawn, ddof=1)) * (1 + abs(share)) if np.isfinite(share) else np.inf
    return (share, error) if np.isfinite(error) else (0.0, np.inf)


def share_left(each: Measured) -> tuple[float, bool]:
    """The share of the start values that is left, and whether that is certain and explains all but noise."""
    if not np.isnan(each.start):
        return each.start, _fits(each, each.start)
    share, error = _start_left(each)
    return share, share > max(WARM_UP, SURE * error) and _fits(each, share)


def _fits(each: Measured, share: float) -> bool:
    """Whether a share of the start values leaves no more to explain than the noise of 1 − share of batches.

    Or hardly a part of what those batches brought: weights that moved a little leave that too.
    """
    from scipy.special import chdtri

    if not 0 < share < 1:
        return False
    mean, var = each.running["mean"], each.running["var"] - share  # of the batches, as far as they are in
    own_mean, own_var = (1 - share) * each.mean, (1 - share) * each.var
    with np.errstate(all="ignore"):
        stretch = np.log((var + share) / (own_var + share)) * (own_var + share) / (own_var * each.var_error)
        rest = np.abs(np.stack([(mean - own_mean) / ((1 - share) * each.mean_error), stretch]))
        part = np.abs(np.stack([mean - own_mean, var - own_var])) / np.abs([own_mean, own_var])
    for far, of_batches in zip(rest, part, strict=True):
        known = np.isfinite(far) & np.isfinite(of_batches)
        chance = float(np.sum(far[known] ** 2)) < NOISY * chdtri(max(np.sum(known), 1), MISFIT)
        if not chance and float(np.median(of_batches[known])) > REST:
            return False
    return True


def offset_due(each: Measured, share: float) -> float:
    """How far evaluation is off by such a share of the start values, in standard deviations, in the worst channel."""
    with np.errstate(all="ignore"):
        var = share + (1 - share) * each.var
        due = np.stack([share * np.abs(each.mean) / np.sqrt(var), np.abs(np.log(var / each.var)) / 2])
    return float(np.max(due, where=np.isfinite(due) & (each.var > 0), initial=0))


def find_warming(layers: list[Measured]) -> Warming | None:
    """The layer with most of its start values left.

    Behind it training has moved the weights besides: there no share explains everything.
    """
    found = [(each.name, *share_left(each)) for each in layers if each.shift is not None and np.isnan(each.start)]
    return max(
        (Warming(name, share) for name, share, explained in found if explained), key=lambda one: one.share, default=None
    )


def is_alike(each: Measured, share: float, other: float) -> bool:
    """Whether a layer has as much of its start values left as another one, as far as it shows."""
    return abs(share - other) < ALIKE * other or _fits(each, other)
