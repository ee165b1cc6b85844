"""Data parallelism: each batch is split over the devices of a one-dimensional mesh, and every device takes equal part.

The mapped axis is `DEVICE_AXIS`, and a norm that pools the batch names it as one more axis. Parameters, running
statistics and optimiser state are the same on all devices, which the checked `shard_map` proves. The mean over devices
is taken of the loss, before it is differentiated: so JAX sums the gradients, and nothing else does.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from normjax.lab.config import DEVICE_AXIS, Config
from normjax.lab.errors import UserError

SAME, SPLIT = P(), P(DEVICE_AXIS)  # the same on all devices; in equal parts along the first array axis


def make_cpu_devices(count: int) -> None:
    """Let the CPU stand for `count` devices, if JAX has not started yet; an accelerator's devices stay as they are."""
    if count > 1:
        with suppress(RuntimeError):  # JAX has started; `make_mesh` counts what there is
            jax.config.update("jax_num_cpu_devices", count)


def make_mesh(config: Config) -> Mesh | None:
    """The mesh of a run, None where one device has nothing to synchronise with.

    Raises:
        UserError: if there are fewer devices than `devices` says.
    """
    if config.devices == 1 and not config.norm.is_synchronised:
        return None
    here = jax.devices()
    if len(here) < config.devices:
        raise UserError(
            f"devices is {config.devices}, but JAX sees {len(here)} ({here[0].platform}); "
            f"make it {len(here)} or less, or have the CPU stand for them: JAX_PLATFORMS=cpu"
        )
    chosen = here[: config.devices]
    return jax.make_mesh((config.devices,), (DEVICE_AXIS,), axis_types=(AxisType.Auto,), devices=chosen)


def describe(config: Config) -> str:
    """What a run splits its batches over, in one line."""
    platform = jax.devices()[0].platform
    by_whom = ", made by jax_num_cpu_devices" if platform == "cpu" else ""
    size, share = config.train.batch_size, config.train.batch_size // config.devices
    return f"{config.devices} devices ({platform}{by_whom}); each takes {share} of a batch's {size} images"


def spread(mesh: Mesh | None, function: Callable, ins: Any, outs: Any) -> Callable:
    """`function` on the devices of the mesh; each argument and result is `SAME` or `SPLIT`."""
    return function if mesh is None else jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=outs)


def mean_over(mesh: Mesh | None, tree: Any) -> Any:
    """Inside `spread`: the means over devices of what each device computed from its own part."""
    return tree if mesh is None else jax.lax.pmean(tree, DEVICE_AXIS)


def on_all(mesh: Mesh | None) -> NamedSharding | None:
    """Where an array that is the same on all devices lies."""
    return None if mesh is None else NamedSharding(mesh, SAME)
