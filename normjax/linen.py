"""Flax linen's norms, by normjax: change the import, keep the model and its checkpoints.

Class names, arguments, defaults, parameters and collections are `flax.linen`'s. Every argument of ours is keyword-only
and has one meaning in all classes:

  layout, axis_names: any reduction in words, such as "N H W C" and "N H W". Together they take the place of the numbers
    (`reduction_axes`, `num_groups`, `group_size`); `axis` and `feature_axes` may then be names, and still say what
    the parameters run along (in a group norm: the axis that is split). A name it lacks is a mapped axis.
  zero_centered: stores γ − 1 as `scale`, so that weight decay pulls γ to 1; `scale_init` still gives γ.
  derivative: "vjp", "jvp" (for forward mode) or "autodiff" (the plain formula).

Statistics are in float32 at least and never E[x²] − E[x]², whatever `use_fast_variance` and `force_float32_reductions`
say. `axis_name` may be several names, whose devices count by entries; `axis_index_groups` work under every mapping.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from normjax._extras import require

require("normjax.linen", "flax", "flax")

from flax import errors  # noqa: E402
from flax import linen as nn  # noqa: E402
from flax.typing import Axes, Dtype, Initializer  # noqa: E402

from normjax import _flax, _flax_axes  # noqa: E402
from normjax._linen_fold import fold  # noqa: E402
from normjax._running import Cumulative, Ema  # noqa: E402

__all__ = ["BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm", "fold"]


def _scale(module: Any, axes: _flax_axes.Axes):
    init = _flax.centred(module.scale_init) if module.zero_centered else module.scale_init
    return module.param("scale", init, list(axes.shape), module.param_dtype) if module.use_scale else None


def _bias(module: Any, axes: _flax_axes.Axes):
    return module.param("bias", module.bias_init, list(axes.shape), module.param_dtype) if module.use_bias else None


def _statistics(module: Any, axes: _flax_axes.Axes, out, frozen: bool) -> dict[str, nn.Variable]:
    """The variables that hold running statistics: mean and var, and what they rest on where that is needed to move."""
    dtype = jnp.float32 if module.force_float32_reductions else module.param_dtype
    names = {"mean": "batch_stats", "var": "batch_stats"}
    if _flax.needs_counts(module) and (module.is_initializing() or not frozen):
        names |= {"count": "batch_counts", "weight": "batch_counts"}
    try:
        return {
            name: module.variable(
                collection, name, lambda name=name: getattr(_flax.first_statistics(axes.shape, dtype, out), name)
            )
            for name, collection in names.items()
        }
    except (errors.ScopeCollectionNotFound, errors.ScopeVariableNotFoundError) as error:
        error.add_note(_flax.missing_statistics(dict.fromkeys(names.values())))
        raise


def _normalized(module: Any, axes: _flax_axes.Axes, x, mask, *, bias: bool = True, center: bool = True):
    """Every norm but batch norm. Under initialisation no mapped axis is touched."""
    axes = axes.local() if module.is_initializing() else axes
    scale = _scale(module, axes)
    shift = _bias(module, axes) if bias else None
    out = _flax.output_dtype(x, scale, shift, module.dtype)
    return _flax.normalized(module, axes, x, scale, shift, mask, out, center=center)


class BatchNorm(nn.Module):
    """Batch norm: each feature by its mean and variance over all other axes, or by their running averages.

    Variables: `scale` and `bias` in params; `mean` and `var` in batch_stats, float32 at least whatever the other
    dtypes; `count` (int32) and `weight` (float32) in batch_counts, only where `running` needs them, and not for
    evaluation. All but `count` run along `axis`. Under initialisation the statistics stay as they are and no mapped
    axis is touched.

    Attributes:
      use_running_average: normalises by the running statistics and leaves them alone; here or in the call.
      axis: the feature axis, or several in order.
      momentum: the share of the old running statistics that is kept.
      epsilon: at least 0, added to the variance.
      dtype: of y; by default what x, scale and bias promote to.
      param_dtype: of scale and bias.
      use_bias: whether there is a bias.
      use_scale: whether there is a scale.
      bias_init: makes the bias.
      scale_init: makes the scale.
      axis_name: mapped axes whose devices share their statistics.
      axis_index_groups: as in `jax.lax.psum`, for one mapped axis.
      use_fast_variance: accepted; the variance is the accurate one.
      force_float32_reductions: accepted; with False new statistics are stored in `param_dtype` if that is wider.
      layout: names of the axes of x; see the module's text.
      axis_names: the names that pool.
      running: an `Ema` or `Cumulative` in the place of `momentum`. To train on from statistics that nothing counted
        (Flax's), add batch_counts of 1: `jax.tree.map(jnp.ones_like, model.init(…)["batch_counts"])`.
      zero_centered: stores γ − 1.
      derivative: "vjp", "jvp" or "autodiff".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x, norm = jnp.array([[1.0], [7.0]]), BatchNorm(momentum=0.9)
      >>> variables = norm.init(jax.random.key(0), x, use_running_average=False)
      >>> y, new = norm.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
      >>> print(y[:, 0].round(2), new["batch_stats"]["mean"], new["batch_stats"]["var"])
      [-1.  1.] [0.4] [1.8]
    """

    use_running_average: bool | None = None
    axis: Any = -1
    momentum: float = 0.99
    epsilon: float = 1e-5
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = nn.initializers.zeros
    scale_init: Initializer = nn.initializers.ones
    axis_name: Any = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True
    layout: str | None = dataclasses.field(default=None, kw_only=True)
    axis_names: Any = dataclasses.field(default=None, kw_only=True)
    running: Ema | Cumulative | None = dataclasses.field(default=None, kw_only=True)
    zero_centered: bool = dataclasses.field(default=False, kw_only=True)
    derivative: str = dataclasses.field(default="vjp", kw_only=True)

    @nn.compact
    def __call__(self, x, use_running_average: bool | None = None, *, mask: jax.Array | None = None):
        """Returns x normalised, and moves the running statistics unless they are used.

        Args:
          x: of any rank and dtype.
          use_running_average: static; here or in the constructor, not both.
          mask: boolean (or 0 and 1), broadcastable to x: the entries that count.

        Returns:
          y of x's shape.

        Raises:
          ValueError: an axis out of range (also an IndexError), twice or out of order; a mapped axis that is not bound
            (also a NameError); use_running_average given twice or never; a mask that does not broadcast.
          TypeError: a mask of floats; use_running_average is traced.
          flax.errors.ScopeCollectionNotFound: there are no batch_stats.
        """
        frozen = nn.merge_param("use_running_average", self.use_running_average, use_running_average)
        frozen = _flax.plain_bool("BatchNorm", frozen)
        axes = _flax_axes.batch_axes(self, x.shape)
        scale, bias = _scale(self, axes), _bias(self, axes)
        out = _flax.output_dtype(x, scale, bias, self.dtype)
        held = _statistics(self, axes, out, frozen)
        stats = _flax.statistics({name: variable.value for name, variable in held.items()})
        starting = self.is_initializing()
        y, new = _flax.batch_normalized(self, axes, x, scale, bias, stats, mask, out, frozen=frozen, starting=starting)
        if new is not stats:
            for name, variable in held.items():
                variable.value = getattr(new, name)
        return y


class LayerNorm(nn.Module):
    """Layer norm: each example by the mean and variance of its own features.

    Parameters `scale` and `bias` of the shape of x along `feature_axes`. Any axes may pool and any be features.

    Attributes:
      epsilon: at least 0, added to the variance.
      dtype: of y; by default what x, scale and bias promote to.
      param_dtype: of scale and bias.
      use_bias: whether there is a bias.
      use_scale: whether there is a scale.
      bias_init: makes the bias.
      scale_init: makes the scale.
      reduction_axes: the axes that pool, in order.
      feature_axes: the axes that the parameters run along, in order.
      axis_name: mapped axes whose devices share their statistics.
      axis_index_groups: as in `jax.lax.psum`, for one mapped axis.
      use_fast_variance: accepted; the variance is the accurate one.
      force_float32_reductions: accepted; statistics are in float32 at least.
      layout: names of the axes of x; see the module's text.
      axis_names: the names that pool.
      zero_centered: stores γ − 1.
      derivative: "vjp", "jvp" or "autodiff".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> y, variables = LayerNorm().init_with_output(jax.random.key(0), jnp.array([[1.0, 7.0]]))
      >>> print(y.round(2), variables["params"]["scale"])
      [[-1.  1.]] [1. 1.]
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = nn.initializers.zeros
    scale_init: Initializer = nn.initializers.ones
    reduction_axes: Axes = -1
    feature_axes: Axes = -1
    axis_name: Any = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True
    layout: str | None = dataclasses.field(default=None, kw_only=True)
    axis_names: Any = dataclasses.field(default=None, kw_only=True)
    zero_centered: bool = dataclasses.field(default=False, kw_only=True)
    derivative: str = dataclasses.field(default="vjp", kw_only=True)

    @nn.compact
    def __call__(self, x, *, mask: jax.Array | None = None):
        """Returns x normalised; `mask`, boolean (or 0 and 1) and broadcastable to x, says which entries count.

        Raises:
          ValueError: an axis out of range, twice or out of order; a mapped axis that is not bound (also a NameError).
          TypeError: a mask of floats.
        """
        return _normalized(self, _flax_axes.layer_axes(self, x.shape), x, mask)


class RMSNorm(nn.Module):
    """RMS norm: each example by the root of the mean square of its own features; nothing is subtracted.

    Parameter `scale` of the shape of x along `feature_axes`.

    Attributes:
      epsilon: at least 0, added to the mean square.
      dtype: of y; by default what x and scale promote to.
      param_dtype: of scale.
      use_scale: whether there is a scale.
      scale_init: makes the scale.
      reduction_axes: the axes that pool, in order.
      feature_axes: the axes that the parameters run along, in order.
      axis_name: mapped axes whose devices share their statistics.
      axis_index_groups: as in `jax.lax.psum`, for one mapped axis.
      use_fast_variance: accepted; the variance is the accurate one.
      force_float32_reductions: accepted; statistics are in float32 at least.
      layout: names of the axes of x; see the module's text.
      axis_names: the names that pool.
      zero_centered: stores γ − 1.
      derivative: "vjp", "jvp" or "autodiff".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> y, _ = RMSNorm().init_with_output(jax.random.key(0), jnp.array([[3.0, -3.0]]))
      >>> print(y.round(2))
      [[ 1. -1.]]
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_scale: bool = True
    scale_init: Initializer = nn.initializers.ones
    reduction_axes: Axes = -1
    feature_axes: Axes = -1
    axis_name: Any = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True
    layout: str | None = dataclasses.field(default=None, kw_only=True)
    axis_names: Any = dataclasses.field(default=None, kw_only=True)
    zero_centered: bool = dataclasses.field(default=False, kw_only=True)
    derivative: str = dataclasses.field(default="vjp", kw_only=True)

    @nn.compact
    def __call__(self, x, *, mask: jax.Array | None = None):
        """Returns x normalised; `mask`, boolean (or 0 and 1) and broadcastable to x, says which entries count.

        Raises:
          ValueError: an axis out of range, twice or out of order; a mapped axis that is not bound (also a NameError).
          TypeError: a mask of floats.
        """
        return _normalized(self, _flax_axes.layer_axes(self, x.shape), x, mask, bias=False, center=False)


class GroupNorm(nn.Module):
    """Group norm: each group of channels of an example by its mean and variance over positions.

    Parameters `scale` and `bias` of the shape of the last axis, which holds the channels.

    Attributes:
      num_groups: how many groups; None where `group_size` is given.
      group_size: channels in a group.
      epsilon: at least 0, added to the variance.
      dtype: of y; by default what x, scale and bias promote to.
      param_dtype: of scale and bias.
      use_bias: whether there is a bias.
      use_scale: whether there is a scale.
      bias_init: makes the bias.
      scale_init: makes the scale.
      reduction_axes: the axes that pool, in order, the last of x among them; by default all but the first.
      axis_name: mapped axes whose devices share their statistics.
      axis_index_groups: as in `jax.lax.psum`, for one mapped axis.
      use_fast_variance: accepted; the variance is the accurate one.
      force_float32_reductions: accepted; statistics are in float32 at least.
      layout: names of the axes of x; see the module's text.
      axis_names: the names that pool.
      zero_centered: stores γ − 1.
      derivative: "vjp", "jvp" or "autodiff".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> y, _ = GroupNorm(num_groups=2).init_with_output(jax.random.key(0), jnp.array([[1.0, 3.0, 10.0, 30.0]]))
      >>> print(y.round(2))
      [[-1.  1. -1.  1.]]
    """

    num_groups: int | None = 32
    group_size: int | None = None
    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = nn.initializers.zeros
    scale_init: Initializer = nn.initializers.ones
    reduction_axes: Axes | None = None
    axis_name: Any = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True
    layout: str | None = dataclasses.field(default=None, kw_only=True)
    axis_names: Any = dataclasses.field(default=None, kw_only=True)
    zero_centered: bool = dataclasses.field(default=False, kw_only=True)
    derivative: str = dataclasses.field(default="vjp", kw_only=True)

    @nn.compact
    def __call__(self, x, *, mask: jax.Array | None = None):
        """Returns x normalised; `mask`, boolean (or 0 and 1) and broadcastable to x, says which entries count.

        Raises:
          ValueError: groups that do not divide the channels; axes and masks as in `LayerNorm`.
          TypeError: a mask of floats.
        """
        return _normalized(self, _flax_axes.group_axes(self, x.shape, self.num_groups, self.group_size), x, mask)


class InstanceNorm(nn.Module):
    """Instance norm: each feature of an example by its mean and variance over positions.

    Parameters `scale` and `bias` of the shape of x along `feature_axes`; the first axis numbers the examples.

    Attributes:
      epsilon: at least 0, added to the variance.
      dtype: of y; by default what x, scale and bias promote to.
      param_dtype: of scale and bias.
      use_bias: whether there is a bias.
      use_scale: whether there is a scale.
      bias_init: makes the bias.
      scale_init: makes the scale.
      feature_axes: the axes that do not pool, in order, besides the first.
      axis_name: mapped axes whose devices share their statistics.
      axis_index_groups: as in `jax.lax.psum`, for one mapped axis.
      use_fast_variance: accepted; the variance is the accurate one.
      force_float32_reductions: accepted; statistics are in float32 at least.
      layout: names of the axes of x; see the module's text.
      axis_names: the names that pool.
      zero_centered: stores γ − 1.
      derivative: "vjp", "jvp" or "autodiff".

    Example:
      >>> import jax, jax.numpy as jnp
      >>> y, _ = InstanceNorm().init_with_output(jax.random.key(0), jnp.array([[[1.0, 20.0], [7.0, 10.0]]]))
      >>> print(y.round(2))
      [[[-1.  1.]
        [ 1. -1.]]]
    """

    epsilon: float = 1e-6
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    use_bias: bool = True
    use_scale: bool = True
    bias_init: Initializer = nn.initializers.zeros
    scale_init: Initializer = nn.initializers.ones
    feature_axes: Axes = -1
    axis_name: Any = None
    axis_index_groups: Any = None
    use_fast_variance: bool = True
    force_float32_reductions: bool = True
    layout: str | None = dataclasses.field(default=None, kw_only=True)
    axis_names: Any = dataclasses.field(default=None, kw_only=True)
    zero_centered: bool = dataclasses.field(default=False, kw_only=True)
    derivative: str = dataclasses.field(default="vjp", kw_only=True)

    @nn.compact
    def __call__(self, x, *, mask: jax.Array | None = None):
        """Returns x normalised; `mask`, boolean (or 0 and 1) and broadcastable to x, says which entries count.

        Raises:
          ValueError: the first axis is a feature axis, or no axis is left to pool; axes and masks as in `LayerNorm`.
          TypeError: a mask of floats.
        """
        return _normalized(self, _flax_axes.instance_axes(self, x.shape), x, mask)
