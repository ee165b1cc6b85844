"""Which examples of a function's output depend on which of its input, in numbers and as a picture."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from normjax._derivatives import abs_square
from normjax._extras import require
from normjax._inputs import as_array, is_real_scalar, kind_of
from normjax._mapped import vary_alike
from normjax._sharding import placed_as

PROBES = 4


def example_coupling(fn: Callable[[Any], Any], x, *, example_axis: int = 0) -> jax.Array:
    """Returns how strongly each example of fn(x) depends on each example of x: (N, N), row i for output i.

    Entry (i, j) estimates the Frobenius norm of ∂fn(x)ᵢ/∂xⱼ from `PROBES` products of random vectors with the Jacobian;
    it is 0 where the derivative is, or below what x's dtype holds. Costs `PROBES` · N backward passes.

    Args:
      fn: takes an array like x; its result has the examples along the same axis.
      x: float array.
      example_axis: which axis of both holds the examples.

    Returns:
      Array (N, N) of x's dtype, float32 at least.

    Raises:
      ValueError: x or fn(x) lacks the axis, or their sizes along it differ.
      TypeError: x is not of a float dtype; example_axis is no int; fn(x) is not one array of numbers to differentiate.

    Example:
      >>> import normjax as nj
      >>> x = jnp.arange(6.0).reshape(3, 2)
      >>> norm = lambda x: nj.layer_norm(x, layout="N D", axis_names="D")[0]
      >>> print(example_coupling(norm, x) > 0)
      [[ True False False]
       [False  True False]
       [False False  True]]
    """
    name = "example_coupling"
    x = as_array(name, "x", x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: x must be of a float dtype, to differentiate by; got {x.dtype}.")
    y = jax.eval_shape(lambda x: call(name, "fn", fn, x), x)
    if not isinstance(y, jax.ShapeDtypeStruct):
        raise TypeError(f"{name}: fn must return one array; got {kind_of(y)}. Write lambda x: fn(x)[0], say.")
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        raise TypeError(f"{name}: fn(x) must be of a float dtype, to differentiate; got {y.dtype}.")
    own, other = (_axis(name, example_axis, what, shape) for what, shape in (("x", x.shape), ("fn(x)", y.shape)))
    size, found = x.shape[own], y.shape[other]
    if size != found:
        raise ValueError(f"{name}: x has {size} examples along axis {example_axis}, but fn(x) has {found}.")
    return jax.jit(lambda x: _coupling(fn, x, own, other))(x)


def _axis(name: str, example_axis, what: str, shape: tuple[int, ...]) -> int:
    """Where the examples lie in an array of this shape."""
    try:
        axis = None if isinstance(example_axis, (bool, np.bool_)) else operator.index(example_axis)
    except TypeError:
        axis = None
    if axis is None:
        raise TypeError(f"{name}: example_axis must be an int, the axis of examples; got {example_axis!r}.")
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"{name}: {what} has shape {shape}, which has no axis example_axis={axis}.")
    return axis % len(shape)


def _coupling(fn, x, own: int, other: int):
    """Row by row the sizes of products with the Jacobian; x has the examples along `own`, fn(x) along `other`."""
    y, pullback = jax.vjp(fn, x)
    beside = tuple(axis for axis in range(y.ndim) if axis != other)
    real, imaginary = np.random.default_rng(0).normal(size=(2, PROBES, *y.shape))
    probes = jnp.asarray(real + 1j * imaginary if jnp.iscomplexobj(y) else real, y.dtype)

    def row(chosen):
        def strength(probe):
            cotangent = jnp.where(jnp.expand_dims(chosen, beside), probe, 0)
            _, cotangent = vary_alike((y, placed_as(jax.typeof(y), cotangent)))
            unit, norm = lengths([jnp.moveaxis(pullback(cotangent)[0], own, 0)])
            return unit * norm

        unit, norm = lengths([lax.map(strength, probes).T])
        return unit * (norm / PROBES**0.5)

    return lax.map(row, jnp.eye(y.shape[other], dtype=bool))


def assert_uncoupled(fn: Callable[[Any], Any], x, *, example_axis: int = 0) -> None:
    """Returns nothing where no example of fn(x) depends on another one of x; for users' own tests.

    Args:
      fn: as for `example_coupling`.
      x: float array; random values, so that no derivative is 0 by chance.
      example_axis: which axis of both holds the examples.

    Raises:
      AssertionError: names the first pair that couples, and how many do.
      ValueError, TypeError: as `example_coupling`.

    Example:
      >>> import normjax as nj
      >>> norm = lambda x: nj.batch_norm(x, layout="N C", axis_names="N", train=True)[0]
      >>> assert_uncoupled(norm, jnp.array([[1.0], [2.0], [4.0]]))
      Traceback (most recent call last):
          ...
      AssertionError: output 0 depends on input 1 (strength 0.31 beside 0.21 on its own); 6 of 6 pairs couple.
    """
    coupling = np.asarray(example_coupling(fn, x, example_axis=example_axis))
    pairs = [(int(i), int(j)) for i, j in zip(*np.nonzero(coupling != 0), strict=True) if i != j]
    if np.isnan(coupling).any():
        i, j = map(int, np.argwhere(np.isnan(coupling))[0])
        raise AssertionError(f"the derivative of output {i} by input {j} is NaN, which says nothing; try another x.")
    if pairs:
        (i, j), size = pairs[0], len(coupling)
        raise AssertionError(
            f"output {i} depends on input {j} (strength {coupling[i, j]:.2g} beside {coupling[i, i]:.2g} on its own); "
            f"{len(pairs)} of {size * (size - 1)} pairs couple."
        )


def plot_coupling(coupling, *, ax=None, title: str = "", limits: tuple[float, float] | None = None):
    """Returns the axes with a picture of `example_coupling`, on a logarithmic scale; a white cell is exactly 0.

    Args:
      coupling: array (N, N).
      ax: axes of matplotlib; None makes a figure with a colour bar.
      title: of the picture.
      limits: log₁₀ of the smallest and the largest strength shown, so that pictures compare; None: those found.

    Raises:
      ModuleNotFoundError: matplotlib is missing.
      ValueError: coupling has not two axes; limits are no two finite numbers, the smaller first.
    """
    require("per_example.plot_coupling", "lab", "matplotlib")
    from matplotlib import pyplot, ticker

    name, strength = "plot_coupling", np.asarray(coupling)
    if strength.ndim != 2:
        raise ValueError(f"{name}: coupling must be an array (N, N), of example_coupling; got shape {strength.shape}.")
    low, high = (None, None) if limits is None else _limits(name, limits)
    logs = np.where(strength > 0, np.log10(np.where(strength > 0, strength, 1)), np.nan)
    alone = ax is None
    ax = pyplot.subplots(figsize=(4.2, 3.4), layout="constrained")[1] if alone else ax
    image = ax.imshow(logs, vmin=low, vmax=high)
    if alone:
        ax.figure.colorbar(image, ax=ax, label="log₁₀ size of ∂ output i / ∂ input j")
    ax.set(title=title, xlabel="input j", ylabel="output i")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(integer=True))
    return ax


def _limits(name: str, limits) -> tuple[float, float]:
    pair = list(limits) if isinstance(limits, (tuple, list)) or np.ndim(limits) else [limits]
    if len(pair) == 2 and all(map(is_real_scalar, pair)) and -np.inf < pair[0] < pair[1] < np.inf:
        return float(pair[0]), float(pair[1])
    raise ValueError(
        f"{name}: limits={limits!r} must be two finite numbers, the smaller first: log₁₀ of the strengths at the "
        "ends of the colours, as in limits=(-3, 1)."
    )


def lengths(arrays) -> tuple[jax.Array, jax.Array]:
    """The norm of every entry along the leading axis, over all arrays (one at least), as a unit and the norm in it.

    So no square overflows or underflows. The derivative at 0 is 0.
    """
    arrays = [array.astype(wide_dtype(array.dtype)) for array in arrays]
    rests = [tuple(range(1, array.ndim)) for array in arrays]
    sizes = [jnp.max(jnp.abs(array), rest, initial=0) for array, rest in zip(arrays, rests, strict=True)]
    largest = lax.stop_gradient(jnp.max(jnp.stack(sizes), 0))
    # The reciprocal of a number near the greatest would be flushed to 0.
    unit = jnp.where(largest == 0, 1, jnp.minimum(largest, float(jnp.finfo(largest.dtype).max) ** 0.75))
    scaled = [array / jnp.expand_dims(unit, rest) for array, rest in zip(arrays, rests, strict=True)]
    square = sum(jnp.sum(abs_square(array), rest) for array, rest in zip(scaled, rests, strict=True))
    return unit, jnp.where(square == 0, 0, jnp.sqrt(jnp.where(square == 0, 1, square)))


def wide_dtype(dtype):
    """The dtype, float32 at least, under JAX's strict promotion too."""
    return np.promote_types(dtype, np.float32)


def call(fn: str, what: str, function: Callable, *args):
    """function(*args); where that moves an nnx variable of a model outside, the error says how to bring it in."""
    try:
        return function(*args)
    except Exception as error:
        if type(error).__name__ != "TraceContextError":  # of Flax, which need not be there
            raise
        raise ValueError(
            f"{fn}: {what} changes a variable of an nnx model that it has from outside: {str(error).split(' (')[0]}. "
            "Outside write graph, weights, rest = nnx.split(model, nnx.Param, ...), and inside "
            "model = nnx.merge(graph, weights, rest, copy=True), or put the model in evaluation by model.eval()."
        ) from error
