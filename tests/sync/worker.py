"""One process of several: synchronised batch norm over the devices of all, by shard_map, jit and pmap.

python -m tests.sync.worker PORT PROCESS PROCESSES DEVICES_EACH OUT
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import normjax as nj
from tests.quick import quick_jit

ROWS, FEATURES = 4, 3  # of one device


def inputs(devices: int):
    """x, g, where, scale and bias, the same in every process; x has an axis for the devices."""
    rng = np.random.default_rng(0)
    x, g = rng.normal(1.5, 2.0, (2, devices, ROWS, FEATURES))
    where = rng.random(x.shape) < rng.uniform(0.3, 1.0, (devices, 1, 1))
    where[1] = False
    return x, g, where, *rng.normal(size=(2, FEATURES))


def step(layout: str, axis_names: str, x, g, where, scale, bias):
    """y, dx, (dscale, dbias) and the new (mean, var) of one device, or of all under jit."""

    def apply(x, scale, bias):
        state = nj.BatchStats.init(C=FEATURES, dtype=jnp.float64)
        options = {"layout": layout, "axis_names": axis_names, "where": where, "running": nj.Ema(0.5, unbiased=True)}
        y, new = nj.batch_norm(x, nj.Affine(scale, bias, "C"), state, train=True, **options)
        return y, (new.mean, new.var)

    y, pullback, state = jax.vjp(apply, x, scale, bias, has_aux=True)
    dx, *d_params = pullback(g)
    return y, dx, tuple(d_params), state


def by_shard_map(devices, x, g, where, scale, bias):
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    cut = NamedSharding(mesh, P("data"))

    def on_one(x, g, where, scale, bias):
        y, dx, *others = step("N C", "N data", x[0], g[0], where[0], scale, bias)
        return y[None], dx[None], *others

    specs = {"in_specs": (P("data"),) * 3 + (P(), P()), "out_specs": (P("data"), P("data"), P(), P())}
    program = quick_jit(jax.shard_map(on_one, mesh=mesh, **specs))
    return program(
        *(jax.make_array_from_callback(a.shape, cut, lambda at, a=a: a[at]) for a in (x, g, where)), scale, bias
    )


def by_jit(devices, x, g, where, scale, bias):
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    cut = NamedSharding(mesh, P("data"))
    program = quick_jit(lambda *args: step("D N C", "D N", *args))
    return program(
        *(jax.make_array_from_callback(a.shape, cut, lambda at, a=a: a[at]) for a in (x, g, where)), scale, bias
    )


def by_pmap(devices, x, g, where, scale, bias):
    def on_one(*args):
        y, dx, d_params, state = step("N C", "N data", *args)
        return y, dx, jax.lax.psum(d_params, "data"), state

    here = [i for i, device in enumerate(devices) if device.process_index == jax.process_index()]
    program = jax.pmap(on_one, axis_name="data", in_axes=(0, 0, 0, None, None), devices=devices)
    return program(x[here], g[here], where[here], scale, bias)


WAYS = {"shard_map": by_shard_map, "jit": by_jit, "pmap": by_pmap}


def results(devices) -> dict[str, np.ndarray]:
    """By way and result, what this process holds: its own rows of y and dx, its own copies of the others."""
    found = {}
    for way, run in WAYS.items():
        y, dx, (d_scale, d_bias), (mean, var) = run(devices, *inputs(len(devices)))
        for name, array in {"y": y, "dx": dx}.items():
            shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
            found[f"{way} {name}"] = np.concatenate([np.reshape(shard.data, (1, ROWS, FEATURES)) for shard in shards])
        for name, array in {"dscale": d_scale, "dbias": d_bias, "mean": mean, "var": var}.items():
            copies = [np.reshape(shard.data, FEATURES) for shard in array.addressable_shards]
            found[f"{way} {name}"] = np.stack(copies)
    return found


def main(port: str, process: str, processes: str, devices_each: str, out: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(devices_each))
    jax.config.update("jax_enable_x64", True)
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, int(processes), int(process), initialization_timeout=30)
    try:
        np.savez(f"{out}.npz", **results(jax.devices()))
    finally:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
