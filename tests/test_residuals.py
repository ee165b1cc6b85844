"""What is saved for the backward: x in its own dtype, the small statistics, masks and parameters; nothing else."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.quick import quick_jit


@dataclasses.dataclass(frozen=True)
class Norm:
    fn: Callable
    shape: tuple[int, ...]
    layout: str
    axis_names: str
    groups: int
    train: bool = True
    masked: bool = False

    @property
    def axes(self):
        return {"layout": self.layout, "axis_names": self.axis_names}

    def __call__(self, x, params, derivative="vjp"):
        state = None if self.train else nj.BatchStats.init(C=self.shape[-1])
        where = self.where() if self.masked else None
        options = {"train": self.train, "where": where, "derivative": derivative, **self.axes}
        return self.fn(x, params, state, **options)[0]

    def where(self):
        return jnp.asarray(np.random.default_rng(0).random(self.shape) < 0.7)


_IMAGE = (4, 8, 8, 16)
NORMS = {
    "batch": Norm(nj.batch_norm, _IMAGE, "N H W C", "N H W", 16),
    "batch, masked": Norm(nj.batch_norm, _IMAGE, "N H W C", "N H W", 16, masked=True),
    "batch in evaluation": Norm(nj.batch_norm, _IMAGE, "N H W C", "N H W", 16, train=False),
    "ghost batch": Norm(nj.batch_norm, _IMAGE, "N=(B n=2) H W C", "n H W", 32),
    "layer": Norm(nj.layer_norm, (8, 8, 64), "... C", "C", 64),
    "instance": Norm(nj.instance_norm, _IMAGE, "N H W C", "H W", 64),
    "group": Norm(nj.group_norm, _IMAGE, "N H W C=(G=4 K)", "H W K", 16),
    "rms": Norm(nj.rms_norm, (8, 8, 64), "... C", "C", 64),
}
# In evaluation the plain formula too keeps one array of x's size: x − μ.
TRAINING = {name: norm for name, norm in NORMS.items() if norm.train}
each_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
each_how = pytest.mark.parametrize("how", [lambda f: f, jax.jit], ids=["eager", "jit"])


def distinct(tree) -> dict[int, jax.Array]:
    """The arrays of a tree, each once: by where they lie in memory, or as objects while they are traced."""
    at = lambda leaf: leaf.unsafe_buffer_pointer() if is_stored(leaf) else id(leaf)  # noqa: E731
    return {at(leaf): leaf for leaf in jax.tree.leaves(tree)}


def is_stored(leaf) -> bool:
    """Whether it is an array in memory; JAX keeps small constants as NumPy arrays."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)


def size_in_bytes(pullback) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in distinct(pullback).values())


def bytes_saved_by_a_run(function, *primals) -> int:
    return size_in_bytes(jax.vjp(function, *primals)[1])


def bytes_saved(function, *primals) -> int:
    """The same, read off the trace: nothing is compiled."""
    sizes = []
    jax.eval_shape(lambda *primals: sizes.append(bytes_saved_by_a_run(function, *primals)), *primals)
    return sizes[0]


def allowed_bytes(norm: Norm, x, params) -> int:
    """x's own, four float32 statistics a group (mean in two parts, variance, count), mask, parameters, eps."""
    mask = norm.where().nbytes if norm.masked else 0
    eps = 64  # a number, and the few zeros that JAX keeps as numbers
    return x.nbytes + 4 * 4 * norm.groups + mask + sum(leaf.nbytes for leaf in jax.tree.leaves(params)) + eps


def inputs(norm: Norm, dtype, rng):
    x = jnp.asarray(rng.normal(size=norm.shape), dtype)
    return x, nj.Affine(*jnp.asarray(rng.normal(size=(2, norm.shape[-1])), jnp.float32), "C")


@each_how
@pytest.mark.parametrize("derivative", ["vjp", "jvp"])
@each_dtype
@each_norm
def test_no_more_is_saved_than_x_statistics_masks_and_parameters(norm, dtype, derivative, how, rng):
    x, params = inputs(norm, dtype, rng)
    saved = bytes_saved(how(lambda x, params: norm(x, params, derivative)), x, params)
    # x itself must be among it: a recomputation from elsewhere would need more in the end.
    assert x.nbytes <= saved <= allowed_bytes(norm, x, params)


@each_dtype
@pytest.mark.parametrize("norm", TRAINING.values(), ids=TRAINING.keys())
def test_autodiff_of_the_plain_formula_saves_more_than_that(norm, dtype, rng):
    x, params = inputs(norm, dtype, rng)
    saved = bytes_saved(jax.jit(lambda x, params: norm(x, params, "autodiff")), x, params)
    assert saved > allowed_bytes(norm, x, params)


@pytest.mark.parametrize(
    ("name", "derivative", "how"),
    [
        ("batch, masked", "vjp", lambda f: f),
        ("rms", "autodiff", lambda f: f),
        ("batch, masked", "jvp", jax.jit),
        ("ghost batch", "vjp", jax.jit),
        ("layer", "autodiff", jax.jit),
    ],
)
def test_a_run_saves_what_its_trace_says(name, derivative, how, rng):
    x, params = inputs(NORMS[name], "bfloat16", rng)
    function = how(lambda x, params: NORMS[name](x, params, derivative))
    assert bytes_saved_by_a_run(function, x, params) == bytes_saved(function, x, params)


@pytest.mark.parametrize("derivative", ["vjp", "jvp", "autodiff"])
@pytest.mark.parametrize("name", ["batch", "batch, masked", "layer", "group"])
def test_a_checkpoint_policy_that_saves_the_name_normjax_stats_saves_the_statistics(name, derivative, rng):
    norm = NORMS[name]
    x, params = inputs(norm, "float32", rng)
    policies = jax.checkpoint_policies

    @quick_jit
    def program(x, params):
        def saved(policy):
            f = jax.checkpoint(lambda x, params: norm(x, params, derivative), policy=policy)
            own = distinct((x, params))
            return [leaf for at, leaf in distinct(jax.vjp(f, x, params)[1]).items() if at not in own]

        return saved(policies.save_only_these_names("normjax_stats")), saved(policies.nothing_saveable)

    named, nothing = program(x, params)
    kept = [np.asarray(leaf, np.float64).ravel() for leaf in named if leaf.size == norm.groups]
    where = np.asarray(norm.where()) if norm.masked else None
    mean, var, _ = (
        np.ravel(a)
        for a in reference.moments(np.asarray(x), where=where, layout=norm.layout, axis_names=norm.axis_names)
    )
    close = {"rtol": 0, "atol": 16 * float(np.finfo(np.float32).eps) * np.sqrt(x.size / norm.groups)}
    assert any(np.allclose(leaf, var, **close) for leaf in kept)
    assert any(np.allclose(a + b, mean, **close) for i, a in enumerate(kept) for b in kept[:i])
    assert all(leaf.size != norm.groups for leaf in nothing)
