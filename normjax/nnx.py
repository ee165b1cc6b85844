"""Flax nnx's norms, by normjax: change the import, keep the model and its checkpoints.

Class names, arguments, defaults, variables and attributes are `flax.nnx`'s, with `.train()`, `.eval()` and `nnx.view`.
Every argument of ours is keyword-only and has one meaning in all classes:

  layout, axis_names: any reduction in words, such as "N H W C" and "N H W". Together they take the place of the numbers
    (`reduction_axes`, `num_groups`, `group_size`); `axis` and `feature_axes` may then be names, and still say what
    the parameters run along (in a group norm: the axis that is split). A name it lacks is a mapped axis.
  zero_centered: stores γ − 1 as `scale`, so that weight decay pulls γ to 1; `scale_init` still gives γ.
  derivative: "vjp", "jvp" (for forward mode) or "autodiff" (the plain formula).

Some of Flax's mean less here, and never make an answer wrong: statistics are in float32 at least and never
E[x²] − E[x]², whatever `use_fast_variance` says, and `promote_dtype` is asked for the dtype of y alone: neither x nor
what is stored is rounded to it. `axis_name` may be several names, whose devices count by their entries;
`axis_index_groups` work under every mapping. Lists are kept as tuples, so that a module with them can be jitted.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from normjax._extras import require

require("normjax.nnx", "flax", "flax")

from flax import nnx  # noqa: E402
from flax.nnx.nn import dtypes  # noqa: E402
from flax.typing import Axes, Dtype, Initializer, PromoteDtypeFn  # noqa: E402

from normjax import _flax_axes  # noqa: E402
from normjax._nnx_batch import BatchCount, BatchNorm, Norm  # noqa: E402
from normjax._nnx_fold import FoldedBatchNorm, fold  # noqa: E402
from normjax._nnx_replace import replace  # noqa: E402
from normjax._nnx_swap import FrozenBatchNorm, FrozenParam  # noqa: E402

__all__ = [
    "BatchCount",
    "BatchNorm",
    "FoldedBatchNorm",
    "FrozenBatchNorm",
    "FrozenParam",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "RMSNorm",
    "fold",
    "replace",
]


class LayerNorm(Norm):
    """Layer norm: each example by the mean and variance of its own features.

    Variables: `scale` and `bias` (Param). Any axes may pool and any be features.

    Args:
      num_features: the size of x along its features.
      epsilon: at least 0, added to the variance.
      dtype: of y; by default what x, scale and bias promote to.
      param_dtype: of scale and bias.
      use_bias: whether there is a bias.
      use_scale: whether there is a scale.
      bias_init: makes the bias.
      scale_init: makes the scale.
      reduction_axes: the axes that pool, in order.
      feature_axes: the axes that the parameters run along, in order; `num_features` is the product of their sizes.
      axis_name: mapped axes whose devices share their statistics.
      axis_index_groups: as in `jax.lax.psum`, for one mapped axis.
      use_fast_variance: accepted; the variance is the accurate one.
      promote_dtype: asked which dtype (x, scale, bias) promote to with `dtype`; that is y's.
      rngs: for the parameters.
      bias_metadata: metadata of the bias, such as its partitioning.
      scale_metadata: metadata of the scale.
      layout: names of the axes of x; see the module's text.
      axis_names: the names that pool.
      zero_centered: stores γ − 1.
      derivative: "vjp", "jvp" or "autodiff".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> print(LayerNorm(2, rngs=nnx.Rngs(0))(jnp.array([[1.0, 7.0]])).round(2))
      [[-1.  1.]]
    """

    scale: nnx.Param[jax.Array] | None
    bias: nnx.Param[jax.Array] | None

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros_init(),  # noqa: B008
        scale_init: Initializer = nnx.initializers.ones_init(),  # noqa: B008
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: Any = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        layout: str | None = None,
        axis_names: Any = None,
        zero_centered: bool = False,
        derivative: str = "vjp",
    ):
        self._keep(locals())

    def __call__(self, x, *, mask: jax.Array | None = None):
        """Returns x normalised; `mask`, boolean (or 0 and 1) and broadcastable to x, says which entries count.

        Raises:
          ValueError: an axis out of range, twice or out of order; a mapped axis that is not bound (also a NameError);
            features of x of another size than `num_features` (also a TypeError); a mask that does not broadcast.
          TypeError: a mask of floats.
        """
        return self._normalized(_flax_axes.layer_axes(self, x.shape), x, mask)


class RMSNorm(Norm):
    """RMS norm: each example by the root of the mean square of its own features; nothing is subtracted.

    Variable: `scale` (Param).

    Args:
      num_features: the size of x along its features.
      epsilon: at least 0, added to the mean square.
      dtype: of y; by default what x and scale promote to.
      param_dtype: of scale.
      use_scale: whether there is a scale.
      scale_init: makes the scale.
      reduction_axes: the axes that pool, in order.
      feature_axes: the axes that the parameters run along, in order; `num_features` is the product of their sizes.
      axis_name: mapped axes whose devices share their statistics.
      axis_index_groups: as in `jax.lax.psum`, for one mapped axis.
      use_fast_variance: accepted; the variance is the accurate one.
      promote_dtype: asked which dtype (x, scale) promote to with `dtype`; that is y's.
      rngs: for the parameters.
      scale_metadata: metadata of the scale, such as its partitioning.
      layout: names of the axes of x; see the module's text.
      axis_names: the names that pool.
      zero_centered: stores γ − 1.
      derivative: "vjp", "jvp" or "autodiff".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> print(RMSNorm(2, rngs=nnx.Rngs(0))(jnp.array([[3.0, -3.0]])).round(2))
      [[ 1. -1.]]
    """

    scale: nnx.Param[jax.Array] | None
    bias: nnx.Param[jax.Array] | None

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer = nnx.initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: Any = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        layout: str | None = None,
        axis_names: Any = None,
        zero_centered: bool = False,
        derivative: str = "vjp",
    ):
        self._keep(locals())

    def __call__(self, x, mask: jax.Array | None = None):
        """Returns x normalised; `mask`, boolean (or 0 and 1) and broadcastable to x, says which entries count.

        Raises:
          ValueError: an axis out of range, twice or out of order; a mapped axis that is not bound (also a NameError);
            features of x of another size than `num_features` (also a TypeError); a mask that does not broadcast.
          TypeError: a mask of floats.
        """
        return self._normalized(_flax_axes.layer_axes(self, x.shape), x, mask, center=False)


class GroupNorm(Norm):
    """Group norm: each group of channels of an example by its mean and variance over positions.

    Variables: `scale` and `bias` (Param), along the last axis, which holds the channels.

    Args:
      num_features: the size of x along its features.
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
      promote_dtype: asked which dtype (x, scale, bias) promote to with `dtype`; that is y's.
      rngs: for the parameters.
      bias_metadata: metadata of the bias, such as its partitioning.
      scale_metadata: metadata of the scale.
      layout: names of the axes of x; see the module's text.
      axis_names: the names that pool.
      zero_centered: stores γ − 1.
      derivative: "vjp", "jvp" or "autodiff".

    Raises:
      ValueError: groups that do not divide the channels, or both or neither of `num_groups` and `group_size`.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> print(GroupNorm(4, num_groups=2, rngs=nnx.Rngs(0))(jnp.array([[1.0, 3.0, 10.0, 30.0]])).round(2))
      [[-1.  1. -1.  1.]]
    """

    scale: nnx.Param[jax.Array] | None
    bias: nnx.Param[jax.Array] | None
    num_groups: int | None
    group_size: int | None

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros_init(),  # noqa: B008
        scale_init: Initializer = nnx.initializers.ones_init(),  # noqa: B008
        reduction_axes: Axes | None = None,
        axis_name: Any = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        layout: str | None = None,
        axis_names: Any = None,
        zero_centered: bool = False,
        derivative: str = "vjp",
    ):
        if layout is None:
            num_groups, group_size = _flax_axes.grouping("GroupNorm", num_features, num_groups, group_size)
        self._keep(locals())
        self.feature_axis = -1

    def __call__(self, x, *, mask: jax.Array | None = None):
        """Returns x normalised; `mask`, boolean (or 0 and 1) and broadcastable to x, says which entries count.

        Raises:
          ValueError: an axis out of range, twice or out of order; a mapped axis that is not bound (also a NameError);
            features of x of another size than `num_features` (also a TypeError); a mask that does not broadcast.
          TypeError: a mask of floats.
        """
        return self._normalized(_flax_axes.group_axes(self, x.shape, self.num_groups, None), x, mask)


class InstanceNorm(Norm):
    """Instance norm: each feature of an example by its mean and variance over positions.

    Variables: `scale` and `bias` (Param); the first axis of x numbers the examples.

    Args:
      num_features: the size of x along its features.
      epsilon: at least 0, added to the variance.
      dtype: of y; by default what x, scale and bias promote to.
      param_dtype: of scale and bias.
      use_bias: whether there is a bias.
      use_scale: whether there is a scale.
      bias_init: makes the bias.
      scale_init: makes the scale.
      feature_axes: the axes that do not pool, in order, besides the first; `num_features` is the product of their
        sizes.
      axis_name: mapped axes whose devices share their statistics.
      axis_index_groups: as in `jax.lax.psum`, for one mapped axis.
      use_fast_variance: accepted; the variance is the accurate one.
      promote_dtype: asked which dtype (x, scale, bias) promote to with `dtype`; that is y's.
      rngs: for the parameters.
      bias_metadata: metadata of the bias, such as its partitioning.
      scale_metadata: metadata of the scale.
      layout: names of the axes of x; see the module's text.
      axis_names: the names that pool.
      zero_centered: stores γ − 1.
      derivative: "vjp", "jvp" or "autodiff".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> print(InstanceNorm(2, rngs=nnx.Rngs(0))(jnp.array([[[1.0, 20.0], [7.0, 10.0]]])).round(2))
      [[[-1.  1.]
        [ 1. -1.]]]
    """

    scale: nnx.Param[jax.Array] | None
    bias: nnx.Param[jax.Array] | None

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros,
        scale_init: Initializer = nnx.initializers.ones,
        feature_axes: Axes = -1,
        axis_name: Any = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        layout: str | None = None,
        axis_names: Any = None,
        zero_centered: bool = False,
        derivative: str = "vjp",
    ):
        self._keep(locals())

    def __call__(self, x, *, mask: jax.Array | None = None):
        """Returns x normalised; `mask`, boolean (or 0 and 1) and broadcastable to x, says which entries count.

        Raises:
          ValueError: an axis out of range, twice or out of order; a mapped axis that is not bound (also a NameError);
            features of x of another size than `num_features` (also a TypeError); a mask that does not broadcast.
          TypeError: a mask of floats.
        """
        return self._normalized(_flax_axes.instance_axes(self, x.shape), x, mask)
