"""The rest of the family: layer, instance, group and RMS norm. Each is its own checks, then the one core."""

import jax

from normjax._axes import Spec, resolve
from normjax._grammar import quote
from normjax._inputs import as_input
from normjax._normalize import Affine, check_params, normalize_by
from normjax._running import BatchStats


def layer_norm(
    x,
    params: Affine | None = None,
    state: BatchStats | None = None,
    *,
    layout: str,
    axis_names,
    train: bool | None = None,
    where=None,
    eps=1e-5,
    dtype=None,
    derivative: str = "vjp",
) -> tuple[jax.Array, BatchStats | None]:
    """Returns x normalised over each example's features, and the state as it came.

    Args:
      x: array of any float, complex, integer or boolean dtype; statistics are accumulated in float32 at least.
      params: `Affine` along at least one reduced axis, or scalar, or None.
      state: returned untouched, so that configuration can swap this for `batch_norm`.
      layout: names of x's axes, such as "... D".
      axis_names: the names that pool into one mean, such as "D"; one that `layout` lacks is a mapped axis.
      train: accepted and without meaning.
      where: boolean mask of x's rank, each size 1 or x's: entries that do not count.
      eps: real scalar ≥ 0, added to the variance inside the root; may be traced.
      dtype: of y; by default x's (float32 for integers).
      derivative: "vjp", "jvp" (forward mode needs it: jax.jvp, jax.jacfwd) or "autodiff" (the plain formula).

    Returns:
      y of x's shape, and `state`.

    Raises:
      ValueError: axes, shapes, eps or derivative break their rule; params run along no reduced axis.
      TypeError: params, where or dtype is of the wrong type.

    Example:
      >>> import jax.numpy as jnp
      >>> import normjax as nj
      >>> y, _ = nj.layer_norm(jnp.array([[1.0, 7.0]]), nj.Affine.init(D=2), layout="... D", axis_names="D")
      >>> print(y.round(2))
      [[-1.  1.]]

    References:
      Ba, Kiros and Hinton (2016), Layer Normalization, equations 3 and 4.
    """
    del train
    spec, x, wide = _prepare("layer_norm", x, params, layout, axis_names)
    params_run_along(spec, params, kept=False)
    y, _ = normalize_by(spec, x, wide, params, where=where, eps=eps, dtype=dtype, derivative=derivative)
    return y, state


def instance_norm(
    x,
    params: Affine | None = None,
    state: BatchStats | None = None,
    *,
    layout: str,
    axis_names,
    train: bool | None = None,
    where=None,
    eps=1e-5,
    dtype=None,
    derivative: str = "vjp",
) -> tuple[jax.Array, BatchStats | None]:
    """Returns x normalised over the positions of each example and channel, and the state as it came.

    Args:
      x: array of any float, complex, integer or boolean dtype; statistics are accumulated in float32 at least.
      params: `Affine` along at least one kept axis, or scalar, or None.
      state: returned untouched; for tracked statistics use `batch_norm` with the same `axis_names`.
      layout: names of x's axes, such as "N H W C".
      axis_names: the names that pool into one mean, such as "H W"; one that `layout` lacks is a mapped axis.
      train: accepted and without meaning.
      where: boolean mask of x's rank, each size 1 or x's: entries that do not count.
      eps: real scalar ≥ 0, added to the variance inside the root; may be traced.
      dtype: of y; by default x's (float32 for integers).
      derivative: "vjp", "jvp" (forward mode needs it: jax.jvp, jax.jacfwd) or "autodiff" (the plain formula).

    Returns:
      y of x's shape, and `state`.

    Raises:
      ValueError: axes, shapes, eps or derivative break their rule; params run along no kept axis.
      TypeError: params, where or dtype is of the wrong type.

    Example:
      >>> import jax.numpy as jnp
      >>> import normjax as nj
      >>> x = jnp.array([[[1.0, 7.0], [20.0, 10.0]]])
      >>> y, _ = nj.instance_norm(x, nj.Affine.init(C=2), layout="N C L", axis_names="L")
      >>> print(y.round(2))
      [[[-1.  1.]
        [ 1. -1.]]]

    References:
      Ulyanov, Vedaldi and Lempitsky (2016), Instance Normalization.
    """
    del train
    spec, x, wide = _prepare("instance_norm", x, params, layout, axis_names)
    params_run_along(spec, params, kept=True)
    y, _ = normalize_by(spec, x, wide, params, where=where, eps=eps, dtype=dtype, derivative=derivative)
    return y, state


def group_norm(
    x,
    params: Affine | None = None,
    state: BatchStats | None = None,
    *,
    layout: str,
    axis_names,
    train: bool | None = None,
    where=None,
    eps=1e-5,
    dtype=None,
    derivative: str = "vjp",
) -> tuple[jax.Array, BatchStats | None]:
    """Returns x normalised over the positions of each example and block of channels, and the state as it came.

    Args:
      x: array of any float, complex, integer or boolean dtype; statistics are accumulated in float32 at least.
      params: `Affine`, or None.
      state: returned untouched, so that configuration can swap this for `batch_norm`.
      layout: names of x's axes with a split one, such as "N H W C=(G=32 K)".
      axis_names: the names that pool into one mean, such as "H W K"; one that `layout` lacks is a mapped axis.
      train: accepted and without meaning.
      where: boolean mask of x's rank, each size 1 or x's: entries that do not count.
      eps: real scalar ≥ 0, added to the variance inside the root; may be traced.
      dtype: of y; by default x's (float32 for integers).
      derivative: "vjp", "jvp" (forward mode needs it: jax.jvp, jax.jacfwd) or "autodiff" (the plain formula).

    Returns:
      y of x's shape, and `state`.

    Raises:
      ValueError: axes, shapes, eps or derivative break their rule; no axis is split, or no factor of one is kept.
      TypeError: params, where or dtype is of the wrong type.

    Example:
      >>> import jax.numpy as jnp
      >>> import normjax as nj
      >>> y, _ = nj.group_norm(jnp.array([[1.0, 3.0, 10.0, 30.0]]), layout="N C=(G=2 K)", axis_names="K")
      >>> print(y.round(2))
      [[-1.  1. -1.  1.]]

    References:
      Wu and He (2018), Group Normalization, equation 7.
    """
    del train
    spec, x, wide = _prepare("group_norm", x, params, layout, axis_names)
    split = [(axis, start, stop) for axis, start, stop in spec.ranges if axis.factors]
    if not split:
        raise ValueError(
            f'group_norm: layout="{layout}" splits no axis; write the number of groups into it, '
            'as in layout="N H W C=(G=32 K)", axis_names="H W K".'
        )
    if not any(i not in spec.reduced for _, start, stop in split for i in range(start, stop)):
        raise ValueError(
            f'group_norm: axis_names="{" ".join(spec.axis_names)}" pools every factor of '
            f"{quote(str(axis) for axis, _, _ in split)}; keep the factor that numbers the groups."
        )
    y, _ = normalize_by(spec, x, wide, params, where=where, eps=eps, dtype=dtype, derivative=derivative)
    return y, state


def rms_norm(
    x,
    params: Affine | None = None,
    state: BatchStats | None = None,
    *,
    layout: str,
    axis_names,
    train: bool | None = None,
    where=None,
    eps=1e-5,
    dtype=None,
    derivative: str = "vjp",
) -> tuple[jax.Array, BatchStats | None]:
    """Returns x divided by the root of its mean square, and the state as it came; nothing is subtracted.

    Args:
      x: array of any float, complex, integer or boolean dtype; statistics are accumulated in float32 at least.
      params: `Affine`, usually without bias, or None.
      state: returned untouched, so that configuration can swap this for `batch_norm`.
      layout: names of x's axes, such as "... D".
      axis_names: the names that pool into one mean square, such as "D"; one that `layout` lacks is a mapped axis.
      train: accepted and without meaning.
      where: boolean mask of x's rank, each size 1 or x's: entries that do not count.
      eps: real scalar ≥ 0, added to the mean square inside the root; may be traced.
      dtype: of y; by default x's (float32 for integers).
      derivative: "vjp", "jvp" (forward mode needs it: jax.jvp, jax.jacfwd) or "autodiff" (the plain formula).

    Returns:
      y of x's shape, and `state`.

    Raises:
      ValueError: axes, shapes, eps or derivative break their rule.
      TypeError: params, where or dtype is of the wrong type.

    Example:
      >>> import jax.numpy as jnp
      >>> import normjax as nj
      >>> y, _ = nj.rms_norm(jnp.array([[3.0, -3.0]]), nj.Affine.init(D=2, bias=False), layout="... D", axis_names="D")
      >>> print(y.round(2))
      [[ 1. -1.]]

    References:
      Zhang and Sennrich (2019), Root Mean Square Layer Normalization, equation 4.
    """
    del train
    spec, x, wide = _prepare("rms_norm", x, params, layout, axis_names)
    y, _ = normalize_by(spec, x, wide, params, center=False, where=where, eps=eps, dtype=dtype, derivative=derivative)
    return y, state


def _prepare(fn: str, x, params, layout, axis_names):
    x, wide = as_input(fn, x)
    spec = resolve(fn, layout, axis_names, x.shape)
    check_params(spec, params)
    return spec, x, wide


def params_run_along(spec: Spec, params, *, kept: bool) -> None:
    """Necessary, not sufficient: params that are not scalar run along at least one kept, or one reduced axis."""
    if params is None or not params.names or (params.scale is None and params.bias is None):
        return
    declared = [name for name in params.names if spec.positions(name)]
    if len(declared) < len(params.names):
        return  # `Spec.align` will name the missing one
    if kept and all(spec.is_wholly_reduced(name) for name in declared):
        family = "instance norm" if spec.fn == "instance_norm" else "batch norm"
        raise ValueError(
            f'{spec.fn}: params runs along {quote(declared)}, all of which axis_names="{" ".join(spec.axis_names)}" '
            f"reduces; {family} scales the axes it keeps."
        )
    if not kept and not any(spec.is_reduced(name) for name in declared):
        raise ValueError(
            f'{spec.fn}: params runs along {quote(declared)}, none of which axis_names="{" ".join(spec.axis_names)}" '
            "reduces; layer norm scales the axes it pools."
        )
