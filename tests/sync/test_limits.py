"""What mapped axes cannot do, said in our own words: where JAX itself fails, what to do instead; and wrong calls."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import reference
from tests.quick import quick_jit
from tests.sync.mappings import DATA, ShardMap, Vmap, make_mesh

X = np.zeros((2, 2, 4, 3), np.float32)
INNER = Vmap(("inner",), (2,))
OPTIONS = {"layout": "N C", "train": True}
FUNCTIONS = {
    "batch_norm": lambda x, names: nj.batch_norm(x, axis_names=names, **OPTIONS)[0],
    "sync_batch_norm": lambda x, names: nj.sync_batch_norm(x, axis_names=names, **OPTIONS)[0],
    "rms_norm": lambda x, names: nj.rms_norm(x, layout="N C", axis_names=names.replace("N", "C"))[0],
    "moments": lambda x, names: nj.moments(x, layout="N C", axis_names=names).mean[None],
}


def nested(check: bool, function):
    """The function under vmap inside shard_map."""
    layer = INNER.wrap(lambda x: (function(x),), (DATA,), (DATA,))
    return ShardMap(("data",), (2,), check=check).wrap(layer, (DATA,), (DATA,))


@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("names", ["N inner", "N data inner"])
def test_a_vmap_axis_inside_checked_shard_map_is_an_error_that_says_what_to_do(fn, names):
    program = nested(True, lambda x: FUNCTIONS[fn](x, names))
    with pytest.raises(
        ValueError, match=rf"^{fn}: 'inner' is an axis of vmap inside shard_map with check_vma"
    ) as caught:
        jax.eval_shape(program, X)
    assert "Use check_vma=False, or make it an axis of the array and name it in layout." in str(caught.value)


@pytest.mark.parametrize("collective", [jax.lax.psum, jax.lax.pmean, jax.lax.pmax])
def test_jax_itself_has_no_collective_there(collective):
    with pytest.raises(AssertionError):
        jax.eval_shape(nested(True, lambda x: x - collective(x, "inner")), X)
    jax.eval_shape(nested(False, lambda x: x - collective(x, "inner")), X)


def test_autodiff_of_a_plain_norm_fails_there_too():
    def loss(x):
        mean = jax.lax.pmean(x, "inner")
        return jnp.sum((x - mean) / jnp.sqrt(jax.lax.pmean((x - mean) ** 2, "inner") + 1e-5))

    with pytest.raises(AssertionError):
        jax.eval_shape(nested(True, jax.grad(loss)), X)


def test_both_ways_out_that_the_error_names_work(rng):
    x = rng.normal(1.5, 2.0, X.shape).astype(np.float32)
    exact = reference.normalize(x, layout="D I N C", axis_names="D I N")
    names = "N data inner"
    (unchecked,) = quick_jit(nested(False, lambda x: FUNCTIONS["batch_norm"](x, names)))(x)
    options = {"layout": "inner N C", "axis_names": names, "train": True}
    as_array_axis = ShardMap(("data",), (2,)).wrap(lambda x: (nj.batch_norm(x, **options)[0],), (DATA,), (DATA,))
    for y in (unchecked, quick_jit(as_array_axis)(x)[0]):
        # 16 entries in a group: 16 eps √16 of numbers of size 4 at most.
        np.testing.assert_allclose(y, exact, rtol=0, atol=3e-5)


@pytest.mark.parametrize("check", [True, False])
def test_a_vmap_axis_that_is_not_pooled_is_no_hindrance(check, rng):
    x = rng.normal(1.5, 2.0, X.shape).astype(np.float32)
    (y,) = quick_jit(nested(check, lambda x: FUNCTIONS["batch_norm"](x, "N data")))(x)
    np.testing.assert_allclose(y, reference.normalize(x, layout="D I N C", axis_names="D N"), rtol=0, atol=3e-5)


def of_members(function, *, check: bool, spmd_axis_name: str | None = "member"):
    """The sum of cubes over two members with an axis of the mesh to themselves, each spread over two devices."""
    mesh = make_mesh(("member", "data"), (2, 2))
    one = jax.shard_map(function, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check)
    return lambda x: jnp.sum(jax.vmap(one, spmd_axis_name=spmd_axis_name)(x) ** 3)


MEMBERS = np.zeros((2, 4, 3), np.float32)
WITH_A_PROGRAM_INSIDE = {
    "plain checkpoint": jax.checkpoint(lambda x: jnp.sin(x) * x),
    "plain scan": lambda x: jax.lax.scan(lambda carry, _: (carry * carry, None), x, None, length=2)[0],
    "plain platform_dependent": lambda x: jax.lax.platform_dependent(x, cpu=lambda x: x * x, default=lambda x: x * x),
    **{
        f"batch_norm, {names}, {derivative}": lambda x, names=names, derivative=derivative: nj.batch_norm(
            x, axis_names=names, derivative=derivative, **OPTIONS
        )[0]
        for names in ("N", "N data")
        for derivative in ("vjp", "jvp")
    },
}


@pytest.mark.parametrize("name", WITH_A_PROGRAM_INSIDE)
def test_jax_itself_has_no_gradient_of_vmap_with_a_mesh_axis_around_checked_shard_map(name):
    """Wherever a program is stored within: ours have such, too. Outside of gradients they work."""
    function = WITH_A_PROGRAM_INSIDE[name]
    jax.eval_shape(of_members(function, check=True), MEMBERS)
    with pytest.raises(ValueError, match=r"varying|cotangent type"):
        jax.eval_shape(jax.grad(of_members(function, check=True)), MEMBERS)


@pytest.mark.parametrize(("check", "spmd_axis_name"), [(False, "member"), (True, None)])
def test_both_ways_out_of_that_which_the_page_names_work(check, spmd_axis_name, rng, x64):
    x = rng.normal(1.5, 2.0, (2, 4, 3))
    norm = WITH_A_PROGRAM_INSIDE["batch_norm, N data, vjp"]
    slope = quick_jit(jax.grad(of_members(norm, check=check, spmd_axis_name=spmd_axis_name)))(x)
    spec = {"layout": "M N C", "axis_names": "N"}
    wanted, *_ = reference.backward(x, 3 * reference.normalize(x, **spec) ** 2, **spec)
    np.testing.assert_allclose(slope, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.case(48)
@pytest.mark.parametrize("fn", FUNCTIONS)
@pytest.mark.parametrize("bound", [None, "shard_map", "vmap", "jit"])
def test_a_name_that_nothing_binds_is_an_error_in_training_that_says_where_to_bind_it(fn, bound):
    layer = lambda x: (FUNCTIONS[fn](x, "N data typo"),)  # noqa: E731
    mapping = {"shard_map": ShardMap(("data",), (2,)), "vmap": Vmap(("data",), (2,))}
    if bound in mapping:
        layer = mapping[bound].wrap(layer, (DATA,), (DATA,))
    missing = "typo" if bound in mapping else "data"
    with pytest.raises(
        ValueError, match=rf"^{fn}: .*'{missing}' is neither in layout.*nor a mapped axis here"
    ) as caught:
        (jax.jit(layer) if bound == "jit" else layer)(X[0] if bound in mapping else X[0, 0])
    assert f"inside shard_map, pmap or vmap with the axis name '{missing}'" in str(caught.value)
    assert "under jit over sharded arrays the batch is already global: drop it" in str(caught.value)


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_a_wrong_name_inside_shard_map_is_told_the_names_that_are_there(fn):
    layer = ShardMap(("data",), (2,)).wrap(lambda x: (FUNCTIONS[fn](x, "N batch"),), (DATA,), (DATA,))
    with pytest.raises(ValueError, match=r"'batch' is neither in .* shard_map has 'data' here\. "):
        layer(X[0])


@pytest.mark.case(48)
@pytest.mark.parametrize("fn", [nj.batch_norm, nj.sync_batch_norm])
def test_initialisation_and_evaluation_touch_no_mapped_name(fn, rng):
    x = rng.normal(size=(4, 3)).astype(np.float32)
    params, state = nj.Affine.init(C=3), nj.BatchStats.init(C=3)
    # One layer, first under a mapping, then outside of any.
    layer = lambda x, state, train: fn(x, params, state, layout="N C", axis_names="N data", train=train)  # noqa: E731
    train = lambda x: layer(x, state, True)[1]  # noqa: E731
    trained = quick_jit(jax.vmap(train, axis_name="data", out_axes=None))(np.stack([x, x]))
    y, same = quick_jit(lambda x, state: layer(x, state, False))(x, trained)
    for kept, was in zip(jax.tree.leaves(same), jax.tree.leaves(trained), strict=True):
        np.testing.assert_array_equal(kept, was)
    exact = reference.normalize(
        x, mean=np.asarray(trained.mean), var=np.asarray(trained.var), stat_names="C", layout="N C", axis_names="N"
    )
    np.testing.assert_allclose(y, exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("train", [True, False])
def test_synchronised_batch_norm_without_a_mapped_name_is_an_error(train):
    state = nj.BatchStats.init(C=3)
    with pytest.raises(ValueError, match=r'^sync_batch_norm: axis_names="N" holds no mapped axis') as caught:
        nj.sync_batch_norm(X[0, 0], None, state, layout="N C", axis_names="N", train=train)
    assert "add the name of the vmap, pmap or shard_map axis to synchronise over, or call batch_norm" in str(
        caught.value
    )


GHOSTS = {"layout": "N=(B n=10) C", "axis_names": "n data"}


@pytest.mark.case(50)
@pytest.mark.parametrize("rows", [101, 7])
def test_ghost_batches_that_do_not_divide_a_shard_are_an_error_in_training_alone(rows, rng):
    x = rng.normal(size=(2, rows, 2)).astype(np.float32)
    state = nj.BatchStats.init(C=2)
    step = lambda x: nj.batch_norm(x, None, state, train=True, **GHOSTS)[1]  # noqa: E731
    with pytest.raises(ValueError, match=re.escape("batch_norm: ")) as caught:
        jax.vmap(step, axis_name="data")(x)
    assert f"has size {rows}" in str(caught.value)
    assert "10 does not divide" in str(caught.value)
    y = quick_jit(lambda x: nj.batch_norm(x, None, state, train=False, **GHOSTS)[0])(x[0])
    np.testing.assert_allclose(y, x[0] / np.sqrt(1 + 1e-5), rtol=1e-6)


@pytest.mark.case(50)
def test_ghost_batches_of_ten_in_a_hundred_rows_of_each_device_pool_their_own_place_on_all(rng):
    x = rng.normal(1.5, 2.0, (2, 100, 2)).astype(np.float32)
    state = nj.BatchStats.init(C=2)
    step = lambda x: nj.batch_norm(x, None, state, train=True, **GHOSTS)  # noqa: E731
    y, new = quick_jit(jax.vmap(step, axis_name="data", out_axes=(0, None)))(x)
    spec = {"layout": "S N=(B n=10) C", "axis_names": "S n"}
    np.testing.assert_allclose(y, reference.normalize(x, **spec), rtol=0, atol=3e-5)
    start = np.zeros(2), np.ones(2), np.zeros(2)
    mean, var, _ = reference.update(*start, *reference.moments(x, **spec), rule="ema", extra_axes=(0,))
    np.testing.assert_allclose(new.mean, mean, atol=1e-5)
    np.testing.assert_allclose(new.var, var, atol=1e-5)
