"""The arrays of a case, the float64 reference's answer to them, and how far a contestant's answer may be from it.

Inputs are moderate (standard normal with mean 0.5), so that every correct implementation is right on them, those that
compute a variance as E[x²] − E[x]² too. How the norms fare on hard inputs is another table: `benchmarks.accuracy`.
"""

import functools
import math
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from benchmarks.cases import Case
from normjax import reference

EPS = 1e-5
OUTPUTS = ("y", "dx", "dscale", "dbias")
RUNNING = ("mean", "var")
NEW_WEIGHT = 0.1
CONTRACT = 1e-6  # how far normjax's x̂ may be from float64; the running statistics are held to the same


class Problem(NamedTuple):
    """What a contestant is given, in NumPy; None where the case has no such thing."""

    x: np.ndarray
    g: np.ndarray
    scale: np.ndarray
    bias: np.ndarray | None
    mean: np.ndarray | None
    var: np.ndarray | None
    where: np.ndarray | None
    index: np.ndarray | None


def problem(case: Case) -> Problem:
    """The arrays of a case, the same in every process and mode."""
    return _problem(case.problem)


def exact(case: Case) -> dict[str, np.ndarray]:
    """By `normjax.reference` in float64: y; with a backward dx, dscale, dbias; of batch norm in training, mean, var."""
    return {name: value for name, value in _exact(case.problem).items() if case.backward or name in ("y", *RUNNING)}


def errors(case: Case, answer: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The largest error of each output, over max(1, the largest exact entry); NaN anywhere gives NaN.

    New running statistics are compared where the answer has them.
    """
    found = {}
    for name, expected in exact(case).items():
        if name in RUNNING and name not in answer:
            continue
        size = max(1.0, float(np.max(np.abs(expected))))
        actual = np.asarray(answer[name], np.float64)
        if actual.shape != expected.shape:
            raise ValueError(f"{name} has shape {actual.shape}, but should have {expected.shape}")
        found[name] = float(np.max(np.abs(actual - expected))) / size
    return found


def bound(case: Case, output: str, *, contract: bool = False) -> float:
    """The error allowed: 4 roundings of float32 that add up like a random walk along the sum, and 4 of x's dtype.

    The latter four, since some libraries round the statistics, x̂ and the scaled x̂ to bfloat16 before they round y.
    With `contract` what normjax promises of y and the running statistics: see `CONTRACT`.
    """
    if contract and output == "y":
        return _promised(case)
    if contract and output in RUNNING:
        return CONTRACT
    entries = math.prod(case.shape) // case.channels
    summed = case.group_size if output in ("y", "dx") else max(entries, case.group_size)
    roundoff = float(ml_dtypes.finfo(case.dtype).eps) / 2
    return 4 * float(np.finfo(np.float32).eps) * math.sqrt(summed) + 4 * roundoff


def _promised(case: Case) -> float:
    """Of y = γx̂ + β: |γ| times the error of x̂, a float32 rounding of the product and of the sum, one to x's dtype."""
    given, y = problem(case), float(np.max(np.abs(exact(case)["y"])))
    bias = 0.0 if given.bias is None else float(np.max(np.abs(given.bias)))
    single, last = (float(ml_dtypes.finfo(dtype).eps) / 2 for dtype in ("float32", case.dtype))
    error = float(np.max(np.abs(given.scale))) * CONTRACT + single * (y + bias) + single * y
    if case.dtype != "float32":
        error += last * y
    return error / max(1.0, y)


def is_right(case: Case, found: Mapping[str, float], *, contract: bool = False) -> bool:
    """Whether every error is within its bound; NaN is not."""
    return all(error <= bound(case, name, contract=contract) for name, error in found.items())


@functools.lru_cache(maxsize=1)
def _problem(case: Case) -> Problem:
    rng = np.random.default_rng(zlib.crc32(case.label.encode()))
    channels = case.channels

    def normal(*shape):
        return rng.standard_normal(shape, dtype=np.float32)

    x, g = (normal(*case.shape) + 0.5).astype(case.dtype), normal(*case.shape).astype(case.dtype)
    scale, bias = 1 + 0.1 * normal(channels), 0.1 * normal(channels)
    batch = case.family == "batch"
    # No group is without an entry, where others give NaN: positions for batch norm, features for layer norm.
    visible = (*case.shape[:-1], 1) if batch else (case.shape[0], *[1] * (len(case.shape) - 2), channels)
    where = rng.random(visible) < 2 / 3 if case.masked else None
    return Problem(
        x=x,
        g=g,
        scale=scale,
        bias=None if case.family == "rms" else bias,
        mean=0.5 + 0.1 * normal(channels) if batch else None,
        var=rng.uniform(0.5, 1.5, channels).astype(np.float32) if batch else None,
        where=where,
        index=rng.permutation(case.shape[0]).astype(np.int32) if case.gather else None,
    )


@functools.lru_cache(maxsize=1)
def _exact(case: Case) -> dict[str, np.ndarray]:
    given = _problem(case)
    x = given.x if given.index is None else given.x[given.index]
    options = {
        "names": "C",
        "layout": case.layout,
        "axis_names": case.axis_names,
        "center": case.family != "rms",
        "where": given.where,
        "eps": EPS,
    }
    if not case.train:
        options |= {"mean": given.mean, "var": given.var, "stat_names": "C"}
    y = reference.normalize(x, given.scale, given.bias, **options)
    dx, dscale, dbias = reference.backward(x, given.g, given.scale, given.bias, **options)
    if given.index is not None:
        gathered, dx = dx, np.empty_like(dx)
        dx[given.index] = gathered
    found = {"y": y, "dx": dx, "dscale": dscale, "dbias": dbias}
    if case.family == "batch" and case.train:
        batch = reference.moments(x, layout=case.layout, axis_names=case.axis_names, where=given.where)
        ghosts = (0,) if case.ghost else ()
        old = (given.mean, given.var, np.ones(case.channels))
        new = reference.update(*old, *batch, rule="ema", new_weight=NEW_WEIGHT, extra_axes=ghosts)
        found |= dict(zip(RUNNING, new[:2], strict=True))
    return {name: value for name, value in found.items() if value is not None}
