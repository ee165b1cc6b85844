"""Population statistics over a data set, in three frameworks, against NumPy float64 over the whole set."""

import io
import sys

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normjax as nj
import normjax.linen
import normjax.nnx
from normjax import recalibrate as module
from normjax.recalibrate import recalibrate
from tests.quick import quick_jit
from tests.recalibrate.nets import LAYERS, NETS, WIDTHS, populations, pure

EPS = float(np.finfo(np.float32).eps)
ROWS = {"layout": "N C", "axis_names": "N"}


def split(x, *sizes):
    return np.split(x, np.cumsum(sizes)[:-1])


def data(rng, *sizes):
    """Batches whose means lie apart, so that the variance between them counts."""
    return [rng.normal(rng.normal(0, 0.5, WIDTHS[0]), 1, (size, WIDTHS[0])).astype(np.float32) for size in sizes]


def copies(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]


def close(mean, var, x, tolerance=1e-6):
    """Within the contract of 1e-6, of the variance and of the larger of mean and deviation."""
    x = np.asarray(x, np.float64)
    size = np.maximum(np.abs(x.mean(0)), x.std(0))
    assert np.max(np.abs(mean - x.mean(0)) / size) <= tolerance
    np.testing.assert_allclose(var, x.var(0), rtol=tolerance)


@pytest.mark.parametrize("by_layer", [False, True], ids=["one pass", "layer by layer"])
@pytest.mark.parametrize("framework", NETS)
def test_three_norms_in_a_row_get_the_populations_that_numpy_finds(framework, by_layer, rng):
    net, batches = NETS[framework](), data(rng, 16, 16, 5)
    before = copies(net.stats)
    stats = recalibrate(net.step, net.stats, batches, layers=LAYERS if by_layer else None)
    wanted = populations(batches, by_layer=by_layer)
    for name in LAYERS:
        mean, var = net.read(stats, name)
        # A norm's inputs are themselves float32 sums of up to six terms: 16 eps, as in every test of values.
        np.testing.assert_allclose(mean, wanted[name][0], rtol=0, atol=16 * EPS * np.sqrt(wanted[name][1]).max())
        np.testing.assert_allclose(var, wanted[name][1], rtol=16 * EPS)
    jax.tree.map(np.testing.assert_array_equal, copies(net.stats), before)
    assert jax.tree.structure(stats) == jax.tree.structure(net.stats)


def test_the_two_ways_differ_after_the_first_norm_and_agree_on_one_batch(rng):
    batches = data(rng, 16, 16)
    for several in (batches, [np.concatenate(batches)]):
        net = pure()
        one, by_layer = (recalibrate(net.step, net.stats, several, layers=layers) for layers in (None, LAYERS))
        apart = [float(np.max(np.abs(one[name].var / by_layer[name].var - 1))) for name in LAYERS]
        assert apart[0] == 0
        assert all((gap > 1e-3) == (len(several) > 1) for gap in apart[1:])


def norm_of_linen():
    norm = flax.linen.BatchNorm(use_running_average=False, use_scale=False, use_bias=False)
    variables = norm.init(jax.random.key(0), jnp.zeros((1, 1)))

    def step(stats, x):
        return norm.apply({**variables, "batch_stats": stats}, x, mutable=["batch_stats"])[1]["batch_stats"]

    return quick_jit(step), variables["batch_stats"], lambda stats, name: stats[name]


def norm_of_nnx():
    graph, params, stats = nnx.split(nnx.BatchNorm(1, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def step(stats, x):
        norm = nnx.merge(graph, params, stats, copy=True)
        norm(x)
        return nnx.state(norm, nnx.BatchStat)

    return quick_jit(step), stats, lambda stats, name: stats[name][...]


def norm_of_ours():
    return single(), nj.BatchStats.init(C=1), getattr


@pytest.mark.case(80)
@pytest.mark.parametrize("norm", [norm_of_ours, norm_of_linen, norm_of_nnx], ids=["ours", "linen", "nnx"])
def test_batches_of_0_3_and_6_6_have_mean_3_75_and_variance_6_1875(norm):
    step, stats, read = norm()
    batches = [np.array(batch, np.float32)[:, None] for batch in ([0], [3], [6, 6])]
    before = copies(stats)
    found = recalibrate(step, stats, batches)
    np.testing.assert_allclose(read(found, "mean"), [3.75], rtol=1e-6)
    np.testing.assert_allclose(read(found, "var"), [6.1875], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, copies(stats), before)


AVERAGES = {
    "Flax's 0.99": nj.Ema.flax(0.99),
    "Flax's 0.999": nj.Ema.flax(0.999),
    "a third": nj.Ema(1 / 3),
    "the batch alone": nj.Ema(1.0),
    "debiased": nj.Ema(0.01, debias=True),
    "by entries": nj.Cumulative(),
    "by updates": nj.Cumulative("updates"),
    "PyTorch's": nj.Ema.torch(0.1),
    "PyTorch's None": nj.Ema.torch(None),
    "unbiased by entries": nj.Cumulative(unbiased=True),
}


def single(running=nj.Ema(0.1), **options):  # noqa: B008
    """A step of one norm."""
    options = {**ROWS, "train": True, "running": running, **options}
    return quick_jit(lambda stats, x: nj.batch_norm(x, None, stats, **options)[1])


@pytest.mark.parametrize("told", [False, True], ids=["measured", "told"])
@pytest.mark.parametrize("average", AVERAGES)
def test_whatever_average_step_keeps_the_population_is_that_of_the_whole_set(average, told, rng):
    running, x = AVERAGES[average], rng.normal([3, 0, -50], [2, 1, 7], (41, 3)).astype(np.float32)
    unbiased = running.unbiased if told else None
    stats = recalibrate(single(running), nj.BatchStats.init(C=3), split(x, 16, 16, 9), unbiased=unbiased)
    close(stats.mean, stats.var, x)
    assert int(stats.count) == 3
    weight = {"by entries": 41, "unbiased by entries": 41, "by updates": 3, "PyTorch's None": 3, "the batch alone": 3}
    np.testing.assert_array_equal(stats.weight, np.full(3, weight.get(average, 1), np.float32))


def test_an_unbiased_variance_told_to_be_biased_is_off_by_one_in_m(rng):
    # What is measured, and what its rows of the table would notice.
    x = rng.normal(size=(32, 3)).astype(np.float32)
    stats = recalibrate(single(nj.Ema.torch(0.1)), nj.BatchStats.init(C=3), [x], unbiased=False)
    np.testing.assert_allclose(stats.var, x.astype(np.float64).var(0) * 32 / 31, rtol=1e-6)


@pytest.mark.parametrize("rows", [2, 3, 4, 24])
def test_m_is_measured_in_batches_of_any_size(rows, rng):
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    stats = recalibrate(single(nj.Ema.torch(0.1)), nj.BatchStats.init(C=3), [x])
    close(stats.mean, stats.var, x)


def test_m_is_measured_where_half_a_batch_cannot_be_split_among_devices(rng):
    def step(stats, x):
        shards = x.reshape(8, -1, 3)
        options = {"layout": "N C", "axis_names": "N data", "train": True, "running": nj.Ema.torch(0.1)}
        norm = lambda x: nj.sync_batch_norm(x, None, stats, **options)[1]  # noqa: E731
        return jax.vmap(norm, axis_name="data", out_axes=None)(shards)

    x = rng.normal(size=(24, 3)).astype(np.float32)
    for unbiased in (None, True):
        stats = recalibrate(step, nj.BatchStats.init(C=3), [x], unbiased=unbiased)
        close(stats.mean, stats.var, x)


@pytest.mark.parametrize("unbiased", [None, True])
def test_m_is_measured_beside_dead_units(unbiased, rng):
    x = np.maximum(rng.normal(1, 1, (40, 4)), 0).astype(np.float32)
    x[:, :3] = 0
    x[:, 2] = 7
    stats = recalibrate(single(nj.Ema.torch(0.1)), nj.BatchStats.init(C=4), split(x, 16, 16, 8), unbiased=unbiased)
    close(stats.mean[3], stats.var[3], x[:, 3])
    np.testing.assert_array_equal(stats.var[:3], 0)


def test_m_is_measured_where_the_first_half_is_all_padding(rng):
    x, where = rng.normal(1, 1, (32, 3)).astype(np.float32), np.arange(32)[:, None] >= 10
    step = lambda stats, batch: nj.batch_norm(  # noqa: E731
        batch[0], None, stats, where=batch[1], train=True, running=nj.Ema.torch(0.1), **ROWS
    )[1]
    batches = list(zip(split(x, 16, 16), split(where, 16, 16), strict=True))
    stats = recalibrate(step, nj.BatchStats.init(C=3), batches, entries=lambda batch: batch[1].sum())
    close(stats.mean, stats.var, x[10:])


def test_m_is_measured_beside_arrays_that_all_examples_share(rng):
    x, ones = rng.normal(1, 1, (32, 3)).astype(np.float32), np.ones(3, np.float32)
    step = lambda stats, batch: single(nj.Ema.torch(0.1))(stats, batch["x"] * batch["w"])  # noqa: E731
    stats = recalibrate(step, nj.BatchStats.init(C=3), [{"w": ones, "x": part} for part in split(x, 16, 16)])
    close(stats.mean, stats.var, x)


def test_dropout_is_not_taken_for_an_unbiased_variance(rng):
    class Dropping(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            x = jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, x.shape), x, 0)
            return flax.linen.BatchNorm(use_running_average=False, use_scale=False, use_bias=False)(x)

    x = rng.normal(size=(2, 64, 16, 16, 4)).astype(np.float32)
    stats = Dropping().init(jax.random.key(0), x[0])["batch_stats"]
    step = jax.jit(
        lambda stats, x: Dropping().apply({"batch_stats": stats}, x, mutable=["batch_stats"])[1]["batch_stats"]
    )
    measured, told = (recalibrate(step, stats, list(x), unbiased=unbiased) for unbiased in (None, False))
    jax.tree.map(np.testing.assert_array_equal, measured, told)


@pytest.mark.parametrize("mean", [0.0, 1e2, 1e3])
def test_rounding_is_not_taken_for_an_unbiased_variance(mean):
    # Flax's E[x²] − E[x]², whose error on half the examples is not that on the same twice over.
    norm = flax.linen.BatchNorm(use_running_average=False, use_scale=False, use_bias=False)
    stats = norm.init(jax.random.key(0), np.zeros((1, 1)))["batch_stats"]
    step = quick_jit(lambda stats, x: norm.apply({"batch_stats": stats}, x, mutable=["batch_stats"])[1]["batch_stats"])
    for seed in range(3):
        x = np.random.default_rng(seed).normal(mean, 1, (8, 32, 1)).astype(np.float32)
        measured, told = (recalibrate(step, stats, list(x), unbiased=unbiased) for unbiased in (None, False))
        np.testing.assert_array_equal(measured["var"], told["var"])


def test_float64_statistics_are_exact_to_float64(rng, x64):
    x = rng.normal([1e4, 0, 1], 1, (41, 3))
    stats = recalibrate(single(nj.Ema.flax(0.99)), nj.BatchStats.init(C=3, dtype=jnp.float64), split(x, 16, 16, 9))
    close(stats.mean, stats.var, x, 1e-11)


def test_numpy_statistics_in_float64_are_taken_for_what_jax_computes_in(rng):
    x = rng.normal([3, -50], [2, 7], (24, 2)).astype(np.float32)
    given = nj.BatchStats(np.zeros(2), np.ones(2), np.int32(0), np.zeros(2, np.float32), "C")
    stats = recalibrate(single(nj.Ema.flax(0.99)), given, split(x, 16, 8))
    assert stats.mean.dtype == np.float32
    close(stats.mean, stats.var, x)


def test_synchronised_norms_have_the_rows_of_all_devices(rng):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    norm = lambda stats, x: nj.sync_batch_norm(x, None, stats, layout="N C", axis_names="N data", train=True)[1]  # noqa: E731
    step = quick_jit(jax.shard_map(norm, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))
    x = rng.normal([3, -50], [2, 7], (40, 2)).astype(np.float32)
    stats = recalibrate(step, nj.BatchStats.init(C=2), split(x, 16, 16, 8))
    close(stats.mean, stats.var, x)


def test_many_batches_lose_nothing_to_rounding(rng):
    x = rng.normal([3, -50], [2, 7], (600, 2)).astype(np.float32)
    stats = recalibrate(single(), nj.BatchStats.init(C=2), split(x, *[10] * 60))
    close(stats.mean, stats.var, x)


def test_the_start_values_have_no_say(rng):
    x = rng.normal(size=(24, 2)).astype(np.float32)
    fresh = recalibrate(single(), nj.BatchStats.init(C=2), split(x, 16, 8))
    used = nj.BatchStats(jnp.array([1e6, jnp.nan]), jnp.array([jnp.inf, 0.0]), jnp.int32(7), jnp.ones(2), "C")
    jax.tree.map(np.testing.assert_array_equal, recalibrate(single(), used, split(x, 16, 8)), fresh)


def test_masked_entries_are_left_out_where_the_average_counts(rng):
    x, where = rng.normal(3, 2, (30, 3)).astype(np.float32), rng.random((30, 3)) < 0.6
    options = {**ROWS, "train": True, "running": nj.Cumulative()}
    step = quick_jit(lambda stats, batch: nj.batch_norm(batch[0], None, stats, where=batch[1], **options)[1])
    where[:, 2] = False
    given = nj.BatchStats.init(C=3)
    stats = recalibrate(step, given, list(zip(split(x, 16, 14), split(where, 16, 14), strict=True)))
    for channel in (0, 1):
        close(stats.mean[channel], stats.var[channel], x[where[:, channel], channel])
    # A feature without an entry stays as it was.
    assert (stats.mean[2], stats.var[2], stats.weight[2]) == (0, 1, 0)


def test_entries_say_how_many_rows_a_mask_keeps(rng):
    x, where = rng.normal(3, 2, (30, 3)).astype(np.float32), rng.random((30, 1)) < 0.6
    step = quick_jit(lambda stats, batch: nj.batch_norm(batch[0], None, stats, where=batch[1], train=True, **ROWS)[1])
    batches = list(zip(split(x, 16, 14), split(where, 16, 14), strict=True))
    stats = recalibrate(step, nj.BatchStats.init(C=3), batches, entries=lambda batch: batch[1].sum())
    close(stats.mean, stats.var, x[where[:, 0]])


@pytest.mark.parametrize("first", [True, False])
def test_a_batch_without_examples_is_left_out(first, rng):
    x = rng.normal(0, 2, (12, 3)).astype(np.float32)
    norm = flax.linen.BatchNorm(use_running_average=False, use_scale=False, use_bias=False)
    stats = norm.init(jax.random.key(0), x)["batch_stats"]
    step = lambda stats, x: norm.apply({"batch_stats": stats}, x, mutable=["batch_stats"])[1]["batch_stats"]  # noqa: E731
    stats = recalibrate(step, stats, [x[:0], x] if first else [x, x[:0]])
    close(stats["mean"], stats["var"], x)


@pytest.mark.parametrize("first", [True, False])
def test_a_batch_of_padding_alone_is_left_out_where_entries_says_so(first, rng):
    real, padding = rng.normal(3, 2, (12, 3)).astype(np.float32), np.zeros((12, 3), np.float32)
    stats = recalibrate(
        single(running=nj.Ema(0.1, unbiased=True)),
        nj.BatchStats.init(C=3),
        [padding, real] if first else [real, padding],
        entries=lambda x: len(x) * x.any(),
        unbiased=True,
    )
    close(stats.mean, stats.var, real)
    assert stats.count == 1


def test_images_of_several_sizes_weigh_by_their_positions(rng):
    images = [rng.normal(i, 1, (4, side, side, 2)).astype(np.float32) for i, side in enumerate((3, 5, 4))]
    step = single(layout="N H W C", axis_names="N H W")
    with pytest.raises(ValueError, match="how many entries a batch has cannot be seen"):
        recalibrate(step, nj.BatchStats.init(C=2), images)
    stats = recalibrate(step, nj.BatchStats.init(C=2), images, entries=np.size)
    close(stats.mean, stats.var, np.concatenate([image.reshape(-1, 2) for image in images]))


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_the_counts_of_normjaxs_own_modules_are_used_and_kept(kind, rng):
    x, where = rng.normal(3, 2, (30, 2)).astype(np.float32), rng.random((30, 2)) < 0.6
    options = {"running": nj.Cumulative(), "use_running_average": False}
    if kind == "linen":
        norm = normjax.linen.BatchNorm(**options)
        variables = norm.init(jax.random.key(0), x)
        params, stats = variables.pop("params"), variables

        def step(stats, batch):
            return norm.apply({"params": params, **stats}, batch[0], mask=batch[1], mutable=list(stats))[1]

    else:
        graph, params, stats = nnx.split(normjax.nnx.BatchNorm(2, rngs=nnx.Rngs(0), **options), nnx.Param, ...)

        def step(stats, batch):
            norm = nnx.merge(graph, params, stats, copy=True)
            norm(batch[0], mask=batch[1])
            return nnx.state(norm, nnx.Not(nnx.Param))

    batches = list(zip(split(x, 16, 14), split(where, 16, 14), strict=True))
    found = recalibrate(quick_jit(step), stats, batches)
    mean, var = (found["batch_stats"][n] if kind == "linen" else found[n][...] for n in ("mean", "var"))
    weight = found["batch_counts"]["weight"] if kind == "linen" else found["weight"][...]
    for channel in (0, 1):
        close(mean[channel], var[channel], x[where[:, channel], channel])
    np.testing.assert_array_equal(weight, where.sum(0))


def test_step_may_donate_what_it_is_given(rng):
    stats = {"norm": nj.BatchStats.init(C=2), "kernel": jnp.eye(2)}

    def step(stats, x):
        return stats | {"norm": nj.batch_norm(x @ stats["kernel"], None, stats["norm"], train=True, **ROWS)[1]}

    x = rng.normal(size=(24, 2)).astype(np.float32)
    found = recalibrate(quick_jit(step, donate_argnums=0), stats, split(x, 16, 8))
    close(found["norm"].mean, found["norm"].var, x)
    np.testing.assert_array_equal(found["kernel"], np.eye(2))
    np.testing.assert_array_equal(stats["norm"].mean, [0, 0])


def test_a_frozen_norm_stays_as_it_was(rng):
    stats = {
        "frozen": nj.BatchStats(jnp.ones(2), jnp.ones(2), jnp.int32(3), jnp.ones(2), "C"),
        "norm": nj.BatchStats.init(C=2),
    }
    one = single()
    x = rng.normal(size=(24, 2)).astype(np.float32)
    found = recalibrate(lambda stats, x: stats | {"norm": one(stats["norm"], x)}, stats, [x])
    jax.tree.map(np.testing.assert_array_equal, found["frozen"], stats["frozen"])
    close(found["norm"].mean, found["norm"].var, x)


def test_a_constant_zero_channel_has_variance_0(rng):
    x = rng.normal(size=(24, 2)).astype(np.float32) * np.array([1, 0], np.float32)
    stats = recalibrate(single(), nj.BatchStats.init(C=2), split(x, 16, 8))
    assert abs(float(stats.mean[1])) < 1e-30
    assert stats.var[1] == 0


def test_nan_in_the_data_shows(rng):
    x = rng.normal(size=(24, 2)).astype(np.float32)
    x[20, 0] = np.nan
    stats = recalibrate(single(), nj.BatchStats.init(C=2), split(x, 16, 8))
    assert np.isnan(stats.mean[0])
    close(stats.mean[1], stats.var[1], x[:, 1])


@pytest.mark.parametrize(("unbiased", "expected"), [(False, [16, 16, 8]), (None, [16, 16, 8, 16, 8])])
def test_step_is_called_once_a_batch_and_some_times_more_on_the_first(unbiased, expected, rng):
    calls, one = [], single()
    step = lambda stats, x: calls.append(len(x)) or one(stats, x)  # noqa: E731
    recalibrate(step, nj.BatchStats.init(C=2), split(rng.normal(size=(24, 2)), 16, 8), unbiased=unbiased)
    assert calls == expected


@pytest.mark.parametrize("rich", [True, False])
def test_on_a_terminal_the_batches_are_counted(rich, monkeypatch, rng):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    if not rich:
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    recalibrate(single(), nj.BatchStats.init(C=2), split(rng.normal(size=(24, 2)).astype(np.float32), 16, 8))
    said = sys.stderr.getvalue()
    assert "recalibrate" in said
    assert ("100%" in said) if rich else ("\rrecalibrate: batch 2 of 2\n" in said)
