"""Splitting an axis that an Explicit mesh shards: where JAX cannot, our error says so and each way out works."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import reference
from tests.quick import quick_jit
from tests.sync.mappings import make_mesh

SPLIT = {"layout": "N=(B=2 n) C", "axis_names": "n"}


def on_mesh(x, kind):
    return jax.device_put(x, NamedSharding(make_mesh(("data",), (4,), kind), P("data")))


def ghost(x, where=None, **axes):
    return nj.batch_norm(x, train=True, where=where, **(axes or SPLIT))[0]


def jax_refuses(x):
    with pytest.raises(Exception, match="reshape is not supported") as caught:
        jax.eval_shape(lambda x: jnp.reshape(x, (2, 8, 3)), x)
    assert type(caught.value).__name__ == "ShardingTypeError"


@pytest.mark.parametrize("call", ["batch_norm", "its gradient", "moments", "a mask"])
def test_a_split_of_a_sharded_axis_is_an_error_of_ours(call):
    x = on_mesh(np.zeros((16, 3), np.float32), AxisType.Explicit)
    mask = on_mesh(np.ones((16, 1), bool), AxisType.Explicit)
    calls = {
        "batch_norm": ghost,
        "its gradient": jax.grad(lambda x: ghost(x).sum()),
        "moments": functools.partial(nj.moments, **SPLIT),
        "a mask": lambda x: ghost(np.zeros((16, 3), np.float32), x),
    }
    fn, what = "moments" if call == "moments" else "batch_norm", "where" if call == "a mask" else "x"
    with pytest.raises(ValueError, match=rf"^{fn}: layout=\"N=\(B=2 n\) C\": JAX does not split") as caught:
        jax.eval_shape(calls[call], mask if call == "a mask" else x)
    assert f"'N=(B=2 n)' where an Explicit mesh shards that axis of {what} over 'data' (4 devices)" in str(caught.value)
    assert "a multiple of 4, take an Auto mesh, or jax.sharding.reshard first" in str(caught.value)
    jax_refuses(x)


def test_every_way_out_that_the_error_names_works(rng):
    x = rng.normal(1.5, 2.0, (16, 3)).astype(np.float32)
    multiple = {"layout": "N=(B=4 n) C", "axis_names": "n"}
    explicit = on_mesh(x, AxisType.Explicit)
    whole = NamedSharding(explicit.sharding.mesh, P())
    found = [
        (multiple, quick_jit(functools.partial(ghost, **multiple))(explicit)),
        (SPLIT, quick_jit(ghost)(on_mesh(x, AxisType.Auto))),
        (SPLIT, quick_jit(lambda x: ghost(jax.sharding.reshard(x, whole)))(explicit)),
    ]
    for axes, y in found:
        # At most eight entries in a group: 16 eps sqrt(8) of numbers of size 3.
        np.testing.assert_allclose(y, reference.normalize(x, **axes), rtol=0, atol=2e-5)
