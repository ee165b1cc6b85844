"""The network: a small convolutional classifier, in each of three kinds, which compute the same.

"pure" is a Flax nnx network whose norm is one of normjax's pure functions, "nnx" the same one with the modules of
`normjax.nnx`, and "linen" a Flax linen network with those of `normjax.linen`. All start from the same parameters.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import normjax as nj
from normjax import linen as our_linen
from normjax import nnx as our_nnx
from normjax._grammar import parse_layout
from normjax.lab.config import Config, ModelConfig, NormConfig
from normjax.lab.errors import UserError

_MODULES = {
    "batch": "BatchNorm",
    "layer": "LayerNorm",
    "instance": "InstanceNorm",
    "group": "GroupNorm",
    "rms": "RMSNorm",
}


class Network(NamedTuple):
    """A network of any kind, as functions of its parameters and its running statistics.

    `init() -> (params, stats)`;
    `apply(params, stats, images, *, train, use_batch_stats=False) -> (logits, stats, means)`: logits are (n, classes),
    only training moves the statistics, and only there do `means` hold those of the last norm's channel 0, where it
    keeps any: `batch_mean` of its input and the `running_mean`.
    """

    init: Callable[[], tuple[Any, Any]]
    apply: Callable[..., tuple[jax.Array, Any, dict[str, jax.Array]]]


def network(config: Config) -> Network:
    """The configured network; whoever traces it gets a UserError where its norm is impossible."""
    return _linen_network(config) if config.model.kind == "linen" else _nnx_network(config)


@contextmanager
def _blamed_on_the_config() -> Iterator[None]:
    """What a norm says of its arguments, as something that the user gave."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise UserError(f"config [norm]: {error}") from error


def _running(config: NormConfig) -> nj.Ema:
    return nj.Ema(config.new_weight, unbiased=config.unbiased, debias=config.debias)


def _norm_adds_bias(config: NormConfig) -> bool:
    return config.family != "none" and config.bias


def _module_settings(config: NormConfig) -> dict[str, Any]:
    """The arguments of a family's module, in linen and in nnx alike."""
    names = ("layout", "axis_names", "derivative")
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    settings |= {"epsilon": config.eps, "use_scale": config.scale}
    if config.family != "rms":
        settings["use_bias"] = config.bias
    if config.keeps_statistics:
        return settings | {"axis": config.channel, "running": _running(config)}
    if config.family != "group":
        return settings | {"feature_axes": config.channel}
    split = [axis.name for axis in parse_layout("norm.layout", config.layout) if axis.factors]
    if len(split) == 1 and split != [config.channel]:
        raise ValueError(f"channel is {config.channel!r}; GroupNorm scales the axis that layout splits: name that one")
    return settings


def batch_mean(config: NormConfig, x: jax.Array) -> jax.Array:
    """The mean that this batch offers to the running mean, per channel."""
    pooled = nj.moments(x, layout=config.layout, axis_names=config.axis_names)
    fresh = nj.BatchStats.init(**{config.channel: x.shape[-1]})
    return nj.update(fresh, pooled, running=nj.Ema(1.0)).mean


def _watched(config: NormConfig, before_norm: jax.Array, mean: Any) -> dict[str, jax.Array]:
    """The means of a `Network`, in training."""
    return {"batch_mean": batch_mean(config, before_norm)[0], "running_mean": mean[0]}


class RunningStat(nnx.Variable):
    """Running statistics: state that no gradient moves, in a collection of its own."""


def _variables(kind: type[nnx.Variable], tree: Any) -> Any:
    """A pytree with each leaf in a Variable, as an attribute that nnx searches."""
    return nnx.data(jax.tree.map(kind, tree))


def _values(tree: Any) -> Any:
    """The pytree inside `_variables`."""
    return jax.tree.map(lambda v: v[...], tree, is_leaf=lambda v: isinstance(v, nnx.Variable))


class Norm(nnx.Module):
    """The configured norm: parameters and running statistics, handed to the family's function at each call."""

    def __init__(self, channels: int, config: NormConfig):
        """Start values for `channels` channels."""
        self.config = config
        sizes: dict[str, Any] = {config.channel: channels}
        has_params = config.family != "none" and (config.scale or config.bias)
        affine = nj.Affine.init(scale=config.scale, bias=config.bias, **sizes) if has_params else None
        stats = nj.BatchStats.init(**sizes) if config.keeps_statistics else None
        self.params = _variables(nnx.Param, affine)
        self.stats = _variables(RunningStat, stats)

    def __call__(self, x: jax.Array, *, train: bool, use_batch_stats: bool = False) -> jax.Array:
        """The normalised x; in training the running statistics move."""
        c = self.config
        if c.family == "none":
            return x
        options: dict[str, Any] = {"eps": c.eps, "derivative": c.derivative, "train": train}
        if c.keeps_statistics:
            options |= {"running": _running(c), "use_batch_stats": use_batch_stats}
        function = getattr(nj, f"{c.family}_norm")
        with _blamed_on_the_config():
            y, state = function(
                x, _values(self.params), _values(self.stats), layout=c.layout, axis_names=c.axis_names, **options
            )
        if train and c.keeps_statistics:
            self.stats = _variables(RunningStat, state)
        return y

    @property
    def running_mean(self) -> Any:
        """Of a norm that keeps statistics."""
        return self.stats.mean


class ModuleNorm(nnx.Module):
    """The configured norm as the module that `normjax.nnx` has for its family."""

    def __init__(self, channels: int, config: NormConfig):
        """Start values for `channels` channels, none of them random."""
        self.keeps_statistics = config.keeps_statistics
        self.module: Any = nnx.data(None)
        if config.family != "none":
            kind = getattr(our_nnx, _MODULES[config.family])
            with _blamed_on_the_config():
                self.module = kind(channels, **_module_settings(config), rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array, *, train: bool, use_batch_stats: bool = False) -> jax.Array:
        """The normalised x; batch statistics move the running ones."""
        if self.module is None:
            return x
        options = {"use_running_average": not (train or use_batch_stats)} if self.keeps_statistics else {}
        with _blamed_on_the_config():
            return self.module(x, **options)

    @property
    def running_mean(self) -> Any:
        """Of a norm that keeps statistics."""
        return self.module.mean


class Block(nnx.Module):
    """Convolution, norm, relu."""

    def __init__(self, channels_in: int, channels: int, config: NormConfig, rngs: nnx.Rngs, *, kind: str = "pure"):
        """A 3 × 3 convolution, without a bias where the norm adds one."""
        self.conv = nnx.Conv(channels_in, channels, (3, 3), use_bias=not _norm_adds_bias(config), rngs=rngs)
        self.norm = (ModuleNorm if kind == "nnx" else Norm)(channels, config)


class Classifier(nnx.Module):
    """Blocks with 2 × 2 max pooling while the image is larger than 2, then a dense layer."""

    def __init__(self, model: ModelConfig, norm: NormConfig, *, size: int = 8, classes: int = 10, rngs: nnx.Rngs):
        """Random parameters from `rngs`."""
        widths = (1, *model.features)
        self.blocks = nnx.List(
            Block(widths[i], width, norm, rngs, kind=model.kind) for i, width in enumerate(model.features)
        )
        for _ in model.features:
            size = size // 2 if size > 2 else size
        self.head = nnx.Linear(size * size * model.features[-1], classes, rngs=rngs)

    def __call__(self, images: jax.Array, *, train: bool, use_batch_stats: bool = False) -> tuple[jax.Array, jax.Array]:
        """Logits (n, classes), and what the last norm was given, for whoever watches its statistics."""
        x = before_norm = images
        for block in self.blocks:
            before_norm = block.conv(x)
            x = jax.nn.relu(block.norm(before_norm, train=train, use_batch_stats=use_batch_stats))
            if x.shape[1] > 2:
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.head(jnp.reshape(x, (x.shape[0], -1))), before_norm


def classifier(config: Config) -> Classifier:
    """With random parameters from the config's seed."""
    # These keys compile several times faster on a CPU than the default ones.
    return Classifier(config.model, config.norm, rngs=nnx.Rngs(jax.random.key(config.seed, impl="rbg")))


def _nnx_network(config: Config) -> Network:
    """The kinds "pure" and "nnx"."""

    def init() -> tuple[nnx.State, nnx.State]:
        _, params, stats = nnx.split(classifier(config), nnx.Param, ...)
        return params, stats

    graph, *_ = nnx.split(nnx.eval_shape(lambda: classifier(config)), nnx.Param, ...)

    def apply(params, stats, images, *, train, use_batch_stats=False):
        # Under a gradient the variables given are the outer trace's, which this one may read but not set.
        model = nnx.merge(graph, params, stats, copy=True)
        logits, before_norm = model(images, train=train, use_batch_stats=use_batch_stats)
        if not train:
            return logits, stats, {}
        watched = config.norm.keeps_statistics
        means = _watched(config.norm, before_norm, model.blocks[-1].norm.running_mean) if watched else {}
        return logits, nnx.state(model, nnx.Not(nnx.Param)), means

    return Network(init, apply)


class LinenClassifier(nn.Module):
    """The network of `Classifier` in linen, with the norms of `normjax.linen`.

    Attributes:
        model: its blocks.
        norm: the norm in them.
        classes: how many logits.
    """

    model: ModelConfig
    norm: NormConfig
    classes: int = 10

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool, use_batch_stats: bool = False) -> tuple[jax.Array, jax.Array]:
        """Logits (n, classes), and what the last norm was given."""
        x = before_norm = images
        for i, width in enumerate(self.model.features):
            before_norm = nn.Conv(width, (3, 3), use_bias=not _norm_adds_bias(self.norm), name=f"conv_{i}")(x)
            x = nn.relu(self._normalized(i, before_norm, frozen=not (train or use_batch_stats)))
            if x.shape[1] > 2:
                x = nn.max_pool(x, (2, 2), strides=(2, 2))
        return nn.Dense(self.classes, name="head")(jnp.reshape(x, (x.shape[0], -1))), before_norm

    def _normalized(self, i: int, x: jax.Array, *, frozen: bool) -> jax.Array:
        if self.norm.family == "none":
            return x
        kind = getattr(our_linen, _MODULES[self.norm.family])
        options = {"use_running_average": frozen} if self.norm.keeps_statistics else {}
        with _blamed_on_the_config():
            return kind(**_module_settings(self.norm), name=f"norm_{i}")(x, **options)


def _linen_network(config: Config) -> Network:
    """The kind "linen"."""
    model = LinenClassifier(config.model, config.norm)

    def init() -> tuple[dict[str, Any], dict[str, Any]]:
        # Linen would draw other numbers from the seed, so its layers get those that nnx draws.
        drawn: Any = nnx.to_pure_dict(nnx.state(classifier(config), nnx.Param))
        images = jnp.zeros((config.train.batch_size, 8, 8, 1))
        stats = dict(model.init(jax.random.key(0), images, train=False))
        layers = {f"conv_{i}": block["conv"] for i, block in drawn["blocks"].items()} | {"head": drawn["head"]}
        return stats.pop("params") | layers, stats

    def apply(params, stats, images, *, train, use_batch_stats=False):
        options: dict[str, Any] = {"train": train, "use_batch_stats": use_batch_stats, "mutable": list(stats)}
        (logits, before_norm), moved = model.apply({"params": params, **stats}, images, **options)
        if not train:
            return logits, stats, {}
        if not config.norm.keeps_statistics:
            return logits, moved, {}
        last = moved["batch_stats"][f"norm_{len(config.model.features) - 1}"]
        return logits, moved, _watched(config.norm, before_norm, last["mean"])

    return Network(init, apply)
