"""Three norms over mapped axes: a call of the library on one shard, and the reference on the concatenated batch."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import normjax as nj
from normjax import reference
from tests.sync.mappings import Mapping

SHARD = (4, 3, 4)  # N, L and C of one shard
EPS, NEW_WEIGHT = 1e-3, 0.25
RUNNING = nj.Ema(NEW_WEIGHT, unbiased=True)


@dataclasses.dataclass(frozen=True)
class Family:
    """A norm of shards: what it pools within one."""

    fn: Callable
    layout: str
    axis_names: str
    has_state: bool = True
    ghosts: bool = False


# K is a number, so that a shard of the channels has as many groups as it has channels for.
FAMILIES = {
    "batch": Family(nj.batch_norm, "N L C", "N L"),
    "ghost": Family(nj.batch_norm, "N=(B n=2) L C", "n L", ghosts=True),
    "group": Family(nj.group_norm, "N L C=(G K=2)", "L K", has_state=False),
}
MASKS = ("all counted", "unequal counts", "an empty shard", "all empty")


def norm(family: str, mapping: Mapping, derivative: str):
    """f(x, where, scale, bias, mean, var) → y and the new mean and var, of one shard."""
    given, axes = FAMILIES[family], mapping.array_axes
    options = {
        "layout": " ".join((*axes, given.layout)),
        "axis_names": " ".join((given.axis_names, *mapping.pooled)),
        "eps": EPS,
        "derivative": derivative,
    }

    def apply(x, where, scale, bias, mean, var):
        params = nj.Affine(scale, bias, "C")
        if not given.has_state:
            return given.fn(x, params, where=where, **options)[0], mean, var
        state = nj.BatchStats(mean, var, jnp.int32(1), jnp.ones(mean.shape, jnp.float32), "C")
        fn = given.fn if axes else nj.sync_batch_norm
        y, new = fn(x, params, state, train=True, where=where, running=RUNNING, **options)
        return y, new.mean, new.var

    return apply


def inputs(mapping: Mapping, mask: str | None, rng):
    """x, g, where, scale, bias, mean, var; what a mask excludes is NaN here and there."""
    shape = (*mapping.sizes.values(), *SHARD)
    x, g = rng.normal(1.5, 2.0, shape), rng.normal(size=shape)
    params = (*(mapping.sizes[name] for name in mapping.members), SHARD[-1])
    scale, bias, mean = rng.normal(size=(3, *params))
    var = rng.uniform(0.5, 2.0, params)
    where = None if mask is None else masked(mapping, mask, shape, rng)
    if where is not None:
        x = np.where(where | (rng.random(shape) < 0.5), x, np.nan)
    return x, g, where, scale, bias, mean, var


def masked(mapping: Mapping, mask: str, shape, rng):
    if mask in ("all counted", "all empty"):
        return np.full(shape, mask == "all counted")
    shares = rng.uniform(0.2, 1.0, (*mapping.sizes.values(), 1, 1, 1))
    where = rng.random(shape) < shares
    if mask == "an empty shard":
        axis = list(mapping.sizes).index(mapping.pooled[0])
        where[(slice(None),) * axis + (0,)] = False
    return where


def expected(family: str, mapping: Mapping, x, g, where, scale, bias, mean, var):
    """y, dx, dscale, dbias, mean and var by the reference; mean and var with an axis for each name, 1 where pooled."""
    given, names = FAMILIES[family], list(mapping.sizes)
    kept = [name for name in names if name not in mapping.pooled]
    options = {
        "layout": " ".join([*mapping.pooled, given.layout]),
        "axis_names": " ".join([*mapping.pooled, given.axis_names]),
    }
    y, dx = np.empty_like(x), np.empty_like(x)
    d_scale, d_bias = np.zeros_like(scale), np.zeros_like(bias)
    means = np.empty([1 if name in mapping.pooled else size for name, size in mapping.sizes.items()] + [SHARD[-1]])
    new_mean, new_var = means, means.copy()
    for place in np.ndindex(*(mapping.sizes[name] for name in kept)):
        at = dict(zip(kept, place, strict=True))
        cut = tuple(at.get(name, slice(None)) for name in names)
        own = tuple(at[name] for name in mapping.members)
        mask = None if where is None else where[cut]
        how = {"names": "C", "eps": EPS, "where": mask, **options}
        y[cut] = reference.normalize(x[cut], scale[own], bias[own], **how)
        dx[cut], ds, db = reference.backward(x[cut], g[cut], scale[own], bias[own], **how)
        d_scale[own] += ds
        d_bias[own] += db
        moved = mean[own], var[own]
        if given.has_state:
            batch = reference.moments(x[cut], where=mask, **options)
            rule = {"rule": "ema", "new_weight": NEW_WEIGHT, "unbiased": True}
            extra = (0,) if given.ghosts else ()
            moved = reference.update(*moved, np.ones(SHARD[-1]), *batch, extra_axes=extra, **rule)[:2]
        stat = tuple(at.get(name, 0) for name in names)
        new_mean[stat], new_var[stat] = moved
    return y, dx, d_scale, d_bias, new_mean, new_var
