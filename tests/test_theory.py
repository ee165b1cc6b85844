"""The worked numbers and the invariants of the theory, for the library: what must hold whatever the implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from tests.closeness import close64 as close
from tests.quick import quick_jit

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
    return quick_jit(lambda x, params, eps: function(x, params, train=True, eps=eps, **axes)[0])


@functools.cache
def _pullback(family):
    function, axes = FAMILY[family]

    def program(x, params, eps, g):
        y, pullback = jax.vjp(lambda x, params: function(x, params, train=True, eps=eps, **axes)[0], x, params)
        return y, *pullback(g)

    return quick_jit(program)


def norm_and_gradients(family, x, g, params=None, eps=1e-5):
    """The output and the gradients in x and params, by one program a family likewise."""
    return _pullback(family)(x, params, eps, g)


def norm(family, x, params=None, eps=1e-5):
    """The output in training, by one compiled program a family."""
    return _program(family)(x, params, eps)


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
    axes = {"layout": "N C", "axis_names": "N" if family == "batch" else "C"}
    (y, _), found = quick_jit(lambda x: (function(x, params, train=True, **axes), nj.moments(x, **axes)))(x)
    np.testing.assert_allclose(np.ravel(y), [-1.683, 0.106, 1.894, 3.683], atol=5e-4)
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
    close(np.mean(np.square(np.asarray(y))), 5 / (5 + 1e-5), m=4)
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
    y, dx, params = norm_and_gradients(family, x, g, nj.Affine(np.float64(gamma), np.float64(beta)), eps=eps)
    np.testing.assert_array_equal(y, beta)
    assert params.scale == 0
    close(blocks(dx), gamma / np.sqrt(eps) * (blocks(g) - over_groups(family, g, np.mean)), m=g.size)


def test_batch_norm_of_channels_or_of_a_signal_pools_every_position_and_has_two_numbers_a_channel(rng, x64):
    x = rng.normal(size=(3, 2, 4, 5))
    signal = x.reshape(3, 8, 5).swapaxes(1, 2)
    whole = quick_jit(lambda x: nj.moments(x, layout="N H W C", axis_names="N H W"))(x)
    close(whole.mean, x.mean((0, 1, 2)), m=24)
    assert np.all(np.asarray(whole.count) == 24)
    signal = quick_jit(lambda x: nj.moments(x, layout="N C L", axis_names="N L"))(signal)
    close(signal.var, whole.var, m=24)
    assert [leaf.shape for leaf in jax.tree.leaves(nj.Affine.init(C=5))] == [(5,), (5,)]
    assert whole.mean.shape == whole.var.shape == (5,)


def test_group_norm_of_one_block_is_layer_norm_over_channels_and_positions(rng, x64):
    x = rng.normal(1.0, 2.0, SHAPE)
    group, _ = quick_jit(lambda x: nj.group_norm(x, layout="N L C=(G=1 K)", axis_names="L K"))(x)
    layer, _ = quick_jit(lambda x: nj.layer_norm(x, layout="N L C", axis_names="L C"))(x)
    close(group, layer, m=30)


def test_group_norm_of_one_channel_a_block_is_instance_norm(rng, x64):
    x = rng.normal(1.0, 2.0, SHAPE)
    group, _ = quick_jit(lambda x: nj.group_norm(x, layout="N L C=(G K=1)", axis_names="L K"))(x)
    instance, _ = quick_jit(lambda x: nj.instance_norm(x, layout="N L C", axis_names="L"))(x)
    close(group, instance, m=5)


def test_rms_norm_subtracts_nothing(rng, x64):
    x, scale = rng.normal(2.0, 1.0, (3, 6)), rng.normal(size=6)
    y, _ = quick_jit(lambda x: nj.rms_norm(x, nj.Affine(scale, None, "D"), layout="N D", axis_names="D"))(x)
    close(y, scale * x / np.sqrt(np.mean(x**2, 1, keepdims=True) + 1e-5), m=6)


def test_gamma_of_the_spread_and_beta_of_the_mean_give_the_input_back_on_that_batch_alone(rng, x64):
    x, other = rng.normal(3.0, 2.0, (8, 3)), rng.normal(-1.0, 1.0, (8, 3))
    params = nj.Affine(np.sqrt(x.var(0) + 1e-5), x.mean(0), "C")
    train = quick_jit(lambda x: nj.batch_norm(x, params, train=True, **BATCH)[0])
    close(train(x), x, m=8)
    y = train(other)
    close(np.mean(np.asarray(y), 0), x.mean(0), m=8)
    assert np.all(np.abs(np.mean(np.asarray(y), 0) - other.mean(0)) > 1)


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

    @quick_jit
    def f(b):
        y, pullback = jax.vjp(lambda b: nj.batch_norm(x + b, train=True, **BATCH)[0], b)
        return y, pullback(g)[0]

    y, slope = f(b)
    close(y, f(np.zeros(3))[0], m=8)
    # Against the gradients that cancel: each of the eight is some 1/σ.
    close(slope, np.zeros(3), m=8)


# --- backward


def test_the_jacobian_of_the_standardised_group_is_the_projection_of_the_theory_and_symmetric(rng, x64):
    x, m, eps = rng.normal(2.0, 3.0, 6), 6, 0.01
    jacobian = quick_jit(jax.jacrev(lambda x: nj.layer_norm(x, layout="D", axis_names="D", eps=eps)[0]))(x)
    r = np.sqrt(x.var() + eps)
    hat = (x - x.mean()) / r
    close(jacobian, (np.eye(m) - 1 / m - np.outer(hat, hat) / m) / r, m=m)
    close(jacobian, jacobian.T, m=m)


def test_one_gamma_a_group_stands_before_the_backward_and_one_a_feature_inside_it(rng, x64):
    x, g, gamma, eps = rng.normal(1.0, 2.0, (8, 3)), rng.normal(size=(8, 3)), rng.normal(size=3), 1e-5

    def slope(function, axis_names):
        f = lambda x: function(x, nj.Affine(gamma, None, "C"), layout="N C", axis_names=axis_names, train=True)[0]  # noqa: E731
        return quick_jit(lambda x, g: jax.vjp(f, x)[1](g)[0])(x, g)

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
        return quick_jit(jax.jacrev(f))(x)

    own = np.einsum("nm,c,cd->ncmd", np.eye(4), gamma / np.sqrt(var + 1e-5), np.eye(3))
    close(jacobian(False), own)
    between = np.asarray(jacobian(True))[0, :, 1, :]
    assert np.all(np.abs(np.diagonal(between)) > 1e-3)


# --- invariants


@centred
def test_a_shift_leaves_the_output_unchanged_and_the_gradient_sums_to_zero(family, rng, x64):
    x, g = rng.normal(size=SHAPE), rng.normal(size=SHAPE)
    y, dx, _ = norm_and_gradients(family, x, g)
    # x + 64 rounds x to 64·eps, which 1/σ, some 3 at most, carries to y.
    close(norm(family, x + 64.0), y, m=x.size, k=64)
    close(over_groups(family, np.asarray(dx), np.sum), 0, m=x.size)


@pytest.mark.parametrize("a", [3.0, -0.5])
@every_family
def test_scaling_the_input_is_scaling_epsilon_and_a_negative_one_flips_the_sign(family, a, rng, x64):
    x, eps = rng.normal(0.5, 1.0, SHAPE), 0.1
    close(norm(family, a * x, eps=eps), np.sign(a) * np.asarray(norm(family, x, eps=eps / a**2)), m=x.size)
    close(norm(family, a * x, eps=0.0), np.sign(a) * np.asarray(norm(family, x, eps=0.0)), m=x.size)


@every_family
def test_the_gradient_is_orthogonal_to_the_standardised_input_as_epsilon_vanishes(family, rng, x64):
    x, g = rng.normal(0.5, 1.0, SHAPE), rng.normal(size=SHAPE)

    def overlap(eps):
        y, dx, _ = norm_and_gradients(family, x, g, eps=eps)
        return over_groups(family, np.asarray(y) * np.asarray(dx), np.sum)

    close(overlap(0.0), 0, m=x.size)
    # In closed form Σ x̂ dx = (ε/(v+ε)) Σ u x̂ / r: proportional to ε while ε is small.
    close(overlap(2e-6), 2 * overlap(1e-6), m=x.size, k=1e8)
    assert np.all(np.abs(overlap(1e-1)) > 1e-8)


def test_scaling_a_weight_before_the_norm_leaves_the_output_and_shrinks_its_gradient(rng, x64):
    x, w, g = rng.normal(size=(8, 4)), rng.normal(size=(4, 3)), rng.normal(size=(8, 3))

    @quick_jit
    def f(w):
        y, pullback = jax.vjp(lambda w: nj.batch_norm(x @ w, train=True, eps=0.0, **BATCH)[0], w)
        return y, pullback(g)[0]

    (y, slope), (scaled, scaled_slope) = f(w), f(10 * w)
    close(scaled, y, m=32)
    close(10 * np.asarray(scaled_slope), slope, m=32, k=128)


def test_batch_mates_change_the_output_in_training_and_not_in_evaluation(rng, x64):
    x, state = rng.normal(size=(4, 3)), nj.BatchStats.init(C=3)
    other = np.concatenate([x[:1], rng.normal(5.0, 1.0, (3, 3))])

    def outputs(train):
        call = quick_jit(lambda b: nj.batch_norm(b, None, state, train=train, **BATCH)[0])
        return [np.asarray(call(b))[0] for b in (x, other)]

    with_, without = outputs(True)
    assert np.all(np.abs(with_ - without) > 0.1)
    np.testing.assert_array_equal(*outputs(False))


@pytest.mark.parametrize("family", ["layer", "instance", "group", "rms"])
def test_batch_mates_never_change_the_output_of_the_others(family, rng):
    x = rng.normal(size=SHAPE).astype(np.float32)
    other = np.concatenate([x[:1], rng.normal(5.0, 1.0, (3, *SHAPE[1:])).astype(np.float32)])
    np.testing.assert_array_equal(np.asarray(norm(family, x))[0], np.asarray(norm(family, other))[0])


def test_the_statistics_of_a_random_batch_are_noisy_by_one_over_the_root_of_m(rng, x64):
    batches = 4000
    for m in (16, 64):
        found = quick_jit(lambda x: nj.moments(x, layout="B N", axis_names="N"))(rng.normal(size=(batches, m)))
        # The mean of m normals has spread 1/√m and their variance √(2/m); 4000 batches know a spread to 1.1 %.
        np.testing.assert_allclose(np.std(np.asarray(found.mean)) * np.sqrt(m), 1, atol=6 / np.sqrt(2 * batches))
        np.testing.assert_allclose(np.std(np.asarray(found.var)) * np.sqrt(m / 2), 1, atol=0.1)


def test_a_batch_of_one_gives_beta_in_a_dense_layer_and_pools_positions_in_a_convolution(rng, x64):
    x, beta = rng.normal(size=(1, 3)), rng.normal(size=3)
    y, _ = quick_jit(lambda x: nj.batch_norm(x, nj.Affine(np.ones(3), beta, "C"), train=True, **BATCH))(x)
    np.testing.assert_array_equal(y[0], beta)
    image = rng.normal(size=(1, 4, 4, 3))
    y, _ = quick_jit(lambda x: nj.batch_norm(x, layout="N H W C", axis_names="N H W", train=True))(image)
    close(np.var(np.asarray(y), (0, 1, 2)), image.var((0, 1, 2)) / (image.var((0, 1, 2)) + 1e-5), m=16)
