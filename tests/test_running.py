"""Running statistics: how Ema and Cumulative move them, and what they refuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.closeness import close
from tests.quick import quick_jit

SPEC = {"layout": "N C", "axis_names": "N"}
RULES = [
    (nj.Ema(), {"rule": "ema"}),
    (nj.Ema(0.3), {"rule": "ema", "new_weight": 0.3}),
    (nj.Ema(0.0), {"rule": "ema", "new_weight": 0.0}),
    (nj.Ema(1), {"rule": "ema", "new_weight": 1.0}),
    (nj.Ema(0.3, unbiased=True), {"rule": "ema", "new_weight": 0.3, "unbiased": True}),
    (nj.Ema(0.3, debias=True), {"rule": "ema_debiased", "new_weight": 0.3}),
    (nj.Ema(0.3, True, True), {"rule": "ema_debiased", "new_weight": 0.3, "unbiased": True}),
    (nj.Cumulative(), {"rule": "cumulative_entries"}),
    (nj.Cumulative(unbiased=True), {"rule": "cumulative_entries", "unbiased": True}),
    (nj.Cumulative("updates"), {"rule": "cumulative_updates"}),
    (nj.Cumulative(by="updates", unbiased=True), {"rule": "cumulative_updates", "unbiased": True}),
]


@pytest.mark.case(62)
@pytest.mark.parametrize(("running", "rule"), RULES, ids=[str(running) for running, _ in RULES])
def test_a_rule_moves_the_statistics_as_the_reference_does(running, rule, rng):
    x = rng.normal(2.0, 3.0, (4, 8, 3)).astype(np.float32)
    where = rng.random((4, 8, 3)) < 0.7
    where[0, :, 0] = False  # feature 0 starts with nothing
    where[1] = False  # nobody sees anything in the second step
    where[2, :, 1] = np.arange(8) == 3  # one entry: m/(m−1) is skipped

    def step(state, batch):
        x, where = batch
        return nj.batch_norm(x, None, state, train=True, where=where, running=running, **SPEC)[1], state.weight

    state, _ = quick_jit(lambda *batches: jax.lax.scan(step, nj.BatchStats.init(C=3), batches))(x, where)

    right = np.zeros(3), np.ones(3), np.zeros(3)
    for part, mask in zip(x, where, strict=True):
        right = reference.update(*right, *reference.moments(part, where=mask, **SPEC), **rule)
    for actual, expected in zip((state.mean, state.var, state.weight), right, strict=True):
        close(actual, expected, m=32)
    assert state.count == 3  # updates that saw at least one entry


def moved(running, batches, start=(0.0, 1.0)):
    """A scalar state after batches of numbers."""
    state = nj.BatchStats(np.float32(start[0]), np.float32(start[1]), np.int32(0), np.float32(0))
    for batch in batches:
        state = nj.update(state, nj.moments(np.array(batch, np.float32), layout="N", axis_names="N"), running=running)
    return state


# x = (1, 3, 5, 7) has mean 4, variance 5, unbiased 20/3; (10, 10, 16) has mean 12, variance 8, unbiased 12.
ONE, TWO = [1, 3, 5, 7], [10, 10, 16]


@pytest.mark.case(96)
@pytest.mark.case(97)
@pytest.mark.parametrize(
    ("running", "translated", "mean", "var"),
    [
        # 0.9·(0.9·0 + 0.1·4) + 0.1·12, and the same from 1 with 20/3 and 12
        (nj.Ema.torch(0.1), nj.Ema(0.1, unbiased=True), 1.56, 0.9 * (0.9 + 2 / 3) + 1.2),
        (nj.Ema.torch(), nj.Ema(0.1, unbiased=True), 1.56, 0.9 * (0.9 + 2 / 3) + 1.2),
        (nj.Ema.torch(None), nj.Cumulative(by="updates", unbiased=True), 8.0, 28 / 3),
        (nj.Ema.flax(0.9), nj.Ema(1 - 0.9), 1.56, 0.9 * (0.9 + 0.5) + 0.8),
        (nj.Ema.keras(0.9), nj.Ema(1 - 0.9), 1.56, 0.9 * (0.9 + 0.5) + 0.8),
        (nj.Ema.flax(), nj.Ema(1 - 0.99), 0.99 * 0.04 + 0.12, 0.99 * (0.99 + 0.05) + 0.08),
        (nj.Ema.keras(), nj.Ema(1 - 0.99), 0.99 * 0.04 + 0.12, 0.99 * (0.99 + 0.05) + 0.08),
        # debiased: (0.9·0.1·4 + 0.1·12) / 0.19
        (nj.Ema.haiku(0.9), nj.Ema(1 - 0.9, debias=True), 1.56 / 0.19, (0.45 + 0.8) / 0.19),
        (nj.Ema.haiku(), nj.Ema(1 - 0.999, debias=True), (3.996 + 12) / 1.999, (4.995 + 8) / 1.999),
        (nj.Cumulative(), nj.Cumulative("entries", False), 52 / 7, 44 / 7),
    ],
)
def test_each_framework_s_number_means_what_it_means_there(running, translated, mean, var):
    assert running == translated
    state = moved(running, [ONE, TWO])
    close(state.mean, mean)
    # α = 0.001 has a float32 error of 5e-5 of itself in no rule, but w = 1.999e-3 is a sum of rounded terms.
    close(state.var, var, k=32)


@pytest.mark.parametrize("running", [nj.Ema(0.5), nj.Ema(1.0), nj.Ema.torch(1.0)])
@pytest.mark.case(97)
def test_the_forward_divides_by_m_whatever_is_stored(running):
    x = np.array([[0.0], [0.0], [6.0]], np.float32)
    layer = functools.partial(nj.batch_norm, train=True, running=running, eps=0.0, **SPEC)
    y, state = quick_jit(layer)(x, None, nj.BatchStats.init(C=1))
    close(y[:, 0], np.array([-2, -2, 4]) / np.sqrt(8))
    batch = 12.0 if running.unbiased else 8.0
    close(state.var, [1 + running.new_weight * (batch - 1)])


@pytest.mark.case(80)
def test_cumulative_by_entries_weighs_by_entries_and_merge_pools_the_variance_as_well():
    state = moved(nj.Cumulative(), [[0], [3], [6, 6]])
    close(state.mean, 3.75)
    close(state.var, 0.0)  # the mean of the batches' variances: 0 each
    assert (int(state.count), float(state.weight)) == (3, 4.0)
    by_updates = moved(nj.Cumulative("updates"), [[0], [3], [6, 6]])
    close(by_updates.mean, 3.0)
    assert float(by_updates.weight) == 3.0


def test_the_first_debiased_step_is_the_batch_itself():
    state = moved(nj.Ema(0.01, debias=True), [ONE], start=(100.0, 100.0))
    close(state.mean, 4.0, k=512)  # the start value's 100 cancels: rounding is relative to it
    close(state.var, 5.0, k=512)
    close(state.weight, 0.01)


@pytest.mark.case(14)
@pytest.mark.parametrize("debias", [False, True])
def test_a_running_variance_stays_between_the_batches_variances(debias, rng):
    x = rng.uniform(size=(100, 20, 3)).astype(np.float32)

    def step(state, x):
        _, state = nj.batch_norm(x, None, state, train=True, running=nj.Ema(0.4, debias=debias), **SPEC)
        return state, (state.var, nj.moments(x, **SPEC).var)

    state, (stored, batches) = quick_jit(lambda x: jax.lax.scan(step, nj.BatchStats.init(C=3), x))(x)
    batches = np.concatenate([batches, np.ones_like(batches[:1])][: 1 if debias else 2])
    assert np.all(stored >= batches.min(0))
    assert np.all(stored <= batches.max(0))
    assert state.count == 100


@pytest.mark.parametrize("rule", [nj.Ema(0.37), nj.Ema(0.37, debias=True), nj.Cumulative(), nj.Cumulative("updates")])
def test_equal_batches_leave_a_state_that_equals_them(rule):
    state = moved(rule, [[2.0, 4.0]] * 5, start=(3.0, 1.0))
    assert (float(state.mean), float(state.var)) == (3.0, 1.0)


# --- unbiased


@pytest.mark.case(37)
@pytest.mark.case(75)
def test_unbiased_counts_the_entries_of_all_devices(rng):
    x = np.array([[[0.0], [0.0], [0.0], [0.0]], [[8.0], [np.nan], [np.nan], [np.nan]]], np.float32)
    where = ~np.isnan(x)

    def layer(x, where):
        spec = {"layout": "N C", "axis_names": "N data"}
        state = nj.BatchStats.init(C=1)
        return nj.batch_norm(x, None, state, train=True, where=where, running=nj.Ema.torch(1.0), **spec)[1]

    state = quick_jit(jax.vmap(layer, axis_name="data", out_axes=None))(x, where)
    close(state.mean, [1.6])
    close(state.var, [12.8])  # 10.24 · 5/4


UNBIASED = {"train": True, "running": nj.Ema(0.5, unbiased=True), "layout": "N C", "axis_names": "N data"}


def mapped(rows, groups=None):
    """The state after one batch of two mapped rows."""
    layer = functools.partial(nj.batch_norm, axis_index_groups=groups, **UNBIASED)
    return quick_jit(jax.vmap(lambda x: layer(x, None, nj.BatchStats.init(C=1))[1], axis_name="data"))(rows)


def test_one_entry_on_each_of_two_devices_is_enough_for_an_unbiased_variance():
    state = mapped(np.array([[[1.0]], [[5.0]]], np.float32))
    close(state.var[:, 0], [4.5, 4.5])  # 1 + 0.5 (8 − 1)


@pytest.mark.parametrize(("devices", "groups"), [(1, None), (2, [[0], [1]])])
def test_one_entry_over_all_devices_is_an_error_with_unbiased(devices, groups):
    with pytest.raises(ValueError, match=r"^batch_norm: running=.*unbiased=True.*m/\(m-1\).*m = 1 here") as caught:
        mapped(np.ones((devices, 1, 1), np.float32), groups)
    assert "Pool more axes, use larger batches, or unbiased=False" in str(caught.value)


@pytest.mark.parametrize("where", [[[True]], [[True], [False]]])
def test_one_entry_that_only_the_run_knows_of_skips_the_factor(where):
    x = np.array([[3.0], [np.inf]], np.float32)[: len(where)]
    state = nj.BatchStats.init(C=1)
    layer = functools.partial(nj.batch_norm, train=True, running=nj.Ema.torch(0.5), **SPEC)
    _, new = quick_jit(layer)(x, None, state, where=np.array(where))
    np.testing.assert_array_equal(new.mean, [1.5])
    np.testing.assert_array_equal(new.var, [0.5])
    step = lambda x, where: nj.update(state, nj.moments(x, where=where, **SPEC), running=nj.Ema.torch(0.5))  # noqa: E731
    new = quick_jit(step)(x, np.array(where))
    np.testing.assert_array_equal(new.var, [0.5])


def test_one_entry_is_no_error_where_nothing_is_stored():
    x, state = np.ones((1, 3), np.float32), nj.BatchStats.init(C=3)
    for mode in ({"train": False}, {"train": False, "use_batch_stats": True}):
        layer = functools.partial(nj.batch_norm, running=nj.Ema.torch(), **mode, **SPEC)
        assert jax.eval_shape(layer, x, None, state)[0].shape == (1, 3)
    _, new = quick_jit(functools.partial(nj.batch_norm, train=True, running=nj.Ema.flax(0.5), **SPEC))(x, None, state)
    np.testing.assert_array_equal(new.var, np.full(3, 0.5, np.float32))


# --- axes that the state lacks


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("names", ["C", "G C", "C G", ""])
def test_axes_that_the_state_lacks_are_averaged_by_count(names, unbiased, rng):
    mean, var = rng.normal(size=(3, 2)), rng.uniform(1, 2, (3, 2))
    m = np.array([[4, 1], [0, 9], [2, 2]])
    moments = nj.Moments(*(np.asarray(array, np.float32) for array in (mean, var, m)), "G C")
    sizes = {"G": 3, "C": 2}
    state = nj.BatchStats.init(**{name: sizes[name] for name in names.split()})
    new = quick_jit(functools.partial(nj.update, running=nj.Ema(0.25, unbiased)))(state, moments)

    extra = tuple(i for i, name in enumerate("GC") if name not in names.split())
    start = [sizes[name] for name in "GC" if name in names.split()]
    old = np.zeros(start), np.ones(start), np.zeros(start)
    rule = {"rule": "ema", "new_weight": 0.25, "unbiased": unbiased, "extra_axes": extra}
    right = reference.update(*old, mean, var, m, **rule)
    for actual, expected in zip((new.mean, new.var, new.weight), right, strict=True):
        close(actual, expected.T if names == "C G" else expected, m=6)
    assert new.names == state.names
    assert new.count == 1


def test_the_state_may_run_along_unnamed_axes(rng):
    x = rng.normal(size=(5, 2, 3)).astype(np.float32)
    start = np.zeros((2, 3), np.float32), np.ones((2, 3), np.float32)
    state = nj.BatchStats(*start, np.int32(0), np.zeros((2, 3), np.float32), "...")
    layer = functools.partial(nj.batch_norm, layout="N ...", axis_names="N", train=True, running=nj.Ema(1.0))
    _, new = quick_jit(layer)(x, None, state)
    close(new.mean, x.astype(np.float64).mean(0), m=5)
    close(new.var, x.astype(np.float64).var(0), m=5)


# --- errors


STATE, MOMENTS = nj.BatchStats.init(C=3), nj.Moments.init(C=3)
STACKED = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), STATE)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: nj.Ema(1.5), ValueError, ["Ema: new_weight=1.5", "between 0 and 1", "weight of the new batch"]),
        (lambda: nj.Ema(-0.1), ValueError, ["Ema: new_weight=-0.1", "between 0 and 1"]),
        (lambda: nj.Ema(float("nan")), ValueError, ["Ema: new_weight=nan", "between 0 and 1"]),
        (lambda: nj.Ema(np.float32(1.5)), ValueError, ["Ema: new_weight=", "1.5", "between 0 and 1"]),
        (lambda: nj.Ema("0.1"), TypeError, ["Ema: new_weight must be a number", "'0.1'"]),
        (lambda: nj.Ema(np.ones(3)), TypeError, ["Ema: new_weight must be a number", "array([1., 1., 1.])"]),
        (
            lambda: nj.Ema.torch(90),
            ValueError,
            ["Ema.torch: momentum=90", "between 0 and 1", "weight of the new batch"],
        ),
        (lambda: nj.Ema.flax(1.2), ValueError, ["Ema.flax: momentum=1.2", "share of the old value that is kept"]),
        (lambda: nj.Ema.keras(-0.5), ValueError, ["Ema.keras: momentum=-0.5", "share of the old value that is kept"]),
        (lambda: nj.Ema.haiku("x"), TypeError, ["Ema.haiku: decay_rate must be a number", "'x'"]),
        (lambda: nj.Cumulative("epochs"), ValueError, ["Cumulative: by='epochs'", '"entries" or "updates"']),
        (lambda: nj.update(3, MOMENTS), TypeError, ["update: state must be a normjax.BatchStats", "got int"]),
        (lambda: nj.update(STATE, 3), TypeError, ["update: moments must be a normjax.Moments", "got int"]),
        (lambda: nj.update(STATE, MOMENTS, running=0.1), TypeError, ["update: running must be an Ema or a Cumulative"]),
        (
            lambda: nj.update(nj.BatchStats.init(D=3), MOMENTS),
            ValueError,
            ["update: state runs along 'D'", "along 'C'"],
        ),
        (
            lambda: nj.update(nj.BatchStats.init(C=4), MOMENTS),
            ValueError,
            ["update: state.mean has shape (4,)", "(3,)"],
        ),
        (lambda: nj.update(STACKED, MOMENTS), ValueError, ["update: state.count has shape (8,)", "pool_stats("]),
        (
            lambda: nj.update(STATE, nj.Moments(np.zeros(3), np.zeros(3), np.zeros(3))),
            ValueError,
            ["update: state runs along 'C'"],
        ),
        (
            lambda: nj.update(nj.BatchStats.init(), nj.Moments(np.zeros(3), np.zeros(3), np.zeros(3))),
            ValueError,
            ["update: moments.mean has shape (3,)"],
        ),
        (lambda: nj.pool_stats(3, "data"), TypeError, ["pool_stats: state must be a normjax.BatchStats", "got int"]),
        (lambda: nj.pool_stats(STATE, ""), ValueError, ['pool_stats: axis_names=""', "names no axis"]),
        (lambda: nj.pool_stats(STATE, "a a"), ValueError, ["pool_stats: ", "'a' is given twice"]),
        (lambda: nj.pool_stats(STATE, 3), TypeError, ["pool_stats: axis_names must be a string", "got 3"]),
        (
            lambda: nj.pool_stats(STATE, "data"),
            ValueError,
            ["pool_stats: 'data' is neither in the state's names 'C' nor a mapped axis", "shard_map, pmap or vmap"],
        ),
        (
            lambda: nj.pool_stats(STACKED, "device"),
            ValueError,
            ["pool_stats: state.mean has shape (8, 3)", 'names="device C"), "device")'],
        ),
        (
            lambda: nj.pool_stats(jax.tree.map(lambda leaf: leaf.astype("bfloat16"), STATE), "C"),
            TypeError,
            ["pool_stats: state.mean is bfloat16", "need float32 or more"],
        ),
    ],
)
def test_a_broken_rule_says_what_came_and_how_to_mend_it(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
