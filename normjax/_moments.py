"""Count, mean and variance of every group, as data: `Moments`, made by `moments`, added up by `merge`."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from normjax import _mapped
from normjax._axes import Spec, resolve
from normjax._derivatives import Pooling, Statistics, statistics
from normjax._inputs import (
    as_dtype,
    as_input,
    as_mask,
    check_derivative,
    check_one_shape,
    check_sizes,
    kind_of,
    static_bool,
    with_arrays,
)
from normjax._pytree import pytree, settle, show
from normjax._sharding import sharded_axes


@pytree(static=["names"])
class Moments:
    """What one pooling produced: a pytree.

    Attributes:
      mean: of each group, along `names`; zero without centring. At least float32.
      var: biased variance of each group (the mean square without centring), shape of mean, real.
      count: float32, shape of mean: how many entries were pooled, over all devices, masked ones not counted.
      names: the layout axes that mean runs along, in order (static); "..." stands for unnamed axes.
    """

    mean: Any
    var: Any
    count: Any
    names: tuple[str, ...] = ()

    __post_init__ = settle
    __repr__ = show

    @classmethod
    def init(cls, *, dtype=jnp.float32, **sizes: int) -> "Moments":
        """Empty moments, the identity of `merge`: mean 0, var 0, count 0.

        Args:
          dtype: of the mean; var has its real dtype.
          **sizes: the axes in order, such as C=64.
        """
        shape, dtype = check_sizes("Moments.init", sizes), as_dtype("Moments.init", dtype, complex_too=True)
        if jnp.finfo(dtype).bits < 32:
            raise TypeError(f"Moments.init: dtype={dtype.name!r} must be float32 or more, as moments are.")
        real = jnp.finfo(dtype).dtype
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, real), jnp.zeros(shape, jnp.float32), tuple(sizes))


def pooled_statistics(spec: Spec, x, wide, where, *, center: bool, axis_index_groups, derivative: str) -> Statistics:
    """The statistics of the expanded x over `spec`'s axes, mapped ones included; where: as from `as_mask`."""
    if axis_index_groups is not None:
        _mapped.check_groups(spec, axis_index_groups)
    for name in spec.mapped:
        _mapped.axis_size(spec, name)
    pooling = Pooling(spec.reduced, center, not sharded_axes(wide) & set(spec.reduced))
    x, wide, where = _mapped.vary_alike((x, wide, where))
    stats = statistics(x, wide, where, pooling=pooling, derivative=derivative)
    return _mapped.pool(spec, stats, spec.group_size, axis_index_groups) if spec.mapped else stats


def as_moments(spec: Spec, stats: Statistics, apart: tuple[str, ...] = ()) -> Moments:
    """Statistics of the expanded rank as `Moments` along the kept axes; a name in `apart` keeps a factor on its own."""
    count = spec.group_size if stats.count is None else stats.count
    count = jnp.broadcast_to(jnp.asarray(count, jnp.float32), stats.var.shape)
    mean, var, count = (spec.collapse(array, apart) for array in (stats.mean, stats.var, count))
    return Moments(mean, var, lax.stop_gradient(count), tuple(name for name, _ in spec.kept_axes(apart)))


def moments(x, *, layout: str, axis_names, center: bool = True, where=None, axis_index_groups=None) -> Moments:
    """Returns the count, mean and biased variance of every group of x: differentiable, exact at any mean.

    Args:
      x: array of any float, complex, integer or boolean dtype; accumulated in float32 at least.
      layout: names of x's axes, such as "N H W C".
      axis_names: the names that pool into one mean; one that `layout` lacks is a mapped axis.
      center: False gives mean 0 and, as var, the mean square (what RMS norm divides by).
      where: boolean mask of x's rank, each size 1 or x's; entries that are False are not counted.
      axis_index_groups: as in `jax.lax.psum`, for one mapped axis.

    Returns:
      `Moments` along the kept axes. A group without entries has mean 0, var 0, count 0. One collective where there are
      mapped axes (two where they are larger than 32 together).

    Raises:
      ValueError: an axis error, a mask that does not fit, a mapped name that is not bound.
      TypeError: a mask that is not boolean, x that holds no numbers.

    Example:
      >>> m = moments(jnp.array([[1.0, 3.0, 5.0, 7.0]]), layout="N D", axis_names="D")
      >>> print(m.mean, m.var, m.count, m.names)
      [4.] [5.] [4.] ('N',)
    """
    fn = "moments"
    center = static_bool(fn, "center", center)
    x, wide = as_input(fn, x)
    spec = resolve(fn, layout, axis_names, x.shape)
    where = as_mask(spec, where)
    stats = pooled_statistics(
        spec,
        spec.expand(x),
        spec.expand(wide),
        where,
        center=center,
        axis_index_groups=axis_index_groups,
        derivative=check_derivative(fn, "vjp", x),
    )
    return as_moments(spec, stats)


def merge(*moments: Moments, axis: int | None = None) -> Moments:
    """Returns the moments of all entries together, exactly: shards, micro-batches, epochs add up.

    Args:
      *moments: `Moments` along the same names; or one whose leaves have a further axis (stacked by scan or vmap).
      axis: which axis that is.

    Returns:
      `Moments` along the same names, of all entries together. Moments with count 0 change nothing. The formula is
      exact; a `mean` is one rounded number, so beside pooling at once x̂ moves by the spacing of floats at the mean
      over the standard deviation (float32, mean 10⁴, deviation 1: 5e-4; mean 1: 1e-7).

    Raises:
      ValueError: none given, several given with `axis`, or names or shapes that differ.
      TypeError: an argument that is no `Moments`.

    Example:
      >>> whole = merge(*(moments(jnp.array(part), layout="N", axis_names="N") for part in ([0.0], [3.0], [6.0, 6.0])))
      >>> print(whole.mean, whole.var, whole.count)
      3.75 6.1875 4.0

    References:
      Chan, Golub and LeVeque (1979), Updating formulae and a pairwise algorithm for computing sample variances.
    """
    if not moments:
        raise ValueError("merge: give at least one Moments.")
    checked = [checked_moments("merge", item) for item in moments]
    first = checked[0]
    if axis is None:
        stacked = _stack(checked)
    elif len(moments) > 1:
        raise ValueError(f"merge: axis={axis} is for one stacked Moments, but {len(moments)} were given.")
    elif not hasattr(axis, "__index__") or isinstance(axis, bool):
        raise TypeError(f"merge: axis must be an integer; got {axis!r}.")
    else:
        if not -first.mean.ndim <= axis < first.mean.ndim:
            raise ValueError(f"merge: axis={axis} is out of range for moments of shape {first.mean.shape}.")
        stacked = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, axis, 0), first)
    shift = lax.stop_gradient(stacked.mean)
    pooled = _mapped.merge_stacked(Statistics(shift, stacked.mean - shift, stacked.var, stacked.count))
    return Moments(pooled.mean, pooled.var, pooled.count, first.names)


def checked_moments(fn: str, moments) -> Moments:
    """The moments with array leaves of one shape; TypeError or ValueError otherwise."""
    if not isinstance(moments, Moments):
        raise TypeError(f"{fn}: moments must be a normjax.Moments; got {kind_of(moments)}.")
    moments = with_arrays(fn, "moments", moments)
    check_one_shape(fn, "moments", moments, "mean", "var", "count")
    return moments


def _stack(moments: Sequence[Moments]) -> Moments:
    first = moments[0]
    for item in moments[1:]:
        if item.names != first.names or item.mean.shape != first.mean.shape:
            raise ValueError(
                f"merge: moments must run along the same axes: {first.names} of shape {first.mean.shape}, "
                f"but {item.names} of shape {item.mean.shape} came too."
            )
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *moments)
