"""Sums of several terms over the same axes, reading what they are made of once; for XLA's CPU backend by hand.

Elsewhere XLA fuses such sums by itself. Its CPU backend makes a pass of each, a library call that wants its input
written to memory first, and it evaluates what is small and cheap (a mean from its sum, say) anew for every entry of
every loop that uses it, often in scalar code. A reduction of all terms over 16 blocks of an axis becomes one vectorised
loop instead, and what is left to sum is a sixteenth. Compiled for another platform, `sums` is `jnp.sum` and `kept`
does nothing.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from normjax._sharding import sharded_axes

BLOCKS = 16
FEW = 32  # entries that one loop adds up in a chain; more would lose digits
TINY = 1 << 13  # entries below which XLA, too, sums in loops of its own, which one reduction spares
LARGE = 1 << 16  # entries from which on speed counts; below, a call takes microseconds


def sums(terms: Callable[..., tuple], axes: tuple[int, ...], *operands) -> tuple[jax.Array, ...]:
    """The sum over `axes`, kept with size 1, of each term of `terms(*operands)`, which broadcast against each other.

    Args:
      terms: a function of a module, for the sake of caching; elementwise.
      axes: of the terms.
      *operands: real arrays of equal rank.
    """
    if not axes:
        return terms(*operands)
    shape = jnp.broadcast_shapes(*(operand.shape for operand in operands))
    split = {axis for operand in operands for axis in sharded_axes(operand)}
    cut = _cut(shape, tuple(axis for axis in axes if axis not in split), axes)
    return _plain(terms, axes, *operands) if cut is None else _sums(terms, axes, cut, *operands)


def kept(array, user):
    """The array, stored where otherwise every loop over the entries of `user` would compute it anew."""
    return _kept(array) if is_large(user.shape) else array


@jax.custom_vjp
def written(array):
    """The array; where a gradient is taken, the CPU writes it, and its cotangent, to memory once.

    A norm's input is saved for the backward anyway. Left to itself XLA computes it anew in every loop that uses it, and
    with it the norm before, and the norm before that: fifty norms in a row took a minute to compile.
    """
    return array


def is_large(shape: Sequence[Any]) -> bool:
    """Whether an array of this shape is so large that speed counts; no symbolic shape is."""
    return all(isinstance(size, int) for size in shape) and math.prod(shape) >= LARGE


def _plain(terms, axes, *operands):
    return tuple(jnp.sum(term, axes, keepdims=True) for term in terms(*operands))


class Cut(NamedTuple):
    """The axis that is cut into blocks, and whether they are interleaved."""

    axis: int
    blocks: int
    inner: bool


def _at_once(terms, axes, cut: Cut | tuple[()], *operands):
    if not cut:
        return tuple(jnp.expand_dims(part, axes) for part in _reduce(terms(*operands), axes))

    def fold(operand):
        size = operand.shape[cut.axis]
        rest = 1 if size == 1 else size // cut.blocks
        pair = (rest, size // rest) if cut.inner else (size // rest, rest)
        return jnp.reshape(operand, operand.shape[: cut.axis] + pair + operand.shape[cut.axis + 1 :])

    parts = _reduce(terms(*map(fold, operands)), (cut.axis + cut.inner,))
    return tuple(jnp.sum(part, axes, keepdims=True) for part in parts)


def _reduce(terms, axes):
    zeros = tuple(jnp.zeros((), term.dtype) for term in terms)
    return lax.reduce(terms, zeros, lambda *two: tuple(a + b for a, b in zip(*two, strict=True)), axes)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
@partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _sums(terms, axes, cut, *operands):
    at_once, plain = partial(_at_once, terms, axes, cut), partial(_plain, terms, axes)
    return lax.platform_dependent(*operands, cpu=at_once, default=plain)


@_sums.defjvp
def _sums_jvp(terms, axes, cut, operands, tangents):
    _, tangent = jax.jvp(partial(_plain, terms, axes), operands, tangents)
    return _sums(terms, axes, cut, *operands), tangent


@jax.custom_jvp
@jax.jit
def _written(array):
    def in_a_branch(array):
        # Either branch returns the array; the barriers keep XLA from seeing that until it has chosen what to fuse.
        known = lax.optimization_barrier(jnp.ones((), bool))
        return lax.cond(known, lambda array: array, lax.optimization_barrier, array)

    return lax.platform_dependent(array, cpu=in_a_branch, default=lambda array: array)


@_written.defjvp
def _written_jvp(primals, tangents):
    return _written(*primals), tangents[0]


written.defvjp(lambda array: (_written(array), None), lambda _, cotangent: (_written(cotangent),))


@jax.custom_jvp
@partial(jax.jit, inline=True)
def _kept(array):
    through_a_sum = lambda array: jnp.sum(jnp.stack([array, jnp.zeros_like(array)]), 0)  # noqa: E731
    return lax.platform_dependent(array, cpu=through_a_sum, default=lambda array: array)


@_kept.defjvp
def _kept_jvp(primals, tangents):
    return _kept(*primals), tangents[0]


def _cut(shape: Sequence[Any], whole: tuple[int, ...], axes: tuple[int, ...]) -> Cut | tuple[()] | None:
    """How to sum over `axes` in one loop; () without cutting one of the `whole`, None where a plain sum is better.

    A vectorised loop runs along the innermost axis, so a cut leaves that at least 16 entries long. Blocks of any other
    axis are interleaved, which keeps neighbours together, and on an axis that jit shards what one device holds; the
    leading axis, which is sharded most often, is cut last.
    """
    if not is_large(shape):
        tiny = all(isinstance(size, int) for size in shape) and math.prod(shape) < TINY
        return () if tiny and math.prod(shape[axis] for axis in axes) <= FEW else None
    last = len(shape) - 1
    cuts = [
        (blocks < 7, -axis, abs(blocks - BLOCKS), blocks)
        for axis in whole
        for blocks in range(4, 2 * BLOCKS + 1)
        if shape[axis] % blocks == 0 and (axis < last or shape[axis] // blocks >= 16)
    ]
    if not cuts:
        return None
    _, axis, _, blocks = min(cuts)
    return Cut(-axis, blocks, -axis < last)
