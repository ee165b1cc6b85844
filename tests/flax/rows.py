"""Ways to write each norm in Flax, each with the same norm in words, and how to build and call it in either library."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as flax_linen
from flax import nnx as flax_nnx

from normjax import linen, nnx, reference

SHAPE = (4, 3, 5, 8)
LAYOUT = "N H W C"
SIZES = dict(zip(LAYOUT.split(), SHAPE, strict=True))
KINDS = ("BatchNorm", "LayerNorm", "RMSNorm", "GroupNorm", "InstanceNorm")
LINEN = {"normjax": linen, "flax": flax_linen}
NNX = {"normjax": nnx, "flax": flax_nnx}


@dataclasses.dataclass(frozen=True)
class Row:
    """One module on an x of SHAPE: Flax's arguments, and what they mean by name."""

    kind: str
    arguments: dict
    axis_names: str
    names: str = "C"  # what parameters and running statistics run along
    layout: str = LAYOUT
    nnx_is_right: bool = True  # whether Flax's own nnx module is; its linen one always is, on harmless numbers

    def __str__(self) -> str:
        return " ".join([self.kind, *(f"{name}={value}" for name, value in self.arguments.items())])

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(SIZES[name] for name in self.names.split())

    @property
    def batch(self) -> bool:
        return self.kind == "BatchNorm"

    @property
    def center(self) -> bool:
        return self.kind != "RMSNorm"

    @property
    def eps(self) -> float:
        return self.arguments.get("epsilon", 1e-5 if self.batch else 1e-6)

    @property
    def parameters(self) -> tuple[str, ...]:
        wanted = ("scale", "bias") if self.center else ("scale",)
        return tuple(name for name in wanted if self.arguments.get(f"use_{name}", True))

    def linen(self, library: str, **more):
        return getattr(LINEN[library], self.kind)(**self.arguments, **more)

    def nnx(self, library: str, **more):
        features = math.prod(self.shape)
        return getattr(NNX[library], self.kind)(features, **self.arguments, rngs=flax_nnx.Rngs(0), **more)

    def filled(self, rng) -> dict[str, jax.Array]:
        """Parameters, and for batch norm running statistics, that are not what they start as."""
        values = {name: rng.normal(size=self.shape) + (name == "scale") for name in self.parameters}
        if self.batch:
            values |= {"mean": rng.normal(size=self.shape), "var": 0.5 + rng.random(self.shape)}
        return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}

    def run_linen(self, library: str, values: dict, x, mask=None, *, train: bool = True, **more):
        """y, and the batch_stats after it."""
        module = self.linen(library, **more)
        stats = {name: values[name] for name in ("mean", "var") if name in values}
        variables = {"params": {name: values[name] for name in self.parameters}}
        mode = {"use_running_average": not train} if self.batch else {}
        if stats:
            variables["batch_stats"] = stats
        y, new = module.apply(variables, x, mask=mask, mutable=["batch_stats"], **mode)
        return y, dict(new.get("batch_stats", {}))

    def run_nnx(self, library: str, values: dict, x, mask=None, *, train: bool = True, **more):
        """The same by the nnx module."""
        module = self.nnx(library, **more)
        for name, value in values.items():
            getattr(module, name).set_value(value.reshape(-1))
        mode = {"use_running_average": not train} if self.batch else {}
        y = module(x, mask=mask, **mode)
        stats = (
            {name: getattr(module, name).get_value().reshape(self.shape) for name in ("mean", "var")} if mode else {}
        )
        return y, stats

    def expected(self, values: dict, x, mask=None, *, train: bool = True):
        """y and the running statistics after it, by the reference."""
        x = np.asarray(x, np.float32)
        axes = {"layout": self.layout, "axis_names": self.axis_names}
        params = (values.get("scale"), values.get("bias"))
        frozen = {} if train or not self.batch else {"mean": values["mean"], "var": values["var"]}
        frozen |= {"stat_names": self.names} if frozen else {}
        options = {"names": self.names, "center": self.center, "where": mask, "eps": self.eps}
        y = reference.normalize(x, *params, **axes, **options, **frozen)
        if not self.batch:
            return y, {}
        stats = {name: np.asarray(values[name], np.float64) for name in ("mean", "var")}
        if train:
            mean, var, _ = reference.moments(x, where=mask, **axes)
            kept = self.arguments.get("momentum", 0.99)
            stats = {name: kept * stats[name] + (1 - kept) * new for name, new in (("mean", mean), ("var", var))}
        return y, stats

    def gradients(self, values: dict, x, g, mask=None):
        """Those of x, scale and bias by the reference."""
        params = (values.get("scale"), values.get("bias"))
        options = {"names": self.names, "center": self.center, "where": mask, "eps": self.eps}
        return reference.backward(x, g, *params, layout=self.layout, axis_names=self.axis_names, **options)


GROUPS = "N H W C=(G=4 K)"
HALVES = "N H W C=(G=2 K)"
ROWS = (
    Row("BatchNorm", {}, "N H W"),
    Row("BatchNorm", {"axis": 1, "momentum": 0.5}, "N W C", "H"),
    Row("BatchNorm", {"axis": (1, -1), "epsilon": 0.1}, "N W", "H C", nnx_is_right=False),
    Row("BatchNorm", {"use_scale": False, "use_fast_variance": False}, "N H W"),
    Row("LayerNorm", {}, "C"),
    Row("LayerNorm", {"reduction_axes": (1, 2, 3), "feature_axes": (1, 2, 3), "epsilon": 0.1}, "H W C", "H W C"),
    Row("LayerNorm", {"reduction_axes": [1, 2], "use_bias": False}, "H W"),
    Row("LayerNorm", {"feature_axes": 1}, "C", "H"),
    Row("RMSNorm", {}, "C"),
    Row("RMSNorm", {"reduction_axes": (-3, -2, -1), "feature_axes": [-2, -1]}, "H W C", "W C"),
    Row("GroupNorm", {"num_groups": 4}, "H W K", layout=GROUPS),
    Row("GroupNorm", {"num_groups": None, "group_size": 4}, "H W K", layout=HALVES),
    Row("GroupNorm", {"num_groups": 2, "reduction_axes": (2, 3)}, "W K", layout=HALVES, nnx_is_right=False),
    Row("GroupNorm", {"num_groups": 2, "reduction_axes": [0, 1, -1]}, "N H K", layout=HALVES, nnx_is_right=False),
    Row("InstanceNorm", {}, "H W"),
    Row("InstanceNorm", {"feature_axes": (1, 3), "use_scale": False}, "W", "H C"),
)
