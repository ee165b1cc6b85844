"""What each layer refuses, and how it says so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import normjax as nj
from normjax import reference
from tests.quick import quick_jit
from tests.trees import SPEC

STATE = nj.BatchStats.init(C=3)
STACKED = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), STATE)
# Arguments of batch_norm beside x = ones (4, 3), layout "N C", axis_names "N", train=True.
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
    *(
        ({"params": array}, TypeError, ["must be a normjax.Affine or None; got an array. Wrap arrays as Affine("])
        for array in (np.ones(3), jnp.ones(3))
    ),
    (
        {"params": nnx.Param(nj.Affine.init(C=3))},
        TypeError,
        ["params must be a normjax.Affine or None; got Param, a variable: pass variable.get_value()."],
    ),
    ({"params": nj.Affine.init(Q=3)}, ValueError, ["params.scale runs along 'Q'", 'not in layout "N C"']),
    (
        {"params": nj.Affine(np.ones(4), None, "C")},
        ValueError,
        ["params.scale has shape (4,)", "axis 'C'", "size 3", "shape (4, 3)"],
    ),
    ({"params": nj.Affine(np.ones(3), np.ones(2), "C")}, ValueError, ["params.bias has shape (2,)", "axis 'C'"]),
    ({"params": nj.Affine(np.ones((1, 3)), None, "C")}, ValueError, ["params.scale has shape (1, 3)", "'C' say one"]),
    (
        {"params": nj.Affine(np.ones(3), None)},
        ValueError,
        ["params.scale has shape (3,)", 'a scalar; pass names, as in names="C".'],
    ),
    (
        {"params": nj.Affine(np.ones((4, 3)), None)},
        ValueError,
        ["params.scale has shape (4, 3)", 'a scalar; pass names, as in names="N C".'],
    ),
    (
        {"params": nj.Affine(np.ones(5), None), "layout": "N D"},
        ValueError,
        ["params.scale has shape (5,)", 'a scalar; pass names, as in names="C".'],
    ),
    ({"params": nj.Affine(np.ones(3, complex), None, "C")}, TypeError, ["params.scale is complex", "x is real"]),
    (
        {"params": nj.Affine.init(N=4)},
        ValueError,
        ["params runs along 'N'", 'axis_names="N" reduces', "batch norm scales the axes it keeps"],
    ),
    # state
    (
        {"state": 3},
        TypeError,
        ["must be a normjax.BatchStats; got int. Start from BatchStats.init(C=64), or wrap arrays as BatchStats("],
    ),
    ({"state": (1, 2)}, TypeError, ["got tuple. Start from BatchStats.init(C=64), or"]),
    ({"state": (1, STATE)}, TypeError, ["got tuple. It is what a norm returns, y and the state: pass the second."]),
    ({"state": jnp.ones(3)}, TypeError, ["state must be a normjax.BatchStats; got an array. Start from"]),
    (
        {"state": nnx.BatchStat(STATE)},
        TypeError,
        ["got BatchStat, a variable: pass variable.get_value(). Start from BatchStats.init(C=64)"],
    ),
    (
        {"state": nj.BatchStats(STATE.mean, STATE.var, STATE.count, STATE.weight)},
        ValueError,
        [
            "state.mean has shape (3,)",
            'it names no axis: a scalar; pass names, as in names="C". If the further axis holds replicas',
            'names="device"), "device")',
        ],
    ),
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
    ({"running": 0.9}, TypeError, ["got float. Write the weight of the new batch as Ema(0.1)"]),
    ({"running": np.ones(1)}, TypeError, ["running must be an Ema or a Cumulative; got an array. Write"]),
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
    layer = quick_jit(functools.partial(getattr(nj, name), layout=layout, axis_names=axis_names, **train))
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
