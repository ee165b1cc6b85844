"""The network: a small Flax nnx convolutional classifier whose norm is one of normjax's pure functions."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import normjax as nj
from normjax.lab.config import ModelConfig, NormConfig
from normjax.lab.errors import UserError


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
            running = nj.Ema(c.new_weight, unbiased=c.unbiased, debias=c.debias)
            options |= {"running": running, "use_batch_stats": use_batch_stats}
        function = getattr(nj, f"{c.family}_norm")
        try:
            y, state = function(
                x, _values(self.params), _values(self.stats), layout=c.layout, axis_names=c.axis_names, **options
            )
        except (ValueError, TypeError) as error:
            raise UserError(f"config [norm]: {error}") from error
        if train and c.keeps_statistics:
            self.stats = _variables(RunningStat, state)
        return y

    def batch_mean(self, x: jax.Array) -> jax.Array:
        """The mean that this batch offers to the running mean, per channel."""
        pooled = nj.moments(x, layout=self.config.layout, axis_names=self.config.axis_names)
        fresh = nj.BatchStats.init(**{self.config.channel: x.shape[-1]})
        return nj.update(fresh, pooled, running=nj.Ema(1.0)).mean


class Block(nnx.Module):
    """Convolution, norm, relu."""

    def __init__(self, channels_in: int, channels: int, config: NormConfig, rngs: nnx.Rngs):
        """A 3 × 3 convolution, without a bias where the norm adds one."""
        norm_adds_bias = config.family != "none" and config.bias
        self.conv = nnx.Conv(channels_in, channels, (3, 3), use_bias=not norm_adds_bias, rngs=rngs)
        self.norm = Norm(channels, config)


class Classifier(nnx.Module):
    """Blocks with 2 × 2 max pooling while the image is larger than 2, then a dense layer."""

    def __init__(self, model: ModelConfig, norm: NormConfig, *, size: int = 8, classes: int = 10, rngs: nnx.Rngs):
        """Random parameters from `rngs`."""
        widths = (1, *model.features)
        self.blocks = nnx.List(Block(widths[i], width, norm, rngs) for i, width in enumerate(model.features))
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
