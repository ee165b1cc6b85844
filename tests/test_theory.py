"""The worked numbers and the invariants of the theory, for the library: what must hold whatever the implementation."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference

EPS64 = float(np.finfo(np.float64).eps)

BATCH = {"layout": "N C", "axis_names": "N"}
FAMILY = {
    "batch": (nj.batch_norm, {"layout": "N L C", "axis_names": "N L"}),
    "layer": (nj.layer_norm, {"layout": "N L C", "axis_names": "C"}),
    "instance": (nj.instance_norm, {"layout": "N L C", "axis_names": "L"}),
    "group": (nj.group_norm, {"layout": "N L C=(G=2 K)", "axis_names": "L K"}),
    "rms": (nj.rms_norm, {"layout": "N L C", "axis_names": "C"}),
}
SHAPE = (4, 5, 6)
centred = pytest.mark.parametrize("family", ["batch", "layer", "instance", "group"])
every_family = pytest.mark.parametrize("family", FAMILY)


@functools.cache
def _program(family):
    function, axes = FAMILY[family]
    return jax.jit(lambda x, params, eps: function(x, params, train=True, eps=eps, **axes)[0])


def norm(family, x, params=None, eps=1e-5):
    """The output in training, by one compiled program a family."""
    return _program(family)(x, params, eps)


def close(actual, expected, *, m=1, k=32):
    """Equal within k·eps·√m of the largest expected number, in float64."""
    size = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=k * EPS64 * np.sqrt(m) * size)


def over_groups(family, x, reduce):
    """`reduce` over the axes that the family pools, of an array of SHAPE with its channels in two blocks."""
    axes = {"batch": (0, 1), "layer": (2, 3), "instance": (1,), "group": (1, 3), "rms": (2, 3)}[family]
    return reduce(blocks(x), axis=axes, keepdims=True)


def blocks(x):
    """The same array with its channels in two blocks."""
    return np.reshape(x, (4, 5, 2, 3))


# --- worked numbers


@pytest.mark.parametrize("family", ["batch", "layer"])
def test_one_three_five_seven_with_gamma_two_and_beta_one(family, x64):
    x = np.array([1.0, 3.0, 5.0, 7.0])
    x = x[:, None] if family == "batch" else x[None]
    function = nj.batch_norm if family == "batch" else nj.layer_norm
    names = "C" if family == "batch" else ""
    params = nj.Affine(np.full((1,) if names else (), 2.0), np.full((1,) if names else (), 1.0), names)
    y, _ = function(x, params, layout="N C", axis_names="N" if family == "batch" else "C", train=True)
    np.testing.assert_allclose(np.ravel(y), [-1.683, 0.106, 1.894, 3.683], atol=5e-4)
    found = nj.moments(x, layout="N C", axis_names="N" if family == "batch" else "C")
    assert (found.mean.item(), found.var.item(), found.count.item()) == (4.0, 5.0, 4.0)


def test_running_statistics_of_3_8_and_5_4_map_five_to_2_033(x64):
    state = nj.BatchStats(np.array([3.8]), np.array([5.4]), 1, np.ones(1, np.float32), "C")
    params = nj.Affine(np.array([2.0]), np.array([1.0]), "C")
    y, _ = nj.batch_norm(np.array([[5.0]]), params, state, train=False, **BATCH)
    np.testing.assert_allclose(y.item(), 2.033, atol=5e-4)


def test_one_two_three_and_three_by_given_moments(x64):
    y, _ = nj.layer_norm(np.array([[1.0, 2.0, 3.0]]), layout="N D", axis_names="D")
    np.testing.assert_allclose(y, [[-1.2247, 0, 1.2247]], atol=5e-5)
    given = nj.Moments(2.0, 2 / 3, 3.0)
    y, _ = nj.normalize(np.array([3.0]), layout="N", axis_names="N", moments=given)
    np.testing.assert_allclose(y, [1.2247], atol=5e-5)


@pytest.mark.parametrize(("unbiased", "stored"), [(False, 5.0), (True, 20 / 3)])
def test_the_biased_variance_normalises_and_the_stored_one_is_a_convention(unbiased, stored, x64):
    x = np.array([[1.0], [3.0], [5.0], [7.0]])
    state = nj.BatchStats.init(C=1, dtype=jnp.float64)
    y, new = nj.batch_norm(x, None, state, train=True, running=nj.Ema(0.25, unbiased=unbiased), **BATCH)
    close(np.mean(np.square(y)), 5 / (5 + 1e-5), m=4)
    close(new.var, [0.75 * 1 + 0.25 * stored])
    close(new.mean, [0.25 * 4])


# --- forward


@every_family
def test_epsilon_is_inside_the_root_so_the_standardised_variance_is_v_over_v_plus_epsilon(family, rng, x64):
    x, eps = rng.normal(3.0, 0.5, SHAPE), 0.1
    y = norm(family, x, eps=eps)
    center = 0.0 if family == "rms" else over_groups(family, x, np.mean)
    v = over_groups(family, (blocks(x) - center) ** 2, np.mean)
    close(over_groups(family, np.asarray(y) ** 2, np.mean), v / (v + eps), m=x.size)


@centred
def test_a_constant_group_gives_beta_no_scale_gradient_and_only_the_projection_in_x(family, rng, x64):
    eps, gamma, beta = 1e-3, 1.7, 0.3
    x, g = np.full(SHAPE, 0.1), rng.normal(size=SHAPE)
    f = lambda x, params: norm(family, x, params, eps=eps)  # noqa: E731
    y, pullback = jax.vjp(f, x, nj.Affine(jnp.array(gamma), jnp.array(beta)))
    np.testing.assert_array_equal(y, beta)
    dx, params = pullback(jnp.asarray(g))
    assert params.scale == 0
    close(blocks(dx), gamma / np.sqrt(eps) * (blocks(g) - over_groups(family, g, np.mean)), m=g.size)


def test_batch_norm_of_channels_or_of_a_signal_pools_every_position_and_has_two_numbers_a_channel(rng, x64):
    x = rng.normal(size=(3, 2, 4, 5))
    whole = nj.moments(x, layout="N H W C", axis_names="N H W")
    close(whole.mean, x.mean((0, 1, 2)), m=24)
    assert np.all(np.asarray(whole.count) == 24)
    signal = nj.moments(x.reshape(3, 8, 5).swapaxes(1, 2), layout="N C L", axis_names="N L")
    close(signal.var, whole.var, m=24)
    assert [leaf.shape for leaf in jax.tree.leaves(nj.Affine.init(C=5))] == [(5,), (5,)]
    assert whole.mean.shape == whole.var.shape == (5,)


def test_group_norm_of_one_block_is_layer_norm_over_channels_and_positions(rng, x64):
    x = rng.normal(1.0, 2.0, SHAPE)
    group, _ = nj.group_norm(x, layout="N L C=(G=1 K)", axis_names="L K")
    layer, _ = nj.layer_norm(x, layout="N L C", axis_names="L C")
    close(group, layer, m=30)


def test_group_norm_of_one_channel_a_block_is_instance_norm(rng, x64):
    x = rng.normal(1.0, 2.0, SHAPE)
    group, _ = nj.group_norm(x, layout="N L C=(G K=1)", axis_names="L K")
    instance, _ = nj.instance_norm(x, layout="N L C", axis_names="L")
    close(group, instance, m=5)


def test_rms_norm_subtracts_nothing(rng, x64):
    x, scale = rng.normal(2.0, 1.0, (3, 6)), rng.normal(size=6)
    y, _ = nj.rms_norm(x, nj.Affine(scale, None, "D"), layout="N D", axis_names="D")
    close(y, scale * x / np.sqrt(np.mean(x**2, 1, keepdims=True) + 1e-5), m=6)


def test_gamma_of_the_spread_and_beta_of_the_mean_give_the_input_back_on_that_batch_alone(rng, x64):
    x, other = rng.normal(3.0, 2.0, (8, 3)), rng.normal(-1.0, 1.0, (8, 3))
    params = nj.Affine(np.sqrt(x.var(0) + 1e-5), x.mean(0), "C")
    close(nj.batch_norm(x, params, train=True, **BATCH)[0], x, m=8)
    y, _ = nj.batch_norm(other, params, train=True, **BATCH)
    close(np.mean(y, 0), x.mean(0), m=8)
    assert np.all(np.abs(np.mean(y, 0) - other.mean(0)) > 1)


# --- running statistics and evaluation


def test_evaluation_is_a_fixed_affine_map_that_folds_into_the_layer_before(rng, x64):
    x, w, b = rng.normal(size=(7, 4)), rng.normal(size=(4, 3)), rng.normal(size=3)
    gamma, beta, mean = rng.normal(size=(3, 3))
    var = rng.uniform(0.5, 2.0, 3)
    state = nj.BatchStats(mean, var, 1, np.ones(3, np.float32), "C")
    y, same = nj.batch_norm(x @ w + b, nj.Affine(gamma, beta, "C"), state, train=False, **BATCH)
    factor = gamma / np.sqrt(var + 1e-5)
    close(y, x @ (w * factor) + (b - mean) * factor + beta, m=4)
    assert same is state


def test_a_bias_before_batch_norm_gets_no_gradient_and_changes_nothing(rng, x64):
    x, b, g = rng.normal(size=(8, 3)), rng.normal(size=3), rng.normal(size=(8, 3))
    f = lambda b: nj.batch_norm(x + b, train=True, **BATCH)[0]  # noqa: E731
    close(f(b), f(np.zeros(3)), m=8)
    # Against the gradients that cancel: each of the eight is some 1/σ.
    close(jax.vjp(f, b)[1](jnp.asarray(g))[0], np.zeros(3), m=8)


# --- backward


def test_the_jacobian_of_the_standardised_group_is_the_projection_of_the_theory_and_symmetric(rng, x64):
    x, m, eps = rng.normal(2.0, 3.0, 6), 6, 0.01
    jacobian = jax.jacrev(lambda x: nj.layer_norm(x, layout="D", axis_names="D", eps=eps)[0])(x)
    r = np.sqrt(x.var() + eps)
    hat = (x - x.mean()) / r
    close(jacobian, (np.eye(m) - 1 / m - np.outer(hat, hat) / m) / r, m=m)
    close(jacobian, jacobian.T, m=m)


def test_one_gamma_a_group_stands_before_the_backward_and_one_a_feature_inside_it(rng, x64):
    x, g, gamma, eps = rng.normal(1.0, 2.0, (8, 3)), rng.normal(size=(8, 3)), rng.normal(size=3), 1e-5

    def slope(function, axis_names):
        f = lambda x: function(x, nj.Affine(gamma, None, "C"), layout="N C", axis_names=axis_names, train=True)[0]  # noqa: E731
        return jax.vjp(f, x)[1](jnp.asarray(g))[0]

    hat, r = (x - x.mean(0)) / np.sqrt(x.var(0) + eps), np.sqrt(x.var(0) + eps)
    close(slope(nj.batch_norm, "N"), gamma / r * (g - g.mean(0) - hat * (g * hat).mean(0)), m=24)
    mean, r = x.mean(1, keepdims=True), np.sqrt(x.var(1, keepdims=True) + eps)
    hat, u = (x - mean) / r, gamma * g
    right = (u - u.mean(1, keepdims=True) - hat * (u * hat).mean(1, keepdims=True)) / r
    wrong = gamma * (g - g.mean(1, keepdims=True) - hat * (g * hat).mean(1, keepdims=True)) / r
    close(slope(nj.layer_norm, "C"), right, m=24)
    assert np.max(np.abs(right - wrong)) > 0.1
    r = np.sqrt((x**2).mean(1, keepdims=True) + eps)
    hat = x / r
    close(slope(nj.rms_norm, "C"), (u - hat * (u * hat).mean(1, keepdims=True)) / r, m=24)


def test_training_couples_the_examples_and_frozen_statistics_do_not(rng, x64):
    x, gamma, var = rng.normal(size=(4, 3)), rng.normal(size=3), rng.uniform(0.5, 2.0, 3)
    state = nj.BatchStats(rng.normal(size=3), var, 1, np.ones(3, np.float32), "C")

    def jacobian(train):
        f = lambda x: nj.batch_norm(x, nj.Affine(gamma, None, "C"), state, train=train, **BATCH)[0]  # noqa: E731
        return jax.jacrev(f)(x)

    own = np.einsum("nm,c,cd->ncmd", np.eye(4), gamma / np.sqrt(var + 1e-5), np.eye(3))
    close(jacobian(False), own)
    between = jacobian(True)[0, :, 1, :]
    assert np.all(np.abs(np.diagonal(between)) > 1e-3)


# --- invariants


@centred
def test_a_shift_leaves_the_output_unchanged_and_the_gradient_sums_to_zero(family, rng, x64):
    x, g = rng.normal(size=SHAPE), rng.normal(size=SHAPE)
    y, pullback = jax.vjp(lambda x: norm(family, x), x)
    # x + 64 rounds x to 64·eps, which 1/σ, some 3 at most, carries to y.
    close(norm(family, x + 64.0), y, m=x.size, k=64)
    close(over_groups(family, np.asarray(pullback(jnp.asarray(g))[0]), np.sum), 0, m=x.size)


@pytest.mark.parametrize("a", [3.0, -0.5])
@every_family
def test_scaling_the_input_is_scaling_epsilon_and_a_negative_one_flips_the_sign(family, a, rng, x64):
    x, eps = rng.normal(0.5, 1.0, SHAPE), 0.1
    close(norm(family, a * x, eps=eps), np.sign(a) * norm(family, x, eps=eps / a**2), m=x.size)
    close(norm(family, a * x, eps=0.0), np.sign(a) * norm(family, x, eps=0.0), m=x.size)


@every_family
def test_the_gradient_is_orthogonal_to_the_standardised_input_as_epsilon_vanishes(family, rng, x64):
    x, g = rng.normal(0.5, 1.0, SHAPE), rng.normal(size=SHAPE)

    def overlap(eps):
        y, pullback = jax.vjp(lambda x: norm(family, x, eps=eps), x)
        return over_groups(family, np.asarray(y * pullback(jnp.asarray(g))[0]), np.sum)

    close(overlap(0.0), 0, m=x.size)
    # In closed form Σ x̂ dx = (ε/(v+ε)) Σ u x̂ / r: proportional to ε while ε is small.
    close(overlap(2e-6), 2 * overlap(1e-6), m=x.size, k=1e8)
    assert np.all(np.abs(overlap(1e-1)) > 1e-8)


def test_scaling_a_weight_before_the_norm_leaves_the_output_and_shrinks_its_gradient(rng, x64):
    x, w, g = rng.normal(size=(8, 4)), rng.normal(size=(4, 3)), rng.normal(size=(8, 3))
    f = lambda w: nj.batch_norm(x @ w, train=True, eps=0.0, **BATCH)[0]  # noqa: E731
    y, pullback = jax.vjp(f, w)
    scaled, scaled_pullback = jax.vjp(f, 10 * w)
    close(scaled, y, m=32)
    close(10 * scaled_pullback(jnp.asarray(g))[0], pullback(jnp.asarray(g))[0], m=32, k=128)


def test_batch_mates_change_the_output_in_training_and_not_in_evaluation(rng, x64):
    x, state = rng.normal(size=(4, 3)), nj.BatchStats.init(C=3)
    other = np.concatenate([x[:1], rng.normal(5.0, 1.0, (3, 3))])
    outputs = lambda train: [nj.batch_norm(b, None, state, train=train, **BATCH)[0][0] for b in (x, other)]  # noqa: E731
    with_, without = outputs(True)
    assert np.all(np.abs(with_ - without) > 0.1)
    np.testing.assert_array_equal(*outputs(False))


@pytest.mark.parametrize("family", ["layer", "instance", "group", "rms"])
def test_batch_mates_never_change_the_output_of_the_others(family, rng):
    x = rng.normal(size=SHAPE).astype(np.float32)
    other = np.concatenate([x[:1], rng.normal(5.0, 1.0, (3, *SHAPE[1:])).astype(np.float32)])
    np.testing.assert_array_equal(norm(family, x)[0], norm(family, other)[0])


def test_the_statistics_of_a_random_batch_are_noisy_by_one_over_the_root_of_m(rng, x64):
    batches = 4000
    for m in (16, 64):
        found = nj.moments(rng.normal(size=(batches, m)), layout="B N", axis_names="N")
        # The mean of m normals has spread 1/√m and their variance √(2/m); 4000 batches know a spread to 1.1 %.
        np.testing.assert_allclose(np.std(found.mean) * np.sqrt(m), 1, atol=6 / np.sqrt(2 * batches))
        np.testing.assert_allclose(np.std(found.var) * np.sqrt(m / 2), 1, atol=0.1)


def test_a_batch_of_one_gives_beta_in_a_dense_layer_and_pools_positions_in_a_convolution(rng, x64):
    x, beta = rng.normal(size=(1, 3)), rng.normal(size=3)
    y, _ = nj.batch_norm(x, nj.Affine(np.ones(3), beta, "C"), train=True, **BATCH)
    np.testing.assert_array_equal(y[0], beta)
    image = rng.normal(size=(1, 4, 4, 3))
    y, _ = nj.batch_norm(image, layout="N H W C", axis_names="N H W", train=True)
    close(np.var(y, (0, 1, 2)), image.var((0, 1, 2)) / (image.var((0, 1, 2)) + 1e-5), m=16)


# --- properties

SHAPES = [(1,), (2,), (7,), (3, 4), (2, 3, 5)]
profile = hypothesis.settings(deadline=None, derandomize=True, max_examples=25, database=None)


def arrays(spread: float):
    elements = st.floats(-spread, spread, width=32, allow_subnormal=False)
    return st.sampled_from(SHAPES).flatmap(lambda shape: hnp.arrays(np.float32, (*shape, 2), elements=elements))


@functools.cache
def _forward(center):
    def forward(x, where):
        options = {"center": center, "where": where, "eps": 1e-3}
        return nj.normalize(x, layout="... C", axis_names="...", **options)

    return jax.jit(forward)


@profile
@hypothesis.given(x=arrays(1000.0), center=st.booleans(), data=st.data())
def test_any_finite_input_under_any_mask_is_within_1e_5_of_the_reference(x, center, data):
    where = data.draw(hnp.arrays(bool, x.shape))
    y, found = _forward(center)(x, where)
    axes = {"layout": "... C", "axis_names": "...", "where": where, "center": center}
    expected = reference.normalize(x, eps=1e-3, **axes)
    # An excluded entry may lie far outside: its x̂ is as precise as it is large.
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    mean, var, count = reference.moments(x, **axes)
    eps32 = float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(found.mean, mean, rtol=0, atol=4 * eps32 * np.max(np.abs(x), initial=0))
    np.testing.assert_allclose(found.var, var, rtol=64 * eps32, atol=1e-30)
    np.testing.assert_array_equal(found.count, count)


@jax.jit
def _merged(x, owners):
    parts = [nj.moments(x, where=owners == i, layout="N C", axis_names="N") for i in range(3)]
    return nj.merge(*parts), nj.merge(*parts[::-1])


@profile
@hypothesis.given(x=arrays(100.0), data=st.data())
def test_moments_of_any_split_merge_to_those_of_the_whole_in_any_order(x, data):
    x = x.reshape(-1, 2).astype(np.float64)
    owners = data.draw(hnp.arrays(np.int32, (len(x), 1), elements=st.integers(0, 2)))
    with jax.enable_x64(True):
        for found in _merged(x, owners):
            close(found.mean, x.mean(0), m=len(x))
            close(found.var, x.var(0), m=len(x))
            np.testing.assert_array_equal(found.count, len(x))


@functools.cache
def _updated(debias):
    def step(x, state, alpha):
        batch = nj.moments(x, layout="N C", axis_names="N")
        return batch, nj.update(state, batch, running=nj.Ema(alpha, debias=debias))

    return jax.jit(step)


@profile
@hypothesis.given(x=arrays(100.0), alpha=st.floats(0, 1, width=32), debias=st.booleans())
def test_running_statistics_stay_between_the_least_and_the_largest_seen(x, alpha, debias):
    x = x.reshape(-1, 2)
    state = nj.BatchStats.init(C=2)
    low, high = jax.tree.map(np.array, (state.mean, state.var)), jax.tree.map(np.array, (state.mean, state.var))
    for i in range(3):
        batch, state = _updated(debias)(x * (i - 1), state, alpha)
        low = jax.tree.map(np.minimum, low, (batch.mean, batch.var))
        high = jax.tree.map(np.maximum, high, (batch.mean, batch.var))
        for least, stored, largest in zip(low, (state.mean, state.var), high, strict=True):
            assert np.all(least <= stored)
            assert np.all(stored <= largest)


@jax.jit
def _slope(x, g):
    return jax.vjp(lambda x: nj.batch_norm(x, train=True, eps=1e-3, **BATCH)[0], x)[1](g)[0]


@profile
@hypothesis.given(x=arrays(10.0), seed=st.integers(0, 2**16))
def test_the_gradient_of_any_input_sums_to_zero_over_its_group(x, seed):
    x = x.reshape(-1, 2).astype(np.float64)
    g = np.random.default_rng(seed).normal(size=x.shape)
    with jax.enable_x64(True):
        # Each term is at most 1/√ε times the largest cotangent.
        bound = 32 * EPS64 * np.sqrt(x.size) * np.abs(g).max() / np.sqrt(1e-3)
        np.testing.assert_allclose(np.sum(_slope(x, g), 0), 0, atol=bound)
