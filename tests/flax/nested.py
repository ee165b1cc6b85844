"""Models of flax.nnx with norms in all kinds of places, for `replace` to change."""

import jax
import jax.numpy as jnp
from flax import nnx

from tests.flax import models


class Block(nnx.Module):
    """A linear layer and a batch norm, on x of shape (N, L, 8)."""

    def __init__(self, rngs, **settings):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, scale_init=models.RANDOM, bias_init=models.RANDOM, rngs=rngs, **settings)

    def __call__(self, x):
        return jax.nn.relu(self.norm(self.linear(x)))


class Nested(nnx.Module):
    """Norms in an attribute, a list, a dict, a tuple, a plain dict of lists, and at two places."""

    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs)])
        self.heads = nnx.Dict(a=nnx.LayerNorm(8, rngs=rngs))
        self.pair = nnx.data((nnx.RMSNorm(8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)))
        self.plain = nnx.data({"q": [nnx.GroupNorm(8, 2, rngs=rngs)]})
        self.instance = nnx.InstanceNorm(8, rngs=rngs)
        self.again = self.blocks[0].norm

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        x = self.plain["q"][0](self.pair[0](self.heads["a"](x)))
        return self.again(self.instance(self.pair[1](x)))


def nested() -> Nested:
    return Nested(nnx.Rngs(0))


def batch(rng, *shape):
    return jnp.asarray(rng.normal(size=shape))


def variables(model) -> dict:
    """Every variable of a model, by path."""
    return {path: leaf for path, leaf in nnx.iter_graph(model) if isinstance(leaf, nnx.Variable)}


def double(model):
    """The model in float64, so that many layers' roundings do not hide a change."""
    for variable in variables(model).values():
        variable.set_value(variable.get_value().astype(jnp.float64))
    return model
