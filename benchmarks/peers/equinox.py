"""Equinox, whose norms take one example with its channels first: mapped over the batch; it has no masks.

So batch, group and instance norm move the channels there and back, and their times have that in them.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.cases import Case
from benchmarks.contestants import Apply, in_jax
from benchmarks.problems import EPS, NEW_WEIGHT


def build(case: Case) -> Apply | None:
    """A module with the given parameters put in, under vmap."""
    if case.masked:
        return None
    return _batch(case) if case.family == "batch" else _stateless(case)


def _with(module, scale, bias):
    if bias is None:
        return eqx.tree_at(lambda module: module.weight, module, scale)
    return eqx.tree_at(lambda module: (module.weight, module.bias), module, (scale, bias))


def _stateless(case: Case) -> Apply:
    spatial = case.family in ("group", "instance")
    if spatial:
        module = eqx.nn.GroupNorm(case.groups or case.channels, case.channels, eps=EPS)
    elif case.family == "rms":
        module = eqx.nn.RMSNorm(case.channels, eps=EPS, use_bias=False)
    else:
        module = eqx.nn.LayerNorm(case.channels, eps=EPS)
    mapped = 1 if spatial else len(case.shape) - 1

    def apply(x, scale, bias, mean, var, where):
        one = _with(module, scale, bias)
        for _ in range(mapped):
            one = jax.vmap(one)
        y = one(jnp.moveaxis(x, -1, 1) if spatial else x)
        return jnp.moveaxis(y, 1, -1) if spatial else y, None

    return apply


def _batch(case: Case) -> Apply:
    module, start = eqx.nn.make_with_state(eqx.nn.BatchNorm)(
        case.channels, axis_name="batch", eps=EPS, momentum=1 - NEW_WEIGHT, mode="batch", inference=not case.train
    )
    leaves, tree = jax.tree.flatten(start)  # a state object can be set only once

    def apply(x, scale, bias, mean, var, where):
        state = jax.tree.unflatten(tree, leaves).set(module.batch_state_index, (mean, var))
        norm = jax.vmap(_with(module, scale, bias), axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        y, state = norm(jnp.moveaxis(x, case.channel_axis, 1), state)
        new = state.get(module.batch_state_index) if case.train else None
        return jnp.moveaxis(y, 1, case.channel_axis), new

    return apply


prepare = in_jax(build)
