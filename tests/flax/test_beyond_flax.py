"""What Flax's modules do not do: reductions in words, other averages, zero-centred scale, exact synchronising."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec as P

import normjax as nj
from normjax import linen, nnx
from tests.closeness import close
from tests.flax.rows import KINDS, ROWS, SHAPE
from tests.quick import quick_jit
from tests.sync.mappings import make_mesh
from tests.trees import same

FIRST = {kind: next(row for row in ROWS if row.kind == kind) for kind in KINDS}
frameworks = pytest.mark.parametrize("framework", ["linen", "nnx"])


def new(framework: str, kind: str, features: int, x, **settings):
    """y of a new module in training, and its running statistics."""
    if framework == "nnx":
        module = getattr(nnx, kind)(features, **settings, rngs=flax_nnx.Rngs(0))
        y = module(x)
        return y, {name: getattr(module, name)[...] for name in ("mean", "var") if kind == "BatchNorm"}
    mode = {"use_running_average": False} if kind == "BatchNorm" else {}
    module = getattr(linen, kind)(**settings)
    y, new = module.apply(module.init(jax.random.key(0), x, **mode), x, mutable=["batch_stats"], **mode)
    return y, dict(new.get("batch_stats", {}))


# kind, number of features, settings beside the layout, layout, axis_names, names of the parameters
LAYOUTS = [
    ("BatchNorm", 8, {}, "N=(B n=2) H W C", "n H W", "C"),
    ("BatchNorm", 3, {"axis": "C"}, "N C H W", "N H W", "C"),
    ("BatchNorm", 3, {"axis": 1}, "N C ...", "N ...", "C"),
    ("BatchNorm", 24, {"axis": "C D"}, "N C H D", "N H", "C D"),
    ("LayerNorm", 8, {}, "... D", "D", "D"),
    ("LayerNorm", 8, {"feature_axes": ("C",)}, "N H W C", "H W C", "C"),
    ("RMSNorm", 8, {}, "N H W C=(G=2 K)", "K", "C"),
    ("GroupNorm", 8, {}, "N H W (G=2 K)", "H W K", "G K"),
    ("GroupNorm", 3, {}, "N C=(G=3 K) H W", "H W K", "C"),
    ("InstanceNorm", 3, {"feature_axes": 1}, "N C ...", "...", "C"),
]


@frameworks
@pytest.mark.parametrize(("kind", "features", "settings", "layout", "axis_names", "names"), LAYOUTS)
def test_a_layout_says_what_the_numbers_cannot(framework, kind, features, settings, layout, axis_names, names, rng):
    x = jnp.asarray(rng.normal(size=SHAPE), jnp.float32)
    axes = {"layout": layout, "axis_names": axis_names}
    y, stats = new(framework, kind, features, x, **settings, **axes)
    eps = FIRST[kind].eps
    expected, _ = nj.normalize(x, center=kind != "RMSNorm", eps=eps, **axes)
    np.testing.assert_allclose(y, expected, atol=1e-6)
    if kind == "BatchNorm":
        sizes = {"C": 3, "D": 8} if names == "C D" else {names: features}
        state = nj.BatchStats.init(**sizes)
        _, state = nj.batch_norm(x, None, state, train=True, running=nj.Ema.flax(0.99), **axes)
        close(stats["mean"].ravel(), state.mean.ravel(), m=64)
        close(stats["var"].ravel(), state.var.ravel(), m=64)


def test_evaluation_ignores_a_ghost_size_that_does_not_divide(rng):
    norm = nnx.BatchNorm(3, layout="N=(B n=4) C", axis_names="n", rngs=flax_nnx.Rngs(0))
    x = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    norm(x)
    with pytest.raises(ValueError, match="which 4 does not divide"):
        norm(x[:7])
    norm.eval()
    np.testing.assert_allclose(norm(x[:7]), norm(x)[:7], rtol=1e-6)


def test_a_group_norm_needs_a_layout_that_splits_the_channels_alone():
    with pytest.raises(ValueError, match="splits no axes"):
        new("linen", "GroupNorm", 8, jnp.ones(SHAPE), layout="N H W C", axis_names="H W")


# --- zero-centred scale


@frameworks
@pytest.mark.parametrize("kind", KINDS)
def test_a_zero_centred_scale_starts_at_0_and_acts_as_1(framework, kind, rng):
    row, x = FIRST[kind], jnp.asarray(rng.normal(size=SHAPE), jnp.float32)
    values = row.filled(rng)
    run = {"linen": row.run_linen, "nnx": row.run_nnx}[framework]
    y, _ = run("normjax", {**values, "scale": values["scale"] - 1}, x, zero_centered=True)
    expected, _ = row.expected(values, x)
    close(y, expected, m=60)
    if framework == "nnx":
        scale = row.nnx("normjax", zero_centered=True).scale[...]
    else:
        mode = {"use_running_average": False} if row.batch else {}
        scale = row.linen("normjax", zero_centered=True).init(jax.random.key(0), x, **mode)["params"]["scale"]
    np.testing.assert_array_equal(scale, np.zeros(8))


# --- averages


@frameworks
@pytest.mark.parametrize(
    "running", [nj.Cumulative(), nj.Cumulative("updates", unbiased=True), nj.Ema(0.25, debias=True), nj.Ema.torch(0.1)]
)
def test_running_statistics_move_as_running_says(framework, running, rng):
    xs = jnp.asarray(rng.normal(size=(3, 8, 4)) + 2, jnp.float32)
    state = nj.BatchStats.init(C=4)
    for x in xs:
        state = nj.update(state, nj.moments(x, layout="N C", axis_names="N"), running=running)
    counted = isinstance(running, nj.Cumulative) or running.debias
    if framework == "linen":
        norm = linen.BatchNorm(use_running_average=False, running=running)
        variables = norm.init(jax.random.key(0), xs[0])
        assert set(variables) == {"params", "batch_stats"} | ({"batch_counts"} if counted else set())
        assert set(variables["batch_stats"]) == {"mean", "var"}
        for x in xs:
            _, new_state = norm.apply(variables, x, mutable=["batch_stats", "batch_counts"])
            variables |= new_state
        got = {**variables["batch_stats"], **variables.get("batch_counts", {})}
        evaluated = norm.clone(use_running_average=True).apply(variables, xs[0])
    else:
        norm = nnx.BatchNorm(4, running=running, rngs=flax_nnx.Rngs(0))
        for x in xs:
            norm(x)
        assert set(flax_nnx.state(norm, flax_nnx.BatchStat)) == {"mean", "var"}
        counts = flax_nnx.to_pure_dict(flax_nnx.state(norm, nnx.BatchCount))
        got = {**flax_nnx.to_pure_dict(flax_nnx.state(norm, flax_nnx.BatchStat)), **counts}
        norm.eval()
        evaluated = norm(xs[0])
    assert set(got) == {"mean", "var"} | ({"count", "weight"} if counted else set())
    for name, value in got.items():
        close(value, getattr(state, name), m=8)
    close(evaluated, (xs[0] - state.mean) / np.sqrt(state.var + 1e-5), m=8)


def test_linen_and_nnx_call_the_counts_alike():
    name = flax_nnx.variablelib.variable_name_from_type(nnx.BatchCount)
    assert name == "batch_counts"


# --- masks


@frameworks
def test_a_mask_may_have_fewer_axes_and_be_of_integers_as_in_flax(framework, rng):
    x = jnp.asarray(rng.normal(size=SHAPE), jnp.float32)
    mask = jnp.array([1, 1, 0, 1, 1, 0, 1, 1])
    row = FIRST["LayerNorm"]
    run = {"linen": row.run_linen, "nnx": row.run_nnx}[framework]
    values = row.filled(rng)
    y, _ = run("normjax", values, x, mask)
    expected, _ = row.expected(values, x, np.broadcast_to(mask > 0, SHAPE))
    close(y, expected, m=8)


@pytest.mark.case(29)
@pytest.mark.case(30)
@frameworks
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_mask_leaves_out_reaches_nothing(framework, kind, rng):
    row, g = FIRST[kind], jnp.asarray(rng.normal(size=SHAPE), jnp.float32)
    values, x = row.filled(rng), jnp.asarray(rng.normal(size=SHAPE), jnp.float32)
    mask = jnp.ones(SHAPE, bool).at[3].set(False)
    run = {"linen": row.run_linen, "nnx": row.run_nnx}[framework]

    @quick_jit
    def program(values, x, mask):
        loss = lambda values, x: jnp.sum(jnp.where(mask, run("normjax", values, x, mask)[0], 0) * g)  # noqa: E731
        return jax.grad(loss, (0, 1))(values, x), run("normjax", values, x, mask)

    clean, ruined = (program(values, x.at[3].set(value), mask) for value in (0.0, jnp.nan))
    same((ruined[0], ruined[1][1]), (clean[0], clean[1][1]))
    if kind == "BatchNorm":
        _, (y, stats) = program(values, x, jnp.zeros(SHAPE, bool))
        same(stats, {name: values[name] for name in stats})
        np.testing.assert_array_equal(y, np.broadcast_to(values["bias"], SHAPE))


# --- synchronised


def shards(rng):
    """Eight shards of which each has its own number of entries, and one has none."""
    x = rng.normal(size=(8, 4, 6)) + np.arange(8)[:, None, None]
    mask = np.arange(4)[None, :, None] < np.array([4, 1, 0, 3, 2, 4, 1, 2])[:, None, None]
    return jnp.asarray(x, jnp.float32), jnp.asarray(np.broadcast_to(mask, x.shape))


def linen_norm(x, mask, **settings):
    module = linen.BatchNorm(use_running_average=False, momentum=0.5, **settings)
    variables = {"params": {"scale": jnp.ones(6), "bias": jnp.zeros(6)}}
    variables["batch_stats"] = {"mean": jnp.zeros(6), "var": jnp.ones(6)}
    y, new = module.apply(variables, x, mask=mask, mutable=["batch_stats"])
    return y, new["batch_stats"]


def nnx_norm(x, mask, **settings):
    module = nnx.BatchNorm(6, momentum=0.5, **settings, rngs=flax_nnx.Rngs(0))
    y = module(x, mask=mask)
    return y, {"mean": module.mean[...], "var": module.var[...]}


def by_vmap(norm, x, mask):
    return jax.vmap(norm, axis_name="data", out_axes=(0, None))(x, mask)


def by_nested_vmap(norm, x, mask):
    inner = jax.vmap(norm, axis_name="model", out_axes=(0, None))
    split = [array.reshape(4, 2, *array.shape[1:]) for array in (x, mask)]
    y, stats = jax.vmap(inner, axis_name="data", out_axes=(0, None))(*split)
    return y.reshape(x.shape), stats


def by_two_mesh_axes(norm, x, mask):
    """check_vma=True: that the statistics are the same on every device is checked by JAX."""
    whole = lambda x, mask: norm(x[0], mask[0])  # noqa: E731
    mesh, split = make_mesh(("data", "model"), (4, 2)), P(("data", "model"))
    y, stats = jax.shard_map(whole, mesh=mesh, in_specs=(split, split), out_specs=(split, P()))(x, mask)
    return y.reshape(x.shape), stats


@pytest.mark.case(36)
@pytest.mark.case(51)
@pytest.mark.parametrize("norm", [linen_norm, nnx_norm])
@pytest.mark.parametrize(
    ("mapping", "axis_name"),
    [(by_vmap, "data"), (by_nested_vmap, ("data", "model")), (by_two_mesh_axes, ("data", "model"))],
)
def test_shards_count_by_their_entries(mapping, axis_name, norm, rng):
    x, mask = shards(rng)
    y, stats = quick_jit(lambda x, mask: mapping(lambda x, m: norm(x, m, axis_name=axis_name), x, mask))(x, mask)
    whole, expected = norm(x.reshape(-1, 6), mask.reshape(-1, 6))
    close(y.reshape(-1, 6), whole, m=32)
    for name, value in expected.items():
        close(stats[name], value, m=32)


GROUPS = [[0, 2, 4], [1, 3, 5, 6, 7]]


def stacked_vmap(norm, x, mask):
    return jax.vmap(norm, axis_name="data")(x, mask)


def stacked_mesh(norm, x, mask):
    def one(x, mask):
        return jax.tree.map(lambda leaf: leaf[None], norm(x[0], mask[0]))

    mesh = make_mesh(("data",), (8,))
    return jax.shard_map(one, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))(x, mask)


@pytest.mark.case(44)
@pytest.mark.parametrize("norm", [linen_norm, nnx_norm])
@pytest.mark.parametrize("mapping", [stacked_vmap, stacked_mesh])
def test_axis_index_groups_work_where_jax_has_none(mapping, norm, rng):
    x, mask = shards(rng)
    settings = {"axis_name": "data", "axis_index_groups": GROUPS}
    y, stats = quick_jit(lambda x, mask: mapping(lambda x, m: norm(x, m, **settings), x, mask))(x, mask)
    for group in GROUPS:
        at = np.array(group)
        whole, expected = norm(x[at].reshape(-1, 6), mask[at].reshape(-1, 6))
        close(y[at].reshape(-1, 6), whole, m=20)
        for name, value in expected.items():
            close(stats[name][at], np.broadcast_to(value, (len(group), 6)), m=20)


def test_initialisation_touches_no_mapped_axis_even_where_nothing_else_pools():
    norm = linen.BatchNorm(use_running_average=False, axis_name="example")
    y, variables = norm.init_with_output(jax.random.key(0), jnp.arange(3.0))
    np.testing.assert_allclose(y, np.arange(3.0), rtol=1e-5)  # by the statistics it starts with
    assert jax.tree.map(jnp.shape, variables["batch_stats"]) == {"mean": (3,), "var": (3,)}
    batch = jnp.array([[1.0, 2, 3], [7, 8, 9]])
    apply = lambda x: norm.apply(variables, x, mutable=["batch_stats"])  # noqa: E731
    y, new = jax.vmap(apply, axis_name="example", out_axes=(0, None))(batch)
    np.testing.assert_allclose(y, [[-1] * 3, [1] * 3], atol=1e-5)
    np.testing.assert_allclose(new["batch_stats"]["mean"], [0.04, 0.05, 0.06], rtol=1e-5)


# --- partitioning


def test_linen_partitioning_boxes_are_flax_s_and_zero_centring_keeps_them():
    init = nn.with_partitioning(nn.initializers.ones, ("model",))
    x = jnp.ones((2, 4))
    mine, theirs = (lib.LayerNorm(scale_init=init).init(jax.random.key(0), x)["params"]["scale"] for lib in (linen, nn))
    assert type(mine) is type(theirs)
    assert mine.names == theirs.names == ("model",)
    centred = linen.LayerNorm(scale_init=init, zero_centered=True).init(jax.random.key(0), x)["params"]["scale"]
    assert centred.names == ("model",)
    np.testing.assert_array_equal(centred.value, np.zeros(4))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_nnx_metadata_are_flax_s(zero_centered):
    settings = {"scale_metadata": {"note": "γ"}, "bias_metadata": {"note": "β"}, "rngs": flax_nnx.Rngs(0)}
    mine = nnx.BatchNorm(4, **settings, zero_centered=zero_centered)
    theirs = flax_nnx.BatchNorm(4, **settings)
    for name in ("scale", "bias", "mean", "var"):
        assert getattr(mine, name).get_metadata() == getattr(theirs, name).get_metadata()
    init = flax_nnx.with_metadata(flax_nnx.initializers.ones_init(), note="γ")
    layer = nnx.LayerNorm(4, scale_init=init, rngs=flax_nnx.Rngs(0), zero_centered=zero_centered)
    assert layer.scale.get_metadata()["note"] == "γ"
    np.testing.assert_array_equal(layer.scale[...], np.full(4, 1.0 - zero_centered))
