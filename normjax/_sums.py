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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BLOCKS = 16
LARGE = 1 << 14  # entries; below, a call takes microseconds and a longer program does not pay


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
    return _sums(terms, axes, _split(shape, axes), *operands)


def kept(array, axes: tuple[int, ...], user):
    """The array, stored where otherwise every loop over `user` with sums over `axes` would compute it anew."""
    return array if _split(user.shape, axes) is None else _kept(array)


def _plain(terms, axes, *operands):
    return tuple(jnp.sum(term, axes, keepdims=True) for term in terms(*operands))


def _in_blocks(terms, axes, split, *operands):
    axis, blocks, inner = split

    def fold(operand):
        size = operand.shape[axis]
        cut = (1, 1) if size == 1 else (size // blocks, blocks) if inner else (blocks, size // blocks)
        return jnp.reshape(operand, operand.shape[:axis] + cut + operand.shape[axis + 1 :])

    folded = terms(*map(fold, operands))
    zeros = tuple(jnp.zeros((), term.dtype) for term in folded)
    parts = lax.reduce(folded, zeros, lambda *two: tuple(a + b for a, b in zip(*two, strict=True)), (axis + inner,))
    return tuple(jnp.sum(part, axes, keepdims=True) for part in parts)


@partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
@partial(jax.jit, static_argnums=(0, 1, 2))
def _sums(terms, axes, split, *operands):
    if split is None:
        return _plain(terms, axes, *operands)
    return lax.platform_dependent(
        *operands, cpu=partial(_in_blocks, terms, axes, split), default=partial(_plain, terms, axes)
    )


@_sums.defjvp
def _sums_jvp(terms, axes, split, operands, tangents):
    _, tangent = jax.jvp(partial(_plain, terms, axes), operands, tangents)
    return _sums(terms, axes, split, *operands), tangent


@jax.custom_jvp
@jax.jit
def _kept(array):
    through_a_sum = lambda array: jnp.sum(jnp.stack([array, jnp.zeros_like(array)]), 0)  # noqa: E731
    return lax.platform_dependent(array, cpu=through_a_sum, default=lambda array: array)


@_kept.defjvp
def _kept_jvp(primals, tangents):
    return _kept(*primals), tangents[0]


def _split(shape: Sequence[Any], axes: tuple[int, ...]) -> tuple[int, int, bool] | None:
    """Which axis to cut into how many blocks, and whether they are interleaved; None where it would not pay.

    A vectorised loop runs along the innermost axis, so a cut leaves that at least 16 entries long. Blocks of any other
    axis are interleaved, which keeps neighbours together, and on an axis that jit shards what one device holds; the
    leading axis, which is sharded most often, is cut last.
    """
    if not all(isinstance(size, int) for size in shape) or math.prod(shape) < LARGE:
        return None
    last = len(shape) - 1
    cuts = [
        (blocks < 7, -axis, abs(blocks - BLOCKS), blocks)
        for axis in axes
        for blocks in range(4, 2 * BLOCKS + 1)
        if shape[axis] % blocks == 0 and (axis < last or shape[axis] // blocks >= 16)
    ]
    if not cuts:
        return None
    _, axis, _, blocks = min(cuts)
    return -axis, blocks, -axis < last
