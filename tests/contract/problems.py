"""One norm told three times: as a call of the library, to the reference, and as a plain formula for `jax.grad`.

The plain formula works on *wide* arrays, in which each factor of a split axis is an axis of its own; which of them are
pooled follows from the names alone, so it shares no grammar with the library.
"""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import normjax as nj
from normjax import reference

EPS = 1e-3
RUNNING = nj.Ema(0.25, unbiased=True)
FUNCTIONS = {
    "batch": nj.batch_norm,
    "batch_eval": nj.batch_norm,
    "layer": nj.layer_norm,
    "instance": nj.instance_norm,
    "group": nj.group_norm,
    "rms": nj.rms_norm,
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout and what each family pools in it."""

    text: str
    factors: str  # the axes of the wide array
    wide: tuple[int, ...]
    pooled: dict[str, str]  # by family, in the words of axis_names
    params: str = "C"
    kind: str = "scale and bias"
    state: str = "C"
    splits: dict[str, str] = dataclasses.field(default_factory=dict)  # a split axis' own name: its factors


def _families(positions: str, layer: str, rms: str, block: str = "K") -> dict[str, str]:
    batch = f"N {positions}"
    group = f"{positions} {block}"
    return {
        "batch": batch,
        "batch_eval": batch,
        "layer": layer,
        "instance": positions,
        "group": group,
        "rms": rms,
    }


# Sizes that agree where a mistake would look for them: channels and the last axis of a signal, examples and channels.
_IMAGE, _SIGNAL, _WORDS = (4, 2, 3, 4), (3, 4, 4), (4, 5, 4)
LAYOUTS = {
    "channels last": Layout("N H W C", "N H W C", _IMAGE, _families("H W", layer="C", rms="C")),
    "channels first": Layout("N C H W", "N C H W", (4, 4, 2, 3), _families("H W", layer="C H W", rms="H W C")),
    "signal, scale alone": Layout("N C L", "N C L", _SIGNAL, _families("L", layer="L C", rms="C"), kind="scale alone"),
    "sequence, zero-centred": Layout(
        "N ... C", "N ... C", _WORDS, _families("...", layer="C", rms="C"), kind="zero-centred"
    ),
    "split axes": Layout(
        "N L=(H=2 W) C=(G=2 K)",
        "N H W G K",
        (4, 2, 3, 2, 2),
        {"batch": "N L K", "batch_eval": "N L K", "layer": "L C", "instance": "H W", "group": "W K H", "rms": "K"},
        state="G",
        splits={"L": "H W", "C": "G K"},
    ),
    "ghost batches": Layout(
        "N=(B n=2) L C", "B n L C", (2, 2, 5, 4), {"batch": "n L", "batch_eval": "n L"}, splits={"N": "B n"}
    ),
    "conditional parameters": Layout("N L C", "N L C", _WORDS, _families("L", layer="C", rms="C"), params="N C"),
    "scalar parameters": Layout("N L C", "N L C", _WORDS, _families("L", layer="L C", rms="C"), params=""),
    "no parameters": Layout("N L C", "N L C", _WORDS, _families("L", layer="C", rms="L C"), kind="none"),
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One norm: how to call it, and everything that its plain formula needs."""

    family: str
    layout: str
    axis_names: str
    shape: tuple[int, ...]
    wide: tuple[int, ...]
    axes: tuple[int, ...]  # what is pooled, in the wide array
    params: str  # the names that parameters run along
    kind: str
    stored: tuple[int, ...]  # the shape of parameters
    affine: tuple[int, ...]  # the same in the wide array
    state: str
    stat_shape: tuple[int, ...]  # of the running statistics
    stat_wide: tuple[int, ...]

    @property
    def m(self) -> int:
        """Entries in a group."""
        return int(np.prod([self.wide[axis] for axis in self.axes]))

    @property
    def zero_centered(self) -> bool:
        return self.kind == "zero-centred"

    @property
    def center(self) -> bool:
        return self.family != "rms"

    @property
    def frozen(self) -> bool:
        return self.family == "batch_eval"

    @property
    def options(self) -> dict:
        """What the reference is told besides arrays."""
        return {
            "names": self.params,
            "layout": self.layout,
            "axis_names": self.axis_names,
            "center": self.center,
            "zero_centered": self.zero_centered,
            "eps": EPS,
        }


def problem(family: str, layout: str) -> Problem:
    """The norm of a family in one of `LAYOUTS`."""
    given = LAYOUTS[layout]
    text, factors, wide, splits = given.text, given.factors.split(), list(given.wide), dict(given.splits)
    if family == "group" and "C" not in splits:
        text = text.replace("C", "C=(G=2 K)")
        at = factors.index("C")
        factors[at : at + 1], wide[at : at + 1] = ["G", "K"], [2, wide[at] // 2]
        splits["C"] = "G K"

    def spread(names: str) -> list[str]:
        return [factor for name in names.split() for factor in splits.get(name, name).split()]

    def sizes(names: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        stored = tuple(int(np.prod([wide[factors.index(f)] for f in spread(name)])) for name in names.split())
        return stored, tuple(size if f in spread(names) else 1 for f, size in zip(factors, wide, strict=True))

    own = {factor: name for name, parts in splits.items() for factor in parts.split()}
    array_axes = list(dict.fromkeys(own.get(factor, factor) for factor in factors))
    return Problem(
        family,
        text,
        given.pooled[family],
        sizes(" ".join(array_axes))[0],
        tuple(wide),
        tuple(factors.index(factor) for factor in spread(given.pooled[family])),
        given.params,
        given.kind,
        *sizes(given.params),
        given.state,
        *sizes(given.state),
    )


# --- the inputs


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Three draws of x, two of parameters, a cotangent and running statistics: NumPy float64, exact in their dtypes."""

    xs: np.ndarray
    g: np.ndarray
    scales: np.ndarray | None
    biases: np.ndarray | None
    mean: np.ndarray
    var: np.ndarray
    where: np.ndarray | None


def _exact(array: np.ndarray, dtype) -> np.ndarray:
    return np.asarray(array).astype(jnp.dtype(dtype)).astype(np.float64)


def inputs(given: Problem, mask: str, x_dtype, param_dtype) -> Inputs:
    """Random inputs that depend on the problem, the mask and the dtypes alone."""
    x_dtype = jnp.dtype(x_dtype)
    rng = np.random.default_rng(zlib.crc32(repr((given, mask, x_dtype.name)).encode()))
    integer = jnp.issubdtype(x_dtype, jnp.integer)
    xs = rng.integers(-4, 6, (3, *given.shape)) if integer else rng.normal(1.5, 2.0, (3, *given.shape))
    g = rng.normal(size=given.shape)
    scales, biases = rng.normal(size=(2, 2, *given.stored))
    where = _mask(given, mask, rng)
    if mask == "NaN left out":
        xs = np.where(where, xs, np.where(rng.random(given.shape) < 0.5, np.nan, np.inf))
    return Inputs(
        _exact(xs, x_dtype),
        _exact(g, jnp.float32 if integer else x_dtype),
        None if given.kind == "none" else _exact(scales, param_dtype),
        None if given.kind in ("none", "scale alone") else _exact(biases, param_dtype),
        _exact(rng.normal(size=given.stat_shape), np.float32),
        _exact(rng.uniform(0.5, 2.0, given.stat_shape), np.float32),
        where,
    )


def _mask(given: Problem, mask: str, rng) -> np.ndarray | None:
    if mask == "none":
        return None
    if mask == "small":
        # Along the first array axis that is pooled, one place of it left out.
        group = np.zeros(given.wide, bool)
        group[tuple(slice(None) if i in given.axes else 0 for i in range(len(given.wide)))] = True
        axis = next(i for i, places in enumerate(np.nonzero(group.reshape(given.shape))) if np.ptp(places))
        where = np.ones([size if i == axis else 1 for i, size in enumerate(given.shape)], bool)
        where.flat[1] = False
        return where
    where = rng.random(given.wide) >= 0.3
    if mask == "empties a group":
        where[tuple(slice(None) if i in given.axes else 0 for i in range(len(given.wide)))] = False
    return where.reshape(given.shape)


# --- the library


def affine(given: Problem, scale, bias) -> nj.Affine | None:
    return None if given.kind == "none" else nj.Affine(scale, bias, given.params, given.zero_centered)


def stats(given: Problem, values: Inputs, dtype=jnp.float32) -> nj.BatchStats:
    return nj.BatchStats(
        jnp.asarray(np.asarray(values.mean, dtype)),
        jnp.asarray(np.asarray(values.var, dtype)),
        jnp.asarray(np.int32(3)),
        jnp.asarray(np.ones(given.stat_shape, np.float32)),
        given.state,
    )


def library(given: Problem, derivative: str = "vjp", eps=EPS):
    """f(x, scale, bias, state, where) → (y, new state)."""

    def norm(x, scale, bias, state, where):
        running = {"running": RUNNING} if given.family == "batch" else {}
        return FUNCTIONS[given.family](
            x,
            affine(given, scale, bias),
            state,
            layout=given.layout,
            axis_names=given.axis_names,
            train=not given.frozen,
            where=where,
            eps=eps,
            derivative=derivative,
            **running,
        )

    return norm


# --- what is right


def _frozen(given: Problem, values: Inputs) -> dict:
    return {"mean": values.mean, "var": values.var, "stat_names": given.state} if given.frozen else {}


def output(given: Problem, values: Inputs, x, scale, bias) -> np.ndarray:
    """y by the reference."""
    return reference.normalize(x, scale, bias, where=values.where, **given.options, **_frozen(given, values))


def cotangents(given: Problem, values: Inputs, x, g, scale, bias):
    """dx, dscale and dbias by the reference."""
    return reference.backward(x, g, scale, bias, where=values.where, **given.options, **_frozen(given, values))


def next_stats(given: Problem, values: Inputs, xs) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Running mean, variance, weight and count after training on each x in turn; as they were for other families."""
    mean, var, weight, count = values.mean, values.var, np.ones(given.stat_shape), 3
    if given.family != "batch":
        return mean, var, weight, count
    for x in xs:
        batch = reference.moments(x, layout=given.layout, axis_names=given.axis_names, where=values.where)
        extra = tuple(range(batch[0].ndim - mean.ndim))  # the ghost axis, which comes first
        rule = {"rule": "ema", "new_weight": RUNNING.new_weight, "unbiased": RUNNING.unbiased, "extra_axes": extra}
        mean, var, weight = reference.update(mean, var, weight, *batch, **rule)
        count += 1 if np.any(batch[2]) else 0
    return mean, var, weight, count


def plain(given: Problem, x, scale, bias, mean, var, where, eps=EPS):
    """The formula as one would write it down, of the shape of x, for its derivatives: 0 where a lost entry stands.

    where is a full mask; mean and var are the state's, for evaluation. Lost is an excluded entry that is NaN or Inf.
    """
    x, where = jnp.reshape(x, given.wide), jnp.reshape(where, given.wide)
    lost = ~where & ~jnp.isfinite(x)
    x = jnp.where(lost, 0, x)
    some = jnp.any(where, given.axes, keepdims=True)
    if given.frozen:
        mean, var, some = jnp.reshape(mean, given.stat_wide), jnp.reshape(var, given.stat_wide), True
    else:
        # A group that the mask empties has mean 0/0 in jax.numpy: it takes all its entries, and is replaced below.
        included = where | ~some
        mean = jnp.mean(x, given.axes, where=included, keepdims=True) if given.center else 0.0
        var = jnp.mean((x - mean) ** 2, given.axes, where=included, keepdims=True)
    y = jnp.where(some, (x - mean) / jnp.sqrt(var + eps), 0.0)
    if scale is not None:
        y = y * (jnp.reshape(scale, given.affine) + (1 if given.zero_centered else 0))
    if bias is not None:
        y = y + jnp.reshape(bias, given.affine)
    return jnp.reshape(jnp.where(lost, 0, y), given.shape)


def full_mask(given: Problem, values: Inputs) -> np.ndarray:
    return np.broadcast_to(True if values.where is None else values.where, given.shape)


def derivative_loss(norm, g, counted):
    """A loss whose second derivatives, by x and by parameters, are no zeros: Σ g y² over the counted entries."""

    def loss(*primals):
        y = norm(*primals)
        wide = y.astype(jnp.promote_types(y.dtype, jnp.float32))
        return jnp.sum(jnp.where(counted, g * wide * wide, 0))

    return loss


def projected_gradient(loss, weights, argnums):
    """The inner product of a loss's gradient with fixed weights, to differentiate once more."""

    def projection(*primals):
        slopes = jax.grad(loss, argnums)(*primals)
        return sum(jnp.sum(w * slope.astype(w.dtype)) for w, slope in zip(weights, slopes, strict=True))

    return projection
