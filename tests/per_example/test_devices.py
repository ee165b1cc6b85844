"""Per-example gradients across devices: data by closure, Explicit meshes, and losses that meet other devices."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import per_example
from tests.quick import quick_jit
from tests.sync.mappings import make_mesh

EXAMPLES, CHANNELS = 8, 4


def loss(w, x):
    return jnp.sum(jnp.tanh(w * x)) ** 2


def arrays(rng):
    return jnp.asarray(rng.normal(size=CHANNELS)), jnp.asarray(rng.normal(size=(EXAMPLES, CHANNELS)))


def clipped(rows, most):
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.sum(rows * np.minimum(1, most / norms), 0)


def close(got, wanted):
    np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_data_of_the_device_may_come_by_closure(chunk_size, checked, rng, x64):
    w, x = arrays(rng)
    shift = jnp.asarray(rng.normal(size=(2, CHANNELS)))
    mesh = make_mesh(("data", "model"), (2, 2), AxisType.Auto)

    @quick_jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P("data"), check_vma=checked)
    def by_device(w, x, own):
        shifted = lambda w, x: loss(w, x + own[0])  # noqa: E731
        rows = per_example.per_example_grads(shifted, w, x, chunk_size=chunk_size)
        total = per_example.clipped_grad(shifted, w, x, l2_norm=0.5, chunk_size=chunk_size)
        return rows, total, per_example.coupled_grads(lambda w, x: jax.vmap(shifted, (None, 0))(w, x), w, x)

    rows, total, coupled = by_device(w, x, shift)
    one = jax.vmap(jax.grad(loss), (None, 0))
    wanted = np.concatenate([one(w, x + own) for own in shift])
    close(rows, wanted)
    close(coupled, wanted)
    close(total, np.concatenate([clipped(wanted[:EXAMPLES], 0.5), clipped(wanted[EXAMPLES:], 0.5)]))


@pytest.mark.parametrize("in_context", [True, False])
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=["examples", "features"])
def test_on_an_explicit_mesh_every_function_takes_sharded_arrays(spec, in_context, rng, x64):
    w, x = arrays(rng)
    mesh = make_mesh(("data",), (4,), AxisType.Explicit)
    wanted = np.stack([jax.grad(loss)(w, row) for row in x])
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    batch = lambda x: nj.batch_norm(x, layout="N C", axis_names="N", train=True)[0]  # noqa: E731

    @quick_jit
    def all_of_them(w, x):
        rows = per_example.per_example_grads(loss, w, x)
        total = per_example.clipped_grad(loss, w, x, l2_norm=0.5)
        coupled = per_example.coupled_grads(jax.vmap(loss, (None, 0)), w, x)
        return rows, total, coupled, per_example.example_coupling(batch, x)

    with jax.set_mesh(mesh if in_context else jax.sharding.get_mesh()):
        rows, total, coupled, strengths = all_of_them(w, sharded)
    close(rows, wanted)
    close(total, clipped(wanted, 0.5))
    close(coupled, wanted)
    close(strengths, per_example.example_coupling(batch, x))


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=["examples", "features"])
def test_chunks_of_what_an_explicit_mesh_shards_are_refused_and_each_way_out_works(spec, rng, x64):
    w, x = arrays(rng)
    mesh = make_mesh(("data",), (4,), AxisType.Explicit)
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    chunked = partial(per_example.clipped_grad, loss, l2_norm=0.5, chunk_size=1)
    rows = partial(per_example.per_example_grads, loss, chunk_size=1)
    for fn, name in ((chunked, "clipped_grad"), (rows, "per_example_grads")):
        with pytest.raises(ValueError, match=rf"^{name}: chunk_size=1 cuts a batch of 8, but an Explicit") as caught:
            jax.eval_shape(fn, w, sharded)
    for way in ("inside jax.shard_map", "an Auto mesh", "jax.sharding.reshard to P()", "leave chunk_size out"):
        assert way in str(caught.value)

    inside = lambda w, x: jax.lax.psum(chunked(w, x), "data")  # noqa: E731
    by_rows = jax.device_put(x, NamedSharding(mesh, P("data")))
    auto = jax.device_put(x, NamedSharding(make_mesh(("data",), (4,), AxisType.Auto), spec))
    found = [
        quick_jit(jax.shard_map(inside, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))(w, by_rows),
        quick_jit(chunked)(w, auto),
        quick_jit(lambda w, x: chunked(w, jax.sharding.reshard(x, NamedSharding(mesh, P()))))(w, sharded),
    ]
    for total in found:
        close(total, clipped(np.stack([jax.grad(loss)(w, row) for row in x]), 0.5))


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_which_examples_of_a_device_couple_is_told_inside_shard_map(checked, rng):
    x = jnp.asarray(rng.normal(size=(EXAMPLES, CHANNELS)), jnp.float32)
    mesh = make_mesh(("data",), (4,), AxisType.Auto)
    batch = lambda x: nj.batch_norm(x, layout="N C", axis_names="N", train=True)[0]  # noqa: E731
    couple = partial(per_example.example_coupling, batch)
    found = jax.shard_map(couple, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=checked)(x)
    assert found.shape == (EXAMPLES, 2)
    assert np.all(found > 0)


def losses(w, x, names="N data"):
    y, _ = nj.batch_norm(w * x, layout="N C", axis_names=names, train=True)
    return jnp.sum(y**3, -1)


@pytest.mark.parametrize("mapping", ["checked", "unchecked", "vmap"])
def test_losses_that_meet_other_devices_have_rows_only_outside_the_mapping(mapping, rng, x64):
    w, x = arrays(rng)
    mesh = make_mesh(("data",), (2,), AxisType.Auto)
    rows = partial(per_example.coupled_grads, losses)
    shard_map = partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), check_vma=mapping == "checked")
    inside = {
        "vmap": lambda w, x: jax.vmap(rows, (None, 0), axis_name="data")(w, x.reshape(2, -1, CHANNELS)),
    }.get(mapping, shard_map(rows, out_specs=P("data")))
    with pytest.raises(ValueError, match=r"^coupled_grads: losses_fn meets other devices over 'data'") as caught:
        jax.eval_shape(inside, w, x)
    assert "coupled_grads outside, with shard_map inside losses_fn; or under jit" in str(caught.value)
    outside = shard_map(losses, out_specs=P("data"))
    wanted = quick_jit(jax.jacrev(partial(losses, names="N")))(w, x)
    close(quick_jit(partial(per_example.coupled_grads, outside))(w, x), wanted)
    close(quick_jit(partial(per_example.coupled_grads, partial(losses, names="N")))(w, x), wanted)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_clipping_a_loss_that_meets_other_devices_is_refused_inside_shard_map(checked, rng, x64):
    w, x = arrays(rng)
    mesh = make_mesh(("data",), (2,), AxisType.Auto)
    clip = lambda loss: partial(per_example.clipped_grad, loss, l2_norm=0.5)  # noqa: E731
    specs = {"mesh": mesh, "in_specs": (P(), P("data")), "check_vma": checked}
    averaged = jax.shard_map(clip(lambda w, x: jax.lax.pmean(loss(w, x), "data")), out_specs=P("data"), **specs)
    with pytest.raises(ValueError, match=r"^clipped_grad: loss_fn meets other devices over 'data'.* lax.psum the cl"):
        jax.eval_shape(averaged, w, x)
    summed = jax.shard_map(lambda w, x: jax.lax.psum(clip(loss)(w, x), "data"), out_specs=P(), **specs)
    close(quick_jit(summed)(w, x), clipped(np.stack([jax.grad(loss)(w, row) for row in x]), 0.5))
