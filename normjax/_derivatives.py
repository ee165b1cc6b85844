r"""The two maps that every norm is made of, and their hand-written derivatives: the only place with a backward.

Statistics.  x ↦ (K, e, v):  the group's mean is K + e, its variance v; K is a constant near the mean, e corrects it.

    d = x − K,    e = mean(d),    v = mean(d²) − e²

K is the mean of an eighth of the group (of all of it where that costs little, or a mask or a sharded axis forbids a
part), taken relative to one of the group's own entries, so constant groups give d = 0 exactly. It lies within 2.65
standard deviations of the mean whatever the data, so v loses at most three bits, and no rounded mean is ever formed:
K + e stays a pair. Neither K + e nor v depends on K, hence K carries no gradient, at any order. With cotangents ē and
v̄, over m entries:

    x̄ᵢ = (ē + 2 (xᵢ−μ) v̄) / m

Affine map.  (x, K, e, v, γ, β) ↦ y = γ x̂ + β  with  r = 1/√(v+ε),  x̂ = ((x−K)−e) r.  With cotangent g and u = γ g:

    x̄ = r u,   ē = −r Σu,   v̄ = ε̄ = −½ r² Σ(u x̂),   γ̄ = Σ g x̂,   β̄ = Σ g

Chained, they are the textbook backward  x̄ⱼ = r (uⱼ − mean(u) − x̂ⱼ mean(u x̂)); kept apart, the same two rules serve
running statistics, given moments and statistics summed over mapped axes, whose collectives stand between them.

Each map takes x twice: `x`, in its own dtype, is what the backward saves; `wide`, the same values in the statistics'
dtype, carries the derivative, so both contributions to x̄ are added before they are rounded to x's dtype, once.

A masked-out entry whose x̂ is not finite ("lost") is guarded by its value, never by a zero cotangent: 0·NaN is NaN.

Range.  Squares are taken in the statistics' dtype. In float32 a standard deviation above about 10¹⁹ gives NaN; one
below 10⁻¹⁶ keeps no full precision in v, which only an eps of that order lets one see; and gradients are exact
while r² Σ(u x̂) does not underflow: up to |x| of 10¹⁵ for cotangents of 10⁻⁶. float64 has room for all of it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from normjax._sharding import placed_as
from normjax._sums import is_large, kept, sums

STATS_NAME = "normjax_stats"


class Statistics(NamedTuple):
    """Mean = shift + offset and variance of every group, of the expanded rank with size 1 where axes were pooled.

    shift and offset are None without centring; count is None where every group is known to have entries.
    """

    shift: Any
    offset: Any
    var: Any
    count: Any

    @property
    def mean(self):
        """The mean as one rounded number."""
        if self.shift is None:
            return jnp.zeros_like(self.var)
        return self.shift if self.offset is None else self.shift + self.offset


def _centred(wide, shift, offset):
    if shift is None:
        return wide
    d = wide - shift
    return d if offset is None else d - offset


def _axes_to(shape, target) -> tuple[int, ...]:
    return tuple(i for i, (size, whole) in enumerate(zip(shape, target, strict=True)) if size != whole)


def _sum_to(array, shape):
    """Sums over the axes in which `shape` has size 1, keeping them."""
    axes = _axes_to(array.shape, shape)
    return jnp.sum(array, axes, keepdims=True) if axes else array


def _as(primal, cotangent):
    """A cotangent with the dtype and the sharding of its primal's type."""
    return placed_as(primal, cotangent.astype(primal.dtype))


def at_least_zero(var):
    """A variance that rounding may have made negative; a plain maximum would halve the derivative at exactly 0."""
    return var + lax.stop_gradient(jnp.maximum(-var, 0))


def abs_square(d):
    """|d|², real."""
    return jnp.square(d.real) + jnp.square(d.imag) if jnp.iscomplexobj(d) else jnp.square(d)


# ---- statistics ----


class Pooling(NamedTuple):
    """What `statistics` pools (static): the expanded axes, whether it centres, whether a part may be sliced off."""

    axes: tuple[int, ...]
    center: bool
    sliceable: bool


def _group_count(pooling: Pooling, wide, where):
    """Entries in each group: an int without a mask, else an array."""
    count = included = 1
    for axis in pooling.axes:
        if where is None or where.shape[axis] == 1:
            count *= wide.shape[axis]
        else:
            included *= where.shape[axis]
    if where is None:
        return count
    exact = jnp.int32 if _known(included) < 2**31 else wide.real.dtype
    return jnp.sum(where, pooling.axes, dtype=exact, keepdims=True).astype(wide.real.dtype) * as_divisor(count)


def as_divisor(count):
    """A count to divide by: an int of 2³¹ and more would not fit into int32; arrays and symbolic sizes stay."""
    return float(count) if isinstance(count, int) else count


def _shift(pooling: Pooling, x, wide, where):
    """A constant near each group's mean: exactly the entries' value where a group is constant.

    A part is taken of x and then widened: the other way round a TPU stores all of x, widened, to slice it.
    """
    x, wide = lax.stop_gradient((x, wide))
    if not pooling.axes and where is None:
        return wide
    if where is None and pooling.sliceable:
        part, longest = x, max(pooling.axes, key=lambda axis: _known(wide.shape[axis]))
        count = _group_count(pooling, wide, None)
        if not isinstance(count, int) or (count >= 128 and is_large(wide.shape)):
            if longest == wide.ndim - 1:
                part = lax.slice_in_dim(x, 0, -(-wide.shape[longest] // 8), axis=longest)
            else:  # every eighth entry: over an axis that jit shards, each device has its own
                part = lax.slice_in_dim(x, 0, None, 8, axis=longest)
        part = anchor = part.astype(wide.dtype)
        for axis in pooling.axes:
            anchor = lax.slice_in_dim(anchor, 0, 1, axis=axis)
        return anchor + jnp.mean(part - anchor, pooling.axes, keepdims=True)
    if jnp.iscomplexobj(wide):
        anchor = jnp.zeros([1 if i in pooling.axes else size for i, size in enumerate(wide.shape)], wide.dtype)
    elif where is None:
        anchor = jnp.max(wide, pooling.axes, keepdims=True)
    else:
        largest = jnp.max(jnp.where(where, wide, -jnp.inf), pooling.axes, keepdims=True)
        anchor = jnp.where(largest == -jnp.inf, 0, largest)
    return anchor + _mean(pooling, wide - anchor, where)


def _known(size) -> int:
    """A size, or 0 for a symbolic one of `jax.export`, which cannot be compared."""
    return size if isinstance(size, int) else 0


def _mean(pooling: Pooling, d, where):
    count = _group_count(pooling, d, where)
    if where is None:
        return jnp.mean(d, pooling.axes, keepdims=True)
    total = jnp.sum(jnp.where(where, d, 0), pooling.axes, keepdims=True)
    return total / jnp.maximum(count, 1).astype(total.dtype)


def _powers(wide, shift):
    d = wide - shift
    return d, abs_square(d)


def _first_two(pooling: Pooling, wide, shift, where):
    """The means of d = x − K and of |d|²."""
    if where is None and not jnp.iscomplexobj(wide):
        count = _group_count(pooling, wide, None)
        return tuple(total / as_divisor(count) for total in sums(_powers, pooling.axes, wide, shift))
    return tuple(_mean(pooling, power, where) for power in _powers(wide, shift))


def _statistics(pooling: Pooling, x, wide, where) -> Statistics:
    if where is not None:
        wide = jnp.where(where, wide, 0)
    shift = offset = None
    if pooling.center:
        shift = checkpoint_name(kept(_shift(pooling, x, wide, where), wide), STATS_NAME)
        offset, square = _first_two(pooling, wide, shift, where)
        offset = checkpoint_name(kept(offset, wide), STATS_NAME)
        var = at_least_zero(square - abs_square(offset))
    else:
        var = _mean(pooling, abs_square(wide), where)
    count = None if where is None else _group_count(pooling, wide, where)
    return Statistics(shift, offset, checkpoint_name(var, STATS_NAME), count)


def _statistics_fwd(pooling: Pooling, x, wide, where):
    out = _statistics(pooling, x, wide, where)
    return out, (x, where, out.shift, out.offset, out.count)


def _statistics_bwd(pooling: Pooling, saved, cotangent: Statistics):
    x, where, shift, offset, count = saved
    wide = x.astype(cotangent.var.dtype)
    if where is not None:
        wide = jnp.where(where, wide, 0)
    d = _centred(wide, shift, offset)
    count = as_divisor(_group_count(pooling, wide, None)) if count is None else jnp.maximum(count, 1)
    dx = d * (2 * cotangent.var / count)
    if pooling.center:
        dx = dx + cotangent.offset / count
    if where is not None:
        dx = jnp.where(where, dx, 0)
    return None, dx, None


def _statistics_jvp(pooling: Pooling, primals, tangents):
    x, wide, where = primals
    out = _statistics(pooling, x, wide, where)

    @partial(jax.checkpoint, prevent_cse=False)  # a barrier would store g in the statistics' dtype
    def tangent(x, where, shift, offset, dx):
        wide = x.astype(dx.dtype)
        if where is not None:
            wide, dx = jnp.where(where, wide, 0), jnp.where(where, dx, 0)
        d_offset = None if offset is None else _mean(pooling, dx, where)
        return d_offset, _mean(pooling, 2 * (_centred(wide, shift, offset) * dx), where)

    d_offset, d_var = tangent(x, where, out.shift, out.offset, tangents[1])
    zeros = lambda array: None if array is None else jnp.zeros_like(array)  # noqa: E731
    return out, Statistics(zeros(out.shift), d_offset, d_var, zeros(out.count))


# ---- affine map ----


class Form(NamedTuple):
    """The static part of `affine`: whether γ is 1 + scale, and the type of the bias, which is not saved."""

    zero_centered: bool
    bias: Any


def inverse_std(var, eps, count):
    """1/√(v+ε): 0 where v+ε is 0 or a group is empty (so that y = β), NaN where v overflowed (never a silent 0)."""
    v = var + eps
    zero = v == 0
    if count is not None:
        zero = zero | (count == 0)
    # The root comes last, since XLA evaluates a root once for each group and a selection for each entry.
    # That of −∞ is NaN, and no constant NaN is there for `debug_nans` to find.
    v = lax.select(v == jnp.inf, -v, v)
    return lax.rsqrt(lax.select(zero, jnp.full_like(v, jnp.inf), v))


def _gamma(form: Form, scale, dtype):
    if scale is None:
        return None
    scale = scale.astype(dtype)
    return 1 + scale if form.zero_centered else scale


def _lost(where, d, r):
    """Excluded entries whose x̂ is not finite: NaN, Inf, or a padding value so large that x̂ overflows."""
    return ~where & ~jnp.isfinite(lax.stop_gradient(d * r))


def _affine(form: Form, x, wide, stats: Statistics, scale, bias, eps, where):
    del x
    r = inverse_std(stats.var, eps, stats.count).astype(wide.dtype)
    gamma = _gamma(form, scale, wide.dtype)

    def finish(x_hat):
        y = x_hat if gamma is None else x_hat * gamma
        return y if bias is None else y + bias

    d = _centred(wide, stats.shift, stats.offset)
    if where is None:
        return finish(d * r)
    lost = _lost(where, d, r)
    own = jnp.where(r == 0, 0, d * r)
    return jnp.where(lost, lax.stop_gradient(finish(own)), finish(jnp.where(lost, 0, d) * r))


def _affine_fwd(form: Form, x, wide, stats: Statistics, scale, bias, eps, where):
    return _affine(form, x, wide, stats, scale, bias, eps, where), (x, stats, scale, eps, where)


def fits(shape, target) -> bool:
    """Whether sums of the target's shape can be summed further to the shape."""
    return all(size in (1, whole) for size, whole in zip(shape, target, strict=True))


def _with_x_hat(g, d, r):
    return g, g * (d * r)


def _with_near(g, near, *gamma):
    u = g * gamma[0] if gamma else g
    return u, u * near


def _group_sums(g, near, offset, r, *gamma):
    """Σu and Σ(u x̂) of every group, with u = g or γ g and x̂ = (near − offset) r.

    Offset and r enter after the sums, which therefore need not wait for them: one pass serves these and the statistics.
    """
    sum_u, sum_ux = sums(_with_near, _axes_to(g.shape, r.shape), g, near, *gamma)
    return sum_u, r * (sum_ux if offset is None else sum_ux - offset * sum_u)


def carried(stats: Statistics, scale, bias, eps, *, zero_centered: bool) -> tuple[Statistics, Any, Any, Any]:
    """Pooled statistics and eps as constants, beside γ and β, constant in a group, that carry their derivative.

    With μ, v and ε held at μ₀, v₀ and ε₀, γ r/r₀ and β − γ r (μ − μ₀) give the same y, whatever these are, so all
    derivatives agree. Where a checked shard_map casts γ and β, the cotangents of two arrays cross the devices, not
    those of γ, β, μ and v.
    """
    fixed, fixed_eps = lax.stop_gradient((stats, eps))
    r = inverse_std(fixed.var, fixed_eps, fixed.count)
    ratio = lax.rsqrt(1 + r * (r * ((stats.var - fixed.var) + (eps - fixed_eps))))  # r² apart, as in the backward
    factor = _gamma(Form(zero_centered, None), scale, stats.offset.dtype)
    gamma = ratio if factor is None else ratio * factor
    moved = gamma * (r * (fixed.offset - stats.offset))
    return fixed, gamma, moved if bias is None else bias + moved, fixed_eps


def _affine_bwd(form: Form, saved: Any, g):
    x, stats, scale, eps, where = saved
    wide, offset = x.astype(g.dtype), stats.offset
    d, near = _centred(wide, stats.shift, offset), _centred(wide, stats.shift, None)
    r = inverse_std(stats.var, eps, stats.count)
    if where is not None:
        lost = _lost(where, d, r)
        d, g = jnp.where(lost, 0, d), jnp.where(lost, 0, g)
        near, offset = d, None
    gamma = _gamma(form, scale, g.dtype)
    u = g if gamma is None else g * gamma
    if scale is None or fits(scale.shape, r.shape):
        # γ is constant within a group: the group's sums serve γ̄ and β̄ as well.
        sum_g, sum_gx = _group_sums(g, near, offset, r)
        sum_u, sum_ux = (sum_g, sum_gx) if gamma is None else (sum_g * gamma, sum_gx * gamma)
    else:
        sum_u, sum_ux = _group_sums(g, near, offset, r, gamma)
        sum_g, sum_gx = sums(_with_x_hat, _axes_to(g.shape, scale.shape), g, d, r)
    d_scale = None if scale is None else _as(jax.typeof(scale), _sum_to(sum_gx, scale.shape))
    d_bias = None
    if form.bias is not None:
        d_bias = _as(form.bias, _sum_to(sum_g if fits(form.bias.shape, sum_g.shape) else g, form.bias.shape))
    d_mean = None if stats.shift is None else _as(jax.typeof(stats.shift), -(r * sum_u))
    d_var = -0.5 * (r * (r * sum_ux))  # r² apart: r³ would overflow where r² does not
    d_stats = Statistics(d_mean, None if stats.offset is None else d_mean, _as(jax.typeof(stats.var), d_var), None)
    d_eps = jnp.sum(d_var).reshape(eps.shape)
    return None, placed_as(jax.typeof(x), u * r), d_stats, d_scale, d_bias, d_eps, None


def _affine_jvp(form: Form, primals, tangents):
    x, wide, stats, scale, bias, eps, where = primals
    _, d_wide, d_stats, d_scale, d_bias, d_eps, _ = tangents
    y = _affine(form, x, wide, stats, scale, bias, eps, where)

    @partial(jax.checkpoint, prevent_cse=False)  # a barrier would store g in the statistics' dtype
    def tangent(x, stats, scale, eps, where, d_wide, d_stats, d_scale, d_bias, d_eps):
        d = _centred(x.astype(d_wide.dtype), stats.shift, stats.offset)
        r = inverse_std(stats.var, eps, stats.count)
        lost = None if where is None else _lost(where, d, r)
        x_hat = (d if lost is None else jnp.where(lost, 0, d)) * r
        d = r * _centred(d_wide, d_stats.shift, d_stats.offset) - x_hat * (0.5 * (r * (r * (d_stats.var + d_eps))))
        gamma = _gamma(form, scale, d.dtype)
        d = d if gamma is None else d * gamma + x_hat * d_scale.astype(d.dtype)
        d = d if d_bias is None else d + d_bias
        return d if lost is None else jnp.where(lost, 0, d)

    return y, tangent(x, stats, scale, eps, where, d_wide, d_stats, d_scale, d_bias, d_eps)


# ---- the three ways to differentiate ----


def _with_rules(plain, fwd, bwd, jvp) -> dict[str, Any]:
    vjp_form = jax.custom_vjp(plain, nondiff_argnums=(0,))
    vjp_form.defvjp(fwd, bwd)
    jvp_form = jax.custom_jvp(plain, nondiff_argnums=(0,))
    jvp_form.defjvp(jvp)
    forms = {"vjp": vjp_form, "jvp": jvp_form, "autodiff": plain}
    return {name: jax.jit(form, static_argnums=(0,)) for name, form in forms.items()}


_STATISTICS = _with_rules(_statistics, _statistics_fwd, _statistics_bwd, _statistics_jvp)
_AFFINE = _with_rules(_affine, _affine_fwd, _affine_bwd, _affine_jvp)
DERIVATIVES = tuple(_STATISTICS)


def statistics(x, wide, where, *, pooling: Pooling, derivative: str) -> Statistics:
    """Mean (as a pair) and variance of every group of the expanded x, on this device.

    Args:
      x: what the backward saves, any float dtype.
      wide: x in the statistics' dtype; it carries the derivative.
      where: bool mask of the same rank, or None.
      pooling: the reduced axes.
      derivative: a key of `DERIVATIVES`.
    """
    if any(wide.shape[axis] == 0 for axis in pooling.axes):
        zeros = jnp.zeros([1 if i in pooling.axes else size for i, size in enumerate(wide.shape)], wide.dtype)
        return Statistics(*((zeros, zeros) if pooling.center else (None, None)), zeros.real, zeros.real)
    return _STATISTICS[derivative](pooling, x, wide, where)


def affine(x, wide, stats: Statistics, scale, bias, eps, where, *, zero_centered: bool, derivative: str):
    """γ (x − μ)/√(v+ε) + β in the statistics' dtype; all arrays of the expanded rank, scale in its own dtype."""
    form = Form(zero_centered, None if bias is None else jax.typeof(bias))
    return _AFFINE[derivative](form, x, wide, stats, scale, bias, eps, where)
