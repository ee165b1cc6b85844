"""Every way in which JAX maps a function over devices or examples, as transforms of one training step on whole arrays.

Data has an axis for every mapped name in front, so that a whole array is the concatenated batch of one device. A
mapping cuts it into shards, runs the step on each, and puts what comes back together to what one device would return.
"""

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.quick import quick_jit

# What an argument or a result of a step is: data is cut along every name; parameters and state are the same for all
# shards, though each member of an ensemble has its own; so is the gradient of parameters, once it is summed.
DATA, PARAMETER, GRADIENT, STATE = "data", "parameter", "gradient", "state"
STEP = (DATA, DATA, DATA, PARAMETER, PARAMETER, PARAMETER, PARAMETER)  # x, g, where, scale, bias, mean, var
STEPPED = (DATA, DATA, GRADIENT, GRADIENT, STATE, STATE)  # y, dx, dscale, dbias, mean, var
NORM = (DATA, DATA, PARAMETER, PARAMETER, PARAMETER, PARAMETER)  # x, where, scale, bias, mean, var
NORMED = (DATA, STATE, STATE)  # y, mean, var


@functools.cache
def make_mesh(names: tuple[str, ...], sizes: tuple[int, ...], kind: AxisType = AxisType.Auto):
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(names), devices=jax.devices()[: math.prod(sizes)])


@dataclasses.dataclass(frozen=True)
class Layer:
    """One transform. The base class maps nothing: what comes back has an axis for each name, as the data has."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    ensemble: ClassVar[bool] = False

    def stacked(self, role: str) -> tuple[bool, ...]:
        """For each name, whether results of this role have an axis for it."""
        return (True,) * len(self.names)

    def place(self, role: str, array):
        """An argument as the program takes it."""
        return array


class Vmap(Layer):
    def wrap(self, function, ins, outs):
        axes = tuple(0 if role == DATA else None for role in ins)
        return jax.vmap(function, in_axes=axes, axis_name=self.names[0])


class Ensemble(Layer):
    """`vmap` without a name, over models with parameters and states of their own."""

    ensemble = True

    def wrap(self, function, ins, outs):
        return jax.vmap(function)


class Pmap(Layer):
    def wrap(self, function, ins, outs):
        axes = tuple(0 if role == DATA else None for role in ins)
        return jax.pmap(function, axis_name=self.names[0], in_axes=axes, devices=jax.devices()[: self.sizes[0]])


@dataclasses.dataclass(frozen=True)
class ShardMap(Layer):
    """`shard_map`: checked, what has no axis for a name must be proven to be the same on all devices.

    Attributes:
      check: check_vma.
      kept: names that are not pooled, along which the new state differs.
      features: a further mesh axis of size 2 that cuts the channels; by hand, or (`automatic`) by the compiler.
    """

    check: bool = True
    kept: tuple[str, ...] = ()
    features: str | None = None
    automatic: bool = False

    @property
    def mesh(self):
        more = () if self.features is None else (self.features,)
        return make_mesh(self.names + more, self.sizes + (2,) * len(more))

    def stacked(self, role):
        if role == DATA or not self.check:
            return super().stacked(role)
        return tuple(role == STATE and name in self.kept for name in self.names)

    def _spec(self, role: str, stacked, features):
        lead = [name for name, has in zip(self.names, stacked, strict=True) if has]
        if features is None:
            return P(*lead)
        return P(*lead, *([None, None] if role == DATA else []), features)

    def wrap(self, function, ins, outs):
        cut = [(role == DATA,) * len(self.names) for role in ins]

        def on_one(*args):
            blocks = [
                jax.tree.map(lambda a, axes=axes: a.reshape(a.shape[sum(axes) :]), arg)
                for arg, axes in zip(args, cut, strict=True)
            ]
            results = zip(function(*blocks), outs, strict=True)
            return tuple(out.reshape((1,) * sum(self.stacked(role)) + out.shape) for out, role in results)

        features = None if self.automatic else self.features
        return jax.shard_map(
            on_one,
            mesh=self.mesh,
            in_specs=tuple(self._spec(role, axes, features) for role, axes in zip(ins, cut, strict=True)),
            out_specs=tuple(self._spec(role, self.stacked(role), features) for role in outs),
            check_vma=self.check,
            axis_names=set(self.names) if self.automatic else set(),
        )

    def place(self, role, array):
        if not self.automatic:
            return array
        cut = (role == DATA,) * len(self.names)
        return jax.device_put(array, NamedSharding(self.mesh, self._spec(role, cut, self.features)))


@dataclasses.dataclass(frozen=True)
class Jit(Layer):
    """Arrays that are sharded along the names over a mesh of a kind; the names stay axes of the array."""

    kind: AxisType = AxisType.Auto

    def stacked(self, role):
        return (role == DATA,) * len(self.names)

    def wrap(self, function, ins, outs):
        return function

    def place(self, role, array):
        spec = P(*self.names) if role == DATA else P()
        return jax.device_put(array, NamedSharding(make_mesh(self.names, self.sizes, self.kind), spec))


@dataclasses.dataclass(frozen=True)
class Mapping:
    """Layers, the outermost first; which of their names are pooled; and where the gradient is taken."""

    layers: tuple[Layer, ...]
    pooled: tuple[str, ...] = ("data",)
    outside: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Of every axis in front of the data, in order."""
        return {name: size for layer in self.layers for name, size in zip(layer.names, layer.sizes, strict=True)}

    @property
    def array_axes(self) -> tuple[str, ...]:
        """The names that stay axes of the array."""
        return tuple(name for layer in self.layers if isinstance(layer, Jit) for name in layer.names)

    @property
    def members(self) -> tuple[str, ...]:
        """The axes along which parameters and states differ."""
        return tuple(name for layer in self.layers if layer.ensemble for name in layer.names)

    def program(self, norm):
        """f(x, g, where, scale, bias, mean, var) → y, dx, dscale, dbias, mean, var: whole arrays in and out.

        norm: f(x, where, scale, bias, mean, var) → y, mean, var, of one shard.
        """

        def step(norm, x, g, where, scale, bias, mean, var):
            def apply(x, scale, bias):
                y, *state = norm(x, where, scale, bias, mean, var)
                return y, state

            y, pullback, state = jax.vjp(apply, x, scale, bias, has_aux=True)
            return y, *pullback(g), *state

        if self.outside:
            whole_step = functools.partial(step, self.wrap(norm, NORM, NORMED))
        else:
            whole_step = self.wrap(functools.partial(step, norm), STEP, STEPPED)
        run = quick_jit(whole_step)

        def whole(*args):
            for layer in self.layers:
                args = [None if a is None else layer.place(role, a) for role, a in zip(STEP, args, strict=True)]
            return [self.whole(out, role) for out, role in zip(run(*args), STEPPED, strict=True)]

        return whole

    def wrap(self, function, ins, outs):
        """The function under all layers; ins and outs: the role of each argument and result."""
        for layer in reversed(self.layers):
            function = layer.wrap(function, ins, outs)
        return function

    def whole(self, array, role: str):
        """A gradient without the axes of its shares, whose sum it is; a state with every axis, of size 1 where once."""
        array, axis = np.asarray(array), 0
        for layer in self.layers:
            for has in layer.stacked(role):
                if role == GRADIENT and self.outside and not layer.ensemble:
                    continue
                if role == GRADIENT and has and not layer.ensemble:
                    array = array.sum(axis)
                    continue
                if role == STATE and not has:
                    array = np.expand_dims(array, axis)
                axis += has or role == STATE
        return array


DATA4, INNER2, MEMBERS2 = (("data",), (4,)), (("inner",), (2,)), (("member",), (2,))
DATA2, TWO = (("data",), (2,)), (("data", "more"), (2, 2))
CHECKED, UNCHECKED = ShardMap(*DATA4), ShardMap(*DATA4, check=False)

MAPPINGS = {
    "pmap": Mapping((Pmap(*DATA4),)),
    "pmap, gradient outside": Mapping((Pmap(*DATA4),), outside=True),
    "shard_map": Mapping((CHECKED,)),
    "shard_map, gradient outside": Mapping((CHECKED,), outside=True),
    "unchecked shard_map": Mapping((UNCHECKED,)),
    "unchecked shard_map, gradient outside": Mapping((UNCHECKED,), outside=True),
    "vmap": Mapping((Vmap(*DATA4),)),
    "vmap, gradient outside": Mapping((Vmap(*DATA4),), outside=True),
    "nested vmap": Mapping((Vmap(*DATA2), Vmap(*INNER2)), pooled=("data", "inner")),
    "vmap in unchecked shard_map": Mapping((ShardMap(*DATA2, check=False), Vmap(*INNER2)), pooled=("data", "inner")),
    "both of two mesh axes": Mapping((ShardMap(*TWO),), pooled=("data", "more")),
    "both of two mesh axes, unchecked": Mapping((ShardMap(*TWO, check=False),), pooled=("data", "more")),
    "one of two mesh axes": Mapping((ShardMap(*TWO, kept=("more",)),)),
    "one of two mesh axes, unchecked": Mapping((ShardMap(*TWO, check=False),)),
    "channels on a second axis": Mapping((ShardMap(*DATA2, features="model"),)),
    "channels on a second axis, unchecked": Mapping((ShardMap(*DATA2, check=False, features="model"),)),
    "partially manual": Mapping((ShardMap(*DATA2, features="model", automatic=True),)),
    "partially manual, unchecked": Mapping((ShardMap(*DATA2, check=False, features="model", automatic=True),)),
    "jit, Auto mesh": Mapping((Jit(*DATA4),)),
    "jit, Explicit mesh": Mapping((Jit(*DATA4, AxisType.Explicit),)),
    "ensemble around shard_map": Mapping((Ensemble(*MEMBERS2), ShardMap(*DATA2))),
    "ensemble around unchecked shard_map": Mapping((Ensemble(*MEMBERS2), ShardMap(*DATA2, check=False))),
    "ensemble around pmap": Mapping((Ensemble(*MEMBERS2), Pmap(*DATA2))),
    "ensemble in shard_map": Mapping((ShardMap(*DATA2), Ensemble(*MEMBERS2))),
    "ensemble in unchecked shard_map": Mapping((ShardMap(*DATA2, check=False), Ensemble(*MEMBERS2))),
    "ensemble in pmap": Mapping((Pmap(*DATA2), Ensemble(*MEMBERS2))),
    "ensemble in vmap": Mapping((Vmap(*DATA2), Ensemble(*MEMBERS2))),
}
