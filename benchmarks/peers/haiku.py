"""Haiku, as the pure functions of ``transform_with_state``; it has no masks."""

import functools

import haiku as hk
import jax
import jax.numpy as jnp

from benchmarks.cases import Case
from benchmarks.contestants import Apply, in_jax
from benchmarks.problems import EPS, NEW_WEIGHT


def _norm(case: Case) -> hk.Module:
    affine = {"create_scale": True, "create_offset": True, "eps": EPS}
    if case.family == "batch":
        data_format = "channels_last" if case.channel_axis == len(case.shape) - 1 else "channels_first"
        return hk.BatchNorm(decay_rate=1 - NEW_WEIGHT, data_format=data_format, name="norm", **affine)
    if case.family == "layer":
        return hk.LayerNorm(axis=-1, name="norm", **affine)
    if case.family == "rms":
        return hk.RMSNorm(axis=-1, eps=EPS, name="norm")
    if case.family == "group":
        return hk.GroupNorm(case.groups, name="norm", **affine)
    return hk.InstanceNorm(name="norm", **affine)


def build(case: Case) -> Apply | None:
    """The transformed norm with the given parameters, and statistics where it keeps them."""
    if case.masked:
        return None
    batch = case.family == "batch"
    norm = hk.transform_with_state(lambda x, **mode: _norm(case)(x, **mode))
    init = functools.partial(norm.init, **({"is_training": True} if batch else {}))
    shapes, kept = jax.eval_shape(init, jax.random.key(0), jax.ShapeDtypeStruct(case.shape, case.dtype))

    def apply(x, scale, bias, mean, var, where):
        given = {"scale": scale, "offset": bias}
        params = {"norm": {name: jnp.reshape(given[name], leaf.shape) for name, leaf in shapes["norm"].items()}}
        state = {}
        for module, value in (("norm/~/mean_ema", mean), ("norm/~/var_ema", var)):
            if module in kept:
                value = jnp.reshape(value, kept[module]["average"].shape)
                # So late that its debiasing, which would scale the given statistics too, divides by 1.
                state[module] = {"average": value, "hidden": value, "counter": jnp.full((), 2**20, jnp.int32)}
        y, new = norm.apply(params, state, None, x, **({"is_training": case.train} if batch else {}))
        if not (batch and case.train):
            return y, None
        return y, tuple(new[f"norm/~/{name}_ema"]["average"] for name in ("mean", "var"))

    return apply


prepare = in_jax(build)
