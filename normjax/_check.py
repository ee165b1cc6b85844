"""Every norm against the float64 reference on the devices, versions and compiler that are here: `normjax check`.

A number passes if it is within `bound` of the largest expected one: a sum of n rounded terms errs like a random walk,
so 16 eps √n of the statistics' dtype; what comes out in half precision is rounded once more, by eps of its own; and the
reference's own mean is one rounded number, off by eps of float64 beside a deviation of no less than a quarter.
"""

import contextlib
import dataclasses
import functools
import json
import math
import platform
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import reference

DERIVATIVES = ("vjp", "jvp", "autodiff")
DTYPES = ("float32", "bfloat16", "float16", "float64")
EPS = 1e-3
MEANS = (1.5, 1e4)
COLLECTIVES = 2  # of a synchronised value and gradient
_COLLECTIVE = re.compile(
    r"= .*? (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|ragged-all-to-all)(-start)?\("
)


@dataclasses.dataclass(frozen=True)
class Family:
    """One norm: its function, and what is pooled in x of shape (8 a device, 3, 4, 6)."""

    function: Callable[..., Any]
    axis_names: str
    layout: str = "N H W C"
    over_devices: bool = False
    frozen: bool = False

    @property
    def center(self) -> bool:
        """Whether the mean is subtracted."""
        return self.function is not nj.rms_norm


FAMILIES = {
    "batch": Family(nj.batch_norm, "N H W"),
    "sync": Family(nj.sync_batch_norm, "N H W", over_devices=True),
    "ghost": Family(nj.batch_norm, "n H W", layout="N=(B n=4) H W C"),
    "layer": Family(nj.layer_norm, "C"),
    "instance": Family(nj.instance_norm, "H W"),
    "group": Family(nj.group_norm, "H W K", layout="N H W C=(G=2 K)"),
    "rms": Family(nj.rms_norm, "C"),
    "evaluation": Family(nj.batch_norm, "N H W", frozen=True),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One family in one dtype: the largest errors as shares of the largest expected number, and of their bounds.

    Attributes:
      output: error of y.
      gradient: error of the cotangents of x, scale and bias, by each rule.
      share: the largest error in units of its bound.
      problem: what went wrong in words, or "".
    """

    family: str
    dtype: str
    output: float
    gradient: dict[str, float]
    share: float
    problem: str


def bound(terms: int, statistics, out, mean: float) -> float:
    """How far a result of dtype `out`, made of sums of `terms` in the dtype of the statistics, may be off."""
    rounded = float(jnp.finfo(out).eps) if jnp.finfo(out).bits < 32 else 0.0
    exact = 4 * float(np.finfo(np.float64).eps) * mean
    return 16 * float(jnp.finfo(statistics).eps) * math.sqrt(terms) + rounded + exact


def dtypes_here() -> list[str]:
    """All dtypes that the devices compute in: TPUs only imitate float64."""
    return [name for name in DTYPES if name != "float64" or jax.devices()[0].platform != "tpu"]


def rows() -> Iterator[Row]:
    """The rows one by one, each computed when it is asked for."""
    for dtype in dtypes_here():
        for family in FAMILIES:
            yield row(family, dtype)


def row(family: str, dtype: str) -> Row:
    """One family in one dtype; what a compiler or a device refuses is a row, too."""
    with jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext():
        try:
            return _measured(family, dtype)
        except Exception as error:
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            return Row(family, dtype, math.nan, dict.fromkeys(DERIVATIVES, math.nan), math.nan, words)


def machine() -> dict[str, Any]:
    """What the numbers were computed by."""
    devices = jax.local_devices()
    return {
        "normjax": nj.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
    }


def run(*, as_json: bool) -> int:
    """The command: prints a table, row by row, or JSON; 1 where anything is beyond its bound."""
    began, here, found = time.monotonic(), machine(), []
    if not as_json:
        print(", ".join(f"{name} {value}" for name, value in here.items()))
        print(_line("family", "dtype", "output", *DERIVATIVES, "of bound", ""))
    for one in rows():
        found.append(one)
        if not as_json:
            numbers = (f"{error:.1e}" for error in (one.output, *one.gradient.values()))
            print(_line(one.family, one.dtype, *numbers, f"{one.share:.0%}", one.problem or "ok"), flush=True)
    counted = collectives()
    failed = sum(bool(one.problem) for one in found) + (counted not in (None, COLLECTIVES))
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        listed = [{name: _finite(value) for name, value in dataclasses.asdict(one).items()} for one in found]
        ends = {"collectives": counted, "ok": not failed, "seconds": seconds}
        print(json.dumps(here | {"rows": listed} | ends, indent=1, allow_nan=False))
    else:
        alone = "one device, none to count (on a CPU JAX_NUM_CPU_DEVICES=8 makes more)"
        said = alone if counted is None else f"{counted} over {here['devices']} devices, {COLLECTIVES} expected"
        print(f"collectives of a synchronised value and gradient: {said}")
        print(f"{f'{failed} failed' if failed else 'all within rounding'}; {seconds} s", flush=True)
    return 1 if failed else 0


def _line(*cells: str) -> str:
    return "  ".join(f"{cell:<10}" for cell in cells).rstrip()


def _finite(value):
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclasses.dataclass(frozen=True)
class Inputs:
    """x, cotangent, scale, bias, running mean and variance, exact in their dtypes."""

    x: np.ndarray
    g: np.ndarray
    scale: np.ndarray
    bias: np.ndarray
    mean: np.ndarray
    var: np.ndarray


def _inputs(dtype, statistics, mean: float, devices: int) -> Inputs:
    """Random ones; at a large mean the deviation is no less than the spacing of floats there."""
    rng = np.random.default_rng(0)
    shape = (8 * devices, 3, 4, 6)
    deviation = max(1.0, float(jnp.finfo(dtype).eps) * mean)
    x, g = rng.normal(mean, deviation, shape), rng.normal(size=shape)
    params = rng.normal(size=(2, 6))
    stats = rng.normal(mean, deviation, 6), deviation**2 * rng.uniform(0.5, 2, 6)
    return Inputs(x.astype(dtype), g.astype(dtype), *(a.astype(statistics) for a in (*params, *stats)))


def _measured(name: str, dtype_name: str) -> Row:
    family, dtype = FAMILIES[name], jnp.dtype(dtype_name)
    statistics = np.promote_types(dtype, np.float32)
    devices = _devices(family)
    program = jax.jit(_on(devices, family, DERIVATIVES))
    gradients: dict[str, float] = dict.fromkeys(DERIVATIVES, 0.0)
    outputs, shares = [], []
    for mean in MEANS:
        given = _inputs(dtype, statistics, mean, len(devices))
        wanted, terms = _expected(family, given), _terms(family, given)
        for derivative, found in program(*map(jnp.asarray, dataclasses.astuple(given))).items():
            errors = [_error(np.asarray(actual), right) for actual, right in zip(found, wanted, strict=True)]
            bounds = [bound(n, statistics, actual.dtype, mean) for n, actual in zip(terms, found, strict=True)]
            outputs.append(errors[0])
            gradients[derivative] = max(gradients[derivative], *errors[1:])
            shares += [error / most for error, most in zip(errors, bounds, strict=True)]
    return Row(name, dtype_name, max(outputs), gradients, max(shares), "" if max(shares) <= 1 else "beyond rounding")


def collectives() -> int | None:
    """How many the compiled program of a synchronised value and gradient has; None where there is only one device."""
    family = FAMILIES["sync"]
    devices = _devices(family)
    if len(devices) == 1:
        return None
    given = _inputs(jnp.dtype(jnp.float32), jnp.float32, MEANS[0], len(devices))
    program = jax.jit(_on(devices, family, DERIVATIVES[:1])).lower(*dataclasses.astuple(given)).compile()
    return len(_COLLECTIVE.findall(program.as_text() or ""))


def _devices(family: Family) -> list[Any]:
    here = jax.local_devices()
    return here if family.over_devices else here[:1]


def _on(devices, family: Family, derivatives):
    """f(x, g, scale, bias, mean, var) → y, dx, dscale, dbias by each derivative; over the devices if those pool."""

    def function(x, g, scale, bias, mean, var):
        def norm(x, scale, bias, derivative):
            names = f"{family.axis_names} data" if family.over_devices else family.axis_names
            options = {"layout": family.layout, "axis_names": names, "eps": EPS, "derivative": derivative}
            state = nj.BatchStats(mean, var, jnp.int32(1), jnp.ones(mean.shape, jnp.float32), ("C",))
            params = nj.Affine(scale, bias if family.center else None, ("C",))
            return family.function(x, params, state if family.frozen else None, train=not family.frozen, **options)[0]

        def both_ways(derivative):
            y, pullback = jax.vjp(functools.partial(norm, derivative=derivative), x, scale, bias)
            return y, *pullback(g)

        return {derivative: both_ways(derivative) for derivative in derivatives}

    if not family.over_devices:
        return function
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    split, same = P("data"), P()
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(split, split, same, same, same, same),
        out_specs=dict.fromkeys(derivatives, (split, split, same, same)),
    )


def _expected(family: Family, given: Inputs):
    """y, dx, dscale and dbias by the reference."""
    bias = given.bias if family.center else None
    frozen = {"mean": given.mean, "var": given.var, "stat_names": "C"} if family.frozen else {}
    spec = {"names": "C", "layout": family.layout, "axis_names": family.axis_names, "center": family.center, "eps": EPS}
    y = reference.normalize(given.x, given.scale, bias, **spec, **frozen)
    dx, d_scale, d_bias = reference.backward(given.x, given.g, given.scale, bias, **spec, **frozen)
    return y, dx, d_scale, np.zeros(6) if d_bias is None else d_bias


def _terms(family: Family, given: Inputs) -> tuple[int, int, int, int]:
    """The longest sum behind each: the group, or all entries of a parameter."""
    _, _, count = reference.moments(given.x, layout=family.layout, axis_names=family.axis_names)
    m, n = int(count.max()), given.x.size // 6
    return m, m, n, n


def _error(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference beside the largest expected number; infinite for NaN."""
    ratio = np.max(np.abs(actual.astype(np.float64) - expected)) / (np.max(np.abs(expected)) or 1.0)
    return math.inf if np.isnan(ratio) else float(ratio)
