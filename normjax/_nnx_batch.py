"""`nnx.BatchNorm`, and what all norms of nnx.py are made of."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import Dtype, Initializer, PromoteDtypeFn

from normjax import _flax, _flax_axes
from normjax._running import Cumulative, Ema


@nnx.register_variable_name("batch_counts")
class BatchCount(nnx.Variable):
    """What running averages rest on: a variable of its own kind, so that `BatchStat` is mean and variance alone."""


class Norm(nnx.Module):
    """Parameters and settings, as each class was called with them."""

    def _keep(self, given: dict[str, Any]) -> None:
        """Draws scale, then bias, and keeps the other arguments as attributes."""
        given = {name: value for name, value in given.items() if name not in ("self", "__class__")}
        rngs, shape, dtype = given.pop("rngs"), (given["num_features"],), given["param_dtype"]
        for name in ("scale", "bias"):
            init, metadata = given.pop(f"{name}_init", None), given.pop(f"{name}_metadata", {})
            param = None
            if given.get(f"use_{name}"):
                param = nnx.Param(init(rngs.params(), shape, dtype), **metadata)  # type: ignore[misc]
                if name == "scale" and given["zero_centered"]:
                    param.set_value(_flax.less_one(param.get_value()))
            setattr(self, name, nnx.data(None) if param is None else param)
        for name, value in given.items():
            setattr(self, name, _flax_axes.settled(value))

    def _normalized(self, axes: _flax_axes.Axes, x, mask, *, center: bool = True):
        """Every norm but batch norm."""
        module: Any = self
        scale, bias = value_of(module.scale), value_of(module.bias)
        given = (scale, bias) if center else (scale,)
        out = _flax.promoted_dtype(module.promote_dtype, x, *given, dtype=module.dtype)
        return _flax.normalized(module, axes, x, scale, bias, mask, out, center=center)


def value_of(variable):
    """The array in a variable; None stays None."""
    return None if variable is None else variable.get_value()


class BatchNorm(Norm):
    """Batch norm: each feature by its mean and variance over all other axes, or by their running averages.

    Variables: `scale` and `bias` (Param); `mean` and `var` (BatchStat), float32 at least whatever the other dtypes;
    `count` (int32) and `weight` (float32), of the kind `BatchCount`, only where `running` needs them.

    Args:
      num_features: the size of x along its features.
      use_running_average: normalises by the running statistics and leaves them alone; `.train()`, `.eval()` and
        `nnx.view` set it.
      axis: the feature axis, or several in order; `num_features` is the product of their sizes.
      momentum: the share of the old running statistics that is kept.
      epsilon: at least 0, added to the variance.
      dtype: of y; by default what x, mean, var, scale and bias promote to. For complex x in the carry of a scan pass a
        complex dtype: the mean is complex from the start, and not from the first call on.
      param_dtype: of scale and bias.
      use_bias: whether there is a bias.
      use_scale: whether there is a scale.
      bias_init: makes the bias.
      scale_init: makes the scale.
      axis_name: mapped axes whose devices share their statistics.
      axis_index_groups: as in `jax.lax.psum`, for one mapped axis.
      use_fast_variance: accepted; the variance is the accurate one.
      promote_dtype: asked which dtype (x, mean, var, scale, bias) promote to with `dtype`; that is y's.
      rngs: for the parameters.
      bias_metadata: metadata of the bias, such as its partitioning.
      scale_metadata: metadata of the scale.
      layout: names of the axes of x; see the text of `normjax.nnx`.
      axis_names: the names that pool.
      running: an `Ema` or `Cumulative` in the place of `momentum`. Where it counts and the statistics were counted by
        nothing (loaded from Flax), training forgets them unless `count` and `weight` are made 1 (or `weight` what they
        rest on): `nnx.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, BatchCount)))`.
      zero_centered: stores γ − 1.
      derivative: "vjp", "jvp" or "autodiff".

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> norm = BatchNorm(1, momentum=0.9, rngs=nnx.Rngs(0))
      >>> y = norm(jnp.array([[1.0], [7.0]]))
      >>> print(y[:, 0].round(2), norm.mean[...], norm.var[...])
      [-1.  1.] [0.4] [1.8]
    """

    scale: nnx.Param[jax.Array] | None
    bias: nnx.Param[jax.Array] | None

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: Any = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = nnx.initializers.zeros_init(),  # noqa: B008
        scale_init: Initializer = nnx.initializers.ones_init(),  # noqa: B008
        axis_name: Any = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtypeFn = dtypes.promote_dtype,
        rngs: nnx.Rngs,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        layout: str | None = None,
        axis_names: Any = None,
        running: Ema | Cumulative | None = None,
        zero_centered: bool = False,
        derivative: str = "vjp",
    ):
        self._keep(locals())
        first = _flax.first_statistics((num_features,), jnp.float32, param_dtype if dtype is None else dtype)
        self.mean = nnx.BatchStat(first.mean)
        self.var = nnx.BatchStat(first.var)
        counted = _flax.needs_counts(self)
        self.count = BatchCount(first.count) if counted else nnx.data(None)
        self.weight = BatchCount(first.weight) if counted else nnx.data(None)

    def __call__(self, x, use_running_average: bool | None = None, *, mask: jax.Array | None = None):
        """Returns x normalised, and moves the running statistics unless they are used.

        Args:
          x: of any rank and dtype.
          use_running_average: static; goes before that of the constructor.
          mask: boolean (or 0 and 1), broadcastable to x: the entries that count.

        Returns:
          y of x's shape.

        Raises:
          ValueError: an axis out of range (also an IndexError), twice or out of order; a mapped axis that is not bound
            (also a NameError); features of x of another size than `num_features` (also a TypeError); a mask that does
            not broadcast; use_running_average is None in both places.
          TypeError: a mask of floats; use_running_average is traced.
        """
        frozen = self.use_running_average if use_running_average is None else use_running_average
        if frozen is None:
            raise ValueError(
                "BatchNorm: use_running_average is None; pass it here or to the constructor, call .train() or .eval(), "
                "or take nnx.view(model, use_running_average=…)."
            )
        module: Any = self
        frozen = _flax.plain_bool("BatchNorm", frozen)
        if self.weight is None and not frozen and _flax.needs_counts(module):
            raise ValueError(
                f"BatchNorm: running={module.running} needs count and weight, which are made with the norm; pass "
                "running to the constructor."
            )
        axes = _flax_axes.batch_axes(module, x.shape)
        variables = {"mean": self.mean, "var": self.var, "count": self.count, "weight": self.weight}
        held = {name: variable.get_value() for name, variable in variables.items() if variable is not None}
        stats, scale, bias = _flax.statistics(held), value_of(self.scale), value_of(self.bias)
        out = _flax.promoted_dtype(module.promote_dtype, x, stats.mean, stats.var, scale, bias, dtype=module.dtype)
        y, new = _flax.batch_normalized(module, axes, x, scale, bias, stats, mask, out, frozen=frozen)
        if new is not stats:
            for name in held:
                variables[name].set_value(getattr(new, name))
        return y

    def set_view(self, use_running_average: bool | None = None):
        """For `nnx.view`.

        Args:
          use_running_average: normalises by the running statistics and leaves them alone.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average
