"""What a diagnosis must tell apart: chance from drift, one fault from another, and what cannot be known from health."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import normjax as nj
from normjax.diagnose import diagnose
from normjax.linen import BatchNorm, RMSNorm
from normjax.recalibrate import recalibrate
from tests.quick import quick_jit

AXES = {"layout": "N C", "axis_names": "N"}
FRESH = nj.BatchStats.init(C=2)


def forward(stats, x, train):
    return nj.batch_norm(x, None, stats, **AXES, train=train)


def named(report):
    return [(one.fault, one.layer) for one in report.findings]


def after(updates, draw, call=forward, channels=16):
    """The statistics after so many batches that draw() gives."""
    step = quick_jit(lambda stats, x: call(stats, x, True)[1])
    stats = nj.BatchStats.init(C=channels) if isinstance(channels, int) else channels
    for _ in range(updates):
        stats = jax.block_until_ready(step(stats, draw()))
    return stats


def normal(rng, *shape, mean=0.0):
    return jnp.asarray(rng.normal(mean, 1, shape), jnp.float32)


def sparse(x):
    """What a relu leaves of one entry in six, or fewer."""
    return np.maximum(x - np.linspace(1, 2, x.shape[-1]), 0)


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("tail", [sparse, np.exp], ids=["sparse", "lognormal"])
def test_rare_entries_that_a_batch_happens_to_lack_are_not_drift(tail, size):
    step = jax.jit(lambda stats, x: forward(stats, x, True)[1])
    found = []
    for seed in range(5):
        rng = np.random.default_rng(seed)
        *past, batch = jnp.asarray(tail(rng.normal(size=(81, size, 16))), jnp.float32)
        stats = nj.BatchStats.init(C=16)
        for x in past:
            stats = jax.block_until_ready(step(stats, x))
        found += diagnose(forward, stats, batch).findings
    assert found == []


@pytest.mark.parametrize("share", [0.01, 0.02])
def test_features_that_are_rare_are_not_constant(share):
    rng = np.random.default_rng(1)
    draw = lambda: jnp.asarray(rng.random((64, 16)) < share, jnp.float32)  # noqa: E731
    stats = nj.BatchStats.init(C=16)
    step = jax.jit(lambda stats, x: forward(stats, x, True)[1])
    for _ in range(400):
        stats = jax.block_until_ready(step(stats, draw()))
    x = draw()
    assert np.any(np.var(x, 0) == 0)
    assert "constant channels" not in {finding.fault for finding in diagnose(forward, stats, x).findings}


@pytest.mark.parametrize("mean", [0.0, 0.2, 2.0])
@pytest.mark.parametrize("number", [8, 16, 22])
def test_statistics_estimated_anew_are_no_short_warm_up_however_few_the_batches(number, mean):
    batches = jnp.asarray(np.random.default_rng(0).normal(mean, 1.2, (number, 64, 16)), jnp.float32)
    exact = recalibrate(lambda stats, x: forward(stats, x, True)[1], nj.BatchStats.init(C=16), list(batches))
    assert diagnose(forward, exact, batches[0]).findings == ()


class Moving(nnx.Module):
    """Two norms, the second behind a layer that training changes."""

    def __init__(self, rngs):
        self.first = nnx.BatchNorm(16, momentum=0.99, rngs=rngs)
        self.layer = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
        self.second = nnx.BatchNorm(16, momentum=0.99, rngs=rngs)

    def __call__(self, x, train):
        x = nnx.relu(self.first(3 * x + 2, use_running_average=not train))
        return self.second(self.layer(x), use_running_average=not train)


def test_a_short_warm_up_has_its_name_behind_weights_that_have_moved_too():
    rng = np.random.default_rng(0)
    net = Moving(nnx.Rngs(0))
    last = net.layer.kernel[...]
    for step in range(50):  # the kernel grows by a tenth, and turns a little
        net.layer.kernel[...] = last * (0.9 + step / 500) + 0.01 * np.roll(last, 1, 0) * (50 - step) / 50
        net(jnp.asarray(rng.normal(size=(256, 16)), jnp.float32), train=True)
    net.layer.kernel[...] = last
    graph, stats, rest = nnx.split(net, nnx.BatchStat, ...)

    def call(stats, x, train):
        model = nnx.merge(graph, stats, rest, copy=True)
        return model(x, train), nnx.state(model, nnx.BatchStat)

    found = diagnose(call, stats, jnp.asarray(rng.normal(size=(256, 16)), jnp.float32)).findings
    assert [(one.fault, one.layer) for one in found] == [("warm-up too short", name) for name in ("first", "second")]


def test_start_values_that_a_small_variance_still_shows_are_a_warm_up_too_short(rng):
    scales = jnp.array([1.0, 1e-3])  # 0.9⁶⁰ = 0.2 % of a variance of 1, beside one of 1e-6
    stats = after(60, lambda: scales * normal(rng, 64, 2), channels=2)
    exact = lambda stats, x, train: nj.batch_norm(x, None, stats, **AXES, train=train, eps=0)  # noqa: E731
    report = diagnose(exact, stats, scales * normal(rng, 64, 2))
    assert named(report) == [("warm-up too short", "stats")]


def test_a_distance_must_be_certain_and_matter_in_the_same_moment(rng):
    # Behind another norm a mean hardly varies: it is off for certain, by next to nothing, where the weights moved.
    kernel, params = (
        jnp.asarray(rng.normal(size=(8, 16)) / 3, jnp.float32),
        nj.Affine(jnp.ones(8), jnp.full(8, 0.5), "C"),
    )

    def with_kernel(kernel):
        def call(stats, x, train):
            x, one = nj.batch_norm(x, params, stats[0], **AXES, train=train)
            x, two = nj.batch_norm(x @ kernel, None, stats[1], **AXES, train=train)
            return x, [one, two]

        return call

    draw = lambda: normal(rng, 16, 8, mean=2)  # noqa: E731
    stats = after(200, draw, with_kernel(kernel), [nj.BatchStats.init(C=8), nj.BatchStats.init(C=16)])
    for _ in range(4):
        assert named(diagnose(with_kernel(1.001 * kernel), stats, draw())) == []


def test_a_running_variance_of_zero_is_an_error(rng):
    draw = lambda: normal(rng, 64, 4, mean=2)  # noqa: E731
    stats = after(60, draw, channels=4)
    zeros = dataclasses.replace(stats, var=0 * stats.var)
    some = dataclasses.replace(stats, var=stats.var.at[:3].set(0))
    assert named(diagnose(forward, zeros, draw())) == [("drift", "stats")]
    (found,) = diagnose(forward, some, draw()).findings
    assert (found.severity, found.evidence) == (
        "error",
        "a running variance of 0 in 3 of 4 channels, which vary in this batch",
    )
    filled = dataclasses.replace(zeros, mean=0 * stats.mean)
    assert named(diagnose(forward, filled, draw())) == [("never updated", "stats")]


@pytest.mark.parametrize("pools_padding", [False, True])
def test_random_training_is_not_taken_for_pooled_padding(pools_padding, rng):
    kernel = jnp.asarray(rng.normal(size=(16, 16)) / 4, jnp.float32)

    def draw():
        real = jnp.arange(8)[:, None] < rng.integers(3, 9, size=64)[:, None, None]
        return jnp.where(real, rng.normal(size=(64, 8, 16)) + 1, 0).astype(jnp.float32), real

    def dropping(stats, batch, train):
        x, real = batch
        options = {"layout": "N T C", "axis_names": "N T", "train": train, "where": None if pools_padding else real}
        x, one = nj.batch_norm(x @ kernel, None, stats[0], **options)
        if train:
            x = jnp.where(jax.random.bernoulli(jax.random.key(3), 0.9, x.shape), x / 0.9, 0)
        x, two = nj.batch_norm(x @ kernel, None, stats[1], **options)
        return x, [one, two]

    stats = after(100, draw, dropping, [nj.BatchStats.init(C=16)] * 2)
    report = diagnose(dropping, stats, draw(), pad_axis=1)
    if pools_padding:
        assert ("padding pooled", "0") in named(report)  # before anything is dropped
    else:
        assert named(report) == []
        assert any(
            text.startswith("padding pooled in 1: pass a forward whose training is not random")
            for text in report.not_checked
        )


class Heads(nnx.Module):
    """One norm for each of two tasks."""

    def __init__(self, rngs):
        self.one, self.two = (nnx.BatchNorm(4, momentum=0.9, rngs=rngs) for _ in range(2))

    def __call__(self, x, task, train):
        return getattr(self, task)(x, use_running_average=not train)


def test_a_norm_that_forward_does_not_call_is_not_checked(rng):
    heads = Heads(nnx.Rngs(0))
    for _ in range(60):
        for task in ("one", "two"):
            heads(normal(rng, 64, 4), task, True)
    graph, stats, rest = nnx.split(heads, nnx.BatchStat, ...)

    def call(stats, x, train):
        model = nnx.merge(graph, stats, rest, copy=True)
        return model(x, "one", train), nnx.state(model, nnx.BatchStat)

    report = diagnose(call, stats, normal(rng, 64, 4))
    assert (named(report), report.layers) == ([], ("one",))
    assert "two: forward does not call it" in report.not_checked


@pytest.mark.parametrize(
    ("field", "value", "fault"), [("mean", np.nan, "not finite"), ("var", -1.0, "negative variance")]
)
def test_a_broken_replica_is_found_wherever_it_stands(field, value, fault, rng):
    stats = after(60, lambda: normal(rng, 64, 4), channels=4)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), stats)
    broken = dataclasses.replace(stacked, **{field: getattr(stacked, field).at[1, 2].set(value)})
    (found,) = diagnose(forward, broken, normal(rng, 64, 4), replica_axis=0).findings
    assert (found.fault, found.evidence) == (fault, "in replica 1 of 2")


def test_statistics_by_other_names_are_not_called_healthy(rng):
    x = normal(rng, 64, 4)
    other = lambda stats, x, train: (x, stats)  # noqa: E731
    report = diagnose(other, {"running_mean": jnp.zeros(4), "running_var": jnp.ones(4)}, x)
    assert "running statistics: stats holds none, which are a mean and a var side by side" in report.not_checked


@pytest.mark.parametrize("name", ["gain", "kernel"])
def test_what_scales_the_input_of_a_norm_is_no_redundant_bias(name, rng):
    params = {"gain": jnp.ones(4), "kernel": jnp.array([[1.0, -2.0, 0.5, 3.0]])}

    def call(stats, x, train):
        x = x * params["gain"] if name == "gain" else x[:, :1] @ params["kernel"]
        y, stats = forward(stats, x, train)
        return jnp.tanh(y), stats

    draw = lambda: normal(rng, 64, 4)  # noqa: E731
    assert named(diagnose(call, after(60, draw, call, 4), draw(), params=params)) == []


def test_a_zero_centred_scale_of_a_module_may_decay(rng):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            x = BatchNorm(use_running_average=not train, momentum=0.9, zero_centered=True, use_bias=False)(x)
            return RMSNorm(zero_centered=True)(x)

    x = normal(rng, 64, 4)
    variables = Net().init(jax.random.key(0), x, False)
    params, stats = variables["params"], {"batch_stats": variables["batch_stats"]}

    def call(stats, x, train):
        return Net().apply({"params": params, **stats}, x, train, mutable=["batch_stats"])

    stats = after(60, lambda: normal(rng, 64, 4), call, stats)
    assert named(diagnose(call, stats, x, params=params, decay_mask=True)) == []


def test_one_image_leaves_the_size_of_groups_open(rng):
    def call(stats, x, train):
        return nj.batch_norm(x, None, stats, layout="N H W C", axis_names="N H W", train=train)

    draw = lambda: normal(rng, 1, 8, 8, 4)  # noqa: E731
    report = diagnose(call, after(60, draw, call, 4), draw())
    assert any(text.startswith("tiny groups, drift: pass a batch of 4 examples or more") for text in report.not_checked)


def test_strict_settings_of_jax_do_not_keep_it_from_looking(rng):
    x, stats = normal(rng, 16, 2), jax.tree.map(np.asarray, FRESH)
    broken = x.at[0, 0].set(np.nan)
    stats = dataclasses.replace(stats, mean=stats.mean.astype(jnp.bfloat16), var=stats.var.astype(jnp.bfloat16))
    with jax.numpy_dtype_promotion("strict"):
        assert ("half precision", "stats") in named(diagnose(forward, stats, x))
    with jax.debug_nans(True):
        assert ("not finite", "stats") in named(diagnose(forward, FRESH, broken))


@pytest.mark.parametrize(("size", "updates"), [(16, 20), (16, 50), (64, 100)])
def test_a_short_warm_up_is_seen_in_all_channels_together(size, updates, rng):
    # Flax's default momentum; no channel of so small a batch is off for certain.
    norm = linen.BatchNorm(use_scale=False, use_bias=False)
    mean = 3 * rng.normal(size=32)
    draw = lambda: jnp.asarray(3 * rng.normal(size=(size, 32)) + mean, jnp.float32)  # noqa: E731

    def call(stats, x, train):
        return norm.apply(stats, x, use_running_average=not train, mutable=["batch_stats"])

    stats = after(updates, draw, call, norm.init(jax.random.key(0), draw(), use_running_average=True))
    (found,) = diagnose(call, stats, draw()).findings
    assert (found.fault, found.severity) == ("warm-up too short", "error")
    share = float(found.evidence.split()[1])
    assert abs(share - 0.99**updates) < 0.1


@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("scale", [0.25, 4.0])
def test_inputs_of_another_scale_are_drift_in_small_batches_too(scale, size, rng):
    mean = 3 * rng.normal(size=32)
    pair = {"mean": jnp.asarray(mean, jnp.float32), "var": jnp.full(32, 9.0)}

    def call(stats, x, train):
        state = nj.BatchStats(stats["mean"], stats["var"], jnp.int32(0), jnp.zeros(32), "C")
        y, state = forward(state, x, train)
        return y, {"mean": state.mean, "var": state.var}

    x = jnp.asarray(scale * (3 * rng.normal(size=(size, 32)) + mean), jnp.float32)
    (found,) = diagnose(call, pair, x).findings
    assert (found.fault, found.severity) == ("drift", "error")


def test_a_redundant_bias_of_a_convolution_in_bfloat16_is_found(rng):
    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, train):
            for name in ("without", "with_bias"):
                x = linen.Conv(8, (3, 3), use_bias=name == "with_bias", dtype=jnp.bfloat16, name=name)(x)
                x = linen.BatchNorm(use_running_average=not train, momentum=0.9, dtype=jnp.bfloat16)(x)
                x = linen.relu(x)
            return linen.Dense(4, dtype=jnp.bfloat16)(x.mean((1, 2))).astype(jnp.float32)

    draw = lambda: normal(rng, 64, 8, 8, 3)  # noqa: E731
    variables = Net().init(jax.random.key(0), draw(), False)
    params, stats = variables["params"], {"batch_stats": variables["batch_stats"]}

    def call(stats, x, train):
        return Net().apply({"params": params, **stats}, x, train, mutable=["batch_stats"])

    report = diagnose(call, after(60, draw, call, stats), draw(), params=params)
    assert named(report) == [("redundant bias", "with_bias/bias")]
