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
from tests.derivatives import DERIVATIVES, dear
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


@pytest.mark.parametrize("derivative", ["vjp", "jvp", "autodiff"])
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("center", [True, False], ids=["centred", "rms"])
def test_channels_may_be_sharded_over_the_axis_that_a_partial_shard_map_leaves(center, checked, derivative, rng):
    x, g = rng.normal(1.5, 2.0, (2, 8, 4)).astype(np.float32)
    mesh = make_mesh(("data", "model"), (4, 2), AxisType.Explicit)

    def both_ways(x, g, params):
        norm = functools.partial(nj.normalize, layout="N C", axis_names="N data", center=center, derivative=derivative)
        y, pullback = jax.vjp(lambda *given: norm(*given)[0], x, params)
        dx, d_params = pullback(g)
        return y, dx, d_params if checked else jax.lax.psum(d_params, "data")

    mapped = jax.shard_map(
        both_ways,
        mesh=mesh,
        in_specs=(P("data"), P("data"), P()),
        out_specs=(P("data"), P("data"), P()),
        axis_names={"data"},
        check_vma=checked,
    )
    place = lambda array: jax.device_put(array, NamedSharding(mesh, P("data", "model")))  # noqa: E731
    with jax.set_mesh(mesh):
        found = jax.jit(mapped)(place(x), place(g), nj.Affine.init(C=4))
    options = {"names": "C", "layout": "N C", "axis_names": "N", "center": center}
    one, zero = np.ones(4), np.zeros(4)
    expected = reference.normalize(x, one, zero, **options), *reference.backward(x, g, one, zero, **options)
    # Eight entries in a group: 16 eps sqrt(8) of numbers of size 8.
    for actual, exact in zip(jax.tree.leaves(found), expected, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=0, atol=5e-5)


@pytest.mark.parametrize("stored", [P(), P("model")], ids=["whole", "sharded"])
@pytest.mark.parametrize("spec", [P("data"), P("data", "model")], ids=["rows", "rows and channels"])
def test_parameters_and_state_may_be_sharded_otherwise_than_the_channels_of_x(spec, stored, rng):
    x = rng.normal(1.5, 2.0, (8, 4)).astype(np.float32)
    mesh = make_mesh(("data", "model"), (4, 2), AxisType.Explicit)
    params = jax.device_put(nj.Affine.init(C=4), NamedSharding(mesh, stored))
    sharded = nj.BatchStats(
        *[NamedSharding(mesh, stored)] * 2, *[NamedSharding(mesh, P()), NamedSharding(mesh, stored)]
    )
    start = nj.BatchStats.init(C=4)
    state = nj.BatchStats(*map(jax.device_put, jax.tree.leaves(start), jax.tree.leaves(sharded)), start.names)

    @functools.partial(jax.jit, static_argnames="steps")
    def train(params, state, x, steps):
        def loss(params, state):
            y, state = nj.batch_norm(x, params, state, layout="N C", axis_names="N", train=True)
            return jnp.sum(y**3), state

        def step(state, _):
            slopes, state = jax.grad(loss, has_aux=True)(params, state)
            return state, slopes

        return jax.lax.scan(step, state, length=steps)

    new, slopes = train(params, state, jax.device_put(x, NamedSharding(mesh, spec)), 2)
    np.testing.assert_allclose(new.mean, (1 - 0.9**2) * np.mean(x, 0), rtol=1e-6)
    _, d_scale, _ = reference.backward(
        x,
        3 * np.square(reference.normalize(x, layout="N C", axis_names="N")),
        np.ones(4),
        np.zeros(4),
        names="C",
        layout="N C",
        axis_names="N",
    )
    np.testing.assert_allclose(slopes.scale[0], d_scale, rtol=1e-4)


LARGE = {  # shape, the pooled axes, the sharded axis: 2^16 entries and more, which are summed in blocks
    "batch, of the sharded axis": ((1000, 128), "A", 0),
    "features, sharded": ((128, 1000), "B", 1),
    "features, whole": ((72, 1000), "B", 0),
    "images, over the third of three": ((24, 24, 24, 8), "A B C", 2),
    "images, over axes that are whole": ((40, 40, 40, 4), "B C", 0),
}


@dear(
    lambda case, kind, derivative: (kind, derivative) in (("Auto", "vjp"), ("Explicit", "jvp")),
    case=LARGE,
    kind=["Auto", "Explicit"],
    derivative=DERIVATIVES,
)
def test_large_arrays_are_normalised_on_a_mesh_whichever_axis_is_sharded(case, kind, derivative, rng):
    shape, pooled, sharded = LARGE[case]
    names = ["A", "B", "C", "D"][: len(shape)]
    axes = {"layout": " ".join(names), "axis_names": pooled}
    mesh = make_mesh(("data",), (4,), AxisType[kind])
    spec = P(*(None,) * sharded, "data")
    x, g = (jax.device_put(rng.normal(1.5, 2.0, shape).astype(np.float32), NamedSharding(mesh, spec)) for _ in range(2))
    params = nj.Affine.init(**{name: shape[names.index(name)] for name in pooled.split()})

    def both_ways(x, params, g):
        y, pullback = jax.vjp(lambda *given: nj.normalize(*given, **axes, derivative=derivative)[0], x, params)
        return y, *pullback(g)

    y, dx, d_params = jax.jit(both_ways)(x, params, g)
    x, g = np.asarray(x, np.float64), np.asarray(g, np.float64)
    scale, bias = np.ones(params.scale.shape), np.zeros(params.scale.shape)
    y_exact = reference.normalize(x, scale, bias, names=params.names, **axes)
    dx_exact, d_scale, d_bias = reference.backward(x, g, scale, bias, names=params.names, **axes)
    np.testing.assert_allclose(y, y_exact, rtol=0, atol=3e-6)
    np.testing.assert_allclose(dx, dx_exact, rtol=0, atol=1e-5)
    # Sums of up to 2^17 terms of size 10: sqrt(2^17) of their roundings.
    np.testing.assert_allclose(d_params.scale, d_scale, rtol=0, atol=2e-3)
    np.testing.assert_allclose(d_params.bias, d_bias, rtol=0, atol=2e-3)
