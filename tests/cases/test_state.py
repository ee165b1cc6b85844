"""Cases of running statistics: start values, freezing, discarding, none at all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.cases.common import COLUMN, FAMILY, QUICK, close, each_batch_like, each_family, rounded_once, same
from tests.quick import quick_jit

UNBIASED = {
    "ema": nj.Ema(0.1, unbiased=True),
    "PyTorch's": nj.Ema.torch(0.1),
    "PyTorch's None": nj.Ema.torch(None),
    "debiased": nj.Ema(0.1, unbiased=True, debias=True),
    "by entries": nj.Cumulative(unbiased=True),
}

each_rule_compiled_and_one_otherwise = pytest.mark.parametrize(
    ("running", "how"),
    [*((running, "jit") for running in UNBIASED.values()), (UNBIASED["ema"], "eager"), (UNBIASED["ema"], "vmap")],
    ids=str,
)

# --- 75: one entry and the unbiased variance


@pytest.mark.case(75)
@pytest.mark.parametrize("how", ["eager", "jit", "vmap", "eval_shape"])
@pytest.mark.parametrize("running", UNBIASED.values(), ids=UNBIASED)
@pytest.mark.parametrize(
    ("shape", "layout", "axis_names"),
    [((1, 3), "N C", "N"), ((4, 3), "N=(B n=1) C", "n"), ((2, 1, 3), "N L C", "L"), ((1, 1, 3), "N L C", "N L")],
)
def test_one_entry_with_an_unbiased_variance_is_an_error_when_traced(shape, layout, axis_names, running, how):
    def function(x):
        options = {"layout": layout, "axis_names": axis_names, "train": True, "running": running}
        return nj.batch_norm(x, None, nj.BatchStats.init(C=3), **options)

    transform = QUICK.get(how, lambda function: lambda x: jax.eval_shape(function, x))
    with pytest.raises(ValueError, match=r"batch_norm: running=.*needs more than one entry in a group, but m = 1"):
        transform(function)(np.ones(shape, np.float32))


@pytest.mark.case(75)
@each_rule_compiled_and_one_otherwise
def test_one_example_with_positions_stores_the_unbiased_variance(running, how, rng):
    x = np.asarray(rng.standard_normal((1, 3, 4, 4)), np.float32)

    def function(x):
        options = {"layout": "N C H W", "axis_names": "N H W", "train": True, "running": running}
        return nj.batch_norm(x, None, nj.BatchStats.init(C=3), **options)

    y, state = QUICK[how](function)(x)
    unbiased = np.var(np.float64(x), axis=(0, 2, 3), ddof=1)
    plain = isinstance(running, nj.Ema) and not running.debias
    close(state.var, 0.9 + 0.1 * unbiased if plain else unbiased)
    close(y, reference.normalize(x, layout="N C H W", axis_names="N H W"))  # the forward divides by m


@pytest.mark.case(75)
@each_rule_compiled_and_one_otherwise
def test_where_only_the_values_of_the_mask_tell_that_one_entry_is_left_the_factor_is_skipped(running, how, rng):
    x = np.asarray(rng.standard_normal((4, 3)), np.float32)
    where = np.arange(4)[:, None] < np.array([1, 2, 0])  # one entry, two, none

    def function(x, where):
        options = {"train": True, "running": running, "where": where}
        return nj.batch_norm(x, None, nj.BatchStats.init(C=3), **COLUMN, **options)[1]

    # vmap's second example is flipped, so the masks are told apart there.
    state = QUICK[how](function)(x, where)
    plain = isinstance(running, nj.Ema) and not running.debias
    batch = np.array([0, np.var(np.float64(x[:2, 1]), ddof=1)])
    close(state.var, [*(0.9 + 0.1 * batch if plain else batch), 1])


@pytest.mark.case(75)
def test_biased_running_statistics_of_one_entry_are_finite():
    y, state = nj.batch_norm(np.ones((1, 3), np.float32), None, nj.BatchStats.init(C=3), train=True, **COLUMN)
    same(y, np.zeros((1, 3), np.float32))
    close(state.var, np.full(3, 0.9))
    close(state.mean, np.full(3, 0.1))


# --- 76: start values


@pytest.mark.case(76)
@pytest.mark.parametrize(
    ("dtype", "how"), [(np.float32, "jit"), (np.float32, "eager"), (np.float32, "vmap"), (jnp.bfloat16, "jit")]
)
@each_batch_like
def test_a_fresh_state_evaluates_to_almost_the_input(norm, dtype, how):
    x = np.ones(norm.shape, dtype)
    state = nj.BatchStats.init(C=norm.sizes[0])
    y = QUICK[how](lambda x: norm.pair(x, state=state, train=False)[0])(x)
    assert y.dtype == dtype
    # Not to the bit: XLA's reciprocal root of 1.00001 is off by a unit in the last place on some processors.
    rounded_once(y, np.full(norm.shape, 1 / np.sqrt(1.00001)), k=1)


@pytest.mark.case(76)
@pytest.mark.parametrize("sizes", [{}, {"C": 3}, {"H": 2, "C": 3}], ids=str)
def test_start_values_are_mean_0_variance_1_and_nothing_seen(sizes):
    state = nj.BatchStats.init(**sizes)
    shape = tuple(sizes.values())
    same(state.mean, np.zeros(shape, np.float32))
    same(state.var, np.ones(shape, np.float32))
    same(state.count, np.zeros((), np.int32))
    same(state.weight, np.zeros(shape, np.float32))
    assert state.names == tuple(sizes)


# --- 78: frozen statistics


@pytest.mark.case(78)
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(
    ("family", "derivative"),
    [("batch", "vjp"), ("batch", "jvp"), ("batch", "autodiff"), ("ghost", "vjp"), ("batch, channels first", "vjp")],
)
def test_frozen_statistics_in_a_training_step_are_used_and_left_alone(family, masked, derivative, rng):
    norm = FAMILY[family]
    x, g, scale, bias = norm.problem(rng)
    mean, var = np.asarray(rng.uniform(1, 2, (2, *norm.sizes)), np.float32)
    state = nj.BatchStats(mean, var, np.asarray(7, np.int32), np.ones(norm.sizes, np.float32), "C")
    where = rng.random(norm.shape) < 0.5 if masked else None

    @quick_jit
    def step(x, g, scale, bias, state):
        def apply(x, scale, bias):
            return norm.pair(x, scale, bias, state, train=False, where=where, derivative=derivative)

        y, pullback, new = jax.vjp(apply, x, scale, bias, has_aux=True)
        return y, pullback(g), new

    y, gradients, new = step(x, g, scale, bias, state)
    same(new, state)
    frozen = {"mean": mean, "var": var, "stat_names": "C", "where": where}
    close(y, norm.exact(x, scale, bias, **frozen))
    for actual, exact in zip(gradients, norm.exact_cotangents(x, g, scale, bias, **frozen), strict=True):
        close(actual, exact, m=x.size)


@pytest.mark.case(78)
@pytest.mark.parametrize("how", ["jit", "vmap"])
@each_batch_like
def test_in_evaluation_no_example_sees_its_batch_mates(norm, how, rng):
    x, other, _, _ = norm.problem(rng)
    state = nj.BatchStats.init(C=norm.sizes[0])
    evaluate = QUICK[how](lambda x: norm.pair(x, state=state, train=False)[0])
    mixed = np.concatenate([x[:1], other[1:]])
    same(evaluate(x)[0], evaluate(mixed)[0])


@pytest.mark.case(78)
@each_batch_like
def test_batch_statistics_in_inference_leave_the_state_alone_too(norm, rng):
    x, _, scale, bias = norm.problem(rng)
    state = nj.BatchStats.init(C=norm.sizes[0])
    y, new = quick_jit(lambda x, s: norm.pair(x, scale, bias, s, train=False, use_batch_stats=True))(x, state)
    same(new, state)
    close(y, norm.exact(x, scale, bias))


@pytest.mark.case(78)
@each_family
def test_a_state_given_to_a_family_that_keeps_none_comes_back_as_it_was(norm, rng):
    if norm.fn is nj.batch_norm:
        # Under a scan that trains everything else, frozen statistics are a carry that never moves.
        x, _, _, _ = norm.problem(rng)
        state = nj.BatchStats.init(C=norm.sizes[0])
        step = lambda state, _: (norm.pair(x, state=state, train=False)[1], None)  # noqa: E731
        same(quick_jit(lambda state: jax.lax.scan(step, state, length=3)[0])(state), state)
    else:
        state = nj.BatchStats.init(C=3)
        returned = []
        for train in (True, False):
            trace = lambda x: returned.append(norm.pair(x, state=state, train=train)[1])  # noqa: B023, E731
            jax.eval_shape(trace, np.ones(norm.shape, np.float32))
        assert all(each is state for each in returned)
        assert len(returned) == 2


# --- 82: discarded state


@pytest.mark.case(82)
@pytest.mark.parametrize("transform", ["loop", "scan"])
@each_batch_like
def test_ten_steps_show_in_the_count_only_where_the_state_is_kept(norm, transform, rng):
    x, _, _, _ = norm.problem(rng)
    state = nj.BatchStats.init(C=norm.sizes[0])
    train = lambda state: norm.pair(x, state=state)[1]  # noqa: E731
    step = quick_jit(train)
    if transform == "scan":
        kept = quick_jit(lambda state: jax.lax.scan(lambda s, _: (train(s), None), state, length=10)[0])(state)
    else:
        kept = state
        for _ in range(10):
            kept = step(kept)
    for _ in range(10):
        step(state)
    assert kept.count == 10
    assert state.count == 0
    same(state, nj.BatchStats.init(C=norm.sizes[0]))
    mean, _, _ = reference.moments(x, **norm.axes)
    close(kept.mean, (1 - 0.9**10) * mean.reshape(-1, *norm.sizes).mean(0))


@pytest.mark.case(82)
@pytest.mark.parametrize("train", [True, False])
@each_family
def test_every_family_returns_a_pair_in_every_mode(norm, train, rng):
    x, _, scale, bias = norm.problem(rng)
    state = nj.BatchStats.init(C=norm.sizes[0]) if norm.fn is nj.batch_norm else None
    y, new = jax.eval_shape(functools.partial(norm.pair, train=train), x, scale, bias, state)
    assert y.shape == x.shape
    assert type(new) is type(state)
    if train:
        assert jax.eval_shape(norm.pair, x, scale, bias, None)[1] is None


# --- 84: no state


@pytest.mark.case(84)
@pytest.mark.parametrize("how", ["eager", "jit", "vmap", "eval_shape"])
@pytest.mark.parametrize("fn", [nj.batch_norm, nj.sync_batch_norm])
def test_evaluation_without_a_state_says_what_to_pass(fn, how):
    axis_names = "N" if fn is nj.batch_norm else "N data"
    function = lambda x: fn(x, layout="N C", axis_names=axis_names, train=False)[0]  # noqa: E731
    transform = QUICK.get(how, lambda function: lambda x: jax.eval_shape(function, x))
    with pytest.raises(ValueError, match=f"^{fn.__name__}: train=False normalises by running statistics") as raised:
        transform(function)(np.ones((4, 3), np.float32))
    assert "pass the BatchStats that training returned" in str(raised.value)
    assert "use_batch_stats=True to normalise by this batch" in str(raised.value)


@pytest.mark.case(84)
@each_batch_like
def test_both_ways_out_that_the_error_names_work(norm, rng):
    x, _, _, _ = norm.problem(rng)

    @quick_jit
    def program(x):
        by_batch, _ = norm.pair(x, train=False, use_batch_stats=True)
        _, state = norm.pair(x, state=nj.BatchStats.init(C=norm.sizes[0]), running=nj.Ema(1.0))
        return by_batch, state, norm.pair(x, state=state, train=False)[0]

    by_batch, state, by_state = program(x)
    close(by_batch, norm.exact(x))
    close(by_state, norm.exact(x, mean=state.mean, var=state.var, stat_names="C"))


@pytest.mark.case(84)
@pytest.mark.parametrize("state", [{}, {"mean": np.zeros(3), "var": np.ones(3)}, (np.zeros(3), np.ones(3))], ids=repr)
@pytest.mark.parametrize("train", [True, False])
def test_a_state_of_another_kind_is_refused_by_name(state, train):
    kind = type(state).__name__
    with pytest.raises(TypeError, match=f"batch_norm: state must be a normjax.BatchStats; got {kind}"):
        nj.batch_norm(np.ones((4, 3), np.float32), None, state, train=train, **COLUMN)


@pytest.mark.case(84)
@pytest.mark.parametrize("shape", [(4,), (), (2, 3)])
@pytest.mark.parametrize("train", [True, False])
def test_a_state_of_another_size_is_refused_with_both_sizes(shape, train):
    state = nj.BatchStats(np.zeros(shape, np.float32), np.ones(shape, np.float32), 0, np.zeros(shape, np.float32), "C")
    with pytest.raises(ValueError, match=r"batch_norm: state.mean has shape ") as raised:
        nj.batch_norm(np.ones((4, 3), np.float32), None, state, train=train, **COLUMN)
    assert str(shape) in str(raised.value)
