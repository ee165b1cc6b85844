"""One gradient for each example: `per_example_grads`, `clipped_grad`, `coupled_grads`; and which examples couple.

The gradient of one example's loss is taken alone (vmap of grad), as differential privacy, influence functions and the
gradient noise scale need it, while no layer lets examples meet. Batch norm in training does: under vmap each example
would be a batch of one (without positions y = β for every input, and all gradients before it 0). Here that is refused;
with coupled examples the gradient of example i's loss is row i of the Jacobian of all losses, each computed in the
whole batch.
"""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import get_abstract_mesh

from normjax._coupling import assert_uncoupled, call, example_coupling, lengths, plot_coupling, wide_dtype
from normjax._grammar import quote
from normjax._inputs import is_real_scalar, kind_of, static_bool
from normjax._mapped import ALONE, EXAMPLE, vary_alike, varying
from normjax._sharding import placed_as, sharded_axes

__all__ = [
    "assert_uncoupled",
    "clipped_grad",
    "coupled_grads",
    "example_coupling",
    "per_example_grads",
    "plot_coupling",
]


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
      ValueError: sizes differ or are missing; chunk_size is below 1, or cuts what an Explicit mesh shards; loss_fn
        returns no scalar, or moves an nnx model from outside; batch norm in training inside, whose examples are not
        apart, or a norm that pools the axis "example" (the message says what to do).
      TypeError: an argument, or what loss_fn returns, of another type.

    Example:
      >>> loss = lambda w, x: (w * x - 1) ** 2
      >>> print(per_example_grads(loss, jnp.float32(1.0), jnp.array([1.0, 2.0, 3.0])))
      [ 0.  4. 12.]
    """
    fn = "per_example_grads"
    _check_params(fn, "loss_fn", loss_fn, params)
    size = _examples(fn, batch)
    chunk = _chunk(fn, chunk_size, size, (params, batch))
    gradients, params, batch = _each_gradient(fn, loss_fn, params, batch)
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
      TypeError: an argument, or what loss_fn returns, of another type.

    Example:
      >>> loss = lambda w, x: w * x
      >>> print(clipped_grad(loss, jnp.float32(1.0), jnp.array([0.5, 3.0, -4.0, 7.0]), l2_norm=1.0))
      1.5

    References:
      Abadi et al. (2016), Deep Learning with Differential Privacy, algorithm 1.
    """
    fn = "clipped_grad"
    _check_params(fn, "loss_fn", loss_fn, params)
    average = static_bool(fn, "average", average)
    l2_norm = _bound(fn, l2_norm)
    size = _examples(fn, batch)
    chunk = _chunk(fn, chunk_size, size, (params, batch))
    gradients, params, batch = _each_gradient(fn, loss_fn, params, batch)
    if get_abstract_mesh().manual_axes and (across := _met_by(gradients, *batch)):
        raise ValueError(
            f"{fn}: loss_fn meets other devices over {quote(across)}, so that a device does not know how large an "
            "example's whole gradient is. Leave losses and gradients as each device has them, and lax.psum the clipped "
            "sum; where parameters are sharded call clipped_grad outside, under jit over sharded arrays."
        )

    def add(total, _, fresh, part):
        unit, share = _shortening(part, l2_norm)
        share = jnp.where(fresh, share, 0)
        return jax.tree.map(lambda sum_, leaf: sum_ + _weighted(unit, share, leaf, sum_.dtype), total, part)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(jnp.shape(leaf), wide_dtype(jnp.result_type(leaf))), params)
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
      batch: pytree of arrays that losses_fn takes. Under pmap and shard_map the device's own examples.

    Returns:
      A pytree like params, each leaf of shape (N, *its own) and of its own dtype.

    Raises:
      ValueError: losses_fn returns no array of one axis; it moves an nnx model from outside; it synchronises over a
        mapped axis that coupled_grads itself is in.
      TypeError: losses_fn returns no array of real numbers.

    Example:
      >>> import normjax as nj
      >>> losses = lambda w, x: nj.batch_norm(w * x, layout="N", axis_names="N", train=True, eps=1.0)[0] ** 3
      >>> rows = coupled_grads(losses, jnp.float32(1.0), jnp.array([0.0, 1.0, 5.0]))
      >>> whole = jax.grad(lambda w: losses(w, jnp.array([0.0, 1.0, 5.0])).sum())(1.0)
      >>> print(rows.shape, jnp.allclose(rows.sum(), whole))
      (3,) True
    """
    fn = "coupled_grads"
    _check_params(fn, "losses_fn", losses_fn, params)

    def losses(params, batch):
        losses = _loss(fn, "losses_fn", losses_fn, params, batch)
        if losses.ndim != 1:
            raise ValueError(
                f"{fn}: losses_fn must return one array of one loss for each example, of shape (N,); got shape "
                f"{losses.shape}."
            )
        return losses

    params, batch = _varying_as(losses, params, batch)
    value, pullback = jax.vjp(lambda params: losses(params, batch), params)
    if across := _met_by(pullback, value):
        raise ValueError(
            f"{fn}: losses_fn meets other devices over {quote(across)}, as synchronised batch norm does. There every "
            "device would ask for a row of its own at the same time, and get the sum of all that were asked for. Call "
            "coupled_grads outside, with shard_map inside losses_fn; or under jit over sharded arrays, without a name."
        )

    def row(chosen):
        cotangent = placed_as(jax.typeof(value), chosen.astype(value.dtype))
        return pullback(vary_alike((value, cotangent))[1])[0]

    return jax.vmap(row)(jnp.eye(len(value), dtype=bool))


def _met_by(function: Callable, *args) -> list[str]:
    """The mapped axes of the collectives in a function."""
    effects = jax.make_jaxpr(function)(*args).effects
    return sorted({str(effect.name) for effect in effects if hasattr(effect, "name")})


def _check_params(fn: str, what: str, function, params) -> None:
    """Raises TypeError unless there is a function, and parameters to differentiate it by."""
    if not callable(function):
        raise TypeError(f"{fn}: {what} must be a function of params and examples, not called; got {kind_of(function)}.")
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        dtype = getattr(leaf, "dtype", None)
        if isinstance(leaf, (float, complex)) or (dtype is not None and jnp.issubdtype(dtype, jnp.inexact)):
            continue
        raise TypeError(
            f"{fn}: params{jax.tree_util.keystr(path)} is {kind_of(leaf) if dtype is None else dtype}; params are the "
            f"floats to differentiate by. Give counts, keys, running statistics and the like to {what} itself; of an "
            "nnx model take nnx.split(model, nnx.Param, ...)."
        )


def _varying_as(losses: Callable, params, batch):
    """Params and batch, made to vary over every axis of a checked shard_map that the losses vary over.

    A loss may get such data by closure, and the gradient by parameters that do not vary is summed over the devices.
    """
    if not get_abstract_mesh().manual_axes:
        return params, batch
    params, batch = vary_alike((params, batch))
    return vary_alike((params, batch), varying(jax.eval_shape(losses, params, batch)))


def _loss(fn: str, what: str, function: Callable, *args) -> jax.Array:
    """What a loss function returns, as an array; raises TypeError unless it is one of real floats."""
    value = call(fn, what, function, *args)
    if not isinstance(value, (float, jax.Array, np.ndarray, np.generic)):
        raise TypeError(
            f"{fn}: {what} must return {'an array of losses' if what == 'losses_fn' else 'a real scalar'}; got "
            f"{kind_of(value)}. Where it returns more, take the loss alone: lambda *args: loss(*args)[0]."
        )
    if not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        raise TypeError(f"{fn}: {what} must return real numbers to differentiate; got {jnp.result_type(value)}.")
    return jnp.asarray(value)


def _each_gradient(fn: str, loss_fn, params, batch):
    """f(*batch) → the gradient of each example's loss, stacked; and params and batch as it takes them."""

    def loss(params, example):
        value = _loss(fn, "loss_fn", loss_fn, params, *example)
        if value.shape != ():
            raise ValueError(
                f"{fn}: loss_fn must return a scalar for one example; got shape {value.shape}. Sum it, or take [0] of "
                "a loss that has an axis of one example."
            )
        return value

    def each(function):
        mapped = jax.vmap(function, in_axes=(None, 0), axis_name=EXAMPLE)
        return jax.vmap(mapped, in_axes=None, out_axes=None, axis_name=ALONE, axis_size=1)  # maps nothing

    params, batch = _varying_as(each(loss), params, batch)
    return lambda *batch: each(jax.grad(loss))(params, batch), params, batch


def _examples(fn: str, batch) -> int:
    """How many examples a batch has; raises ValueError unless all arrays agree."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(batch)]
    if not shapes:
        raise ValueError(
            f"{fn}: there is no array in the batch; pass what loss_fn takes after params, as in images, labels."
        )
    if () in shapes:
        raise ValueError(
            f"{fn}: every array of the batch needs a leading axis of examples, but one is a scalar; make lists of "
            "numbers arrays, and give what all examples share to loss_fn itself."
        )
    if len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"{fn}: arrays of the batch differ in how many examples they hold: shapes {shapes}.")
    return shapes[0][0]


def _bound(fn: str, l2_norm):
    """The bound as a number for JAX, which has none for an int beyond its own."""
    if not is_real_scalar(l2_norm):
        raise TypeError(f"{fn}: l2_norm must be one real number; got {kind_of(l2_norm)}.")
    if isinstance(l2_norm, Tracer):
        return l2_norm
    try:
        known = float(l2_norm)
    except OverflowError:
        known = math.inf if l2_norm > 0 else -math.inf
    if not known > 0:
        raise ValueError(f"{fn}: l2_norm={l2_norm!r} must be above 0; it is the most one gradient may measure.")
    return known if isinstance(l2_norm, int) else l2_norm


def _chunk(fn: str, chunk_size, size: int, arrays) -> int:
    """How many of `size` examples a chunk has."""
    if chunk_size is None:
        return size
    if isinstance(chunk_size, Tracer):
        raise TypeError(
            f"{fn}: chunk_size is traced, but it chooses the program: keep it out of jit's arguments, or make it "
            'static with jax.jit(f, static_argnames="chunk_size").'
        )
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
    if chunk < size and any(map(sharded_axes, jax.tree.leaves(arrays))):
        raise ValueError(
            f"{fn}: chunk_size={chunk} cuts a batch of {size}, but an Explicit mesh shards arrays of params or batch, "
            "which JAX does not cut and join. Take chunks inside jax.shard_map, where each device has "
            "its own examples; take an Auto mesh; jax.sharding.reshard to P() first; or leave chunk_size out."
        )
    return min(chunk, size)


def _over_chunks(gradients, batch, size: int, chunk: int, take, carry):
    """Returns what carry = take(carry, start, fresh, gradients of a chunk) leaves after all chunks.

    All chunks are of one size, so that one program does: the last one ends with the batch, and repeats examples of the
    one before, which are not `fresh`.
    """
    if size == 0:
        return carry
    if chunk == size:
        return take(carry, 0, True, gradients(*batch))

    def step(carry, first):
        start = jnp.minimum(first, size - chunk)
        part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(jnp.asarray(leaf), start, chunk, 0), batch)
        return take(carry, start, start + jnp.arange(chunk) >= first, gradients(*part)), None

    carry, _ = vary_alike((carry, batch))
    return lax.scan(step, carry, jnp.arange(0, size, chunk))[0]


def _shortening(gradients, l2_norm):
    """A unit and a share for every example: share · gradient / unit is min(1, l2_norm / norm) of it, over all leaves.

    Apart, since their quotient may be too small for float32.
    """
    leaves = jax.tree.leaves(gradients)
    if not leaves:
        return jnp.ones(()), jnp.ones(())
    unit, norm = lengths(leaves)
    if isinstance(l2_norm, float):  # NumPy warns where a number is beyond the dtype
        l2_norm = min(l2_norm, float(jnp.finfo(unit.dtype).max))
    short = norm <= l2_norm / unit
    return jnp.where(short, 1, unit), jnp.where(short, 1, l2_norm / jnp.where(short, 1, norm))  # NaN where either is


def _weighted(unit, share, leaf, dtype):
    """Σ share · leaf / unit over the examples."""
    share = share.astype(dtype)
    wide = leaf.astype(dtype) / jnp.expand_dims(unit.astype(dtype), range(1, leaf.ndim))
    if sharded_axes(leaf):  # where the mesh is Explicit, JAX would ask how the product is to be sharded
        return jnp.sum(jnp.expand_dims(share, range(1, leaf.ndim)) * wide, 0)
    return jnp.tensordot(share, wide, 1, precision=lax.Precision.HIGHEST)
