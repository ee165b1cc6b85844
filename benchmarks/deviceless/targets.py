"""Compiles a program for chips that are not there and counts what it does: what ``apart`` runs in its process."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from benchmarks.deviceless import hlo

TARGETS = ("h200", "v5e")
AXIS = "data"
_PLATFORM = {"h200": "cuda", "v5e": "tpu"}


@dataclasses.dataclass(frozen=True)
class Program:
    """What to compile.

    Attributes:
      fn: takes `arguments`; with `in_specs`, the part of them on one of eight devices along the mesh axis `AXIS`.
      arguments: pytrees of ShapeDtypeStruct.
      in_specs: a PartitionSpec for each argument, or None for one device.
      out_specs: a pytree prefix of PartitionSpec of the results.
      checked: whether the mapping over devices checks who varies (`check_vma`).
      donated: numbers of the donated arguments.
      saved: bytes kept for the backward, where the program is a forward or backward compiled apart.
    """

    fn: Callable
    arguments: tuple
    in_specs: tuple | None = None
    out_specs: Any = None
    checked: bool = False
    donated: tuple[int, ...] = ()
    saved: int | None = None


def devices(target: str) -> list[Any]:
    """Eight devices of a kind."""
    if target == "h200":
        config = Path(__file__).with_name("h200_target.txtpb").read_text()
        found = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x8")
    elif target == "v5e":
        found = topologies.get_topology_desc("v5e:2x4", platform="tpu")
    else:
        raise ValueError(f"devices: target must be one of {TARGETS}; got {target!r}.")
    return list(found.devices)


def compiled_for(target: str, program: Program):
    """The compiled program, which cannot run."""
    fn, chips = program.fn, devices(target)
    if program.in_specs is None:
        place = [SingleDeviceSharding(chips[0])] * len(program.arguments)
    else:
        mesh = Mesh(np.array(chips), (AXIS,))
        place = [NamedSharding(mesh, spec) for spec in program.in_specs]
        fn = jax.shard_map(
            fn, mesh=mesh, in_specs=program.in_specs, out_specs=program.out_specs, check_vma=program.checked
        )
    arguments = [
        jax.tree.map(lambda a, at=at: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at), argument)
        for argument, at in zip(program.arguments, place, strict=True)
    ]
    traced = jax.jit(fn, donate_argnums=program.donated).trace(*arguments)
    return traced.lower(lowering_platforms=(_PLATFORM[target],)).compile()


def measure(target: str, program: Program) -> dict[str, Any]:
    """The counts: bytes moved, kernels, collectives, bytes of temporaries and at the peak, bytes saved."""
    compiled = compiled_for(target, program)
    counts, memory = hlo.count(compiled.as_text()), compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "moved": counts.moved,
        "kernels": counts.kernels,
        "collectives": counts.collectives,
        "temporaries": memory.temp_size_in_bytes,
        "peak": held + memory.temp_size_in_bytes,
        "saved": program.saved,
    }
