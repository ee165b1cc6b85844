"""What an array's type says of an Explicit mesh: which of its axes are sharded, and a copy placed as another is."""

import jax


def sharded_axes(array) -> set[int]:
    """The axes along which an Explicit mesh shards the array, which can be neither sliced nor cut."""
    spec = getattr(getattr(jax.typeof(array), "sharding", None), "spec", ())
    return {axis for axis, names in enumerate(spec) if names is not None}


def placed_as(kind, array):
    """The array with the sharding of a type of its shape; whole where that is on no mesh."""
    wanted, own = kind.sharding, jax.typeof(array).sharding
    if own.spec == wanted.spec:
        return array
    return jax.sharding.reshard(array, jax.NamedSharding(own.mesh if wanted.mesh.empty else wanted.mesh, wanted.spec))
