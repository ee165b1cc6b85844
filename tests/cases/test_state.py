"""Cases of running statistics: start values, freezing, merging, discarding, and weight decay."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import normjax as nj
from normjax import reference
from tests.cases.common import FAMILY, HOW, close, each_batch_like, each_family, each_how, same

COLUMN = {"layout": "N C", "axis_names": "N"}
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

    transform = HOW.get(how, lambda function: lambda x: jax.eval_shape(function, x))
    with pytest.raises(ValueError, match=r"batch_norm: running=.*needs more than one entry in a group, but m = 1"):
        transform(function)(np.ones(shape, np.float32))


@pytest.mark.case(75)
@each_rule_compiled_and_one_otherwise
def test_one_example_with_positions_stores_the_unbiased_variance(running, how, rng):
    x = np.asarray(rng.standard_normal((1, 3, 4, 4)), np.float32)

    def function(x):
        options = {"layout": "N C H W", "axis_names": "N H W", "train": True, "running": running}
        return nj.batch_norm(x, None, nj.BatchStats.init(C=3), **options)

    y, state = HOW[how](function)(x)
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
    state = HOW[how](function)(x, where)
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
    y = HOW[how](lambda x: norm.pair(x, state=state, train=False)[0])(x)
    same(y, np.full(norm.shape, 1 / np.sqrt(1.00001)).astype(np.float32).astype(dtype))


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

    @jax.jit
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
    evaluate = HOW[how](lambda x: norm.pair(x, state=state, train=False)[0])
    mixed = np.concatenate([x[:1], other[1:]])
    same(evaluate(x)[0], evaluate(mixed)[0])


@pytest.mark.case(78)
@each_batch_like
def test_batch_statistics_in_inference_leave_the_state_alone_too(norm, rng):
    x, _, scale, bias = norm.problem(rng)
    state = nj.BatchStats.init(C=norm.sizes[0])
    y, new = jax.jit(lambda x, s: norm.pair(x, scale, bias, s, train=False, use_batch_stats=True))(x, state)
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
        same(jax.jit(lambda state: jax.lax.scan(step, state, length=3)[0])(state), state)
    else:
        state = nj.BatchStats.init(C=3)
        for train in (True, False):
            assert norm.pair(np.ones(norm.shape, np.float32), state=state, train=train)[1] is state


# --- 79: micro-batches


@pytest.mark.case(79)
@each_how
def test_four_updates_with_mean_1_weigh_0_3439_and_one_combined_update_0_1(how):
    x = np.ones((4, 2, 3), np.float32)

    def function(x):
        one_by_one = nj.BatchStats.init(C=3)
        for part in x:
            _, one_by_one = nj.batch_norm(part, None, one_by_one, train=True, **COLUMN)
        merged = nj.merge(*(nj.moments(part, **COLUMN) for part in x))
        return one_by_one, nj.update(nj.BatchStats.init(C=3), merged)

    one_by_one, combined = HOW[how](function)(x)
    close(one_by_one.mean, np.full(3, 1 - 0.9**4))
    close(combined.mean, np.full(3, 0.1))
    assert (one_by_one.count, combined.count) == (4, 1)


@functools.cache
def merged_parts(center):
    return jax.jit(lambda parts: nj.merge(*(nj.moments(part, center=center, **COLUMN) for part in parts)))


SPLITS = [[8, 8], [1, 15], [4, 4, 4, 4], [3, 0, 6, 7], [1] * 16]


@pytest.mark.case(79)
@pytest.mark.parametrize("center", [True, False], ids=["centred", "uncentred"])
@pytest.mark.parametrize("mean", [0.0, 1e4], ids=["at 0", "at 10⁴"])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_merged_moments_of_micro_batches_are_those_of_the_full_batch(sizes, mean, center, rng):
    x = np.asarray(rng.standard_normal((16, 5)) + mean, np.float32)
    parts = np.split(x, np.cumsum(sizes)[:-1])
    merged = merged_parts(center)(parts)
    exact_mean, exact_var, count = reference.moments(x, center=center, **COLUMN)
    same(merged.count, count.astype(np.float32))
    # Each part's mean is rounded once: the variance of those roundings is second order, their product first.
    np.testing.assert_allclose(merged.mean, exact_mean, rtol=2e-7, atol=1e-6)
    spacing = np.spacing(np.float32(mean)) if center else 0
    np.testing.assert_allclose(merged.var, exact_var, rtol=4e-6 + 4 * spacing)
    if mean == 0:
        y, _ = jax.jit(lambda x, merged: nj.normalize(x, moments=merged, center=center, **COLUMN))(x, merged)
        close(y, reference.normalize(x, center=center, **COLUMN))


@pytest.mark.case(79)
@pytest.mark.parametrize("road", ["stacked", "scan", "pairwise"])
def test_merging_a_stack_a_scan_and_pairs_agree(road, rng):
    x = np.asarray(rng.standard_normal((4, 2, 3, 5)), np.float32)  # four micro-batches "N L C"
    axes = {"layout": "N L C", "axis_names": "N L"}
    if road == "stacked":
        merged = jax.jit(lambda x: nj.merge(jax.vmap(lambda part: nj.moments(part, **axes))(x), axis=0))(x)
    elif road == "scan":
        body = lambda total, part: (nj.merge(total, nj.moments(part, **axes)), None)  # noqa: E731
        merged, _ = jax.jit(lambda x: jax.lax.scan(body, nj.Moments.init(C=5), x))(x)
    else:

        @jax.jit
        def by_pairs(x):
            a, b, c, d = (nj.moments(part, **axes) for part in x)
            return nj.merge(nj.merge(a, b), nj.merge(c, nj.merge(d, nj.Moments.init(C=5))))

        merged = by_pairs(x)
    mean, var, count = reference.moments(x.reshape(8, 3, 5), **axes)
    close(merged.mean, mean)
    close(merged.var, var)
    same(merged.count, count.astype(np.float32))
    state, expected = nj.update(nj.BatchStats.init(C=5), merged), nj.BatchStats.init(C=5)
    _, expected = nj.batch_norm(x.reshape(8, 3, 5), None, expected, train=True, **axes)
    close(state.mean, np.float64(expected.mean))
    close(state.var, np.float64(expected.var))


# --- 80: re-estimated statistics


@pytest.mark.case(80)
@each_how
def test_three_unequal_batches_merge_to_3_75_and_6_1875_and_average_by_their_entries(how):
    batches = [np.array(values, np.float32)[:, None] for values in ([0], [3], [6, 6])]
    original = nj.BatchStats(
        np.full(1, 9, np.float32), np.full(1, 9, np.float32), jnp.array(5), np.ones(1, np.float32), "C"
    )

    def function(*batches):
        merged = nj.merge(*(nj.moments(x, **COLUMN) for x in batches))
        averaged = {"entries": nj.BatchStats.init(C=1), "updates": nj.BatchStats.init(C=1)}
        for x in batches:
            for by, state in averaged.items():
                averaged[by] = nj.batch_norm(x, None, state, train=True, running=nj.Cumulative(by=by), **COLUMN)[1]
        fresh = nj.update(nj.BatchStats.init(C=1), merged, running=nj.Ema(1.0))
        return merged, averaged, fresh, nj.update(original, merged)

    merged, averaged, fresh, _ = HOW[how](function)(*batches)
    close((merged.mean[0], merged.var[0], merged.count[0]), (3.75, 6.1875, 4))
    close((fresh.mean[0], fresh.var[0]), (3.75, 6.1875))
    by_entries, by_updates = averaged["entries"], averaged["updates"]
    close((by_entries.mean[0], by_entries.weight[0], by_entries.count), (3.75, 4, 3))
    close((by_updates.mean[0], by_updates.weight[0], by_updates.count), (3, 3, 3))
    close((by_entries.var[0], by_updates.var[0]), (0, 0))  # the batches' own variances, averaged
    close((original.mean[0], original.var[0], original.count), (9, 9, 5))


@pytest.mark.case(80)
@pytest.mark.parametrize("by", ["entries", "updates"])
@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_cumulative_averages_of_random_batches_are_the_reference_s(by, masked, rng):
    state, expected = nj.BatchStats.init(C=3), (np.zeros(3), np.ones(3), np.zeros(3))
    originals = jax.tree.map(np.array, state)
    start = state

    @jax.jit
    def step(x, state, where):
        return nj.batch_norm(x, None, state, where=where, train=True, running=nj.Cumulative(by=by), **COLUMN)[1]

    for size in (5, 1, 8, 2):
        x = np.asarray(rng.normal(2, 3, (size, 3)), np.float32)
        where = rng.random(x.shape) < 0.7 if masked else None
        state = step(x, state, where)
        batch = reference.moments(x, where=where, **COLUMN)
        expected = reference.update(*expected, *batch, rule=f"cumulative_{by}")
    for actual, exact in zip((state.mean, state.var, state.weight), expected, strict=True):
        close(actual, exact)
    same(start, originals)


# --- 82: discarded state


@pytest.mark.case(82)
@pytest.mark.parametrize("transform", ["loop", "scan"])
@each_batch_like
def test_ten_steps_show_in_the_count_only_where_the_state_is_kept(norm, transform, rng):
    x, _, _, _ = norm.problem(rng)
    state = nj.BatchStats.init(C=norm.sizes[0])
    step = jax.jit(lambda state: norm.pair(x, state=state)[1])
    if transform == "scan":
        kept = jax.jit(lambda state: jax.lax.scan(lambda s, _: (step(s), None), state, length=10)[0])(state)
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
    y, new = norm.pair(x, scale, bias, state, train=train)
    assert y.shape == x.shape
    assert type(new) is type(state)
    if train:
        assert norm.pair(x, scale, bias, None)[1] is None


# --- 84: no state


@pytest.mark.case(84)
@pytest.mark.parametrize("how", ["eager", "jit", "vmap", "eval_shape"])
@pytest.mark.parametrize("fn", [nj.batch_norm, nj.sync_batch_norm])
def test_evaluation_without_a_state_says_what_to_pass(fn, how):
    axis_names = "N" if fn is nj.batch_norm else "N data"
    function = lambda x: fn(x, layout="N C", axis_names=axis_names, train=False)[0]  # noqa: E731
    transform = HOW.get(how, lambda function: lambda x: jax.eval_shape(function, x))
    with pytest.raises(ValueError, match=f"^{fn.__name__}: train=False normalises by running statistics") as raised:
        transform(function)(np.ones((4, 3), np.float32))
    assert "pass the BatchStats that training returned" in str(raised.value)
    assert "use_batch_stats=True to normalise by this batch" in str(raised.value)


@pytest.mark.case(84)
@each_batch_like
def test_both_ways_out_that_the_error_names_work(norm, rng):
    x, _, _, _ = norm.problem(rng)
    y, _ = norm.pair(x, train=False, use_batch_stats=True)
    close(y, norm.exact(x))
    _, state = norm.pair(x, state=nj.BatchStats.init(C=norm.sizes[0]), running=nj.Ema(1.0))
    y, _ = norm.pair(x, state=state, train=False)
    close(y, norm.exact(x, mean=state.mean, var=state.var, stat_names="C"))


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


# --- 86: weight decay


def decayed(params, rate=0.1, learning_rate=0.5):
    """The parameters after one step of AdamW with gradients of zero: only the decay moves them."""
    optimiser = optax.adamw(learning_rate, weight_decay=rate, mask=nj.decay_mask)
    updates, _ = optimiser.update(jax.tree.map(jnp.zeros_like, params), optimiser.init(params), params)
    return optax.apply_updates(params, updates)


NORM_PARAMETERS = {
    "per channel": nj.Affine.init(C=4),
    "over several axes": nj.Affine.init(H=2, W=3, C=4),
    "kept as (1, 1, C)": nj.Affine(jnp.ones((1, 1, 4)), jnp.zeros((1, 1, 4)), "H W C"),
    "scalar": nj.Affine.init(),
    "scale alone": nj.Affine.init(C=4, bias=False),
    "bias alone": nj.Affine.init(C=4, scale=False),
    "zero-centred": nj.Affine.init(C=4, scale_init=1.5, zero_centered=True),
    "conditional": nj.Affine.init(N=2, C=4, scale_init=2.0),
}


@pytest.mark.case(86)
@pytest.mark.parametrize("affine", NORM_PARAMETERS.values(), ids=NORM_PARAMETERS)
def test_weight_decay_reaches_kernels_and_no_scale_or_bias_of_a_norm(affine):
    kernel, bias = jnp.full((3, 4), 2.0), jnp.full(4, 2.0)
    same(decayed(affine), affine)
    params = {
        "dict": {"norm": affine, "dense": {"kernel": kernel, "bias": bias}},
        "list": [kernel, affine, (bias, affine)],
        "deep": {"block": [{"conv": {"kernel": kernel, "bias": bias}, "norm": {"affine": affine}}]},
    }
    new = decayed(params)
    is_affine = lambda node: isinstance(node, nj.Affine)  # noqa: E731
    for before, after in zip(
        jax.tree.leaves(params, is_leaf=is_affine), jax.tree.leaves(new, is_leaf=is_affine), strict=True
    ):
        if is_affine(before):
            same(after, before)
        else:
            close(after, np.asarray(before) * (1 - 0.5 * 0.1))


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(4)(x)
        x = linen.BatchNorm(use_running_average=True, use_bias=False)(x)
        x = linen.LayerNorm(reduction_axes=(-2, -1), feature_axes=(-2, -1))(x)
        return linen.RMSNorm()(x)


class NnxModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(4, rngs=rngs), nnx.BatchNorm(4, use_bias=False, rngs=rngs)])


@pytest.mark.case(86)
@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_the_norms_of_flax_are_spared_as_well(kind):
    if kind == "linen":
        params = LinenModel().init(jax.random.key(0), jnp.ones((2, 5, 3)))["params"]
    else:
        params = nnx.to_pure_dict(nnx.state(NnxModel(), nnx.Param))
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 2.0), params)
    seen = {"norm": 0, "dense": 0}
    for path, leaf in jax.tree_util.tree_leaves_with_path(decayed(params)):
        dense = "dense" in jax.tree_util.keystr(path).lower()
        seen["dense" if dense else "norm"] += 1
        close(leaf, np.full(leaf.shape, 2.0 * (1 - 0.5 * 0.1) if dense else 2.0))
    assert seen["dense"] == 2
    assert seen["norm"] >= 3


@pytest.mark.case(86)
def test_the_usual_rule_by_rank_would_decay_what_the_mask_spares():
    affine = NORM_PARAMETERS["kept as (1, 1, C)"]
    by_rank = jax.tree.map(lambda leaf: leaf.ndim > 1, affine)
    mask = nj.decay_mask(affine)
    assert jax.tree.leaves(by_rank) == [True, True]
    assert jax.tree.leaves(mask) == [False, False]
    assert jax.tree.structure(mask) == jax.tree.structure(affine)
    assert jax.tree.leaves(nj.decay_mask({"w": jnp.ones(4), "b": jnp.ones(())})) == [True, True]
