"""Small networks of two norms, in each framework, on vectors and on images, whose parts a test may spoil."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import normjax as nj
from normjax._decay import path_names
from tests.quick import quick_jit

WIDTH, CLASSES = 6, 3
KINDS = ("pure", "linen", "nnx")
SHAPES = ("dense", "conv")
RATE = 0.1


@dataclasses.dataclass(frozen=True)
class Net:
    """A network: `apply(params, stats, batch, train) → (y, stats)`, and its first parameters and statistics."""

    apply: Callable[..., Any]
    params: Any
    stats: Any


def build(kind: str, shape: str, seed: int, *, bias: bool = False, eps: float = 1e-5) -> Net:
    """Layer, norm, relu, twice, and a dense layer on the mean over positions."""
    return {"pure": _pure, "linen": _linen, "nnx": _nnx}[kind](shape, seed, bias, eps)


def examples(shape: str, rng: np.random.Generator, size: int = 64, side: int = 4, padded: bool = False):
    """Random inputs: vectors of 5, or images with 2 channels, smooth enough that positions are alike.

    Padded, they are sequences of such vectors, or images, of 1 to `side` positions or lines; the rest is 0.
    """
    if shape == "conv":
        x = rng.normal(size=(size, side, side, 2)) + rng.normal(size=(size, 1, 1, 2))
    else:
        x = rng.normal(size=(size, side, 5) if padded else (size, 5))
    if padded:
        real = np.arange(side) < rng.integers(1, side + 1, size=(size, 1))
        x = x * real.reshape(size, side, *(1,) * (x.ndim - 2))
    return jnp.asarray(x, jnp.float32)


def trained(net: Net, rng: np.random.Generator, shape: str, updates: int = 60, **options):
    """The statistics after so many batches."""
    step = quick_jit(lambda params, stats, x: net.apply(params, stats, x, True)[1])
    stats = net.stats
    for _ in range(updates):
        stats = jax.block_until_ready(step(net.params, stats, examples(shape, rng, **options)))
    return stats


def _drawn(shapes, seed: int):
    """Arrays in the place of shapes: kernels drawn, scales and variances 1, all else 0."""
    rng = np.random.default_rng(seed)

    def draw(keys, leaf):
        if len(leaf.shape) > 1:
            return jnp.asarray(rng.normal(size=leaf.shape) / np.sqrt(np.prod(leaf.shape[:-1])), leaf.dtype)
        return jnp.full(leaf.shape, float(path_names(keys)[-1] in ("scale", "var")), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def _pure(shape, seed, bias, eps):
    before = {"dense": (), "conv": (3, 3)}[shape]
    params: dict[str, Any] = {"head": jax.ShapeDtypeStruct((WIDTH, CLASSES), jnp.float32)}
    for name, width in (("one", {"dense": 5, "conv": 2}[shape]), ("two", WIDTH)):
        params[name] = {"kernel": jax.ShapeDtypeStruct((*before, width, WIDTH), jnp.float32)}
        params[name]["norm"] = nj.Affine.init(C=WIDTH)
        if bias:
            params[name]["bias"] = jnp.zeros(WIDTH)
    params = _drawn(params, seed)

    def apply(params, stats, x, train):
        new, axes = {}, {"layout": "... C", "axis_names": "..."}
        for name in ("one", "two"):
            own = params[name]
            if shape == "dense":
                x = x @ own["kernel"]
            else:
                numbers = ("NHWC", "HWIO", "NHWC")
                x = jax.lax.conv_general_dilated(x, own["kernel"], (1, 1), "SAME", dimension_numbers=numbers)
            x = x + own["bias"] if bias else x
            x, new[name] = nj.batch_norm(x, own["norm"], stats[name], **axes, train=train, eps=eps)
            x = jax.nn.relu(x)
        return jnp.mean(x, tuple(range(1, x.ndim - 1))) @ params["head"], new

    return Net(apply, params, {name: nj.BatchStats.init(C=WIDTH) for name in ("one", "two")})


class LinenNet(linen.Module):
    """With flax's own BatchNorm."""

    conv: bool
    bias: bool
    eps: float

    @linen.compact
    def __call__(self, x, train):
        for name in ("one", "two"):
            if self.conv:
                x = linen.Conv(WIDTH, (3, 3), use_bias=self.bias, name=name)(x)
            else:
                x = linen.Dense(WIDTH, use_bias=self.bias, name=name)(x)
            norm = linen.BatchNorm(momentum=1 - RATE, epsilon=self.eps, name=f"norm_{name}")
            x = linen.relu(norm(x, use_running_average=not train))
        return linen.Dense(CLASSES, name="head")(jnp.mean(x, tuple(range(1, x.ndim - 1))))


def _linen(shape, seed, bias, eps):
    model = LinenNet(shape == "conv", bias, eps)
    x = examples(shape, np.random.default_rng(0), 2)
    variables = _drawn(jax.eval_shape(lambda: model.init(jax.random.key(0), x, False)), seed)

    def apply(params, stats, x, train):
        if not train:
            return model.apply({"params": params, "batch_stats": stats}, x, False), stats
        y, new = model.apply({"params": params, "batch_stats": stats}, x, True, mutable=["batch_stats"])
        return y, new["batch_stats"]

    return Net(apply, variables["params"], variables["batch_stats"])


class NnxNet(nnx.Module):
    """With flax's own BatchNorm."""

    def __init__(self, shape, bias, eps, rngs):
        for name, width in (("one", 5 if shape == "dense" else 2), ("two", WIDTH)):
            if shape == "dense":
                layer = nnx.Linear(width, WIDTH, use_bias=bias, rngs=rngs)
            else:
                layer = nnx.Conv(width, WIDTH, (3, 3), use_bias=bias, rngs=rngs)
            setattr(self, name, layer)
            setattr(self, f"norm_{name}", nnx.BatchNorm(WIDTH, momentum=1 - RATE, epsilon=eps, rngs=rngs))
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, x, train):
        for layer, norm in ((self.one, self.norm_one), (self.two, self.norm_two)):
            x = nnx.relu(norm(layer(x), use_running_average=not train))
        return self.head(jnp.mean(x, tuple(range(1, x.ndim - 1))))


def _nnx(shape, seed, bias, eps):
    graph, params, stats = nnx.split(nnx.eval_shape(lambda: NnxNet(shape, bias, eps, nnx.Rngs(0))), nnx.Param, ...)
    params, stats = _drawn(params, seed), _drawn(stats, seed)

    def apply(params, stats, x, train):
        model = nnx.merge(graph, params, stats, copy=True)
        return model(x, train), nnx.state(model, nnx.Not(nnx.Param))

    return Net(apply, params, stats)
