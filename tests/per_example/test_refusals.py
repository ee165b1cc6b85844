"""What per-example gradients refuse, and in which words."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import normjax as nj
from normjax import per_example
from normjax.linen import BatchNorm as LinenBatchNorm
from normjax.nnx import BatchNorm as NnxBatchNorm

CHANNELS = 4
STATE = nj.BatchStats.init(C=CHANNELS)
BOTH = pytest.mark.parametrize("fn", [per_example.per_example_grads, partial(per_example.clipped_grad, l2_norm=1.0)])


OFFERS = ["per_example_grads", "train=False", "normalize(x, params, moments=...)", "coupled_grads", "group"]


def refuses(norm, shape=(5, CHANNELS)):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are looked at below
        per_example.per_example_grads(lambda p, x: norm(p, x).sum(), jnp.ones(CHANNELS), jnp.ones((3, *shape)))
    assert all(words in str(caught.value) for words in OFFERS), caught.value


@pytest.mark.case(55)
@pytest.mark.parametrize("how", [{"train": True}, {"train": False, "use_batch_stats": True}])
@pytest.mark.parametrize("names", ["S", "..."])
def test_batch_statistics_of_one_example_are_refused_and_four_ways_out_named(how, names):
    layout = "S C" if names == "S" else "... C"
    refuses(lambda p, x: nj.batch_norm(x * p, layout=layout, axis_names=names, **how)[0])


def test_batch_norm_of_flax_modules_is_refused_too():
    linen = LinenBatchNorm(use_running_average=False)
    variables = linen.init(jax.random.key(0), jnp.ones((2, CHANNELS)))
    refuses(lambda p, x: linen.apply(variables, x * p, mutable=["batch_stats"])[0])
    graph, state = nnx.split(NnxBatchNorm(CHANNELS, rngs=nnx.Rngs(0)))
    refuses(lambda p, x: nnx.merge(graph, state)(x * p))


@BOTH
@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize(
    "norm",
    [
        lambda x: nj.batch_norm(x, layout="S C", axis_names="S example", train=True)[0],
        lambda x: nj.layer_norm(x, layout="S C", axis_names="C example")[0],
        lambda x: nj.moments(x, layout="S C", axis_names="S example").var,
    ],
)
def test_a_norm_that_pools_the_examples_of_a_chunk_is_refused(norm, chunk_size, fn):
    with pytest.raises(ValueError, match=r"axis_names=\"[SC] example\" pools 'example', the axis of") as caught:
        fn(lambda p, x: norm(p * x).sum(), jnp.ones(CHANNELS), jnp.ones((3, 5, CHANNELS)), chunk_size=chunk_size)
    assert "normjax.per_example.coupled_grads" in str(caught.value)


def test_an_axis_of_that_name_of_the_caller_s_own_may_be_pooled():
    pooled = lambda x: nj.batch_norm(x, layout="S C", axis_names="S example", train=True)[0]  # noqa: E731
    x = jnp.arange(24.0).reshape(3, 4, 2)
    got = jax.vmap(pooled, axis_name="example")(x)
    whole, _ = nj.batch_norm(x, layout="N S C", axis_names="N S", train=True)
    np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.case(55)
@pytest.mark.parametrize("layout", ["N C", "S C", "S H C"])
def test_an_axis_of_that_name_of_the_caller_s_own_is_refused_alike_if_it_is_not_pooled(layout):
    norm = lambda x: nj.batch_norm(x, layout=layout, axis_names=layout[:-2], train=True)[0]  # noqa: E731
    shape = {"N": 1, "S": 5, "H": 2, "C": CHANNELS}
    with pytest.raises(ValueError, match=r"^batch_norm: the mapped axis 'example' \(of per_example_grads and clipped"):
        jax.vmap(norm, axis_name="example")(jnp.ones((3, *(shape[name] for name in layout.split()))))


def tracked(layout, axis_names):
    return lambda x: nj.batch_norm(x, None, STATE, layout=layout, axis_names=axis_names, train=True)[0]


@pytest.mark.parametrize("layout", ["N S C", "... S C"])
def test_instance_norm_that_tracks_its_statistics_is_not_refused(layout, rng):
    x = jnp.asarray(rng.normal(size=(3, 5, CHANNELS)), jnp.float32)
    instance = lambda x: nj.instance_norm(x, layout="N S C", axis_names="S")[0]  # noqa: E731
    got, wanted = (
        per_example.per_example_grads(lambda p, x: (norm(p * x[None]) ** 3).sum(), jnp.ones(CHANNELS), x)  # noqa: B023
        for norm in (tracked(layout, "S"), instance)
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "axis_names", "shape"),
    [
        ("N S C", "N", (1, 5, CHANNELS)),
        ("N S C", "N", (1, 1, CHANNELS)),
        ("N S C", "N S", (1, 5, CHANNELS)),
        ("S C", "S", (5, CHANNELS)),
        ("(B=1 n) C", "n", (5, CHANNELS)),
        ("N S C", "S", (2, 5, CHANNELS)),
    ],
    ids=str,
)
def test_tracked_statistics_of_anything_else_are_refused(layout, axis_names, shape):
    refuses(lambda p, x: tracked(layout, axis_names)(p * x.reshape(shape)), shape)


BAD = [
    ((), {}, ValueError, "there is no array in the batch"),
    ((1.0,), {}, ValueError, "needs a leading axis of examples, but one is a scalar"),
    ((np.ones(3), np.ones(4)), {}, ValueError, "differ in how many examples they hold: shapes [(3,), (4,)]"),
    ((np.ones((3, 2)),), {}, ValueError, "loss_fn must return a scalar for one example; got shape (2,)"),
    ((np.ones(3),), {"chunk_size": np.array([2])}, TypeError, "chunk_size must be an int or None; got an array"),
    ((np.ones(3),), {"chunk_size": 0}, ValueError, "chunk_size=0 must be at least 1"),
    ((np.ones(3),), {"chunk_size": True}, TypeError, "chunk_size must be an int or None; got bool"),
    ((np.ones(3),), {"chunk_size": 2.0}, TypeError, "chunk_size must be an int or None; got float"),
]


@pytest.mark.parametrize("fn", [per_example.per_example_grads, per_example.clipped_grad])
@pytest.mark.parametrize(("batch", "options", "kind", "words"), BAD)
def test_bad_input_is_refused_by_name(fn, batch, options, kind, words):
    if fn is per_example.clipped_grad:
        options = {"l2_norm": 1.0, **options}
    with pytest.raises(kind) as caught:
        fn(lambda w, *example: sum(w * part for part in example), jnp.float32(1), *batch, **options)
    assert str(caught.value).startswith(f"{fn.__name__}: ")
    assert words in str(caught.value)


RETURNED = {
    "a tuple": (lambda w, x: (w * x, x), "loss_fn must return a real scalar; got tuple"),
    "None": (lambda w, x: None, "loss_fn must return a real scalar; got NoneType"),
    "an int": (lambda w, x: 1, "loss_fn must return a real scalar; got int"),
    "an integer array": (lambda w, x: jnp.int32(1), "loss_fn must return real numbers to differentiate; got int32"),
    "a truth": (lambda w, x: w > x, "loss_fn must return real numbers to differentiate; got bool"),
    "a complex number": (lambda w, x: w + 1j * x, "loss_fn must return real numbers to differentiate; got complex64"),
}


@BOTH
@pytest.mark.parametrize("what", RETURNED)
def test_a_loss_that_is_no_real_number_is_refused_by_name(what, fn):
    loss, words = RETURNED[what]
    with pytest.raises(TypeError) as caught:
        fn(loss, jnp.float32(1), jnp.ones(3))
    assert str(caught.value).startswith(f"{getattr(fn, 'func', fn).__name__}: {words}")


@BOTH
def test_a_traced_chunk_size_is_refused_and_the_cure_named(fn):
    chunked = lambda size: fn(lambda w, x: w * x, jnp.float32(1), jnp.ones(3), chunk_size=size)  # noqa: E731
    with pytest.raises(TypeError, match=r": chunk_size is traced, .*jax.jit\(f, static_argnames=\"chunk_size\"\)"):
        jax.jit(chunked)(2)
    assert chunked(np.int64(2)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("l2_norm", "kind"),
    [
        *((number, ValueError) for number in (0.0, -1, np.nan, -np.inf, -(10**400))),
        *((other, TypeError) for other in ("1", True, None, 1 + 0j, np.ones(1), jnp.ones(3))),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_a_norm_to_clip_to_is_a_number_above_zero(l2_norm, kind):
    with pytest.raises(kind, match="clipped_grad: l2_norm"):
        per_example.clipped_grad(lambda w, x: w * x, jnp.float32(1), np.ones(3), l2_norm=l2_norm)


def test_a_traced_norm_to_clip_to_is_one_number_too():
    with pytest.raises(TypeError, match="clipped_grad: l2_norm must be one real number; got an array"):
        jax.jit(lambda most: per_example.clipped_grad(lambda w, x: w * x, 1.0, jnp.ones(3), l2_norm=most))(jnp.ones(3))


@pytest.mark.parametrize(
    "l2_norm", [10**40, 10**400, np.inf, np.float64(1e40)], ids=["10**40", "10**400", "inf", "1e40"]
)
def test_a_bound_beyond_every_gradient_clips_none(l2_norm):
    got = per_example.clipped_grad(lambda w, x: w * x, jnp.float32(1), jnp.array([1e30, 0.0]), l2_norm=l2_norm)
    np.testing.assert_allclose(got, 1e30, rtol=1e-6)


@pytest.mark.parametrize("losses", [lambda w, x: jnp.sum(w * x), lambda w, x: jnp.ones((2, 3)) * w])
def test_coupled_gradients_want_one_loss_for_each_example(losses):
    with pytest.raises(ValueError, match=r"coupled_grads: losses_fn must return one array .* of shape \(N,\)"):
        per_example.coupled_grads(losses, jnp.float32(1), jnp.ones(3))


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (lambda w, x: (w * x, x), "losses_fn must return an array of losses; got tuple"),
        (lambda w, x: jnp.arange(3), "losses_fn must return real numbers to differentiate; got int32"),
        (lambda w, x: w * x + 1j, "losses_fn must return real numbers to differentiate; got complex64"),
    ],
)
def test_coupled_losses_that_are_no_array_of_real_numbers_are_refused(losses, words):
    with pytest.raises(TypeError) as caught:
        per_example.coupled_grads(losses, jnp.float32(1), jnp.ones(3))
    assert str(caught.value).startswith(f"coupled_grads: {words}")


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x)


def test_a_model_in_training_mode_that_a_loss_has_from_outside_is_an_error_with_its_cure():
    x = jnp.arange(12.0).reshape(3, CHANNELS)
    batch_norm, dropped = NnxBatchNorm(CHANNELS, rngs=nnx.Rngs(0)), Dropped(nnx.Rngs(0))
    calls = {
        "per_example_grads": lambda: per_example.per_example_grads(lambda w, x: dropped(w * x).sum(), 1.0, x),
        "clipped_grad": lambda: per_example.clipped_grad(lambda w, x: dropped(w * x).sum(), 1.0, x, l2_norm=1.0),
        "coupled_grads": lambda: per_example.coupled_grads(lambda w, x: batch_norm(w * x).sum(1), 1.0, x),
        "example_coupling": lambda: per_example.example_coupling(batch_norm, x),
    }
    for fn, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{fn}: .* changes a variable of an nnx model") as caught:
            call()
        assert "nnx.merge(graph, weights, rest, copy=True)" in str(caught.value)
    graph, rest = nnx.split(batch_norm)
    coupling = per_example.example_coupling(lambda x: nnx.merge(graph, rest, copy=True)(x), x)
    assert np.all(np.asarray(coupling) > 0)
    dropped.eval()
    np.testing.assert_allclose(calls["per_example_grads"](), x.sum(1))


NO_PARAMETERS = {
    "an integer": ({"w": 1.0, "count": jnp.int32(3)}, "params['count'] is int32"),
    "running statistics": ({"w": 1.0, "stats": STATE}, "params['stats'].count is int32"),
    "a key": ({"w": 1.0, "key": jax.random.key(0)}, "params['key'] is key<fry>"),
    "a string": ("images", "params is str"),
}


@pytest.mark.parametrize(("params", "words"), NO_PARAMETERS.values(), ids=NO_PARAMETERS.keys())
@pytest.mark.parametrize("fn", ["per_example_grads", "clipped_grad", "coupled_grads"])
def test_parameters_that_nothing_is_differentiated_by_are_an_error_that_names_them(fn, params, words):
    options = {"l2_norm": 1.0} if fn == "clipped_grad" else {}
    with pytest.raises(TypeError) as caught:
        getattr(per_example, fn)(lambda p, x: x, params, jnp.ones(3), **options)
    assert str(caught.value).startswith(f"{fn}: {words}; params are the floats to differentiate by. ")
    with pytest.raises(TypeError, match=rf"^{fn}: losse?s?_fn must be a function of params and examples, not called"):
        getattr(per_example, fn)(jnp.float32(2), 1.0, jnp.ones(3), **options)


def test_labels_in_a_list_are_asked_for_as_an_array():
    with pytest.raises(ValueError, match="one is a scalar; make lists of numbers arrays"):
        per_example.per_example_grads(lambda w, x, label: w * x, 1.0, jnp.ones(3), [0, 1, 2])
