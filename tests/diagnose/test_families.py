"""Healthy norms of every family, with masks and without, have no finding; padding that counts has one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.diagnose import diagnose
from tests.derivatives import dear
from tests.quick import quick_jit

CHANNELS = 6
IMAGES = "N H W C"


def batch(stats, x, where, train, layout=IMAGES, axis_names="N H W", **options):
    return nj.batch_norm(x, None, stats, layout=layout, axis_names=axis_names, train=train, where=where, **options)


def counted(stats, x, where, train):
    return batch(stats, x, where, train, running=nj.Cumulative(unbiased=True))


def debiased(stats, x, where, train):
    return batch(stats, x, where, train, running=nj.Ema(0.1, debias=True))


def sync(stats, x, where, train):
    """Four devices, mapped by vmap."""

    def on_one(x, where):
        return batch(stats, x, where, train, axis_names="N H W data")

    split = lambda a: None if a is None else a.reshape(4, -1, *a.shape[1:])  # noqa: E731
    axes = (0, None if where is None else 0)
    y, new = jax.vmap(on_one, axes, out_axes=(0, None), axis_name="data")(split(x), split(where))
    return y.reshape(x.shape), new


def ghost(stats, x, where, train):
    return batch(stats, x, where, train, layout="N=(B n=16) H W C", axis_names="n H W")


def tracked_instance(stats, x, where, train):
    return batch(stats, x, where, train, axis_names="H W")


def stateless(norm, layout, axis_names):
    return lambda stats, x, where, train: norm(x, None, stats, layout=layout, axis_names=axis_names, where=where)


FAMILIES = {
    "batch": batch,
    "counted": counted,
    "debiased": debiased,
    "sync": sync,
    "ghost": ghost,
    "tracked instance": tracked_instance,
    "layer": stateless(nj.layer_norm, IMAGES, "H W C"),
    "group": stateless(nj.group_norm, "N H W C=(G=2 K)", "H W K"),
    "rms": stateless(nj.rms_norm, IMAGES, "C"),
    "instance": stateless(nj.instance_norm, IMAGES, "H W"),
}
KEEPS = ("batch", "counted", "debiased", "sync", "ghost", "tracked instance")


def images(rng, masked: bool, size=64):
    x = rng.normal(size=(size, 4, 4, CHANNELS)) + 0.5 * rng.normal(size=(size, 1, 1, CHANNELS)) + 3
    where = rng.uniform(size=(size, 4, 4, 1)) < 0.7
    return jnp.asarray(x, jnp.float32), jnp.asarray(where) if masked else None


@dear(
    lambda family, masked, seed: not masked or seed == 0,
    family=FAMILIES,
    masked=[False, True],
    seed=range(5),
)
def test_a_healthy_norm_has_no_finding(family, masked, seed):
    rng = np.random.default_rng(seed)
    stats = nj.BatchStats.init(C=CHANNELS) if family in KEEPS else None

    def forward(stats, batch, train):
        return FAMILIES[family](stats, *batch, train)

    step = quick_jit(lambda stats, batch: forward(stats, batch, True)[1])
    for _ in range(60 if stats else 0):
        stats = jax.block_until_ready(step(stats, images(rng, masked)))
    report = diagnose(forward, stats, images(rng, masked))
    assert report.findings == (), str(report)
    assert report.layers == (("stats",) if stats else ())


def sequences(rng):
    """Sequences of 1 to 8 positions, the rest zeros, and which positions are real."""
    lengths = rng.integers(1, 9, size=(32, 1, 1))
    where = np.arange(8)[None, :, None] < lengths
    return jnp.asarray(np.where(where, rng.normal(size=(32, 8, CHANNELS)) + 1, 0), jnp.float32), jnp.asarray(where)


@pytest.mark.parametrize("pools_padding", [False, True])
def test_padding_that_counts_is_found(pools_padding, rng):
    def forward(stats, batch, train):
        x, where = batch
        where = None if pools_padding else where
        return nj.batch_norm(x, None, stats, layout="N L C", axis_names="N L", train=train, where=where)

    stats = nj.BatchStats.init(C=CHANNELS)
    for _ in range(50):
        stats = forward(stats, sequences(rng), True)[1]
    report = diagnose(forward, stats, sequences(rng), pad_axis=1)
    assert [finding.fault for finding in report.findings] == ["padding pooled"] * pools_padding, str(report)
    assert not any("pad_axis" in text for text in report.not_checked)
