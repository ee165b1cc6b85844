"""One net of three batch norms in each framework, as a training-mode pass; and what it computes in NumPy float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import normjax as nj
from tests.quick import quick_jit

WIDTHS, EPS = (6, 5, 4, 3), 1e-5
LAYERS = ("norm0", "norm1", "norm2")
WEIGHTS = [np.random.default_rng(i).normal(size=WIDTHS[i : i + 2]).astype(np.float32) for i in range(3)]


class Net(NamedTuple):
    """step(stats, x) or step(stats, x, layer) → stats; read(stats, name) → the mean and variance of a norm."""

    stats: Any
    step: Callable[..., Any]
    read: Callable[[Any, str], tuple[Any, Any]]


def pure(running=nj.Ema(0.1)) -> Net:  # noqa: B008
    def step(stats, x, layer=None):
        moved = {}
        for name, weight in zip(LAYERS, WEIGHTS, strict=True):
            options = {"layout": "N C", "axis_names": "N", "eps": EPS, "running": running}
            x, moved[name] = nj.batch_norm(x @ weight, None, stats[name], train=layer in (None, name), **options)
            x = jnp.tanh(x)
        return moved

    stats = {name: nj.BatchStats.init(C=size) for name, size in zip(LAYERS, WIDTHS[1:], strict=True)}
    return Net(stats, quick_jit(step, static_argnums=2), lambda stats, name: (stats[name].mean, stats[name].var))


class _Linen(nn.Module):
    @nn.compact
    def __call__(self, x, layer=None):
        for name, weight in zip(LAYERS, WEIGHTS, strict=True):
            norm = nn.BatchNorm(epsilon=EPS, use_scale=False, use_bias=False, name=name)
            x = jnp.tanh(norm(x @ weight, use_running_average=layer not in (None, name)))
        return x


def linen() -> Net:
    model = _Linen()

    def step(stats, x, layer=None):
        return model.apply({"batch_stats": stats}, x, layer, mutable=["batch_stats"])[1]["batch_stats"]

    stats = model.init(jax.random.key(0), jnp.zeros((2, WIDTHS[0])))["batch_stats"]
    return Net(stats, quick_jit(step, static_argnums=2), lambda stats, name: (stats[name]["mean"], stats[name]["var"]))


class _Nnx(nnx.Module):
    def __init__(self):
        for name, size in zip(LAYERS, WIDTHS[1:], strict=True):
            setattr(self, name, nnx.BatchNorm(size, epsilon=EPS, rngs=nnx.Rngs(0)))

    def __call__(self, x, layer=None):
        for name, weight in zip(LAYERS, WEIGHTS, strict=True):
            x = jnp.tanh(getattr(self, name)(x @ weight, use_running_average=layer not in (None, name)))
        return x


def of_nnx() -> Net:
    graph, params, stats = nnx.split(_Nnx(), nnx.Param, ...)

    def step(stats, x, layer=None):
        model = nnx.merge(graph, params, stats, copy=True)
        model(x, layer)
        return nnx.state(model, nnx.BatchStat)

    def read(stats, name):
        return stats[name]["mean"][...], stats[name]["var"][...]

    return Net(stats, quick_jit(step, static_argnums=2), read)


NETS = {"pure": pure, "linen": linen, "nnx": of_nnx}


def populations(batches, *, by_layer: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Mean and variance of what each norm is given, over all batches, where earlier ones use those or a batch's own."""
    given, found = [np.asarray(batch, np.float64) for batch in batches], {}
    for name, weight in zip(LAYERS, WEIGHTS, strict=True):
        given = [x @ weight.astype(np.float64) for x in given]
        rows = np.concatenate(given)
        found[name] = rows.mean(0), rows.var(0)
        used = [found[name]] * len(given) if by_layer else [(x.mean(0), x.var(0)) for x in given]
        given = [np.tanh((x - mean) / np.sqrt(var + EPS)) for x, (mean, var) in zip(given, used, strict=True)]
    return found
