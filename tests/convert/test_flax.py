"""`from_flax` and `to_flax`: linen's variables and nnx's state come along, go on as in Flax, and go back unchanged."""

import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import normjax as nj
from normjax import linen as nj_linen
from normjax import nnx as nj_nnx
from normjax.convert import from_flax, to_flax
from tests.convert.common import close
from tests.quick import quick_jit

SIZE = 6


class Model(linen.Module):
    """The norms of linen in one model, and a layer that is none."""

    @linen.compact
    def __call__(self, x, train=False):
        x = linen.Dense(SIZE)(x)
        x = linen.BatchNorm(momentum=0.75, use_running_average=not train, name="batch")(x)
        for layer in (
            linen.LayerNorm(),
            linen.GroupNorm(num_groups=2),
            linen.RMSNorm(),
            linen.LayerNorm(use_scale=False),
        ):
            x = x + layer(x)
        return x


LAYERS = {
    "LayerNorm_0": ("layer_norm", "N D", "D", "D"),
    "GroupNorm_0": ("group_norm", "N C=(G=2 K)", "K", "C"),
    "RMSNorm_0": ("rms_norm", "N D", "D", "D"),
    "LayerNorm_1": ("layer_norm", "N D", "D", "D"),
}


@pytest.fixture
def x(rng):
    return np.asarray(rng.normal(2.0, 1.5, (8, SIZE)), np.float32)


@pytest.fixture
def variables(rng, x):
    """A trained-looking checkpoint."""
    shapes = jax.eval_shape(Model().init, jax.random.key(0), x)
    return jax.tree.map(lambda leaf: jnp.asarray(0.5 + rng.random(leaf.shape), leaf.dtype), shapes)


def leaves(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def same(actual, wanted):
    actual, wanted = leaves(actual), leaves(wanted)
    assert actual.keys() == wanted.keys()
    for key, leaf in actual.items():
        assert leaf.dtype == wanted[key].dtype
        np.testing.assert_array_equal(leaf, wanted[key])


def test_a_model_of_linens_norms_is_the_same_here(variables, x):
    """Each by its own defaults: eps is 1e-5 in batch norm and 1e-6 in the others."""
    bn = from_flax(variables, prefix="batch", momentum=0.75)
    layers = {name: from_flax(variables, prefix=name, names=call[3]) for name, call in LAYERS.items()}
    assert bn.eps == 1e-5
    assert {layer.eps for layer in layers.values()} == {1e-6}
    assert {layer.state for layer in layers.values()} == {None}

    @quick_jit
    def here(x, state):
        dense = variables["params"]["Dense_0"]
        x = x @ dense["kernel"] + dense["bias"]
        options = {"layout": "N C", "axis_names": "N", "running": bn.running, "eps": bn.eps}
        x, state = nj.batch_norm(x, bn.params, state, train=False, **options)
        for name, (function, layout, axis_names, _) in LAYERS.items():
            options = {"layout": layout, "axis_names": axis_names, "eps": layers[name].eps}
            x = x + getattr(nj, function)(x, layers[name].params, **options)[0]
        return x

    close(here(x, bn.state), quick_jit(Model().apply)(variables, x), m=SIZE)


def test_batch_norm_goes_on_as_in_flax(rng):
    layer = linen.BatchNorm(momentum=0.75)
    batches = np.asarray(rng.normal(2.0, 1.5, (20, 8, SIZE)), np.float32)
    variables = to_flax(nj.Affine.init(C=SIZE, scale_init=2.0), nj.BatchStats.init(C=SIZE))
    params, state, running, eps = from_flax(variables, momentum=0.75)
    options = {"layout": "N C", "axis_names": "N", "running": running, "eps": eps}

    @quick_jit
    def there(variables, x):
        return layer.apply(variables, x, use_running_average=False, mutable="batch_stats")

    @quick_jit
    def here(x, state):
        return nj.batch_norm(x, params, state, train=True, **options)

    @quick_jit
    def evaluated(variables, x, state):
        wanted = layer.apply({**variables, **to_flax(params, state)}, x, use_running_average=True)
        return nj.batch_norm(x, params, state, train=False, **options)[0], wanted

    for number, x in enumerate(batches):
        wanted, moved = there(variables, x)
        variables = {**variables, **moved}
        y, state = here(x, state)
        assert int(state.count) == number + 1
        close(y, wanted, m=8)
        close(state.mean, variables["batch_stats"]["mean"], m=8 + number)
        close(state.var, variables["batch_stats"]["var"], m=8 + number)
    same(to_flax(params, state)["batch_stats"], {"mean": state.mean, "var": state.var})
    y, wanted = evaluated(variables, x, state)
    close(y, wanted, m=8)


@pytest.mark.parametrize("prefix", ["batch", *LAYERS])
@pytest.mark.parametrize("of", [dict, flax.core.freeze])
def test_there_and_back_is_what_it_was(prefix, of, variables):
    params, state, *_ = from_flax(of(variables), prefix=prefix)
    again = to_flax(params, state, prefix=prefix)
    wanted = {name: {prefix: tree[prefix]} for name, tree in variables.items() if prefix in tree}
    same(again, wanted)
    same(from_flax(again, prefix=prefix)[:2], (params, state))


def test_back_and_there_keeps_what_flax_has_a_place_for():
    params = nj.Affine(jnp.arange(3.0), jnp.ones(3, jnp.bfloat16), "C")
    state = nj.BatchStats(jnp.arange(3.0), jnp.full(3, 2.0), jnp.int32(9), jnp.full(3, 9.0), "C")
    back = from_flax(to_flax(params, state))
    same(back.params, params)
    np.testing.assert_array_equal(back.state.mean, state.mean)
    np.testing.assert_array_equal(back.state.var, state.var)
    assert int(back.state.count) == 1
    np.testing.assert_array_equal(back.state.weight, 1)
    assert int(from_flax(to_flax(params, nj.BatchStats.init(C=3))).state.count) == 0


@pytest.mark.parametrize("form", [lambda state: state, nnx.to_pure_dict], ids=["state", "pure dict"])
@pytest.mark.parametrize("prefix", ["layers/0", ("layers", 0), "/layers/0/"])
def test_nnx_state_comes_along(form, prefix):
    model = nnx.Dict(layers=nnx.List([nnx.BatchNorm(3, rngs=nnx.Rngs(0))]), norm=nnx.RMSNorm(3, rngs=nnx.Rngs(0)))
    model.layers[0].mean[...] = jnp.arange(3.0)
    variables = form(nnx.state(model))
    params, state, running, eps = from_flax(variables, prefix=prefix)
    np.testing.assert_array_equal(params.scale, 1)
    np.testing.assert_array_equal(params.bias, 0)
    np.testing.assert_array_equal(state.mean, [0, 1, 2])
    assert (running.new_weight, running.unbiased, eps) == (pytest.approx(0.01), False, 1e-5)
    layer = from_flax(variables, prefix="norm")
    assert (layer.params.bias, layer.state, layer.eps) == (None, None, 1e-6)
    back = to_flax(nj.Affine(2 * params.scale, params.bias, "C"), state)
    nnx.update(model.layers[0], back["params"] | {"mean": back["batch_stats"]["mean"] + 1})
    np.testing.assert_array_equal(model.layers[0].scale[...], 2)
    np.testing.assert_array_equal(model.layers[0].mean[...], [1, 2, 3])


def test_boxes_of_metadata_are_opened():
    layer = linen.LayerNorm(scale_init=linen.with_partitioning(linen.initializers.ones, ("model",)))
    variables = quick_jit(layer.init)(jax.random.key(0), jnp.ones((2, 3)))
    assert isinstance(variables["params"]["scale"], linen.Partitioned)
    np.testing.assert_array_equal(from_flax(variables).params.scale, np.ones(3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_statistics_become_float32(dtype):
    arrays = {"scale": np.ones(3, dtype), "mean": np.ones(3, dtype), "var": np.ones(3, dtype)}
    params, state, *_ = from_flax(arrays)
    assert params.scale.dtype == dtype
    assert state.mean.dtype == state.var.dtype == jnp.float32


def test_complex_parameters_and_means_stay_complex():
    arrays = {"scale": np.ones(3, "complex64"), "mean": np.ones(3, "complex64"), "var": np.ones(3, "float32")}
    params, state, *_ = from_flax(arrays)
    assert params.scale.dtype == state.mean.dtype == jnp.complex64
    assert state.var.dtype == jnp.float32


def test_a_zero_centred_scale_becomes_the_scale_that_is_used():
    params = nj.Affine.init(C=3, scale_init=1.001, dtype=jnp.bfloat16, zero_centered=True)
    scale = to_flax(params)["params"]["scale"]
    assert scale.dtype == jnp.float32
    np.testing.assert_array_equal(scale, 1 + params.scale.astype(jnp.float32))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_scale_of_a_zero_centred_module_is_marked_as_such(zero_centered, x):
    module = nj_nnx.LayerNorm(SIZE, zero_centered=zero_centered, rngs=nnx.Rngs(0))
    module.scale[...] += 0.5
    layer = from_flax(nnx.state(module), names="D", zero_centered=zero_centered)
    assert layer.params.zero_centered is zero_centered
    np.testing.assert_array_equal(layer.params.scale, 1.5 - zero_centered)
    y, _ = nj.layer_norm(x, layer.params, layout="N D", axis_names="D", eps=layer.eps)
    close(y, module(x), m=SIZE)


@pytest.mark.parametrize("running", [nj.Cumulative(), nj.Ema(0.25, debias=True)])
@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_what_our_own_modules_count_comes_along(framework, running, rng):
    batches = np.asarray(rng.normal(2.0, 1.5, (3, 8, SIZE)), np.float32)
    if framework == "nnx":
        module = nj_nnx.BatchNorm(SIZE, running=running, rngs=nnx.Rngs(0))
        for x in batches:
            module(x)
        variables = nnx.state(module)
    else:
        module = nj_linen.BatchNorm(running=running, use_running_average=False)
        variables = module.init(jax.random.key(0), batches[0])
        for x in batches:
            variables |= module.apply(variables, x, mutable=["batch_stats", "batch_counts"])[1]
    wanted = nj.BatchStats.init(C=SIZE)
    for x in batches:
        wanted = nj.update(wanted, nj.moments(x, layout="N C", axis_names="N"), running=running)
    state = from_flax(variables).state
    assert (int(state.count), state.count.dtype, state.weight.dtype) == (3, jnp.int32, jnp.float32)
    for name in ("mean", "var", "weight"):
        close(getattr(state, name), getattr(wanted, name), m=24)


def test_counts_of_0_beside_statistics_that_have_moved_are_one_update():
    """Flax's statistics in a module of ours, which does not know how many there were."""
    arrays = {"mean": np.ones(3), "var": np.ones(3), "count": np.int32(0), "weight": np.zeros(3, "f")}
    state = from_flax(arrays).state
    assert int(state.count) == 1
    np.testing.assert_array_equal(state.weight, 1)
    assert int(from_flax({**arrays, "mean": np.zeros(3)}).state.count) == 0


def test_what_goes_to_flax_is_copied_and_what_is_none_left_out():
    params, state = nj.Affine.init(C=3, bias=False), nj.BatchStats.init(C=3)
    copies = to_flax(params, state)
    assert copies["params"].keys() == {"scale"}
    assert copies["params"]["scale"].unsafe_buffer_pointer() != params.scale.unsafe_buffer_pointer()
    assert to_flax(None, state).keys() == to_flax(None, state, prefix="a/b").keys() == {"batch_stats"}
    assert to_flax() == {}
    nested = to_flax(params, state, prefix="a/b")
    assert nested["params"]["a"]["b"].keys() == {"scale"}


TREE = {
    "params": {"Dense_0": {"kernel": np.ones((2, 3))}, "block": {"norm": {"scale": np.ones(3), "bias": np.ones(3)}}},
    "batch_stats": {"block": {"norm": {"mean": np.ones(3), "var": np.ones(3)}}},
}


COUNTED = {"mean": np.ones(3), "var": np.ones(3), "count": np.int32(1), "weight": np.ones(3)}


@pytest.mark.parametrize(
    ("node", "options", "words"),
    [
        ({"mean": np.ones(3)}, {}, ["missing: var"]),
        ({"var": np.ones(3), "scale": np.ones(3)}, {}, ["missing: mean"]),
        ({"kernel": np.ones((2, 3)), "bias": np.ones(3)}, {}, ["unexpected: kernel"]),
        ({"scale": np.ones(3), "bias": np.ones(4)}, {}, ["shapes differ: scale (3,), bias (4,)"]),
        ({"scale": np.ones(3)}, {"sizes": {"C": 4}}, ["scale: shape (3,), but C must have size 4"]),
        ({"scale": np.ones((2, 3))}, {}, ['scale: shape (2, 3), but names="C" is one axis']),
        ({"scale": np.ones(3, int)}, {}, ["scale must be of a floating-point dtype, not int64"]),
        ({"mean": np.ones(3), "var": np.ones(3, complex)}, {}, ["var must be of a floating-point dtype"]),
        ({"scale": {"deeper": np.ones(3)}}, {}, ["scale is no array: dict of dtype object"]),
        ({"mean": np.ones(3), "var": np.ones(3), "count": np.int32(1)}, {}, ["missing: weight"]),
        ({"mean": np.ones(3), "var": np.ones(3), "weight": np.ones(3)}, {}, ["missing: count"]),
        ({**COUNTED, "count": np.float32(0.5)}, {}, ["count must be one integer"]),
        ({**COUNTED, "weight": np.ones(())}, {}, ["shapes differ: mean and var (3,), weight ()"]),
        ({**COUNTED, "weight": -np.ones(3)}, {}, ["weight must be at least 0, not -1"]),
        ({"scale": np.ones(3), "weight": np.ones(3)}, {}, ["unexpected: weight"]),
        ({"mean": np.ones(3), "var": np.array([1, -0.5, 1])}, {}, ["var must be at least 0, not -0.5"]),
        ({"scale": np.array([1, 1e300, 2])}, {}, ["scale: 1e+300 overflows float32; enable jax_enable_x64"]),
        ({"scale": np.ones(3), "mean": np.ones(4), "q": 1}, {}, ["missing: var", "unexpected: q", "shapes differ"]),
    ],
)
def test_variables_that_are_not_a_norm_are_refused(node, options, words):
    with pytest.raises(ValueError, match=r'^from_flax: at prefix="bn" stands no norm along names="C"') as raised:
        from_flax({"bn": node}, prefix="bn", **options)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ("norm", "nothing stands at prefix=\"norm\" among 5 arrays. Near it: 'block/norm'."),
        ("block/nrm", "Near it: 'block/norm'."),
        ("block/norm/scale", "nothing stands at prefix"),
        ("block", 'at prefix="block" stands no norm along names="C":\n  - unexpected: norm'),
    ],
)
def test_a_prefix_that_leads_to_no_norm_is_an_error(prefix, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        from_flax(TREE, prefix=prefix)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: from_flax(nnx.BatchNorm(3, rngs=nnx.Rngs(0))), "from_flax: variables must be a mapping"),
        (lambda: from_flax(TREE, prefix="block/norm", momentum=None), "from_flax: momentum must be a number"),
        (lambda: from_flax(TREE, prefix="block/norm", eps="1e-5"), "from_flax: eps must be a number"),
        (lambda: from_flax(TREE, prefix="block/norm", zero_centered=1), "from_flax: zero_centered must be a Python"),
        (lambda: to_flax({"scale": 1.0}), "to_flax: params must be a normjax.Affine"),
        (lambda: to_flax(None, {"mean": 1.0}), "to_flax: state must be a normjax.BatchStats"),
        (
            lambda: to_flax(None, nj.BatchStats(*np.ones((2, 3), np.float16), np.int32(1), np.ones(3, "f"), "C")),
            "to_flax: state.mean is float16",
        ),
    ],
)
def test_an_argument_of_another_type_is_a_type_error(call, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        call()
