"""One gradient for each example: `per_example_grads`, `clipped_grad`, `coupled_grads`; and which examples couple.

The gradient of one example's loss is taken alone (vmap of grad), as differential privacy, influence functions and the
gradient noise scale need it, while no layer lets examples meet. Batch norm in training does: under vmap each example
would be a batch of one (without positions y = β for every input, and all gradients before it 0). Here that is refused;
with coupled examples the gradient of example i's loss is row i of the Jacobian of all losses, each computed in the
whole batch.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from normjax._extras import require
from normjax._family import EXAMPLE
from normjax._inputs import is_real_scalar, kind_of, static_bool
from normjax._mapped import vary_alike

PROBES = 4


def per_example_grads(loss_fn: Callable[..., Any], params, *batch, chunk_size: int | None = None):
    """Returns the gradient of every example's own loss: params with a leading axis of N.

    Args:
      loss_fn: loss_fn(params, *example) → a real scalar, where an example is one entry of each of `batch`, without
        the leading axis. A model that wants a batch is given `image[None]`.
      params: pytree of float or complex arrays.
      *batch: pytrees of arrays with one leading axis of size N, as in (images, labels).
      chunk_size: how many examples are differentiated at once; None: all. Bounds what is held besides the result; it
        need not divide N.

    Returns:
      A pytree like params, each leaf of shape (N, *its own) and of its own dtype. Under pmap and shard_map N counts the
      device's own examples.

    Raises:
      ValueError: sizes differ or are missing; chunk_size is below 1; loss_fn returns no scalar; batch norm in training
        inside, whose examples are not apart (the message says what to do).
      TypeError: an argument of another type.

    Example:
      >>> loss = lambda w, x: (w * x - 1) ** 2
      >>> print(per_example_grads(loss, jnp.float32(1.0), jnp.array([1.0, 2.0, 3.0])))
      [ 0.  4. 12.]
    """
    fn = "per_example_grads"
    size = _examples(fn, batch)
    params, batch = vary_alike((params, batch))
    gradients = _each_gradient(fn, loss_fn, params)
    chunk = _chunk(fn, chunk_size, size)
    if chunk >= size:
        return gradients(*batch)
    whole = jax.tree.map(lambda leaf: jnp.zeros((size, *jnp.shape(leaf)), jnp.result_type(leaf)), params)

    def put(whole, start, _, part):
        return jax.tree.map(lambda all_, some: lax.dynamic_update_slice_in_dim(all_, some, start, 0), whole, part)

    return _over_chunks(gradients, batch, size, chunk, put, whole)


def clipped_grad(
    loss_fn: Callable[..., Any],
    params,
    *batch,
    l2_norm,
    chunk_size: int | None = None,
    average: bool = False,
):
    """Returns the sum of all examples' gradients, each first shortened to `l2_norm`: what DP-SGD adds its noise to.

    Never holds the gradients of more than one chunk. Noise is left to the caller.

    Args:
      loss_fn: as for `per_example_grads`.
      params: pytree of float or complex arrays.
      *batch: pytrees of arrays with one leading axis of size N.
      l2_norm: real scalar > 0, the most that one example's gradient may measure over all leaves; may be traced.
      chunk_size: how many examples are differentiated at once; None: all. Need not divide N.
      average: divides the sum by N.

    Returns:
      A pytree like params, of its dtypes; norms and sums are taken in float32 at least. An example whose gradient is
      NaN makes it NaN. Under pmap and shard_map the sum is over the device's own examples: `lax.psum` adds them up.

    Raises:
      ValueError: as `per_example_grads`; l2_norm is not above 0.
      TypeError: an argument of another type.

    Example:
      >>> loss = lambda w, x: w * x
      >>> print(clipped_grad(loss, jnp.float32(1.0), jnp.array([0.5, 3.0, -4.0, 7.0]), l2_norm=1.0))
      1.5

    References:
      Abadi et al. (2016), Deep Learning with Differential Privacy, algorithm 1.
    """
    fn = "clipped_grad"
    average = static_bool(fn, "average", average)
    if not isinstance(l2_norm, Tracer):
        if not is_real_scalar(l2_norm):
            raise TypeError(f"{fn}: l2_norm must be a number; got {kind_of(l2_norm)}.")
        if not float(l2_norm) > 0:
            raise ValueError(f"{fn}: l2_norm={l2_norm!r} must be above 0; it is the most one gradient may measure.")
    size = _examples(fn, batch)
    params, batch = vary_alike((params, batch))
    gradients = _each_gradient(fn, loss_fn, params)
    chunk = _chunk(fn, chunk_size, size)

    def add(total, _, fresh, part):
        share = jnp.where(fresh, _shortening(part, l2_norm), 0)
        return jax.tree.map(lambda sum_, leaf: sum_ + _weighted(share, leaf, sum_.dtype), total, part)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), _wide(jnp.result_type(leaf))), params)
    total = _over_chunks(gradients, batch, size, chunk, add, zeros)
    count = max(size, 1) if average else 1
    return jax.tree.map(lambda sum_, leaf: (sum_ / count).astype(jnp.result_type(leaf)), total, params)


def coupled_grads(losses_fn: Callable[..., Any], params, batch):
    """Returns the gradient of every example's loss in its whole batch: row i of the Jacobian of the losses.

    For models whose examples couple, as batch norm's do in training. Rows add up to the gradient of the summed losses.
    Costs N backward passes of the whole batch, N times as many as `per_example_grads`, and N times their memory.

    Args:
      losses_fn: losses_fn(params, batch) → real array (N,), one loss for each example.
      params: pytree of float arrays.
      batch: pytree of arrays that losses_fn takes. Under pmap and shard_map the device's own examples: losses that
        synchronise across devices have no rows here.

    Returns:
      A pytree like params, each leaf of shape (N, *its own) and of its own dtype.

    Raises:
      ValueError: losses_fn returns anything but an array of one axis.

    Example:
      >>> import normjax as nj
      >>> losses = lambda w, x: nj.batch_norm(w * x, layout="N", axis_names="N", train=True, eps=1.0)[0] ** 3
      >>> rows = coupled_grads(losses, jnp.float32(1.0), jnp.array([0.0, 1.0, 5.0]))
      >>> whole = jax.grad(lambda w: losses(w, jnp.array([0.0, 1.0, 5.0])).sum())(1.0)
      >>> print(rows.shape, jnp.allclose(rows.sum(), whole))
      (3,) True
    """
    params, batch = vary_alike((params, batch))

    def checked(params):
        losses = losses_fn(params, batch)
        shape = getattr(losses, "shape", None)
        if shape is None or len(shape) != 1:
            raise ValueError(
                f"coupled_grads: losses_fn must return one array of one loss for each example, of shape (N,); got "
                f"{kind_of(losses) if shape is None else f'shape {shape}'}."
            )
        return losses

    return jax.jacrev(checked)(params)


def example_coupling(fn: Callable[[Any], Any], x, *, example_axis: int = 0) -> jax.Array:
    """Returns how strongly each example of fn(x) depends on each example of x: (N, N), row i for output i.

    Entry (i, j) estimates the Frobenius norm of ∂fn(x)ᵢ/∂xⱼ from `PROBES` products of random vectors with the Jacobian;
    it is 0 where the derivative is (or so small that its square is). Costs `PROBES` · N backward passes.

    Args:
      fn: takes an array like x; its result has the examples along the same axis.
      x: float array.
      example_axis: which axis of both holds the examples.

    Returns:
      Array (N, N) of x's dtype, float32 at least.

    Raises:
      ValueError: x or fn(x) lacks the axis, or their sizes along it differ.
      TypeError: x is not of a float dtype.

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
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: x must be of a float dtype, to differentiate by; got {x.dtype}.")
    y = jax.eval_shape(fn, x)
    if not isinstance(y, jax.ShapeDtypeStruct):
        raise TypeError(f"{name}: fn must return one array; got {kind_of(y)}. Write lambda x: fn(x)[0], say.")
    if not jnp.issubdtype(y.dtype, jnp.inexact):
        raise TypeError(f"{name}: fn(x) must be of a float dtype, to differentiate; got {y.dtype}.")
    for what, shape in (("x", x.shape), ("fn(x)", y.shape)):
        if not -len(shape) <= example_axis < len(shape):
            raise ValueError(f"{name}: {what} has shape {shape}, which has no axis example_axis={example_axis}.")
    size, found = x.shape[example_axis], y.shape[example_axis]
    if size != found:
        raise ValueError(f"{name}: x has {size} examples along axis {example_axis}, but fn(x) has {found}.")
    rest = tuple(axis for axis in range(x.ndim) if axis != example_axis % x.ndim)
    beside = tuple(axis for axis in range(len(y.shape)) if axis != example_axis % len(y.shape))

    def coupling(x):
        _, pullback = jax.vjp(fn, x)
        real, imaginary = np.random.default_rng(0).normal(size=(2, PROBES, *y.shape))
        probes = jnp.asarray(real + 1j * imaginary if jnp.iscomplexobj(y) else real, y.dtype)

        def row(own):
            def strength(probe):
                (dx,) = pullback(jnp.where(jnp.expand_dims(own, beside), probe, 0))
                return jnp.sum(jnp.square(dx.astype(_wide(dx.dtype))), rest)

            return jnp.sqrt(jnp.mean(lax.map(strength, probes), 0))

        return lax.map(row, jnp.eye(size, dtype=bool))

    return jax.jit(coupling)(x)


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
    """
    require("per_example.plot_coupling", "lab", "matplotlib")
    from matplotlib import pyplot, ticker

    strength = np.asarray(coupling)
    logs = np.where(strength > 0, np.log10(np.where(strength > 0, strength, 1)), np.nan)
    low, high = limits if limits else (None, None)
    alone = ax is None
    ax = pyplot.subplots(figsize=(4.2, 3.4), layout="constrained")[1] if alone else ax
    image = ax.imshow(logs, vmin=low, vmax=high)
    if alone:
        ax.figure.colorbar(image, ax=ax, label="log₁₀ size of ∂ output i / ∂ input j")
    ax.set(title=title, xlabel="input j", ylabel="output i")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(integer=True))
    return ax


def _each_gradient(fn: str, loss_fn, params):
    """f(*batch) → the gradient of each example's loss, stacked."""

    def loss(params, example):
        value = loss_fn(params, *example)
        shape = getattr(value, "shape", ())
        if shape != ():
            raise ValueError(
                f"{fn}: loss_fn must return a scalar for one example; got shape {shape}. Sum it, or take [0] of a loss "
                "that has an axis of one example."
            )
        return value

    each = jax.vmap(jax.grad(loss), in_axes=(None, 0), axis_name=EXAMPLE)
    return lambda *batch: each(params, batch)


def _examples(fn: str, batch) -> int:
    """How many examples a batch has; raises ValueError unless all arrays agree."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    if not shapes:
        raise ValueError(
            f"{fn}: there is no array in the batch; pass what loss_fn takes after params, as in images, labels."
        )
    if () in shapes:
        raise ValueError(
            f"{fn}: every array of the batch needs a leading axis of examples, but one is a scalar; give what all "
            "examples share to loss_fn itself."
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"{fn}: arrays of the batch differ in how many examples they hold: shapes {shapes}.")
    return shapes[0][0]


def _chunk(fn: str, chunk_size, size: int) -> int:
    if chunk_size is None:
        return size
    no_number = TypeError(f"{fn}: chunk_size must be an int or None; got {kind_of(chunk_size)}.")
    if isinstance(chunk_size, bool):
        raise no_number
    try:
        chunk = operator.index(chunk_size)
    except TypeError:
        raise no_number from None
    if chunk < 1:
        raise ValueError(
            f"{fn}: chunk_size={chunk_size!r} must be at least 1: so many examples are differentiated at once."
        )
    return min(chunk, size)


def _over_chunks(gradients, batch, size: int, chunk: int, take, carry):
    """Returns what carry = take(carry, start, fresh, gradients of a chunk) leaves after all chunks.

    All chunks are of one size, so that one program does: the last one ends with the batch, and repeats examples of the
    one before, which are not `fresh`.
    """
    if size == 0:
        return carry

    def step(carry, first):
        start = jnp.minimum(first, size - chunk)
        part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(jnp.asarray(leaf), start, chunk, 0), batch)
        return take(carry, start, start + jnp.arange(chunk) >= first, gradients(*part)), None

    carry, _ = vary_alike((carry, batch))
    return lax.scan(step, carry, jnp.arange(0, size, chunk))[0]


def _shortening(gradients, l2_norm):
    """min(1, l2_norm / norm) of every example, over all leaves; scaled, so that no square overflows."""
    leaves = [jnp.abs(leaf.astype(_wide(leaf.dtype))) for leaf in jax.tree.leaves(gradients)]
    if not leaves:
        return jnp.ones(())
    rows = [jnp.reshape(leaf, (len(leaf), -1)) for leaf in leaves]
    largest = jnp.max(jnp.stack([jnp.max(row, 1, initial=0) for row in rows]), 0)
    # The reciprocal of a number near the greatest would be flushed to 0.
    unit = jnp.where(largest == 0, 1, jnp.minimum(largest, float(jnp.finfo(largest.dtype).max) ** 0.75))
    norm, most = jnp.sqrt(sum(jnp.sum(jnp.square(row / unit[:, None]), 1) for row in rows)), l2_norm / unit
    return jnp.where(norm <= most, 1, most / norm)  # NaN where either is


def _weighted(share, leaf, dtype):
    """Σ share · leaf over the examples."""
    wide = leaf.astype(dtype)
    return jnp.tensordot(share.astype(dtype), wide, 1, precision=lax.Precision.HIGHEST)


def _wide(dtype):
    return jnp.promote_types(dtype, jnp.float32)
