"""Training with optax and the optimizer of nnx, on trees of `Affine` and `BatchStats`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import normjax as nj
from tests.closeness import close
from tests.trees import SPEC, loss_of, problem


def test_two_steps_under_optax(rng):
    x, g, params, state, (scale, bias) = problem(rng)
    optimiser = optax.sgd(0.1)

    @jax.jit
    def step(params, state, memory):
        gradients, state = jax.grad(loss_of, has_aux=True)(params, state, x, g)
        updates, memory = optimiser.update(gradients, memory, params)
        return optax.apply_updates(params, updates), state, memory

    memory = optimiser.init(params)
    for _ in range(2):
        params, state, memory = step(params, state, memory)
    close(params.scale, scale, m=8)
    close(params.bias, bias, m=8)
    assert params.names == ("C",)
    assert state.count == 6


@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
def test_optimisers_with_memory_keep_the_class(optimiser, rng):
    _, _, params, _, _ = problem(rng)
    optimiser = getattr(optax, optimiser)(0.1)
    memory = optimiser.init(params)
    gradients = jax.tree.map(jnp.ones_like, params)
    for _ in range(2):
        _, memory = optimiser.update(gradients, memory, params)
    assert jax.tree.structure(memory[0].mu) == jax.tree.structure(params)
    close(memory[0].mu.scale, np.full(3, 1 - 0.9**2))


def test_two_steps_under_the_nnx_optimizer(rng):
    x, g, params, state, (scale, bias) = problem(rng)

    class Model(nnx.Module):
        def __init__(self):
            self.norm = nnx.data(jax.tree.map(nnx.Param, params))
            self.stats = nnx.data(jax.tree.map(nnx.BatchStat, state))

        def __call__(self, x):
            y, new = nj.batch_norm(x, self.norm, self.stats, train=True, **SPEC)
            for variable, value in zip(
                jax.tree.leaves(self.stats, is_leaf=lambda node: isinstance(node, nnx.Variable)),
                jax.tree.leaves(new),
                strict=True,
            ):
                variable.set_value(value)
            return y

    model = Model()
    optimiser = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimiser):
        gradients = nnx.grad(lambda model: jnp.sum(g * model(x)))(model)
        optimiser.update(model, gradients)

    for _ in range(2):
        step(model, optimiser)
    close(model.norm.scale.get_value(), scale, m=8)
    close(model.norm.bias.get_value(), bias, m=8)
    assert model.norm.names == ("C",)
    assert model.stats.count.get_value() == 6
