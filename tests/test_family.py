"""The family: signatures, the mode table, each layer's own checks, and what its arguments mean."""

import functools
import inspect

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import normjax as nj
from normjax import reference
from tests.closeness import close

# --- signatures

LAYER = "x, params=None, state=None, *, layout, axis_names, train=None, where=None, eps=1e-05, dtype=None, "
BATCH = (
    "x, params=None, state=None, *, layout, axis_names, train, where=None, eps=1e-05, dtype=None, "
    "running=Ema(new_weight=0.1, unbiased=False, debias=False), use_batch_stats=False, axis_index_groups=None, "
    "derivative='vjp'"
)
SIGNATURES = {
    nj.batch_norm: BATCH,
    nj.sync_batch_norm: BATCH,
    nj.layer_norm: LAYER + "derivative='vjp'",
    nj.instance_norm: LAYER + "derivative='vjp'",
    nj.group_norm: LAYER + "derivative='vjp'",
    nj.rms_norm: LAYER + "derivative='vjp'",
    nj.normalize: "x, params=None, *, layout, axis_names, moments=None, center=True, where=None, eps=1e-05, "
    "dtype=None, axis_index_groups=None, derivative='vjp'",
    nj.moments: "x, *, layout, axis_names, center=True, where=None, axis_index_groups=None",
    nj.merge: "*moments, axis=None",
    nj.update: "state, moments, *, running=Ema(new_weight=0.1, unbiased=False, debias=False)",
    nj.pool_stats: "state, axis_names",
    nj.describe: "shape, *, layout, axis_names",
    nj.decay_mask: "params",
    nj.Affine.init: "*, scale=True, bias=True, scale_init=1.0, dtype=float32, zero_centered=False, **sizes",
    nj.BatchStats.init: "*, dtype=float32, **sizes",
    nj.Moments.init: "*, dtype=float32, **sizes",
    nj.Affine: "scale, bias, names=(), zero_centered=False",
    nj.BatchStats: "mean, var, count, weight, names=()",
    nj.Moments: "mean, var, count, names=()",
    nj.Ema: "new_weight=0.1, unbiased=False, debias=False",
    nj.Cumulative: "by='entries', unbiased=False",
}


def rendered(call) -> str:
    """A signature without its annotations; dtypes by their names."""
    parts, keyword_only = [], False
    for parameter in inspect.signature(call).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            parts.append(f"*{parameter.name}")
            keyword_only = True
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        if parameter.kind is parameter.VAR_KEYWORD:
            parts.append(f"**{parameter.name}")
        elif parameter.default is parameter.empty:
            parts.append(parameter.name)
        else:
            default = "float32" if parameter.default is jnp.float32 else repr(parameter.default)
            parts.append(f"{parameter.name}={default}")
    return ", ".join(parts)


@pytest.mark.case(28)
@pytest.mark.case(98)
@pytest.mark.parametrize("call", SIGNATURES, ids=lambda call: call.__qualname__)
def test_a_signature_is_the_contract_to_the_letter(call):
    assert rendered(call) == SIGNATURES[call]


def test_the_public_names_are_those_of_the_contract():
    extras = {"Affine", "BatchStats", "Moments", "Ema", "Cumulative"}
    functions = {call.__name__ for call in SIGNATURES if inspect.isfunction(call)}
    assert set(nj.__all__) == functions | extras


def test_the_parts_start_as_documented():
    params = nj.Affine.init(N=2, C=3, dtype=jnp.bfloat16, scale_init=0.5)
    assert params.names == ("N", "C")
    np.testing.assert_array_equal(params.scale, np.full((2, 3), 0.5, jnp.bfloat16))
    np.testing.assert_array_equal(params.bias, np.zeros((2, 3), jnp.bfloat16))
    assert params.scale.dtype == params.bias.dtype == jnp.bfloat16
    bare = nj.Affine.init(C=3, scale=False, bias=False)
    assert bare.scale is None
    assert bare.bias is None
    scalar = nj.Affine.init(zero_centered=True, scale_init=3.0)
    assert (float(scalar.scale), scalar.scale.shape, scalar.names) == (2.0, (), ())

    state = nj.BatchStats.init(C=3)
    for leaf, value, dtype in [(state.mean, 0, "float32"), (state.var, 1, "float32"), (state.weight, 0, "float32")]:
        np.testing.assert_array_equal(leaf, np.full(3, value))
        assert leaf.dtype == dtype
    assert (int(state.count), state.count.dtype, state.count.shape) == (0, jnp.int32, ())

    empty = nj.Moments.init(C=3)
    for leaf in jax.tree.leaves(empty):
        np.testing.assert_array_equal(leaf, np.zeros(3, np.float32))


@pytest.mark.parametrize("size", [3.0, -1, "a", True, None])
@pytest.mark.parametrize("kind", [nj.Affine, nj.BatchStats, nj.Moments])
def test_a_size_that_is_no_size_says_so(kind, size):
    words = rf"^{kind.__name__}\.init: C={size!r}: the size of an axis must be a non-negative integer"
    with pytest.raises(TypeError, match=words):
        kind.init(C=size)


# --- the mode table


def filled(rng, features=3):
    """Parameters and running statistics away from where they start."""
    scale, bias, mean = (jnp.asarray(rng.normal(size=features), jnp.float32) for _ in range(3))
    var = jnp.asarray(rng.uniform(0.5, 2.0, features), jnp.float32)
    return nj.Affine(scale, bias, "C"), nj.BatchStats(mean, var, jnp.int32(4), jnp.ones(features), "C")


def same(actual, expected):
    """Two trees are equal leaf by leaf, to the bit."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


SPEC = {"layout": "N C", "axis_names": "N"}


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
    y, new = jax.jit(functools.partial(nj.batch_norm, **SPEC, **mode))(x, params, state)

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

    @jax.jit
    def each():
        results = [layer(None, state, train=train) for train in (True, False, None, "train")]
        assert all(returned is state for _, returned in results)
        return [y for y, _ in results]

    ys = each()
    for y in ys:
        np.testing.assert_array_equal(y, ys[0])


# --- errors: arguments of batch_norm beside x = ones (4, 3), layout "N C", axis_names "N", train=True

STATE = nj.BatchStats.init(C=3)
STACKED = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), STATE)
ERRORS = [
    # modes
    (
        {"use_batch_stats": True},
        ValueError,
        ["train=True already normalises by the batch", "use_batch_stats=True is for inference", "train=False with it"],
    ),
    (
        {"train": False},
        ValueError,
        ["train=False normalises by running statistics", "state=None", "pass the BatchStats", "use_batch_stats=True"],
    ),
    ({"train": 1}, TypeError, ["train must be a Python or NumPy bool", "got 1"]),
    ({"train": None}, TypeError, ["train must be a Python or NumPy bool", "got None"]),
    ({"use_batch_stats": "no"}, TypeError, ["use_batch_stats must be a Python or NumPy bool", "got 'no'"]),
    # parameters
    (
        {"params": {"scale": 1}},
        TypeError,
        ["params must be a normjax.Affine or None", "got dict", "Affine(scale, bias"],
    ),
    ({"params": np.ones(3)}, TypeError, ["params must be a normjax.Affine or None", "got ndarray"]),
    ({"params": nj.Affine.init(Q=3)}, ValueError, ["params.scale runs along 'Q'", 'not in layout "N C"']),
    (
        {"params": nj.Affine(np.ones(4), None, "C")},
        ValueError,
        ["params.scale has shape (4,)", "axis 'C'", "size 3", "shape (4, 3)"],
    ),
    ({"params": nj.Affine(np.ones(3), np.ones(2), "C")}, ValueError, ["params.bias has shape (2,)", "axis 'C'"]),
    ({"params": nj.Affine(np.ones((1, 3)), None, "C")}, ValueError, ["params.scale has shape (1, 3)", "'C' say one"]),
    ({"params": nj.Affine(np.ones(3), None)}, ValueError, ["params.scale has shape (3,)", "names no axis: a scalar"]),
    ({"params": nj.Affine(np.ones(3, complex), None, "C")}, TypeError, ["params.scale is complex", "x is real"]),
    (
        {"params": nj.Affine.init(N=4)},
        ValueError,
        ["params runs along 'N'", 'axis_names="N" reduces', "batch norm scales the axes it keeps"],
    ),
    # state
    ({"state": 3}, TypeError, ["state must be a normjax.BatchStats", "got int"]),
    ({"state": nj.BatchStats.init(N=4)}, ValueError, ["state runs along 'N'", 'axis_names="N" pools', "kept axes"]),
    ({"state": nj.BatchStats.init(Q=3)}, ValueError, ["state.mean runs along 'Q'", 'not in layout "N C"']),
    ({"state": nj.BatchStats.init(C=4)}, ValueError, ["state.mean has shape (4,)", "axis 'C'", "size 3"]),
    ({"state": nj.BatchStats.init(Q=3), "train": False}, ValueError, ["state.mean runs along 'Q'"]),
    ({"state": nj.BatchStats.init(C=4), "train": False}, ValueError, ["state.mean has shape (4,)", "size 3"]),
    (
        {"state": nj.BatchStats(np.zeros(3, "f"), np.ones(2, "f"), 0, np.zeros(3, "f"), "C")},
        ValueError,
        ["the leaves of state must have one shape", "mean (3,), var (2,), weight (3,)"],
    ),
    (
        {"state": STACKED},
        ValueError,
        [
            "state.mean has shape (8, 3)",
            "replicas",
            'pool_stats(BatchStats(mean, var, count, weight, names="device C")',
        ],
    ),
    ({"state": STACKED, "train": False}, ValueError, ["state.mean has shape (8, 3)", "replicas", "pool_stats("]),
    (
        {"state": jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), STATE)},
        TypeError,
        ["state.mean is bfloat16", "need float32 or more", "BatchStats.init(dtype=jnp.float32)"],
    ),
    (
        {"state": jax.tree.map(lambda leaf: leaf.astype(jnp.float16), STATE), "train": False},
        TypeError,
        ["state.mean is float16", "need float32 or more"],
    ),
    # where
    (
        {"where": np.ones((4, 3))},
        TypeError,
        ["where must be boolean", "float", "shape (4, 3) for x of shape (4, 3)", "where=mask > 0"],
    ),
    ({"where": np.ones((4, 3), int)}, TypeError, ["where must be boolean", "int"]),
    ({"where": np.ones(4, bool)}, ValueError, ["where has shape (4,)", "x has shape (4, 3)", "each size 1 or x's"]),
    ({"where": np.ones((4, 2), bool)}, ValueError, ["where has shape (4, 2)", "x has shape (4, 3)"]),
    ({"where": np.ones((1, 4, 3), bool)}, ValueError, ["where has shape (1, 4, 3)", "x's rank"]),
    ({"where": True}, ValueError, ["where has shape ()", "x has shape (4, 3)"]),
    # eps
    ({"eps": -1e-5}, ValueError, ["eps=-1e-05 must be at least 0", "added to the variance, inside the root"]),
    ({"eps": float("nan")}, ValueError, ["eps=nan must be at least 0"]),
    ({"eps": np.ones(3)}, TypeError, ["eps must be a real scalar", "array([1., 1., 1.])"]),
    ({"eps": 1j}, TypeError, ["eps must be a real scalar", "1j"]),
    ({"eps": "small"}, TypeError, ["eps must be a real scalar", "'small'"]),
    ({"eps": None}, TypeError, ["eps must be a real scalar", "None"]),
    # the rest
    ({"dtype": jnp.int32}, TypeError, ["dtype=", "int32", "must be a floating-point dtype"]),
    ({"dtype": "nope"}, TypeError, ["dtype=", "nope", "floating-point dtype"]),
    ({"derivative": "backprop"}, ValueError, ["derivative='backprop' is not one of 'vjp', 'jvp', 'autodiff'"]),
    ({"running": 0.9}, TypeError, ["running must be an Ema or a Cumulative", "got float"]),
    ({"x": None}, TypeError, ["x must be an array of numbers", "not NoneType"]),
    ({"x": "abc"}, TypeError, ["x must be an array of numbers", "not str"]),
    ({"x": [[1, 2], [3]]}, TypeError, ["x must be an array of numbers", "not list"]),
    (
        {"x": np.ones((4, 3), np.complex64), "dtype": jnp.float32},
        TypeError,
        ["dtype=", "float32", "must be a complex dtype", "x is complex64"],
    ),
    (
        {"state": nj.BatchStats.init(C=3, dtype=jnp.complex64), "train": False},
        TypeError,
        ["state.mean is complex", "x is real"],
    ),
    (
        {"x": np.ones((1, 3)), "running": nj.Ema(unbiased=True)},
        ValueError,
        ["unbiased=True", "m/(m-1) needs more than one entry", "m = 1 here", "unbiased=False"],
    ),
    (
        {"x": np.ones((1, 3)), "running": nj.Cumulative(unbiased=True)},
        ValueError,
        ["Cumulative(by='entries', unbiased=True)", "m = 1 here"],
    ),
]


@pytest.mark.case(34)
@pytest.mark.case(75)
@pytest.mark.case(84)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("given", "error", "words"), ERRORS)
def test_a_broken_rule_says_what_came_and_how_to_mend_it(given, error, words, transform):
    arguments = {"x": np.ones((4, 3), np.float32), "params": None, "state": None, "train": True, **SPEC, **given}
    with pytest.raises(error) as caught:
        transform(lambda: nj.batch_norm(**arguments))()
    message = str(caught.value)
    assert message.startswith("batch_norm: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize("argument", ["train", "use_batch_stats"])
def test_a_traced_mode_says_how_to_make_it_static(argument):
    def layer(flag):
        return nj.batch_norm(np.ones((4, 3)), **{**SPEC, "train": False, argument: flag})

    with pytest.raises(TypeError, match=rf"^batch_norm: {argument} is traced") as caught:
        jax.jit(layer)(True)
    assert f'jax.jit(f, static_argnames="{argument}")' in str(caught.value)


C, N, NC = nj.Affine.init(C=6), nj.Affine.init(N=4), nj.Affine.init(N=4, C=6)
SPLIT = "N C=(G=2 K)"
FAMILY = [
    # name, params, layout, axis_names, the words of the error or None where it works
    ("batch_norm", N, "N C", "N", "params runs along 'N', all of which axis_names=\"N\" reduces; batch norm scales"),
    ("batch_norm", C, "N C", "N", None),
    ("batch_norm", NC, "N C", "N", None),
    ("batch_norm", nj.Affine.init(), "N C", "N C", None),
    (
        "batch_norm",
        C,
        "N C",
        "N C",
        "'C', all of which axis_names=\"N C\" reduces; batch norm scales the axes it keeps",
    ),
    ("batch_norm", C, SPLIT, "N K", None),
    (
        "instance_norm",
        C,
        "N C",
        "C",
        "params runs along 'C', all of which axis_names=\"C\" reduces; instance norm scales",
    ),
    ("instance_norm", N, "N C", "C", None),
    ("instance_norm", NC, "N C", "C", None),
    ("instance_norm", nj.Affine.init(), "N C", "C", None),
    ("layer_norm", N, "N C", "C", "params runs along 'N', none of which axis_names=\"C\" reduces; layer norm scales"),
    ("layer_norm", C, "N C", "C", None),
    ("layer_norm", NC, "N C", "C", None),
    ("layer_norm", nj.Affine.init(), "N C", "C", None),
    ("layer_norm", C, SPLIT, "K", None),
    ("layer_norm", nj.Affine.init(G=2), SPLIT, "K", "params runs along 'G', none of which axis_names=\"K\" reduces"),
    ("rms_norm", N, "N C", "C", None),
    ("rms_norm", C, "N C", "C", None),
    ("rms_norm", nj.Affine.init(Q=6), "N C", "C", "params.scale runs along 'Q', which is not in layout \"N C\""),
    ("group_norm", C, "N C", "C", 'layout="N C" splits no axis; write the number of groups into it'),
    ("group_norm", C, SPLIT, "K", None),
    ("group_norm", C, SPLIT, "C", "axis_names=\"C\" pools every factor of 'C=(G=2 K)'; keep the factor"),
    ("group_norm", C, SPLIT, "G K", "pools every factor of 'C=(G=2 K)'; keep the factor that numbers the groups"),
    ("group_norm", nj.Affine.init(G=2), SPLIT, "K", None),
    ("group_norm", N, SPLIT, "K", None),
    ("sync_batch_norm", C, "N C", "N", 'axis_names="N" holds no mapped axis, only axes of layout "N C"; add the name'),
]


@pytest.mark.parametrize(("name", "params", "layout", "axis_names", "words"), FAMILY)
def test_each_layer_checks_what_makes_it_that_layer(name, params, layout, axis_names, words, rng):
    x = rng.normal(size=(4, 6)).astype(np.float32)
    train = {"train": True} if "batch" in name else {}
    layer = jax.jit(functools.partial(getattr(nj, name), layout=layout, axis_names=axis_names, **train))
    if words is None:
        y, _ = layer(x, params)
        # γ = 1 and β = 0: only what is pooled shows.
        expected = reference.normalize(x, layout=layout, axis_names=axis_names, center=name != "rms_norm")
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6 * np.sqrt(24))
    else:
        with pytest.raises(ValueError, match=rf"^{name}: ") as caught:
            layer(x, params)
        assert words in str(caught.value)


def test_parameters_of_none_at_all_are_never_refused(rng):
    x = rng.normal(size=(4, 3)).astype(np.float32)
    bare = nj.Affine(None, None, "N")
    np.testing.assert_array_equal(nj.batch_norm(x, bare, train=True, **SPEC)[0], nj.normalize(x, **SPEC)[0])


# --- members of the family


def test_sync_batch_norm_is_batch_norm_that_insists(rng):
    x = rng.normal(size=(3, 4, 3)).astype(np.float32)
    params, state = filled(rng)
    spec = {"layout": "N C", "axis_names": "N data", "train": True}

    def both(x):
        return [layer(x, params, state, **spec) for layer in (nj.sync_batch_norm, nj.batch_norm)]

    ours, plain = jax.jit(jax.vmap(both, axis_name="data"))(x)
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
    y, new = jax.jit(layer)(x, params, state)

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
    y, new = jax.jit(layer)(x, params, state)

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
    y, _ = jax.jit(layer)(x, params)
    spec = {"names": names, "layout": layout, "axis_names": axis_names, "zero_centered": zero_centered}
    close(y, reference.normalize(x, scale, bias, center=name != "rms_norm", **spec), m=12)


@pytest.mark.case(18)
def test_a_zero_centred_scale_is_added_to_one_in_the_statistics_dtype():
    scale = jnp.full(4, 2.0**-9, jnp.bfloat16)  # 1 + 2⁻⁹ is 1 in bfloat16
    params = nj.Affine(scale, None, "D", zero_centered=True)
    y, _ = nj.rms_norm(jnp.ones(4, jnp.bfloat16), params, layout="D", axis_names="D", eps=0.0, dtype=jnp.float32)
    np.testing.assert_array_equal(y, np.full(4, 1 + 2.0**-9, np.float32))


# --- dtype, eps, kinds of input


@pytest.mark.parametrize("given", ["float16", "bfloat16", "float32", "int32", "uint8", "bool"])
@pytest.mark.parametrize("asked", [None, "float32", "bfloat16"])
def test_the_output_has_the_dtype_asked_for_or_that_of_x(given, asked, rng):
    x = jnp.asarray(rng.integers(0, 2 if given == "bool" else 9, (8, 3))).astype(given)
    params, state = filled(rng)
    y, new = jax.jit(functools.partial(nj.batch_norm, train=True, dtype=asked, **SPEC))(x, params, state)
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
    y, _ = jax.jit(lambda: layer(x, where=[[True]] * 2))()
    assert y.dtype == jnp.float32
    close(y, reference.normalize(x, layout="N D", axis_names="D"), m=2)
    close(jax.jit(lambda: layer(np.asarray(x)))()[0], y)


def test_numpy_parameters_and_state_are_input_too(rng):
    x = rng.normal(size=(4, 3)).astype(np.float32)
    params, state = filled(rng)
    plain = functools.partial(jax.tree.map, np.asarray)
    layer = functools.partial(nj.batch_norm, x, train=True, **SPEC)
    # Closed over, since arguments of jit would be JAX arrays inside.
    same(jax.jit(lambda: layer(plain(params), plain(state)))(), jax.jit(lambda: layer(params, state))())


@pytest.mark.case(99)
def test_eps_is_added_to_the_variance_inside_the_root():
    y, _ = nj.layer_norm(np.array([1e-3, -1e-3], np.float32), layout="D", axis_names="D")
    close(y, [0.301511, -0.301511], k=32)


@pytest.mark.parametrize("eps", [0, 1, 0.5, np.float32(0.5), np.float64(0.5), jnp.bfloat16(0.5)])
def test_eps_may_be_any_real_scalar(eps, rng):
    x = rng.normal(size=(4, 3)).astype(np.float32)
    y, _ = jax.jit(functools.partial(nj.layer_norm, layout="N D", axis_names="D"))(x, eps=eps)
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
    value, gradient = jax.jit(jax.value_and_grad(loss))(0.3)
    np.testing.assert_allclose(value, right(0.3), rtol=1e-12)
    np.testing.assert_allclose(gradient, slope, rtol=1e-8)


def test_complex_input_has_a_real_variance_and_complex_running_statistics(rng):
    x = (rng.normal(2, 3, (8, 3)) + 1j * rng.normal(-1, 2, (8, 3))).astype(np.complex64)
    params, _ = filled(rng)
    state = nj.BatchStats.init(C=3, dtype=jnp.complex64)
    assert (state.mean.dtype, state.var.dtype) == (jnp.complex64, jnp.float32)
    y, new = jax.jit(functools.partial(nj.batch_norm, train=True, **SPEC))(x, params, state)
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
    y, new = jax.jit(functools.partial(nj.batch_norm, train=True, **SPEC))(x, params, state, where=where)
    np.testing.assert_array_equal(y, np.broadcast_to(params.bias, (4, 3)))
    same(new, state)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "instance_norm"])
def test_layers_of_nothing_are_nothing(name, shape):
    layer = functools.partial(getattr(nj, name), layout="N D", axis_names="D")
    y, _ = jax.jit(layer)(np.zeros(shape, np.float32))
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


# --- micro-batches


def parts_of(x, where, sizes):
    stops = np.cumsum(sizes)
    return [(x[stop - size : stop], where[stop - size : stop]) for size, stop in zip(sizes, stops, strict=True)]


@pytest.mark.case(79)
@pytest.mark.parametrize("center", [True, False])
def test_micro_batches_equal_the_full_batch(center, rng):
    x = rng.normal(2.0, 3.0, (9, 5, 3)).astype(np.float32)
    where = rng.random((9, 5, 1)) < 0.7
    where[:2] = False  # the first micro-batch is empty
    params, state = filled(rng)
    spec = {"layout": "N L C", "axis_names": "N L", "center": center}
    parts = parts_of(x, where, [2, 3, 4])

    @jax.jit
    def accumulate(parts):
        merged = nj.merge(*(nj.moments(x, where=w, **spec) for x, w in parts))
        y = [nj.normalize(x, params, moments=merged, where=w, **spec)[0] for x, w in parts]
        return merged, jnp.concatenate(y), nj.update(state, merged)

    merged, y, new = accumulate(parts)

    close(y, reference.normalize(x, params.scale, params.bias, names="C", where=where, **spec), m=45)
    batch = reference.moments(x, where=where, **spec)
    for actual, right in zip((merged.mean, merged.var, merged.count), batch, strict=True):
        close(actual, right, m=45)
    mean, var, _ = reference.update(state.mean, state.var, state.weight, *batch, rule="ema")
    close(new.mean, mean, m=45)
    close(new.var, var, m=45)
    assert new.count == 5


@pytest.mark.parametrize("axis", [0, -1])
def test_stacked_moments_merge_along_their_axis(axis, rng):
    x = rng.normal(2.0, 3.0, (4, 5, 3)).astype(np.float32)
    merged = jax.jit(lambda x: nj.merge(jax.vmap(functools.partial(nj.moments, **SPEC), out_axes=axis)(x), axis=axis))(
        x
    )
    assert merged.names == ("C",)
    for leaf, right in zip(
        jax.tree.leaves(merged), reference.moments(x, layout="S N C", axis_names="S N"), strict=True
    ):
        close(leaf, right, m=20)


def test_empty_moments_are_the_identity_of_merge(rng):
    moments, empty = nj.moments(rng.normal(2.0, 3.0, (4, 3)).astype(np.float32), **SPEC), nj.Moments.init(C=3)
    merge = jax.jit(nj.merge)
    for merged in (merge(moments), merge(moments, empty), merge(empty, moments)):
        for leaf, right in zip(jax.tree.leaves(merged), jax.tree.leaves(moments), strict=True):
            close(leaf, right)
    same(merge(empty, empty), empty)


def test_the_gradient_through_merged_moments_is_that_of_the_full_batch(rng, x64):
    x, g = rng.normal(2.0, 3.0, (9, 3)), rng.normal(size=(9, 3))
    scale, bias = rng.normal(size=3), rng.normal(size=3)

    def loss(x, scale, bias):
        parts = [x[:2], x[2:5], x[5:]]
        merged = nj.merge(*(nj.moments(part, **SPEC) for part in parts))
        params = nj.Affine(scale, bias, "C")
        y = [nj.normalize(part, params, moments=merged, **SPEC)[0] for part in parts]
        return jnp.sum(g * jnp.concatenate(y))

    got = jax.jit(jax.grad(loss, (0, 1, 2)))(x, scale, bias)
    for actual, right in zip(got, reference.backward(x, g, scale, bias, names="C", **SPEC), strict=True):
        np.testing.assert_allclose(actual, right, rtol=1e-10, atol=1e-12)


MOMENTS = nj.Moments.init(C=3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: nj.merge(), ValueError, ["merge: give at least one Moments"]),
        (lambda: nj.merge(3), TypeError, ["merge: moments must be a normjax.Moments; got int"]),
        (lambda: nj.merge(MOMENTS, MOMENTS, axis=0), ValueError, ["axis=0 is for one stacked Moments", "2 were given"]),
        (lambda: nj.merge(MOMENTS, axis=1), ValueError, ["axis=1 is out of range", "shape (3,)"]),
        (lambda: nj.merge(MOMENTS, nj.Moments.init(C=4)), ValueError, ["same axes", "(3,)", "(4,)"]),
        (lambda: nj.merge(MOMENTS, nj.Moments.init(D=3)), ValueError, ["same axes", "('C',)", "('D',)"]),
        (lambda: nj.normalize(np.ones((4, 3)), moments=3, **SPEC), TypeError, ["moments must be a normjax.Moments"]),
        (
            lambda: nj.normalize(np.ones((4, 3)), moments=nj.Moments.init(C=4), **SPEC),
            ValueError,
            ["normalize: moments.mean has shape (4,)", "axis 'C'", "size 3"],
        ),
        (
            lambda: nj.normalize(np.ones((4, 3)), moments=nj.Moments.init(Q=3), **SPEC),
            ValueError,
            ["normalize: moments.mean runs along 'Q'", 'not in layout "N C"'],
        ),
    ],
)
def test_moments_that_do_not_fit_say_so(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


# --- weight decay


def decayed(params):
    """Which leaves one step of adamw with zero gradients changes, by path."""
    optimiser = optax.adamw(0.1, weight_decay=0.5, mask=nj.decay_mask)

    @jax.jit
    def step(params):
        return optimiser.update(jax.tree.map(jnp.zeros_like, params), optimiser.init(params), params)[0]

    updates = step(params)
    return jax.tree.map(lambda update: bool(np.any(update)), updates)


def ones_like(tree):
    return jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), tree)


@pytest.mark.case(86)
def test_weight_decay_leaves_scales_and_biases_of_pure_trees_alone():
    norm = nj.Affine.init(N=2, C=3)  # two axes: a rule by rank would decay it
    params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "norm": norm, "blocks": [(norm, jnp.ones(2))]}
    changed = decayed(ones_like(params))
    spared = nj.Affine(False, False, "N C")
    same(changed, {"dense": {"kernel": True, "bias": True}, "norm": spared, "blocks": [(spared, True)]})


@pytest.mark.case(86)
def test_weight_decay_leaves_a_bare_affine_alone():
    same(nj.decay_mask(nj.Affine.init(C=3, bias=False)), nj.Affine(False, None, "C"))
    same(decayed(nj.Affine.init(C=3)), nj.Affine(False, False, "C"))


@pytest.mark.case(86)
def test_weight_decay_leaves_the_norms_of_linen_alone():
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Dense(4, name="dense")(x)
            x = linen.LayerNorm(name="layer")(x)
            x = linen.RMSNorm(name="rms")(x)
            x = linen.BatchNorm(use_running_average=True, use_scale=False, name="batch")(x)
            return linen.Dense(2, use_bias=False, name="head")(linen.GroupNorm(2, name="group")(x))

    params = jax.eval_shape(Model().init, jax.random.key(0), jnp.ones((2, 3)))["params"]
    both, none = {"scale": False, "bias": False}, {"kernel": True, "bias": True}
    same(
        decayed(ones_like(params)),
        {
            "dense": none,
            "layer": both,
            "rms": {"scale": False},
            "batch": {"bias": False},
            "group": both,
            "head": {"kernel": True},
        },
    )


@pytest.mark.case(86)
def test_weight_decay_leaves_the_norms_of_nnx_alone():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.dense = nnx.Linear(3, 4, rngs=rngs)
            self.layer = nnx.LayerNorm(4, rngs=rngs)
            self.rms = nnx.RMSNorm(4, rngs=rngs)
            self.ours = nnx.data(jax.tree.map(nnx.Param, nj.Affine.init(C=4)))

    mask = nj.decay_mask(nnx.state(Model(nnx.Rngs(0)), nnx.Param))
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(mask)}
    got = {path: leaf.get_value() for path, leaf in flat.items() if "ours" not in path}
    assert got == {
        "dense.kernel": True,
        "dense.bias": True,
        "layer.scale": False,
        "layer.bias": False,
        "rms.scale": False,
    }
    assert jax.tree.leaves(mask["ours"]) == [False, False]
