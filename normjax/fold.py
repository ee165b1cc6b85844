"""`fold`: batch norm in evaluation, merged into the dense or convolution layer before it.

Evaluation is one affine map for each channel, y = s z + (β − s μ) with s = γ/√(v+ε), and z = kernel·x + b is linear in
both. So kernel′ = s kernel along the output channels and b′ = (b − μ) s + β give y without the norm. Nothing else may
read z, and nothing may stand between: `normjax.nnx.fold` and `normjax.linen.fold` find out for a whole model.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from normjax._axes import Spec, name_axes
from normjax._derivatives import inverse_std
from normjax._grammar import ELLIPSIS, in_another_form, parse_names, quote
from normjax._inputs import as_array, as_eps
from normjax._normalize import Affine, check_params
from normjax._running import BatchStats, check_state


def fold(
    kernel,
    bias,
    params: Affine | None,
    stats: BatchStats,
    *,
    layout: str,
    channel=None,
    eps=1e-5,
) -> tuple[jax.Array, jax.Array]:
    """Returns the kernel and the bias of one layer that does what the layer and then batch norm in evaluation do.

    Whatever makes y from the kernel linearly will do: strides, dilation, padding and groups stay as they are. Computed
    in float64, under jit and without `jax_enable_x64` too, and rounded once. Differentiable in every argument. A
    channel with variance and eps 0 is β, as in `batch_norm`.

    Args:
      kernel: array of any float or complex dtype.
      bias: what the layer adds, along `stats.names`: that of y = x W + 2 b is 2 b. None: nothing.
      params: `Affine` along the axes of `stats`, or None.
      stats: `BatchStats`; its names find the output channel among the kernel's axes (where it is a scalar, those of
        params do).
      layout: names of the kernel's axes, such as "h w I C"; the grammar is that of `batch_norm`. Flax's ConvTranspose
        has "h w I C", with transpose_kernel=True "h w C I".
      channel: where the kernel has the output channel under another name or spread over several axes: their names in
        order, the slowest first. A depthwise kernel with a multiplier is layout="h w g j", channel="g j"; PyTorch's
        grouped ConvTranspose2d is layout="(g=4 I) j h w", channel="g j".
      eps: real scalar ≥ 0, as the norm has it; may be traced.

    Returns:
      The kernel, of its shape and dtype, and the bias along `stats.names`, of its own dtype, or of the kernel's where
      there was none.

    Raises:
      ValueError: `layout` lacks the output channel, or shapes, names or eps break their rule.
      TypeError: an array of integers, statistics below float32, or arguments of other types.

    Example:
      >>> import jax.numpy as jnp
      >>> import normjax as nj
      >>> from normjax.fold import fold
      >>> stats = nj.BatchStats(jnp.array([5.0]), jnp.array([4.0]), 1, jnp.ones(1), "C")
      >>> kernel, bias = fold(jnp.full((1, 1, 1, 1), 2.0), jnp.array([3.0]), nj.Affine(jnp.array([4.0]),
      ...                     jnp.array([1.0]), "C"), stats, layout="h w I C", eps=0)
      >>> print(kernel.ravel(), bias)
      [4.] [-3.]

    References:
      Jacob et al. (2018), Quantization and Training of Neural Networks, section 3.2.
    """
    fn = "fold"
    dtype = _floats(fn, "kernel", kernel).dtype
    bias_dtype = dtype if bias is None else _floats(fn, "bias", bias).dtype
    with jax.enable_x64(True):
        kernel = _floats(fn, "kernel", kernel)
        bias = None if bias is None else _floats(fn, "bias", bias)
        spec = name_axes(fn, layout, kernel.shape, "the kernel")
        stats = check_state(fn, stats, "stats")
        params = _opened(spec, params)
        names, axes = _channel(spec, params, stats, channel)
        sizes = _sizes(spec, axes)
        shape = sizes if channel is None else (math.prod(sizes),)
        output = name_axes(fn, " ".join(names), shape, "the kernel's output")
        arrays = (kernel, bias, params, stats, as_eps(output, eps, jnp.float64))
        return _folded(*arrays, spec=spec, output=output, axes=axes, dtypes=(dtype, bias_dtype))


@functools.partial(jax.jit, static_argnames=("spec", "output", "axes", "dtypes"))
def _folded(kernel, bias, params, stats, eps, *, spec: Spec, output: Spec, axes: tuple[str, ...], dtypes):
    """Kernel and bias; one program where it is called eagerly. `output` is the channel as the norm knows it."""

    def aligned(what: str, array, names=stats.names):
        return output.align(array, names, what).astype(_double(array))

    mean, var = aligned("stats.mean", stats.mean), aligned("stats.var", stats.var)
    scale, shift = inverse_std(var, eps, None), -mean
    if bias is not None:
        shift = aligned("bias", bias, tuple(output.layout.split())) + shift
    if params is not None and params.scale is not None:
        gamma = aligned("params.scale", params.scale, params.names)
        scale = scale * (1 + gamma if params.zero_centered else gamma)
    shift = shift * scale
    if params is not None and params.bias is not None:
        shift = shift + aligned("params.bias", params.bias, params.names)
    _check_real(spec, "kernel", dtypes[0], scale)
    _check_real(spec, "kernel" if bias is None else "bias", dtypes[1], shift)
    spread = jnp.reshape(jnp.broadcast_to(scale, output.shape), _sizes(spec, axes))
    along = spec.align(spread, axes, "stats")
    folded = jnp.reshape(spec.expand(kernel).astype(_double(kernel)) * along, spec.shape)
    return folded.astype(dtypes[0]), jnp.broadcast_to(shift, output.shape).astype(dtypes[1])


def _sizes(spec: Spec, axes: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(math.prod(spec.expanded[i] for i in spec.positions(axis)) for axis in axes)


def _floats(fn: str, what: str, value) -> jax.Array:
    array = as_array(fn, what, value)
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        raise TypeError(f"{fn}: {what} must have a floating-point or complex dtype; got {array.dtype}.")
    return array


def _double(array):
    """Float64, or complex128 where the array is complex."""
    return jnp.complex128 if jnp.iscomplexobj(array) else jnp.float64


def _check_real(spec: Spec, what: str, dtype, result) -> None:
    if jnp.iscomplexobj(result) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"{spec.fn}: {what} is {dtype}, but the norm's parameters or statistics are complex; make it complex too."
        )


def _opened(spec: Spec, params):
    """The parameters with array leaves."""
    check_params(spec, params)
    if params is None:
        return None
    given = {name: getattr(params, name) for name in ("scale", "bias")}
    arrays = {
        name: None if value is None else as_array(spec.fn, f"params.{name}", value) for name, value in given.items()
    }
    return dataclasses.replace(params, **arrays)


def _channel(spec: Spec, params, stats: BatchStats, channel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the output channel is called by the norm, and by the kernel."""
    names = stats.names or (() if params is None else params.names)
    if params is not None and (more := [name for name in params.names if name not in names]):
        raise ValueError(
            f"{spec.fn}: params runs along {quote(more)}, but stats along {quote(names)} alone; what folds into a "
            "kernel is the same for all examples and positions."
        )
    known = [name for axis, _, _ in spec.ranges for name in axis.names]
    if channel is None:
        if lacking := [name for name in names if name not in known]:
            likely = next((name for name in reversed(known) if name != ELLIPSIS), "C")
            raise ValueError(
                f'{spec.fn}: stats runs along {quote(lacking)}, which layout "{spec.layout}" lacks; call the output '
                f'axis of the kernel so, or say which it is, as in channel="{likely}".'
                f"{in_another_form(lacking[0], known)}"
            )
        return names, names
    axes = parse_names(spec.fn, channel, "channel")
    asked = f'{spec.fn}: channel="{" ".join(axes)}"'
    if lacking := [name for name in axes if name not in known]:
        raise ValueError(
            f'{asked}: {quote(lacking)} is not in layout "{spec.layout}".{in_another_form(lacking[0], known)}'
        )
    if len(names) != 1:
        raise ValueError(
            f"{asked} says what one output channel is made of, but stats runs along {quote(names) or 'no axis'}; "
            'give it one name, as in names="C".'
        )
    if names[0] in known and axes != names:
        raise ValueError(
            f"{asked}: stats runs along '{names[0]}', which layout \"{spec.layout}\" has itself; leave channel out, or "
            "call that axis of the kernel otherwise."
        )
    return names, axes
