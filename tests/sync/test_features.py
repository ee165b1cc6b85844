"""The feature axis spread over devices: layer, RMS and group norm pool a mapped name; parameters are cut like x."""

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
from tests.sync.mappings import DATA, MAPPINGS, make_mesh

EPS = 1e-3
# The function, the layout of a shard, what it pools, the names of its parameters, and x's shape on one device.
NORMS = {
    "layer": (nj.layer_norm, "N D", "D", "D", (3, 2)),
    "rms": (nj.rms_norm, "N D", "D", "D", (3, 2)),
    "group": (nj.group_norm, "N L C=(G=2 K)", "L K", "C", (3, 2, 4)),
}
DERIVATIVES = ("vjp", "jvp", "autodiff")
SPREAD = ("shard_map", "unchecked shard_map", "vmap")
CELLS = [(s, norm, DERIVATIVES[(i + j) % 3]) for i, s in enumerate(SPREAD) for j, norm in enumerate(NORMS)]


def right(norm, x, g, where, scale, bias):
    """y, dx, dscale and dbias of the reference; what stands in front of x and of the parameters is the mapped axis."""
    _, layout, pooled, names, _ = NORMS[norm]
    options = {"layout": f"S {layout}", "axis_names": f"S {pooled}", "names": f"S {names}", "where": where}
    options |= {"eps": EPS, "center": norm != "rms"}
    return reference.normalize(x, scale, bias, **options), *reference.backward(x, g, scale, bias, **options)


@pytest.mark.parametrize(("spread", "norm", "derivative"), CELLS)
def test_features_on_several_devices_are_normalised_together(spread, norm, derivative, rng, x64):
    fn, layout, pooled, names, shape = NORMS[norm]
    x, g = rng.normal(1.5, 2.0, (2, 4, *shape))
    scale, bias = rng.normal(size=(2, 4, shape[-1]))
    mapping = MAPPINGS[spread]

    def step(x, g, where, scale, bias):
        options = {"layout": layout, "axis_names": f"{pooled} data", "where": where, "eps": EPS}
        apply = lambda x, s, b: fn(x, nj.Affine(s, b, names), derivative=derivative, **options)[0]  # noqa: E731
        y, pullback = jax.vjp(apply, x, scale, bias)
        return y, *pullback(g)

    program = quick_jit(mapping.wrap(step, (DATA,) * 5, (DATA,) * 4))
    for share in (1.0, 0.5):
        where = rng.random(x.shape) < share
        where[0] &= share == 1.0  # with fewer, one shard is empty
        for actual, wanted in zip(
            program(x, g, where, scale, bias), right(norm, x, g, where, scale, bias), strict=True
        ):
            np.testing.assert_allclose(actual, wanted, rtol=1e-10, atol=1e-10)


@functools.cache
def _sharded(layout, axis_names):
    def loss(x, scale, bias, g):
        state = nj.BatchStats.init(C=3, dtype=jnp.float64)
        params = nj.Affine(scale, bias, "C")
        y, state = nj.batch_norm(x, params, state, layout=layout, axis_names=axis_names, train=True)
        return jnp.sum(g * y), (y, state.mean, state.var)

    return quick_jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(("layout", "axis_names"), [("N C", "N"), ("N=(B n=2) C", "n")])
def test_a_batch_that_jit_shards_is_already_global(layout, axis_names, kind, rng, x64):
    x, g = rng.normal(1.5, 2.0, (2, 16, 3))
    scale, bias = rng.normal(size=(2, 3))
    cut = NamedSharding(make_mesh(("data",), (4,), kind), P("data"))
    (_, (y, mean, var)), slopes = _sharded(layout, axis_names)(
        *(jax.device_put(a, cut) if a.ndim == 2 else a for a in (x, scale, bias, g))
    )
    spec = {"layout": layout, "axis_names": axis_names}
    extra = (0,) if "B" in layout else ()
    batch = reference.moments(x, **spec)
    moved = reference.update(np.zeros(3), np.ones(3), np.zeros(3), *batch, rule="ema", extra_axes=extra)
    wanted = (
        reference.normalize(x, scale, bias, names="C", **spec),
        *reference.backward(x, g, scale, bias, names="C", **spec),
        *moved[:2],
    )
    for actual, exact in zip((y, *slopes, mean, var), wanted, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-10, atol=1e-10)
