"""y = γ (x−μ)/√(v+ε) + β for any layout: `Affine` and the core, `normalize`; the maths stands in _derivatives.py."""

from typing import Any

import jax
import jax.numpy as jnp

from normjax import _mapped
from normjax._axes import Spec, resolve
from normjax._derivatives import Statistics, affine, carried, fits
from normjax._inputs import (
    as_array,
    as_dtype,
    as_eps,
    as_input,
    as_mask,
    check_derivative,
    check_names,
    check_sizes,
    is_real_scalar,
    kind_of,
    output_dtype,
    static_bool,
    with_arrays,
)
from normjax._moments import Moments, as_moments, pooled_statistics
from normjax._pytree import pytree, settle, show
from normjax._sums import written


@pytree(static=["names", "zero_centered"])
class Affine:
    """Scale γ and bias β of a layer: a pytree.

    Attributes:
      scale: γ, along `names`, or None; with `zero_centered` the γ used is 1 + scale.
      bias: β, along `names`, or None.
      names: the layout axes that both run along, in order (static); () for scalars.
      zero_centered: whether scale is stored as γ − 1 (static).
    """

    scale: Any
    bias: Any
    names: tuple[str, ...] = ()
    zero_centered: bool = False

    __post_init__ = settle
    __repr__ = show

    @classmethod
    def init(
        cls,
        *,
        scale: bool = True,
        bias: bool = True,
        scale_init: float = 1.0,
        dtype=jnp.float32,
        zero_centered: bool = False,
        **sizes: int,
    ) -> "Affine":
        """Returns an effective γ of `scale_init` and a bias of 0 along the given axes.

        Args:
          scale: whether there is a scale.
          bias: whether there is a bias.
          scale_init: the γ that the layer starts with; 0 makes a residual branch start at nothing.
          dtype: of both.
          zero_centered: stores γ − 1, so that weight decay pulls γ to 1.
          **sizes: the axes in order, such as C=64, or N=8, C=64 for parameters of each example. None: scalars.

        Example:
          >>> Affine.init(C=64, bias=False)
          Affine(scale=float32[64], bias=None, names='C', zero_centered=False)
        """
        fn = "Affine.init"
        scale, bias = static_bool(fn, "scale", scale), static_bool(fn, "bias", bias)
        zero_centered = static_bool(fn, "zero_centered", zero_centered)
        shape, dtype = check_sizes(fn, sizes), as_dtype(fn, dtype, complex_too=True)
        if not is_real_scalar(scale_init):
            raise TypeError(f"{fn}: scale_init must be a number; got {scale_init!r}.")
        start = scale_init - 1 if zero_centered else scale_init
        return cls(
            jnp.full(shape, start, dtype) if scale else None,
            jnp.zeros(shape, dtype) if bias else None,
            tuple(sizes),
            zero_centered,
        )


def check_params(spec: Spec, params) -> None:
    """Raises TypeError unless params is an `Affine` or None."""
    if params is not None and not isinstance(params, Affine):
        raise TypeError(
            f"{spec.fn}: params must be a normjax.Affine or None; got {kind_of(params)}. "
            'Wrap arrays as Affine(scale, bias, names="C").'
        )
    if params is not None:
        check_names(spec.fn, "params", params.names)


def _parameter(spec: Spec, value, what: str, names, dtype):
    array = as_array(spec.fn, what, value)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        array = array.astype(jnp.float32)
    if jnp.iscomplexobj(array) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"{spec.fn}: {what} is complex ({array.dtype}) but x is real; give it real numbers.")
    return spec.align(array, names, what)


def given_statistics(spec: Spec, source, what: str, dtype, cure: str = "") -> Statistics:
    """A mean and variance that somebody keeps (`Moments` or `BatchStats`), of the expanded rank."""
    source = with_arrays(spec.fn, what, source)
    mean = source.mean
    if jnp.iscomplexobj(mean) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"{spec.fn}: {what}.mean is complex ({mean.dtype}) but x is real.")
    real = jnp.finfo(dtype).dtype
    mean = spec.align(mean, source.names, f"{what}.mean", cure).astype(dtype)
    var = spec.align(source.var, source.names, f"{what}.var", cure).astype(real)
    return Statistics(mean, None, var, None)


def normalized(spec: Spec, x, wide, params, stats: Statistics, *, where, eps, dtype, derivative: str):
    """Normalises the expanded x by `stats` and applies params; returns an array of x's own shape and of `dtype`."""
    check_params(spec, params)
    out = output_dtype(spec.fn, dtype, x)
    scale = bias = None
    zero_centered = False
    if params is not None:
        zero_centered = params.zero_centered
        if params.scale is not None:
            scale = _parameter(spec, params.scale, "params.scale", params.names, wide.dtype)
        if params.bias is not None:
            bias = _parameter(spec, params.bias, "params.bias", params.names, wide.dtype).astype(wide.dtype)
    eps = as_eps(spec, eps, wide.real.dtype)
    given = [array for array in (scale, bias) if array is not None]
    if spec.mapped and stats.offset is not None and any(fits(array.shape, stats.var.shape) for array in given):
        stats, scale, bias, eps = carried(stats, scale, bias, eps, zero_centered=zero_centered)
        zero_centered = False
        # Cast as one array, so that their cotangents cross the devices as one.
        _, both = _mapped.vary_alike((wide, jnp.stack(jnp.broadcast_arrays(scale, bias))))
        scale, bias = both
    operands: Any = (x, wide, stats, scale, bias, eps, where)
    y = affine(*_mapped.vary_alike(operands), zero_centered=zero_centered, derivative=derivative)
    return jnp.reshape(y.astype(out), spec.shape)


def normalize(
    x,
    params: Affine | None = None,
    *,
    layout: str,
    axis_names,
    moments: Moments | None = None,
    center: bool = True,
    where=None,
    eps=1e-5,
    dtype=None,
    axis_index_groups=None,
    derivative: str = "vjp",
) -> tuple[jax.Array, Moments]:
    """Returns x standardised over `axis_names`, scaled and shifted, and the moments it was standardised by: the core.

    Args:
      x: array of any float, complex, integer or boolean dtype.
      params: `Affine`, applied in the statistics' dtype, or None.
      layout: names of x's axes.
      axis_names: the names that pool into one mean; one that `layout` lacks is a mapped axis.
      moments: `Moments` to normalise by instead of x's own, along any axes of x; differentiable.
      center: False divides by the root mean square and subtracts nothing.
      where: boolean mask of x's rank, each size 1 or x's: entries that do not count.
      eps: real scalar ≥ 0, added to the variance inside the root; may be traced.
      dtype: of y; by default x's (float32 for integers).
      axis_index_groups: as in `jax.lax.psum`, for one mapped axis.
      derivative: "vjp", "jvp" (forward mode needs it: jax.jvp, jax.jacfwd) or "autodiff" (the plain formula).

    Returns:
      y of x's shape, and `Moments`.

    Raises:
      ValueError: axes, shapes, eps or derivative break their rule.
      TypeError: params, moments, where or dtype is of the wrong type.

    Example:
      >>> y, m = normalize(jnp.array([1.0, 7.0]), layout="D", axis_names="D")
      >>> print(y.round(2), m.mean, m.var)
      [-1.  1.] 4.0 9.0
    """
    fn = "normalize"
    center = static_bool(fn, "center", center)
    x, wide = as_input(fn, x)
    spec = resolve(fn, layout, axis_names, x.shape)
    return normalize_by(
        spec,
        x,
        wide,
        params,
        moments=moments,
        center=center,
        where=where,
        eps=eps,
        dtype=dtype,
        axis_index_groups=axis_index_groups,
        derivative=derivative,
    )


def normalize_by(
    spec: Spec,
    x,
    wide,
    params,
    *,
    moments=None,
    center=True,
    where,
    eps,
    dtype,
    axis_index_groups=None,
    derivative,
    apart=(),
) -> tuple[jax.Array, Moments]:
    """`normalize` with its axes resolved; `apart` as in `as_moments`."""
    check_params(spec, params)
    derivative = check_derivative(spec.fn, derivative, x)
    where = as_mask(spec, where)
    if derivative == "vjp":
        x = written(x)
        wide = x.astype(wide.dtype)
    x, wide = spec.expand(x), spec.expand(wide)
    if moments is None:
        stats = pooled_statistics(
            spec, x, wide, where, center=center, axis_index_groups=axis_index_groups, derivative=derivative
        )
        moments = as_moments(spec, stats, apart)
    elif isinstance(moments, Moments):
        stats = given_statistics(spec, moments, "moments", wide.dtype)
        count = spec.align(as_array(spec.fn, "moments.count", moments.count), moments.names, "moments.count")
        stats = stats._replace(count=count.astype(wide.real.dtype), shift=stats.shift if center else None)
    else:
        raise TypeError(
            f"{spec.fn}: moments must be a normjax.Moments or None; got {kind_of(moments)}. "
            "Take them from normjax.moments or normjax.merge."
        )
    y = normalized(spec, x, wide, params, stats, where=where, eps=eps, dtype=dtype, derivative=derivative)
    return y, moments
