"""`normjax.nnx.replace`: what it changes, and that models go on as before."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import nnx
from normjax.nnx import replace
from tests.closeness import close
from tests.flax import models
from tests.flax.nested import Block, Nested, batch, double, nested, variables
from tests.flax.rows import KINDS, NNX, ROWS
from tests.sync.mappings import make_mesh

RIGHT = [row for row in ROWS if row.nnx_is_right]
CALL = flax_nnx.jit(lambda model, x: model(x))
STEP = flax_nnx.jit(models.nnx_step)
PATHS = ["again", "heads.a", "instance", "pair.0", "plain.q.0"]


def states(model):
    return jax.tree.map(np.asarray, flax_nnx.to_pure_dict(flax_nnx.state(model)))


def outputs(model, x):
    """In training, then in evaluation, and what both left behind."""
    model.train()
    first = CALL(model, x)
    model.eval()
    return first, CALL(model, x), states(model)


# --- Flax's by normjax's


def test_norms_are_found_wherever_they_sit_and_shared_ones_changed_once():
    model = nested()
    before = variables(model)
    report = replace(model)
    assert sorted(change.path for change in report) == PATHS
    assert all(re.fullmatch(r"flax\.nnx\.\w+Norm\(8.*\)", change.before) for change in report)
    assert [change.after for change in report] == [change.before.replace("flax", "normjax") for change in report]
    assert model.again is model.blocks[0].norm
    norms = [node for _, node in flax_nnx.iter_modules(model) if type(node).__name__ in KINDS]
    assert len(norms) == len(PATHS)
    assert all(type(norm) is getattr(nnx, type(norm).__name__) for norm in norms)
    after = variables(model)
    assert after.keys() == before.keys()
    assert all(after[path] is before[path] for path in before)
    assert replace(model) == ()


def test_the_model_answers_as_before_in_training_and_evaluation(rng, x64):
    x, theirs, mine = batch(rng, 4, 6, 8), double(nested()), double(nested())
    replace(mine)
    for wanted, found in zip(jax.tree.leaves(outputs(theirs, x)), jax.tree.leaves(outputs(mine, x)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("row", RIGHT, ids=str)
def test_a_replaced_norm_is_one_made_with_the_same_arguments(row):
    settings = {"scale_metadata": {"note": "γ"}} if row.arguments.get("use_scale", True) else {}
    replaced, made = row.nnx("flax", **settings), row.nnx("normjax", **settings)
    (change,) = replace(replaced)
    assert change.path == "(the model)"
    assert flax_nnx.graphdef(replaced) == flax_nnx.graphdef(made)
    for name in ("scale", "bias", "mean", "var"):
        if getattr(made, name, None) is not None:
            assert getattr(replaced, name).get_metadata() == getattr(made, name).get_metadata()


def test_an_optimiser_made_before_goes_on_as_if_nothing_had_happened(rng, x64):
    x, found = batch(rng, 4, 6, 8), {}
    for replaced in (False, True):
        model = double(Block(flax_nnx.Rngs(0)))
        optimizer = flax_nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=flax_nnx.Param)
        STEP(model, optimizer, x, jnp.sin(x))
        if replaced:
            assert len(replace(model)) == 1
        losses = [STEP(model, optimizer, x, jnp.sin(x)) for _ in range(3)]
        assert losses[2] < losses[0]
        found[replaced] = losses, states(model)
    for wanted, got in zip(jax.tree.leaves(found[False]), jax.tree.leaves(found[True]), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_of_the_model_before_loads_into_the_one_after(rng, x64):
    x, old, new = batch(rng, 4, 6, 8), double(nested()), double(Nested(flax_nnx.Rngs(7)))
    outputs(old, x)
    replace(new)
    flax_nnx.update(new, flax_nnx.state(old))
    new.eval()
    np.testing.assert_allclose(CALL(new, x), CALL(old, x), rtol=1e-6, atol=1e-6)


def test_split_and_merge_clone_and_abstract_models_work_after(rng):
    x, model = batch(rng, 4, 6, 8), nested()
    replace(model)
    model.eval()
    for copy in (flax_nnx.merge(*flax_nnx.split(model)), flax_nnx.clone(model)):
        np.testing.assert_array_equal(CALL(copy, x), CALL(model, x))

    def make():
        model = nested()
        replace(model)
        return model

    abstract = flax_nnx.eval_shape(make)
    assert flax_nnx.graphdef(abstract).nodes == flax_nnx.graphdef(make()).nodes
    assert isinstance(abstract.again.mean.get_value(), jax.ShapeDtypeStruct)
    replace(abstract, "frozen")  # nobody can know whether its statistics have moved


def test_norms_stacked_by_vmap_are_replaced_too(rng):
    x = batch(rng, 3, 4, 6, 8)
    stack = flax_nnx.vmap(Block)(flax_nnx.Rngs(0).split(3))
    run = flax_nnx.jit(flax_nnx.vmap(lambda block, x: block(x)))
    wanted = run(stack, x)
    assert replace(stack)[0].before == "flax.nnx.BatchNorm(8)"
    close(run(stack, x), wanted, m=24)


# --- batch norms by group norms


def test_batch_norms_become_group_norms_with_their_scale_bias_and_epsilon(rng):
    x, model = batch(rng, 4, 6, 8), Block(flax_nnx.Rngs(0), epsilon=0.5)
    scale, bias = model.norm.scale, model.norm.bias
    report = replace(model, "group", num_groups=6)
    assert report == (("norm", "flax.nnx.BatchNorm(8)", "normjax.nnx.GroupNorm(8, num_groups=4)"),)
    assert model.norm.scale is scale
    assert model.norm.bias is bias
    made = nnx.GroupNorm(8, 4, epsilon=0.5, rngs=flax_nnx.Rngs(0))
    made.scale.set_value(scale.get_value())
    made.bias.set_value(bias.get_value())
    assert flax_nnx.graphdef(model.norm) == flax_nnx.graphdef(made)
    np.testing.assert_array_equal(model.norm(x), made(x))
    assert [path[-1] for path in variables(model)] == ["bias", "kernel", "bias", "scale"]


@pytest.mark.parametrize(
    ("channels", "most", "groups"), [(72, 32, 24), (64, 32, 32), (48, 32, 24), (7, 5, 1), (4, 2, 2), (30, 8, 6)]
)
def test_the_groups_are_the_most_that_divide_and_are_not_above_the_number(channels, most, groups):
    norm = nnx.BatchNorm(channels, rngs=flax_nnx.Rngs(0))
    replace(norm, "group", num_groups=most)
    assert norm.num_groups == groups


@pytest.mark.parametrize("settings", [{"use_scale": False}, {"use_scale": False, "use_bias": False}])
def test_a_group_norm_has_no_parameters_that_the_batch_norm_lacked(settings, rng):
    norm, x = nnx.BatchNorm(8, **settings, zero_centered=True, rngs=flax_nnx.Rngs(0)), batch(rng, 4, 6, 8)
    replace(norm, "group", num_groups=2)
    np.testing.assert_array_equal(norm(x), nnx.GroupNorm(8, 2, epsilon=1e-5, **settings, rngs=flax_nnx.Rngs(0))(x))
    assert norm.scale is None


class Two(flax_nnx.Module):
    """A batch norm on images and one on features, each of eight channels."""

    def __init__(self, **settings):
        rngs = flax_nnx.Rngs(0)
        self.image = flax_nnx.BatchNorm(8, rngs=rngs, **settings)
        self.drop = flax_nnx.Dropout(0.5, rngs=rngs)
        self.features = flax_nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x, scale=None, *, double: bool = False):
        assert isinstance(double, bool)
        return self.features(self.drop(self.image(x)).mean((1, 2)))


@pytest.mark.case(56)
def test_groups_of_one_entry_are_refused_and_nothing_changes():
    model = Two()
    before = flax_nnx.graphdef(model)
    with pytest.raises(ValueError, match="one entry") as error:
        replace(model, "group")
    lines = str(error.value).splitlines()
    assert lines[0] == "replace: to='group' is refused, and nothing changed:"
    assert [line.split(":")[0] for line in lines[1:]] == ["  - features", "  - image"]
    assert all(
        "unless x has positions, which `example` would show; num_groups=4 gives more" in line for line in lines[1:]
    )
    assert flax_nnx.graphdef(model) == before
    assert len(replace(model, "group", num_groups=4)) == 2


@pytest.mark.case(56)
def test_an_example_shows_which_norms_have_positions():
    x = jax.ShapeDtypeStruct((2, 4, 4, 8), jnp.float32)
    model = Two(axis=3)
    model.train()
    with pytest.raises(ValueError, match="nothing changed") as error:
        replace(model, "group", example=(x, None))
    (line,) = str(error.value).splitlines()[1:]
    assert line.startswith("  - features: 8 channels in 8 groups are groups of one entry")
    assert "x has shape (2, 8); num_groups=4" in line
    assert model.drop.deterministic is False
    only = flax_nnx.PathContains("image")
    (change,) = replace(model, "group", example=(x,), only=only)
    assert change == ("image", "flax.nnx.BatchNorm(8)", "normjax.nnx.GroupNorm(8, num_groups=8)")
    assert isinstance(model.features, flax_nnx.BatchNorm)


def test_an_example_that_the_model_cannot_take_says_where_it_failed():
    with pytest.raises(TypeError) as error:
        replace(Two(), "group", example=(1, 2, 3, 4))
    assert "traced in evaluation on `example`" in " ".join(error.value.__notes__)


# --- synchronised


def test_a_synchronised_model_on_eight_devices_is_the_model_on_one(rng):
    x = batch(rng, 16, 6, 8)
    alone, apart = Block(flax_nnx.Rngs(0), momentum=0.5), Block(flax_nnx.Rngs(0), momentum=0.5)
    (change,) = replace(apart, "sync", axis_name="data")
    assert change.after == "normjax.nnx.BatchNorm(8, axis_name='data')"
    wanted = alone(x)
    graph, state = flax_nnx.split(apart)

    def run(state, x):
        model = flax_nnx.merge(graph, state)
        y = model(x)
        return y, flax_nnx.state(model, flax_nnx.BatchStat)

    mesh = make_mesh(("data",), (8,))
    options = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": (P("data"), P())}
    y, stats = jax.jit(jax.shard_map(run, **options))(state, x)
    close(y, wanted, m=96)
    for name in ("mean", "var"):
        close(stats["norm"][name].get_value(), getattr(alone.norm, name)[...], m=96)


def test_synchronised_over_more_axes_than_before_and_twice_the_same():
    norm = nnx.BatchNorm(8, axis_name="data", rngs=flax_nnx.Rngs(0))
    assert replace(norm, "sync", axis_name="data") == ()
    assert replace(norm, "sync", axis_name=["data", "model"])[0].after.endswith("axis_name=('data', 'model'))")
    with pytest.raises(ValueError, match=r"already; name that in axis_name, too"):
        replace(norm, "sync", axis_name="model")


# --- averages that count


@pytest.mark.parametrize(("to", "mean", "weight"), [("sync", 5.0, 1), ("sync", 0.0, 0), ("frozen", 5.0, 1)])
def test_statistics_that_nothing_counted_count_as_one_update_where_they_have_moved(to, mean, weight):
    """As in `from_flax`: a debiased average would forget them at its next update."""
    theirs = flax_nnx.BatchNorm(2, rngs=flax_nnx.Rngs(0))
    theirs.mean.set_value(jnp.full(2, mean))
    loaded = nnx.BatchNorm(2, running=nj.Ema(0.25, debias=True), rngs=flax_nnx.Rngs(0))
    flax_nnx.update(loaded, flax_nnx.state(theirs))
    later = flax_nnx.clone(theirs)
    later.running = nj.Cumulative("updates")
    for norm in (loaded, later):
        held = norm.mean
        replace(norm, to, **({"axis_name": "data"} if to == "sync" else {}))
        assert norm.mean is held
        assert (int(norm.count[...]), norm.count[...].dtype, norm.weight[...].dtype) == (weight, jnp.int32, jnp.float32)
        np.testing.assert_array_equal(norm.weight[...], [weight] * 2)


def test_counts_that_are_there_stay():
    norm = nnx.BatchNorm(2, running=nj.Cumulative(), rngs=flax_nnx.Rngs(0))
    norm(jnp.array([[1.0, 2.0], [3.0, 5.0], [4.0, 4.0]]))
    replace(norm, "sync", axis_name="data")
    assert int(norm.count[...]) == 1
    np.testing.assert_array_equal(norm.weight[...], [3, 3])


# --- frozen


def trained(rng) -> tuple[Block, jax.Array]:
    x, model = batch(rng, 4, 6, 8) + 1, Block(flax_nnx.Rngs(0), momentum=0.5)
    model(x)
    return model, x


@pytest.mark.case(78)
def test_a_frozen_model_trains_by_running_statistics_that_stay(rng):
    model, x = trained(rng)
    optimizer = flax_nnx.Optimizer(model, optax.sgd(0.1), wrt=flax_nnx.Param)
    model.eval()
    wanted, stats = model(x), flax_nnx.state(model, flax_nnx.BatchStat)
    (change,) = replace(model, "frozen")
    assert change.after == "normjax.nnx.FrozenBatchNorm(8)"
    model.train()
    np.testing.assert_allclose(model(x), wanted, atol=1e-6)
    np.testing.assert_allclose(model.norm(model.linear(x), use_running_average=False), model.norm(model.linear(x)))
    old = states(model)
    step = STEP
    loss = step(model, optimizer, x, jnp.zeros(x.shape))
    assert step(model, optimizer, x, jnp.zeros(x.shape)) < loss
    new = states(model)
    for name in ("mean", "var"):
        np.testing.assert_array_equal(new["norm"][name], stats["norm"][name].get_value())
    for name in ("scale", "bias"):
        assert np.abs(new["norm"][name] - old["norm"][name]).max() > 1e-4
    assert replace(model, "frozen") == ()
    assert replace(model) == ()


def test_frozen_parameters_are_left_alone_by_an_optimiser_made_after(rng):
    model, x = trained(rng)
    model.twin = flax_nnx.BatchNorm(8, rngs=flax_nnx.Rngs(0))
    model.twin.scale = model.norm.scale
    model.twin.mean.set_value(jnp.ones(8))
    report = replace(model, "frozen", train_params=False)
    assert [change.after for change in report] == ["normjax.nnx.FrozenBatchNorm(8, train_params=False)"] * 2
    assert model.norm.scale is model.twin.scale
    optimizer = flax_nnx.Optimizer(model, optax.adamw(0.1, weight_decay=0.5), wrt=flax_nnx.Param)
    old = states(model)
    STEP(model, optimizer, x, jnp.zeros(x.shape))
    new = states(model)
    jax.tree.map(np.testing.assert_array_equal, new["norm"], old["norm"])
    assert np.any(new["linear"]["kernel"] != old["linear"]["kernel"])
    assert list(flax_nnx.to_pure_dict(flax_nnx.state(model, flax_nnx.Param))) == ["linear"]


def test_a_frozen_norm_pools_over_no_mapped_axis(rng):
    model, x = trained(rng)
    replace(model, "sync", axis_name="data")
    assert replace(model, "frozen")[0].before == "normjax.nnx.BatchNorm(8, axis_name='data')"
    assert model(x).shape == x.shape


# --- the report


def test_the_report_is_a_table():
    model = flax_nnx.Sequential(
        *(NNX[lib].BatchNorm(n, rngs=flax_nnx.Rngs(0)) for lib, n in [("flax", 8), ("normjax", 64)])
    )
    model.layers[0].note = "kept"
    report = replace(model, "group", num_groups=4)
    assert str(report).splitlines() == [
        "layers.0  flax.nnx.BatchNorm(8)     -> normjax.nnx.GroupNorm(8, num_groups=4)",
        "layers.1  normjax.nnx.BatchNorm(64) -> normjax.nnx.GroupNorm(64, num_groups=4)",
    ]
    assert model.layers[0].note == "kept"
    assert report[1].path == "layers.1"
    assert str(replace(model)) == ""
