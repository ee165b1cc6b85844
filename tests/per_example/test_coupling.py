"""Which examples couple, in every norm."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from matplotlib import pyplot

import normjax as nj
from normjax import per_example

N, S, C = 8, 3, 4
STATE = nj.BatchStats.init(C=C)
IDENTITY, FULL = np.eye(N, dtype=bool), np.ones((N, N), bool)
PAIRS = np.kron(np.eye(N // 2), np.ones((2, 2))).astype(bool)


def synchronised(x):
    """Two examples on each of four devices, pooled together."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

    @partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def norm(x):
        return nj.sync_batch_norm(x, layout="N S C", axis_names="N S data", train=True)[0]

    return norm(x)


def by_device(x):
    """The same without the name: each device's two examples couple."""
    norm = lambda x: nj.batch_norm(x, layout="N S C", axis_names="N S", train=True)[0]  # noqa: E731
    return jax.vmap(norm)(x.reshape(4, 2, S, C)).reshape(N, S, C)


CASES = {
    "batch": (lambda x: nj.batch_norm(x, layout="N S C", axis_names="N S", train=True)[0], FULL),
    "evaluation": (lambda x: nj.batch_norm(x, None, STATE, layout="N S C", axis_names="N S", train=False)[0], IDENTITY),
    "ghost": (lambda x: nj.batch_norm(x, layout="(B=4 n) S C", axis_names="n S", train=True)[0], PAIRS),
    "layer": (lambda x: nj.layer_norm(x, layout="N S C", axis_names="C")[0], IDENTITY),
    "rms": (lambda x: nj.rms_norm(x, layout="N S C", axis_names="C")[0], IDENTITY),
    "instance": (lambda x: nj.instance_norm(x, layout="N S C", axis_names="S")[0], IDENTITY),
    "group": (lambda x: nj.group_norm(x, layout="N S C=(G=2 K)", axis_names="S K")[0], IDENTITY),
    "synchronised": (synchronised, FULL),
    "one device at a time": (by_device, PAIRS),
}


@pytest.mark.parametrize("case", CASES)
def test_the_coupling_of_each_norm_has_its_picture(case, rng):
    fn, pattern = CASES[case]
    x = jnp.asarray(rng.normal(size=(N, S, C)), jnp.float32)
    coupling = np.asarray(per_example.example_coupling(fn, x))
    np.testing.assert_array_equal(coupling > 0, pattern)
    if (pattern == IDENTITY).all():
        per_example.assert_uncoupled(fn, x)
        return
    pairs = int(pattern.sum()) - N
    with pytest.raises(
        AssertionError, match=rf"^output 0 depends on input 1 \(strength .*; {pairs} of 56 pairs couple"
    ):
        per_example.assert_uncoupled(fn, x)


def test_strengths_are_norms_of_the_jacobians_blocks(rng, x64):
    x = jnp.asarray(rng.normal(size=(4, 40)))
    weights = jnp.asarray(rng.normal(size=(4, 4)))
    coupling = per_example.example_coupling(lambda x: weights @ x, x)
    # Frobenius norm of w_ij I of 40 entries; four probes of 40 random numbers each come within some 20 %.
    np.testing.assert_allclose(coupling, np.abs(weights) * np.sqrt(40), rtol=0.3)
    np.testing.assert_allclose(coupling / np.abs(weights), np.broadcast_to((coupling / np.abs(weights))[:, :1], (4, 4)))


@pytest.mark.parametrize("axis", [1, -2])
def test_examples_may_lie_along_another_axis(axis, rng):
    x = jnp.asarray(rng.normal(size=(S, N, C)), jnp.float32)
    norm = lambda x: nj.batch_norm(x, layout="S (B=4 n) C", axis_names="S n", train=True)[0]  # noqa: E731
    np.testing.assert_array_equal(per_example.example_coupling(norm, x, example_axis=axis) > 0, PAIRS)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_couplings_whose_squares_float32_does_not_hold_are_seen(size, rng):
    x = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)
    one, scaled = (per_example.example_coupling(lambda x: s * jnp.roll(x, 1, 0), x) for s in (1, size))  # noqa: B023
    np.testing.assert_allclose(scaled, size * one, rtol=1e-5)
    assert np.count_nonzero(scaled) == 4
    with pytest.raises(AssertionError, match=r"output 0 depends on input 3"):
        per_example.assert_uncoupled(lambda x: size * jnp.roll(x, 1, 0), x)


def test_a_mask_uncouples_the_examples_it_excludes(rng):
    where = jnp.arange(N)[:, None] != 2
    norm = lambda x: nj.batch_norm(x, layout="N C", axis_names="N", train=True, where=where)[0]  # noqa: E731
    coupling = np.asarray(per_example.example_coupling(norm, jnp.asarray(rng.normal(size=(N, C)), jnp.float32)))
    reached = np.delete(coupling[:, 2], 2)
    assert np.all(reached == 0)
    assert np.all(np.delete(coupling, 2, 1) > 0)


def test_a_complex_output_couples_by_its_imaginary_part(rng):
    x = jnp.asarray(rng.normal(size=(4, 2)), jnp.float32)
    coupling = np.asarray(per_example.example_coupling(lambda x: jax.lax.complex(x, jnp.roll(x, 1, 0)), x))
    np.testing.assert_array_equal(coupling > 0, np.eye(4) + np.roll(np.eye(4), 1, 0) > 0)


BAD = [
    (
        lambda x: jnp.argsort(x, 0),
        jnp.ones(3),
        0,
        TypeError,
        "fn(x) must be of a float dtype, to differentiate; got int32",
    ),
    (lambda x: x, jnp.arange(3), 0, TypeError, "x must be of a float dtype, to differentiate by; got int32"),
    (lambda x: (x, x), jnp.ones(3), 0, TypeError, "fn must return one array; got tuple"),
    (lambda x: x.sum(), jnp.ones(3), 0, ValueError, "fn(x) has shape (), which has no axis example_axis=0"),
    (lambda x: x, jnp.ones(3), 1, ValueError, "x has shape (3,), which has no axis example_axis=1"),
    (lambda x: x, jnp.ones(3), -2, ValueError, "x has shape (3,), which has no axis example_axis=-2"),
    (lambda x: x, jnp.ones(3), True, TypeError, "example_axis must be an int, the axis of examples; got True"),
    (lambda x: x, jnp.ones(3), 0.0, TypeError, "example_axis must be an int, the axis of examples; got 0.0"),
    (lambda x: x, jnp.ones(3), None, TypeError, "example_axis must be an int, the axis of examples; got None"),
    (lambda x: x["a"], {"a": jnp.ones(3)}, 0, TypeError, "x must be an array of numbers, not dict"),
    (lambda x: x, "abc", 0, TypeError, "x must be an array of numbers, not str: 'abc'"),
    (lambda x: x[1:], jnp.ones(3), 0, ValueError, "x has 3 examples along axis 0, but fn(x) has 2"),
]


@pytest.mark.parametrize(("fn", "x", "axis", "kind", "words"), BAD)
def test_bad_input_is_refused_by_name(fn, x, axis, kind, words):
    with pytest.raises(kind) as caught:
        per_example.example_coupling(fn, x, example_axis=axis)
    assert str(caught.value).startswith("example_coupling: ")
    assert words in str(caught.value)


def test_the_picture_has_its_labels_and_white_cells_where_nothing_couples():
    strength = np.where(np.eye(3, dtype=bool), 100.0, 0.0)
    ax = per_example.plot_coupling(strength, title="layer norm", limits=(-1, 3))
    assert (ax.get_title(), ax.get_xlabel(), ax.get_ylabel()) == ("layer norm", "input j", "output i")
    drawn = np.ma.filled(ax.images[0].get_array(), np.nan)
    np.testing.assert_array_equal(drawn, np.where(np.eye(3, dtype=bool), 2.0, np.nan))
    assert ax.images[0].get_clim() == (-1, 3)
    assert len(ax.figure.axes) == 2
    pyplot.close(ax.figure)


@pytest.mark.parametrize("limits", [(-3, 1), [-3, 1.0], np.array([-3, 1])], ids=str)
def test_limits_may_be_any_two_numbers(limits):
    ax = per_example.plot_coupling(np.eye(2), limits=limits)
    assert ax.images[0].get_clim() == (-3, 1)
    pyplot.close(ax.figure)


@pytest.mark.parametrize("limits", [(1, -3), (0, 0), (0,), 3, "ab", (0, np.nan), np.ones(3)], ids=str)
def test_limits_that_are_no_two_numbers_are_refused(limits):
    with pytest.raises(ValueError, match=r"^plot_coupling: limits=.* must be two finite numbers, the smaller first"):
        per_example.plot_coupling(np.eye(2), limits=limits)


def test_a_picture_is_of_an_array_with_two_axes():
    with pytest.raises(ValueError, match=r"^plot_coupling: coupling must be an array \(N, N\).* got shape \(3,\)"):
        per_example.plot_coupling(np.ones(3))


def test_a_derivative_that_is_nan_is_told_apart_from_a_coupling():
    x = jnp.array([[1.0, 2.0], [jnp.nan, 1.0], [3.0, 4.0]])
    norm = lambda x: nj.layer_norm(x, layout="N D", axis_names="D")[0]  # noqa: E731
    with pytest.raises(AssertionError, match=r"^the derivative of output \d by input \d is NaN"):
        per_example.assert_uncoupled(norm, x)
