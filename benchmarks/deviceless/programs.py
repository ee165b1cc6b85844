"""The programs that are counted: normjax under its three derivatives, flax.linen, and the textbook by autodiff."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen
from jax.sharding import PartitionSpec as P

import normjax as nj
from benchmarks.deviceless import transformer
from benchmarks.deviceless.targets import AXIS, Program

EPS = 1e-5
IMPLEMENTATIONS = ("vjp", "jvp", "autodiff", "linen", "textbook")
ROWS = (16384, 1024)
MANY_ROWS = (131072, 1024)  # 268 MB: more than a chip's own memory holds
IMAGES = (32, 56, 56, 256)  # the output of ResNet-50's first stage
CHIPS = 8
SHARDED_IMAGES = (CHIPS * 32, 14, 14, 256)  # that of its third, 32 images a chip


def layer(implementation: str, x, scale, bias):
    """Layer norm of rows."""
    if implementation == "textbook":
        return _textbook(x, scale, bias, lambda array: jnp.mean(array, -1, keepdims=True))
    if implementation == "linen":
        module = linen.LayerNorm(epsilon=EPS, dtype=x.dtype)
        return module.apply({"params": {"scale": scale, "bias": bias}}, x)
    params = nj.Affine(scale, bias, "D")
    return nj.layer_norm(x, params, layout="... D", axis_names="D", eps=EPS, derivative=implementation)[0]


def rms(implementation: str, x, scale):
    """RMS norm of rows."""
    if implementation == "textbook":
        return _textbook(x, scale, None, lambda array: jnp.mean(array, -1, keepdims=True), center=False)
    if implementation == "linen":
        return linen.RMSNorm(epsilon=EPS, dtype=x.dtype).apply({"params": {"scale": scale}}, x)
    params = nj.Affine(scale, None, "D")
    return nj.rms_norm(x, params, layout="... D", axis_names="D", eps=EPS, derivative=implementation)[0]


def batch(implementation: str, x, scale, bias, *, train: bool = True, axis_name: str | None = None):
    """Batch norm of images, in training or by running statistics: y and, of the modules, their new state."""
    channels = x.shape[-1]
    if implementation == "textbook":
        if not train:
            return _scaled(x - jnp.zeros(channels), jnp.ones(channels), scale, bias, x.dtype), None

        def mean(array):
            local = jnp.mean(array, (0, 1, 2))
            return local if axis_name is None else jax.lax.pmean(local, axis_name)

        return _textbook(x, scale, bias, mean), None
    if implementation == "linen":
        module = linen.BatchNorm(not train, epsilon=EPS, dtype=x.dtype, axis_name=axis_name)
        stats = {"mean": jnp.zeros(channels), "var": jnp.ones(channels)}
        variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": stats}
        return module.apply(variables, x, mutable=["batch_stats"])
    names = "N H W" if axis_name is None else f"N H W {axis_name}"
    arguments = {"layout": "N H W C", "axis_names": names, "train": train, "eps": EPS, "derivative": implementation}
    return nj.batch_norm(x, nj.Affine(scale, bias, "C"), nj.BatchStats.init(C=channels), **arguments)


def _textbook(x, scale, bias, mean: Callable, *, center: bool = True):
    wide = x.astype(jnp.float32)
    centre = mean(wide) if center else 0
    return _scaled(wide - centre, mean(jnp.square(wide - centre)), scale, bias, x.dtype)


def _scaled(d, var, scale, bias, dtype):
    y = d * jax.lax.rsqrt(var + EPS) * scale
    return (y if bias is None else y + bias).astype(dtype)


def batch_in_training(implementation: str, x, scale, bias):
    """Batch norm of images: y alone."""
    return batch(implementation, x, scale, bias)[0]


def batch_in_evaluation(implementation: str, x, scale, bias):
    """Batch norm by running statistics: y alone."""
    return batch(implementation, x, scale, bias, train=False)[0]


def _arguments(shape: tuple[int, ...], parameters: int) -> tuple:
    features = jax.ShapeDtypeStruct(shape[-1:], jnp.float32)
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16), *[features] * parameters


# Of each norm: f(implementation, x, *parameters) → y, and the shapes of its arguments but the first.
NORMS: dict[str, tuple[Callable, tuple]] = {
    "layer norm": (layer, _arguments(ROWS, 2)),
    "long layer norm": (layer, _arguments(MANY_ROWS, 2)),
    "rms norm": (rms, _arguments(ROWS, 1)),
    "batch norm": (batch_in_training, _arguments(IMAGES, 2)),
    "batch norm in evaluation": (batch_in_evaluation, _arguments(IMAGES, 2)),
}
# Of each part: how many arrays of x's size it must read or write: x and y; x and y; x, g, dx; x, y, g, dx.
PASSES = {"forward": 2, "forward apart": 2, "backward apart": 3, "value and vjp": 4}


def ideal_bytes(norm: str, part: str) -> int:
    """What a part moves if each array of x's size passes once."""
    x = NORMS[norm][1][0]
    return PASSES[part] * x.size * x.dtype.itemsize


def value_and_vjp(f: Callable) -> Callable:
    """(*arguments, g) ↦ f's value and the cotangents of its arguments, in one program."""

    def both(*arguments):
        *arguments, g = arguments
        y, pullback = jax.vjp(f, *arguments)
        return y, *pullback(g)

    return both


def norm(name: str, part: str, implementation: str) -> Program:
    """A part of a norm, as a program for one chip."""
    of, arguments = NORMS[name]

    def f(*arguments):
        return of(implementation, *arguments)

    if part == "forward":
        return Program(f, arguments)
    if part == "value and vjp":
        return Program(value_and_vjp(f), (*arguments, arguments[0]))
    return _apart(f, arguments)[part]


def _apart(f: Callable, arguments: tuple) -> dict[str, Program]:
    """The forward and the backward as two programs; an argument that is saved as it came is no result of the first."""
    found = {}

    def forward(*arguments):
        y, pullback = jax.vjp(f, *arguments)
        leaves, structure = jax.tree.flatten(pullback)
        at = {id(leaf): leaf for leaf in (*arguments, *leaves)}
        found.update(structure=structure, order=[list(at).index(id(leaf)) for leaf in leaves])
        return y, list(at.values())[len(arguments) :]

    y, made = jax.eval_shape(forward, *arguments)

    def backward(made, *arguments):
        *arguments, g = arguments
        everything = [*arguments, *made]
        return jax.tree.unflatten(found["structure"], [everything[i] for i in found["order"]])(g)

    kept = [(*arguments, *made)[i] for i in set(found["order"])]
    saved = sum(array.size * array.dtype.itemsize for array in kept)
    return {
        "forward apart": Program(forward, arguments, saved=saved),
        "backward apart": Program(backward, (made, *arguments, y), saved=saved),
    }


SYNCHRONISED = ("value and vjp", "evaluation", "checkpointed", "checked")


def synchronised(part: str, implementation: str) -> Program:
    """Batch norm over eight chips.

    Args:
      part: "value and vjp", the same "checked" (by check_vma: the parameters' gradients come summed) or "checkpointed"
        (with the policy that saves "normjax_stats"), or "evaluation".
      implementation: one of `IMPLEMENTATIONS`.
    """
    x, scale, bias = _arguments(SHARDED_IMAGES, 2)
    train, checked = part != "evaluation", part == "checked"

    def f(*arguments):
        return batch(implementation, *arguments, train=train, axis_name=AXIS if train else None)

    if not train:
        return Program(f, (x, scale, bias), (P(AXIS), P(), P()), (P(AXIS), P()))
    if part == "checkpointed":
        f = jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("normjax_stats"))

    def program(*arguments):
        *arguments, g = arguments
        y, pullback, state = jax.vjp(f, *arguments, has_aux=True)
        dx, d_scale, d_bias = pullback(g)
        if not checked:
            d_scale, d_bias = d_scale[None], d_bias[None]  # each device's own share
        return y, state, dx, d_scale, d_bias

    shares = P() if checked else P(AXIS)
    outs = (P(AXIS), P(), P(AXIS), shares, shares)
    return Program(program, (x, scale, bias, x), (P(AXIS), P(), P(), P(AXIS)), outs, checked)


def synchronised_with_one_more(implementation: str) -> Program:
    """That of "value and vjp" with a sum of dx over all devices besides: what a count of collectives must notice."""
    plain = synchronised("value and vjp", implementation)

    def program(*arguments):
        y, state, dx, *others = plain.fn(*arguments)
        return y, state, dx - jax.lax.psum(jnp.sum(dx), AXIS).astype(dx.dtype), *others

    return Program(program, plain.arguments, plain.in_specs, plain.out_specs)


def transformer_step(implementation: str) -> Program:
    """A bf16 training step of a pre-norm transformer whose layer norms are of the implementation."""

    def norm(x, scale, bias):
        return layer(implementation, x, scale, bias)

    return Program(transformer.training_step(norm), (transformer.parameters(), transformer.tokens()), donated=(0,))
