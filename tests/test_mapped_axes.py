"""Names that are mapped axes of vmap: shards pool as the concatenated batch does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.closeness import close
from tests.quick import quick_jit


def shards(rng, number, rows=4, features=3):
    return rng.normal(2.0, 3.0, (number, rows, features)).astype(np.float32)


def synchronised(x, params, state, where=None, *, axis_names="N data", **options):
    """Batch norm of each shard of x, all of which share their statistics; the new state is the same for all."""

    def layer(x, where):
        return nj.batch_norm(x, params, state, layout="N C", axis_names=axis_names, train=True, where=where, **options)

    # Under jit throughout these tests: op by op, each shape of each primitive would compile by itself.
    return quick_jit(jax.vmap(layer, axis_name="data", out_axes=(0, None)))(x, where)


def whole(x, params, state, where=None):
    """The reference on the concatenated batch: y, and the running (mean, var)."""
    flat = x.reshape(-1, x.shape[-1])
    where = None if where is None else where.reshape(-1, where.shape[-1])
    spec = {"layout": "N C", "axis_names": "N", "where": where}
    y = reference.normalize(flat, params.scale, params.bias, names="C", **spec)
    batch = reference.moments(flat, **spec)
    mean, var, _ = reference.update(state.mean, state.var, state.weight, *batch, rule="ema")
    return y.reshape(x.shape), mean, var


def layer_of(rng, features=3):
    scale, bias = (rng.normal(size=features).astype(np.float32) for _ in range(2))
    return nj.Affine(jnp.asarray(scale), jnp.asarray(bias), "C"), nj.BatchStats.init(C=features)


@pytest.mark.parametrize("number", [1, 5, 32, 33])
def test_a_mapped_axis_equals_the_concatenated_batch(number, rng):
    x = shards(rng, number)
    params, state = layer_of(rng)
    y, new = synchronised(x, params, state)
    expected, mean, var = whole(x, params, state)
    m = number * 4
    close(y, expected, m=m)
    close(new.mean, mean, m=m)
    close(new.var, var, m=m)
    assert new.count == 1


@pytest.mark.parametrize("number", [3, 40])
def test_unequal_shards_and_an_empty_one_weigh_by_their_entries(number, rng):
    x = shards(rng, number)
    where = rng.random((number, 4, 1)) < 0.5
    where[0], where[1] = False, True
    x[~np.broadcast_to(where, x.shape)] = np.nan  # what is excluded must not matter
    params, state = layer_of(rng)
    y, new = synchronised(x, params, state, where)
    expected, mean, var = whole(x, params, state, where)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    included = np.broadcast_to(where, x.shape)
    close(np.asarray(y)[included], expected[included], m=int(where.sum()))
    close(new.mean, mean, m=int(where.sum()))
    close(new.var, var, m=int(where.sum()))


@pytest.mark.parametrize("number", [2, 40])
def test_shards_that_are_all_empty_give_the_bias_and_leave_the_state(number, rng):
    x = shards(rng, number)
    params, state = layer_of(rng)
    y, new = synchronised(x, params, state, np.zeros((number, 4, 1), bool))
    np.testing.assert_array_equal(y, np.broadcast_to(params.bias, x.shape))
    np.testing.assert_array_equal(new.mean, state.mean)
    np.testing.assert_array_equal(new.var, state.var)
    assert new.count == 0


def test_shards_of_no_rows_give_no_rows_and_leave_the_state(rng):
    params, state = layer_of(rng)
    y, new = synchronised(np.zeros((2, 0, 3), np.float32), params, state)
    assert y.shape == (2, 0, 3)
    np.testing.assert_array_equal(new.var, state.var)
    assert new.count == 0


@pytest.mark.case(51)
def test_two_nested_mapped_axes_pool_both(rng):
    x = rng.normal(2.0, 3.0, (2, 3, 4, 5)).astype(np.float32)
    params, state = layer_of(rng, 5)

    def layer(x):
        return nj.batch_norm(x, params, state, layout="N C", axis_names="outer N inner", train=True)

    nested = jax.vmap(jax.vmap(layer, axis_name="inner", out_axes=(0, None)), axis_name="outer", out_axes=(0, None))
    y, new = quick_jit(nested)(x)
    expected, mean, var = whole(x, params, state)
    close(y, expected, m=24)
    close(new.mean, mean, m=24)
    close(new.var, var, m=24)


def test_one_of_two_nested_mapped_axes_pools_that_one_alone(rng):
    x = rng.normal(2.0, 3.0, (2, 3, 4, 5)).astype(np.float32)

    def layer(x):
        return nj.batch_norm(x, layout="N C", axis_names="N inner", train=True)[0]

    y = quick_jit(jax.vmap(jax.vmap(layer, axis_name="inner"), axis_name="outer"))(x)
    close(y, reference.normalize(x, layout="O I N C", axis_names="I N"), m=12)


def test_a_mapped_axis_alone_may_be_all_that_is_pooled(rng):
    x = shards(rng, 6)
    layer = lambda x: nj.normalize(x, layout="N C", axis_names="data")[0]  # noqa: E731
    y = quick_jit(jax.vmap(layer, axis_name="data"))(x)
    close(y, reference.normalize(x, layout="S N C", axis_names="S"), m=6)


@pytest.mark.parametrize("number", [5, 40])
def test_rms_norm_pools_a_mapped_axis(number, rng):
    x = shards(rng, number)
    layer = lambda x: nj.rms_norm(x, layout="N D", axis_names="D data")[0]  # noqa: E731
    y = quick_jit(jax.vmap(layer, axis_name="data"))(x)
    close(y, reference.normalize(x, layout="S N D", axis_names="S D", center=False), m=3 * number)


def test_a_name_that_is_both_means_the_axis_of_the_array(rng):
    x = shards(rng, 2)
    layer = lambda x: nj.normalize(x, layout="N C", axis_names="N")[0]  # noqa: E731
    y = quick_jit(jax.vmap(layer, axis_name="N"))(x)
    close(y, reference.normalize(x, layout="S N C", axis_names="N"), m=4)


@pytest.mark.parametrize("number", [3, 40])
def test_gradients_through_a_mapped_axis_equal_those_of_the_whole_batch(number, rng, x64):
    x, g = (rng.normal(size=(number, 4, 3)) for _ in range(2))
    scale, bias = rng.normal(size=3), rng.normal(size=3)

    def loss(x, scale, bias):
        layer = lambda x: nj.normalize(x, nj.Affine(scale, bias, "C"), layout="N C", axis_names="N data")[0]  # noqa: E731
        return jnp.sum(g * jax.vmap(layer, axis_name="data")(x))

    got = quick_jit(jax.grad(loss, (0, 1, 2)))(x, scale, bias)
    spec = {"names": "C", "layout": "N C", "axis_names": "N"}
    expected = reference.backward(x.reshape(-1, 3), g.reshape(-1, 3), scale, bias, **spec)
    for actual, right in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.reshape(actual, right.shape), right, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("groups", [[[0, 1], [2, 3]], [[0, 3], [2, 1]], [[2], [0, 1, 3]], [[0, 1, 2, 3]]])
def test_axis_index_groups_pool_each_group_by_itself(groups, rng):
    x = shards(rng, 4)
    layer = functools.partial(nj.normalize, layout="N C", axis_names="N data", axis_index_groups=groups)
    y, moments = quick_jit(jax.vmap(layer, axis_name="data"))(x)
    for group in groups:
        m = 4 * len(group)
        close(np.asarray(y)[group], reference.normalize(x[group], layout="S N C", axis_names="S N"), m=m)
        mean, var, _ = reference.moments(x[group], layout="S N C", axis_names="S N")
        for shard in group:
            close(moments.mean[shard], mean, m=m)
            close(moments.var[shard], var, m=m)
            np.testing.assert_array_equal(moments.count[shard], np.full(3, m, np.float32))


def test_axis_index_groups_of_a_large_axis_pool_each_group_by_itself(rng):
    x = shards(rng, 40)
    groups = [list(range(10)), list(range(10, 40))]
    layer = functools.partial(nj.normalize, layout="N C", axis_names="N data", axis_index_groups=groups)
    y, _ = quick_jit(jax.vmap(layer, axis_name="data"))(x)
    for group in groups:
        close(np.asarray(y)[group], reference.normalize(x[group], layout="S N C", axis_names="S N"), m=4 * len(group))


def test_axis_index_groups_count_masked_entries_out(rng):
    x, groups = shards(rng, 4), [[0, 1], [2, 3]]
    where = rng.random((4, 4, 1)) < 0.6
    where[0] = False
    params, _ = layer_of(rng)

    def layer(x, where):
        options = {"layout": "N C", "axis_names": "N data", "train": True, "axis_index_groups": groups}
        return nj.batch_norm(x, params, where=where, **options)[0]

    y = quick_jit(jax.vmap(layer, axis_name="data"))(x, where)
    for group in groups:
        spec = {"names": "C", "layout": "S N C", "axis_names": "S N", "where": where[group]}
        close(np.asarray(y)[group], reference.normalize(x[group], params.scale, params.bias, **spec), m=8)


@pytest.mark.parametrize(
    ("axis_names", "groups", "words"),
    [
        ("N", [[0]], ["axis_index_groups subdivides exactly one mapped axis", "has 0"]),
        ("N data other", [[0, 1]], ["axis_index_groups subdivides exactly one mapped axis", "has 2"]),
        ("N data", [[0, 1]], ["[[0, 1]]", "each index of mapped axis 'data'", "(size 3)", "exactly once"]),
        ("N data", [[0, 1], [1, 2]], ["each index of mapped axis 'data'", "exactly once"]),
        ("N data", [[0, 1], [2, 3]], ["each index of mapped axis 'data'", "(size 3)"]),
    ],
)
def test_axis_index_groups_that_do_not_fit_say_so(axis_names, groups, words):
    def layer(x):
        options = {"layout": "N C", "axis_names": axis_names, "train": True, "axis_index_groups": groups}
        return nj.batch_norm(x, **options)[0]

    mapped = jax.vmap(jax.vmap(layer, axis_name="data"), axis_name="other")
    with pytest.raises(ValueError, match=r"^batch_norm: ") as caught:
        mapped(np.zeros((2, 3, 4, 5), np.float32))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.case(48)
@pytest.mark.parametrize("bound", ["", "data"])
def test_a_mapped_name_that_nothing_binds_is_an_error_that_says_where_to_call(bound):
    layer = lambda x: nj.batch_norm(x, layout="N C", axis_names="N data model", train=True)[0]  # noqa: E731
    missing = "model" if bound else "data"
    with pytest.raises(ValueError, match=rf"^batch_norm: .*'{missing}' is neither in layout") as caught:
        jax.vmap(layer, axis_name=bound or None)(np.zeros((2, 4, 3), np.float32))
    assert f"call inside shard_map, pmap or vmap with the axis name '{missing}'" in str(caught.value)
