"""One small model with every norm in it, by either library's modules, and how it trains."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state

from tests.flax.rows import LINEN, NNX
from tests.quick import quick_jit

SHAPE = (16, 4, 8)
OUT = 3
RANDOM = nn.initializers.normal(1.0)


class Linen(nn.Module):
    """Batch, group, instance, layer and RMS norm between dense layers."""

    library: str
    axis_name: Any = None

    @nn.compact
    def __call__(self, x, train: bool):
        norms = LINEN[self.library]
        x = nn.Dense(8)(x)
        batch = norms.BatchNorm(momentum=0.9, axis_name=self.axis_name, scale_init=RANDOM, bias_init=RANDOM)
        x = nn.relu(batch(x, use_running_average=not train))
        x = norms.GroupNorm(num_groups=2, scale_init=RANDOM, bias_init=RANDOM, name="group")(x)
        x = nn.relu(norms.InstanceNorm(use_scale=False, bias_init=RANDOM)(nn.Dense(6)(x)))
        x = norms.LayerNorm(reduction_axes=(1, 2), scale_init=RANDOM)(nn.Dense(6)(x))
        return nn.Dense(OUT)(norms.RMSNorm(scale_init=RANDOM)(x.mean(1)))


class State(train_state.TrainState):
    batch_stats: Any


class Nnx(nnx.Module):
    """The same in nnx."""

    def __init__(self, library: str, *, axis_name: Any = None, rngs: nnx.Rngs):
        norms = NNX[library]
        both = {"scale_init": RANDOM, "bias_init": RANDOM, "rngs": rngs}
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.batch = norms.BatchNorm(8, momentum=0.9, axis_name=axis_name, **both)
        self.group = norms.GroupNorm(8, 2, **both)
        self.second = nnx.Linear(8, 6, rngs=rngs)
        self.instance = norms.InstanceNorm(6, use_scale=False, bias_init=RANDOM, rngs=rngs)
        self.third = nnx.Linear(6, 6, rngs=rngs)
        self.layer = norms.LayerNorm(6, reduction_axes=(1, 2), scale_init=RANDOM, rngs=rngs)
        self.rms = norms.RMSNorm(6, scale_init=RANDOM, rngs=rngs)
        self.last = nnx.Linear(6, OUT, rngs=rngs)

    def __call__(self, x):
        x = self.group(nnx.relu(self.batch(self.first(x))))
        x = self.layer(self.third(nnx.relu(self.instance(self.second(x)))))
        return self.last(self.rms(x.mean(1)))


def problem(rng):
    x = jnp.asarray(rng.normal(size=SHAPE), jnp.float32)
    return x, jnp.asarray(rng.normal(size=(SHAPE[0], OUT)), jnp.float32)


def linen_variables(library: str, x):
    return quick_jit(lambda key: Linen(library).init(key, x, train=True))(jax.random.key(3))


def linen_state(library: str, x, axis_name=None):
    variables = linen_variables(library, x)
    apply = Linen(library, axis_name).apply
    return State.create(
        apply_fn=apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=optax.sgd(0.05, momentum=0.9),
    )


def linen_step(state: State, x, target, reduce=lambda tree: tree):
    """One step of training; `reduce` takes means over devices."""

    def loss_of(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        y, new = state.apply_fn(variables, x, train=True, mutable=["batch_stats"])
        return jnp.mean((y - target) ** 2), new["batch_stats"]

    (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
    return state.apply_gradients(grads=reduce(grads), batch_stats=stats), reduce(loss)


def nnx_model(library: str, axis_name=None):
    model = Nnx(library, axis_name=axis_name, rngs=nnx.Rngs(3))
    return model, nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)


def nnx_step(model: Nnx, optimizer: nnx.Optimizer, x, target, reduce=lambda tree: tree):
    loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - target) ** 2))(model)
    optimizer.update(model, reduce(grads))
    return reduce(loss)
