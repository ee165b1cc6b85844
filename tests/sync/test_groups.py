"""`axis_index_groups` under every mapping, also where JAX's own argument fails: groups of equal and unequal sizes."""

import functools

import jax
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.quick import quick_jit
from tests.sync.mappings import DATA, GRADIENT, MAPPINGS, PARAMETER, ShardMap

SPREAD = ("pmap", "shard_map", "unchecked shard_map", "vmap")
GROUPS = {"equal": [[0, 3], [2, 1]], "unequal": [[2], [0, 1, 3]]}
OPTIONS = {"layout": "N C", "axis_names": "N data", "train": True}
DERIVATIVES = ("vjp", "jvp", "autodiff")
CELLS = [
    (spread, groups, DERIVATIVES[(i + j) % 3]) for i, spread in enumerate(SPREAD) for j, groups in enumerate(GROUPS)
]


@pytest.mark.case(44)
@pytest.mark.parametrize(("spread", "groups", "derivative"), CELLS)
def test_each_group_of_devices_is_a_batch_of_its_own(spread, groups, derivative, rng, x64):
    x, g = rng.normal(1.5, 2.0, (2, 4, 4, 3))
    scale, bias = rng.normal(size=(2, 3))
    mapping = MAPPINGS[spread]

    def step(x, g, where, scale, bias):
        def apply(x, scale, bias):
            options = {"axis_index_groups": GROUPS[groups], "derivative": derivative, "where": where, **OPTIONS}
            state = nj.BatchStats.init(C=3, dtype=np.float64)
            return nj.batch_norm(x, nj.Affine(scale, bias, "C"), state, running=nj.Ema(1.0, unbiased=True), **options)

        y, pullback, new = jax.vjp(apply, x, scale, bias, has_aux=True)
        return y, *pullback(g), new.mean, new.var

    # The new state differs from group to group, so it has an axis for the devices.
    roles = (DATA, DATA, GRADIENT, GRADIENT, DATA, DATA)
    run = quick_jit(mapping.wrap(step, (DATA,) * 3 + (PARAMETER,) * 2, roles))
    for mask in ("all", "some", "an empty shard"):
        where = rng.random(x.shape) < (1.0 if mask == "all" else 0.6)
        where[0] &= mask != "an empty shard"
        results = [mapping.whole(out, role) for out, role in zip(run(x, g, where, scale, bias), roles, strict=True)]
        for actual, wanted in zip(results, by_groups(GROUPS[groups], x, g, where, scale, bias), strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-10, atol=1e-10)


def by_groups(groups, x, g, where, scale, bias):
    """The reference's y, dx, dscale, dbias, and each device's running mean and unbiased variance."""
    y, dx = np.empty_like(x), np.empty_like(x)
    d_scale, d_bias = np.zeros_like(scale), np.zeros_like(bias)
    means, variances = np.empty((2, len(x), x.shape[-1]))
    for group in groups:
        spec = {"layout": "S N C", "axis_names": "S N", "where": where[group]}
        y[group] = reference.normalize(x[group], scale, bias, names="C", **spec)
        dx[group], ds, db = reference.backward(x[group], g[group], scale, bias, names="C", **spec)
        d_scale, d_bias = d_scale + ds, d_bias + db
        start = np.zeros(3), np.ones(3), np.zeros(3)
        batch = reference.moments(x[group], **spec)
        means[group], variances[group], _ = reference.update(*start, *batch, rule="ema", new_weight=1.0, unbiased=True)
    return y, dx, d_scale, d_bias, means, variances


@pytest.mark.case(44)
@pytest.mark.parametrize("spread", ["shard_map", "vmap"])
def test_jax_itself_refuses_groups_there(spread):
    summed = functools.partial(jax.lax.psum, axis_name="data", axis_index_groups=GROUPS["equal"])
    program = MAPPINGS[spread].wrap(lambda x: (summed(x),), (DATA,), (DATA,))
    with pytest.raises(NotImplementedError):
        program(np.zeros((4, 2), np.float32))


BROKEN = {
    "an index twice": [[0, 1], [1, 2, 3]],
    "an index left out": [[0, 1], [2]],
    "an index out of range": [[0, 1], [2, 4]],
    "no lists": [0, 1, 2, 3],
    "no indices": [["a"], [1, 2, 3]],
    "bools": [[False, True], [2, 3]],
    "a bool and its number": [[True], [0, 1, 2, 3]],
    "an iterator": iter([[0, 1], [2, 3]]),
    "a list of iterators": [iter([0, 1]), iter([2, 3])],
}


@pytest.mark.parametrize("groups", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("spread", SPREAD)
def test_groups_that_do_not_partition_the_axis_are_an_error(spread, groups):
    layer = lambda x: (nj.batch_norm(x, axis_index_groups=groups, **OPTIONS)[0],)  # noqa: E731
    program = MAPPINGS[spread].wrap(layer, (DATA,), (DATA,))
    with pytest.raises(ValueError, match=r"^batch_norm: axis_index_groups=.*mapped axis 'data' \(size 4\)") as caught:
        jax.eval_shape(program, np.zeros((4, 2, 3), np.float32))
    assert "exactly once" in str(caught.value)


def test_groups_of_two_mesh_axes_are_an_error_that_asks_for_one():
    options = {**OPTIONS, "axis_names": "N data more", "axis_index_groups": GROUPS["equal"]}
    layer = lambda x: (nj.batch_norm(x, **options)[0],)  # noqa: E731
    program = ShardMap(("data", "more"), (2, 2)).wrap(layer, (DATA,), (DATA,))
    with pytest.raises(ValueError, match=r"^batch_norm: axis_index_groups subdivides exactly one mapped axis.*has 2"):
        jax.eval_shape(program, np.zeros((2, 2, 2, 3), np.float32))


def test_a_mesh_of_two_axes_is_the_same_as_groups(rng):
    x = rng.normal(1.5, 2.0, (4, 4, 3)).astype(np.float32)

    def layer(groups, names):
        return lambda x: (nj.batch_norm(x, **{**OPTIONS, "axis_names": names, "axis_index_groups": groups})[0],)

    grouped = MAPPINGS["shard_map"].wrap(layer(GROUPS["equal"], "N data"), (DATA,), (DATA,))
    meshed = ShardMap(("group", "data"), (2, 2)).wrap(layer(None, "N data"), (DATA,), (DATA,))
    (y,), (z,) = quick_jit(grouped)(x), quick_jit(meshed)(x[np.array(GROUPS["equal"])])
    np.testing.assert_allclose(np.asarray(y)[np.array(GROUPS["equal"])], z, atol=1e-6)


@pytest.mark.parametrize("groups", [GROUPS["unequal"], [[i] for i in range(4)]])
def test_one_entry_in_the_smallest_group_has_no_unbiased_variance(groups):
    x, state = np.zeros((4, 1, 3), np.float32), nj.BatchStats.init(C=3)  # one row on each of four devices

    def train(groups):
        options = {"axis_index_groups": groups, "running": nj.Ema(0.1, unbiased=True), **OPTIONS}
        return jax.eval_shape(jax.vmap(lambda x: nj.batch_norm(x, None, state, **options)[0], axis_name="data"), x)

    with pytest.raises(ValueError, match=r"^batch_norm: running=.*m = 1 here"):
        train(groups)
    for fine in (None, GROUPS["equal"], [[], [0, 1, 2, 3]]):
        train(fine)
