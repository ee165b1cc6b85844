"""The family: the mode table, what makes each member itself, and what the arguments mean."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.closeness import close
from tests.quick import quick_jit
from tests.trees import SPEC, filled, same

# --- the mode table


@pytest.mark.case(78)
@pytest.mark.parametrize(
    ("train", "use_batch_stats", "by", "moves"),
    [(True, False, "batch", True), (False, False, "running", False), (False, True, "batch", False)],
)
@pytest.mark.parametrize("boolean", [bool, np.bool_])
def test_the_mode_table(train, use_batch_stats, by, moves, boolean, rng):
    x = rng.normal(2.0, 3.0, (8, 3)).astype(np.float32)
    params, state = filled(rng)
    mode = {"train": boolean(train), "use_batch_stats": boolean(use_batch_stats)}
    y, new = quick_jit(functools.partial(nj.batch_norm, **SPEC, **mode))(x, params, state)

    frozen = {} if by == "batch" else {"mean": state.mean, "var": state.var}
    close(y, reference.normalize(x, params.scale, params.bias, names="C", **SPEC, **frozen), m=8)
    if moves:
        batch = reference.moments(x, **SPEC)
        mean, var, weight = reference.update(state.mean, state.var, state.weight, *batch, rule="ema")
        close(new.mean, mean, m=8)
        close(new.var, var, m=8)
        close(new.weight, weight)
        assert new.count == 5
    else:
        same(new, state)


@pytest.mark.parametrize("mode", [{"train": True}, {"train": False, "use_batch_stats": True}])
def test_no_state_stays_no_state(mode):
    _, state = jax.eval_shape(functools.partial(nj.batch_norm, **SPEC, **mode), np.ones((4, 3), np.float32))
    assert state is None


def test_evaluation_returns_the_very_state_it_was_given(rng):
    params, state = filled(rng)
    assert nj.batch_norm(np.ones((4, 3), np.float32), params, state, train=False, **SPEC)[1] is state


@pytest.mark.case(76)
def test_evaluation_on_a_fresh_state_divides_by_one():
    y, _ = nj.batch_norm(np.ones((1, 1), np.float32), None, nj.BatchStats.init(C=1), train=False, **SPEC)
    close(y, 1 / np.sqrt(1 + 1e-5))


@pytest.mark.parametrize("name", ["layer_norm", "instance_norm", "group_norm", "rms_norm"])
def test_the_other_layers_accept_train_and_return_the_state_untouched(name, rng):
    x = rng.normal(size=(4, 6)).astype(np.float32)
    layer = functools.partial(getattr(nj, name), x, layout="N C=(G=2 K)", axis_names="K")
    state = object()  # whatever it is

    @quick_jit
    def each():
        results = [layer(None, state, train=train) for train in (True, False, None, "train")]
        assert all(returned is state for _, returned in results)
        return [y for y, _ in results]

    ys = each()
    for y in ys:
        np.testing.assert_array_equal(y, ys[0])


STATE = nj.BatchStats.init(C=3)


# --- members of the family


def test_sync_batch_norm_is_batch_norm_that_insists(rng):
    x = rng.normal(size=(3, 4, 3)).astype(np.float32)
    params, state = filled(rng)
    spec = {"layout": "N C", "axis_names": "N data", "train": True}

    def both(x):
        return [layer(x, params, state, **spec) for layer in (nj.sync_batch_norm, nj.batch_norm)]

    ours, plain = quick_jit(jax.vmap(both, axis_name="data"))(x)
    same(ours, plain)
    expected = reference.normalize(x, params.scale, params.bias, names="C", layout="S N C", axis_names="S N")
    close(ours[0], expected, m=12)


@pytest.mark.parametrize("unbiased", [False, True])
def test_ghost_batches_normalise_apart_and_average_into_one_state(unbiased, rng):
    x = rng.normal(2.0, 3.0, (8, 3, 2)).astype(np.float32)
    where = rng.random((8, 3, 1)) < 0.7
    params, state = filled(rng, 2)
    spec = {"layout": "N=(B n=4) L C", "axis_names": "n L", "where": where}
    layer = functools.partial(nj.batch_norm, train=True, running=nj.Ema(0.1, unbiased), **spec)
    y, new = quick_jit(layer)(x, params, state)

    close(y, reference.normalize(x, params.scale, params.bias, names="C", **spec), m=12)
    batch = reference.moments(x, **spec)
    old = (state.mean, state.var, state.weight)
    mean, var, _ = reference.update(*old, *batch, rule="ema", unbiased=unbiased, extra_axes=(0,))
    close(new.mean, mean, m=24)
    close(new.var, var, m=24)
    assert new.count == 5


def test_tracked_instance_norm_is_batch_norm_over_positions_alone(rng):
    x = rng.normal(2.0, 3.0, (3, 4, 5, 2)).astype(np.float32)
    params, state = filled(rng, 2)
    spec = {"layout": "N H W C", "axis_names": "H W"}
    layer = functools.partial(nj.batch_norm, train=True, running=nj.Ema.torch(0.3), **spec)
    y, new = quick_jit(layer)(x, params, state)

    close(y, reference.normalize(x, params.scale, params.bias, names="C", **spec), m=20)
    old = (state.mean, state.var, state.weight)
    rule = {"rule": "ema", "new_weight": 0.3, "unbiased": True, "extra_axes": (0,)}
    mean, var, _ = reference.update(*old, *reference.moments(x, **spec), **rule)
    close(new.mean, mean, m=60)
    close(new.var, var, m=60)


def test_running_statistics_may_run_along_a_factor(rng):
    x = rng.normal(2.0, 3.0, (5, 6)).astype(np.float32)
    spec = {"layout": "N C=(G=2 K)", "axis_names": "N"}
    mean, var, m = (array.reshape(2, 3) for array in reference.moments(x, **spec))
    layer = jax.jit(functools.partial(nj.batch_norm, running=nj.Ema(1.0), **spec), static_argnames="train")
    _, new = layer(x, None, nj.BatchStats.init(G=2), train=True)
    close(new.mean, np.sum(m * mean, 1) / np.sum(m, 1), m=15)
    close(new.var, np.sum(m * var, 1) / np.sum(m, 1), m=15)
    y, _ = layer(x, None, new, train=False)
    close(y, reference.normalize(x, mean=new.mean, var=new.var, stat_names="G", **spec))


AFFINES = [
    ("conditional batch norm", "batch_norm", "N H W C", "N H W", "N C"),
    ("adaptive instance norm", "instance_norm", "N H W C", "H W", "N C"),
    ("SPADE", "batch_norm", "N H W C", "N H W", "N H W C"),
    ("SPADE shared by examples", "instance_norm", "N H W C", "H W", "H W C"),
    ("adaptive layer norm", "layer_norm", "N H W C", "C", "N C"),
    ("scalar", "rms_norm", "N H W C", "C", ""),
    ("along groups", "group_norm", "N H W C=(G=2 K)", "H W K", "N G"),
    ("the order of names", "batch_norm", "N H W C", "N H W", "C N"),
]


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(("name", "layout", "axis_names", "names"), [row[1:] for row in AFFINES], ids=lambda v: str(v))
def test_parameters_run_along_any_axes(name, layout, axis_names, names, zero_centered, rng):
    x = rng.normal(2.0, 3.0, (2, 3, 2, 4)).astype(np.float32)
    sizes = {"N": 2, "H": 3, "W": 2, "C": 4, "G": 2}
    scale, bias = (np.asarray(rng.normal(size=[sizes[n] for n in names.split()]), np.float32) for _ in range(2))
    params = nj.Affine(scale, bias, names, zero_centered)
    train = {"train": True} if "batch" in name else {}
    layer = functools.partial(getattr(nj, name), layout=layout, axis_names=axis_names, **train)
    y, _ = quick_jit(layer)(x, params)
    spec = {"names": names, "layout": layout, "axis_names": axis_names, "zero_centered": zero_centered}
    close(y, reference.normalize(x, scale, bias, center=name != "rms_norm", **spec), m=12)


@pytest.mark.case(18)
def test_a_zero_centred_scale_is_added_to_one_in_the_statistics_dtype():
    scale = jnp.full(4, 2.0**-9, jnp.bfloat16)  # 1 + 2⁻⁹ is 1 in bfloat16
    params = nj.Affine(scale, None, "D", zero_centered=True)
    y, _ = nj.rms_norm(jnp.ones(4, jnp.bfloat16), params, layout="D", axis_names="D", eps=0.0, dtype=jnp.float32)
    np.testing.assert_array_equal(y, np.full(4, 1 + 2.0**-9, np.float32))


# --- dtype, eps, kinds of input


ASKED = (None, "float32", "bfloat16")


@jax.jit
def in_each_dtype(x, params, state):
    """The batch norm of x in each dtype that may be asked for: one program for an input's dtype."""
    return [nj.batch_norm(x, params, state, train=True, dtype=asked, **SPEC) for asked in ASKED]


@pytest.mark.parametrize("given", ["float16", "bfloat16", "float32", "int32", "uint8", "bool"])
@pytest.mark.parametrize("asked", ASKED)
def test_the_output_has_the_dtype_asked_for_or_that_of_x(given, asked, rng):
    x = rng.integers(0, 2 if given == "bool" else 9, (8, 3)).astype(jnp.dtype(given))
    params, state = filled(rng)
    y, new = in_each_dtype(x, params, state)[ASKED.index(asked)]
    expected = asked or (given if "float" in given else "float32")
    assert y.dtype == expected
    assert [leaf.dtype for leaf in jax.tree.leaves(new)] == [leaf.dtype for leaf in jax.tree.leaves(state)]
    right = reference.normalize(np.asarray(x, np.float64), params.scale, params.bias, names="C", **SPEC)
    # One rounding to the output's dtype, of a number that float32 statistics gave.
    atol = 16 * float(jnp.finfo(jnp.float32).eps) * np.sqrt(8) * np.max(np.abs(right))
    np.testing.assert_allclose(y.astype(jnp.float32), right, rtol=float(jnp.finfo(expected).eps), atol=atol)


@pytest.mark.parametrize("x", [[[1, 2], [3, 9]], [[1.0, 2.0], [3.0, 9.0]], ((True, False), (False, False))])
def test_lists_and_numpy_arrays_are_input_too(x):
    layer = functools.partial(nj.layer_norm, layout="N D", axis_names="D")
    y, _ = quick_jit(lambda: layer(x, where=[[True]] * 2))()
    assert y.dtype == jnp.float32
    close(y, reference.normalize(x, layout="N D", axis_names="D"), m=2)
    close(quick_jit(lambda: layer(np.asarray(x)))()[0], y)


def test_numpy_parameters_and_state_are_input_too(rng):
    x = rng.normal(size=(4, 3)).astype(np.float32)
    params, state = filled(rng)
    plain = functools.partial(jax.tree.map, np.asarray)
    layer = functools.partial(nj.batch_norm, x, train=True, **SPEC)
    # Closed over, since arguments of jit would be JAX arrays inside.
    same(quick_jit(lambda: layer(plain(params), plain(state)))(), quick_jit(lambda: layer(params, state))())


@pytest.mark.case(99)
def test_eps_is_added_to_the_variance_inside_the_root():
    y, _ = nj.layer_norm(np.array([1e-3, -1e-3], np.float32), layout="D", axis_names="D")
    close(y, [0.301511, -0.301511], k=32)


@pytest.mark.parametrize("eps", [0, 1, 0.5, np.float32(0.5), np.float64(0.5), jnp.bfloat16(0.5)])
def test_eps_may_be_any_real_scalar(eps, rng):
    x = rng.normal(size=(4, 3)).astype(np.float32)
    y, _ = quick_jit(functools.partial(nj.layer_norm, layout="N D", axis_names="D"))(x, eps=eps)
    assert y.dtype == jnp.float32
    close(y, reference.normalize(x, layout="N D", axis_names="D", eps=float(eps)), m=3)


@pytest.mark.case(58)
@pytest.mark.parametrize("derivative", ["vjp", "jvp", "autodiff"])
def test_eps_may_be_traced_and_its_gradient_is_the_true_one(derivative, rng, x64):
    x, g, scale = (rng.normal(size=(4, 3)) for _ in range(3))
    spec = {"layout": "N D", "axis_names": "D"}

    def loss(eps):
        params = nj.Affine(scale, None, "N D")
        return jnp.sum(g * nj.layer_norm(x, params, eps=eps, derivative=derivative, **spec)[0])

    def right(eps):
        return np.sum(g * reference.normalize(x, scale, names="N D", eps=eps, **spec))

    h = 1e-4
    # Fourth order: the error is h⁴ times a fifth derivative of order 1, and rounding eps64/h.
    slope = (8 * (right(0.3 + h) - right(0.3 - h)) - (right(0.3 + 2 * h) - right(0.3 - 2 * h))) / (12 * h)
    value, gradient = quick_jit(jax.value_and_grad(loss))(0.3)
    np.testing.assert_allclose(value, right(0.3), rtol=1e-12)
    np.testing.assert_allclose(gradient, slope, rtol=1e-8)


def test_complex_input_has_a_real_variance_and_complex_running_statistics(rng):
    x = (rng.normal(2, 3, (8, 3)) + 1j * rng.normal(-1, 2, (8, 3))).astype(np.complex64)
    params, _ = filled(rng)
    state = nj.BatchStats.init(C=3, dtype=jnp.complex64)
    assert (state.mean.dtype, state.var.dtype) == (jnp.complex64, jnp.float32)
    y, new = quick_jit(functools.partial(nj.batch_norm, train=True, **SPEC))(x, params, state)
    assert y.dtype == jnp.complex64
    close(y, reference.normalize(x, params.scale, params.bias, names="C", **SPEC), m=8)
    batch = reference.moments(x, **SPEC)
    mean, var, _ = reference.update(state.mean, state.var, state.weight, *batch, rule="ema")
    close(new.mean, mean, m=8)
    close(new.var, var, m=8)
    assert (new.mean.dtype, new.var.dtype) == (jnp.complex64, jnp.float32)


@pytest.mark.case(30)
@pytest.mark.parametrize("train", [True, False])
def test_an_empty_batch_gives_an_empty_output_and_leaves_the_state(train, rng):
    params, state = filled(rng)
    y, new = nj.batch_norm(np.zeros((0, 3), np.float32), params, state, train=train, **SPEC)
    assert y.shape == (0, 3)
    same(new, state)


@pytest.mark.case(30)
def test_a_batch_that_is_masked_out_gives_the_bias_and_leaves_the_state(rng):
    params, state = filled(rng)
    x, where = np.full((4, 3), np.nan, np.float32), np.zeros((4, 1), bool)
    y, new = quick_jit(functools.partial(nj.batch_norm, train=True, **SPEC))(x, params, state, where=where)
    np.testing.assert_array_equal(y, np.broadcast_to(params.bias, (4, 3)))
    same(new, state)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "instance_norm"])
def test_layers_of_nothing_are_nothing(name, shape):
    layer = functools.partial(getattr(nj, name), layout="N D", axis_names="D")
    y, _ = quick_jit(layer)(np.zeros(shape, np.float32))
    assert y.shape == shape


# --- evaluation


@pytest.mark.case(50)
@pytest.mark.parametrize("size", [7, 8, 1])
def test_evaluation_ignores_ghost_sizes_and_mapped_names(size, rng):
    x = rng.normal(size=(size, 3)).astype(np.float32)
    params, state = filled(rng)
    ghosts = {"layout": "N=(B n=4) C", "axis_names": "n data model"}
    y, new = nj.batch_norm(x, params, state, train=False, axis_index_groups=[[0, 1]], **ghosts)
    frozen = {"mean": state.mean, "var": state.var}
    close(y, reference.normalize(x, params.scale, params.bias, names="C", stat_names="C", **frozen, **SPEC))
    assert new is state


@pytest.mark.case(50)
@pytest.mark.parametrize("mode", [{"train": True}, {"train": False, "use_batch_stats": True}])
def test_a_batch_that_a_ghost_size_does_not_divide_is_an_error_where_the_batch_is_pooled(mode):
    with pytest.raises(ValueError, match=r"'N=\(B n=4\)' multiply to 4 times 'B'.*size 7.*4 does not divide"):
        nj.batch_norm(np.ones((7, 3)), layout="N=(B n=4) C", axis_names="n", **mode)


def test_evaluation_needs_the_split_that_its_state_or_parameters_run_along():
    state = nj.BatchStats.init(G=2)
    with pytest.raises(ValueError, match=r"'C=\(G=2 K\)' multiply to 2 times 'K'.*size 3"):
        nj.batch_norm(np.ones((4, 3)), None, state, layout="N C=(G=2 K)", axis_names="N", train=False)


def test_evaluation_still_checks_the_grammar():
    with pytest.raises(ValueError, match="separate names by spaces"):
        nj.batch_norm(np.ones((4, 3)), None, STATE, layout="NC", axis_names="N", train=False)
