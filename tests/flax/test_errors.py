"""What is refused, in words; where Flax refuses too, by an error of its type."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx as flax_nnx

import normjax as nj
from tests.flax.rows import LINEN, NNX

SHAPE = (2, 3, 4, 8)
TRAIN, EVALUATE = {"use_running_average": False}, {"use_running_average": True}
frameworks = pytest.mark.parametrize("framework", ["linen", "nnx"])


def call(library: str, framework: str, kind: str, settings: dict, *, shape=SHAPE, features=8, **arguments):
    """Builds a module and calls it."""
    x = jnp.ones(shape)
    if framework == "linen":
        mode = TRAIN if kind == "BatchNorm" and not arguments.keys() & TRAIN.keys() else {}
        return getattr(LINEN[library], kind)(**settings).init_with_output(jax.random.key(0), x, **mode, **arguments)
    return getattr(NNX[library], kind)(features, **settings, rngs=flax_nnx.Rngs(0))(x, **arguments)


# kind, settings, words, whether Flax raises too
AXES = [
    ("BatchNorm", {"axis": 7}, "BatchNorm: axis=7: x has no axis 7; its shape is (2, 3, 4, 8).", True),
    ("BatchNorm", {"axis": -5}, "BatchNorm: axis=-5: x has no axis -5; its shape is (2, 3, 4, 8).", False),
    ("BatchNorm", {"axis": (-1, 3)}, "BatchNorm: axis=(-1, 3) names an axis of x twice", False),
    ("BatchNorm", {"axis": (3, 1)}, "BatchNorm: axis=(3, 1) is out of order; write (1, 3)", False),
    ("BatchNorm", {"axis": 1.0}, "BatchNorm: axis=1.0: axes are integers, or names where a", True),
    ("BatchNorm", {"axis": "C"}, "BatchNorm: axis='C': axes are integers, or names where a", True),
    ("LayerNorm", {"reduction_axes": 4}, "LayerNorm: reduction_axes=4: x has no axis 4", True),
    ("LayerNorm", {"feature_axes": (1, 99)}, "LayerNorm: feature_axes=(1, 99): x has no axis 99", True),
    ("LayerNorm", {"feature_axes": (3, 1)}, "LayerNorm: feature_axes=(3, 1) is out of order; write (1, 3)", False),
    ("LayerNorm", {"reduction_axes": (2, -2)}, "LayerNorm: reduction_axes=(2, -2) names an axis of x twice", False),
    ("RMSNorm", {"reduction_axes": (-1, 1)}, "RMSNorm: reduction_axes=(-1, 1) is out of order; write (1, 3)", False),
    ("RMSNorm", {"reduction_axes": ()}, "RMSNorm: x of shape (2, 3, 4, 8) has no axis left to pool", False),
    ("GroupNorm", {"num_groups": 3}, "GroupNorm: num_groups=3 does not divide the 8 channels.", True),
    ("GroupNorm", {}, "GroupNorm: num_groups=32 does not divide the 8 channels.", True),
    ("GroupNorm", {"num_groups": 0}, "GroupNorm: num_groups=0 does not divide the 8 channels.", True),
    ("GroupNorm", {"num_groups": None, "group_size": 3}, "GroupNorm: group_size=3 does not divide the 8", True),
    ("GroupNorm", {"num_groups": 2, "group_size": 4}, "GroupNorm: num_groups=2, group_size=4: give one of both", True),
    ("GroupNorm", {"num_groups": None}, "GroupNorm: num_groups=None, group_size=None: give one of both", True),
    ("GroupNorm", {"num_groups": 2, "reduction_axes": (1, 2)}, "reduction_axes=(1, 2) must hold the last axis", False),
    ("GroupNorm", {"num_groups": 2, "reduction_axes": (3, 1)}, "reduction_axes=(3, 1) is out of order", False),
    ("InstanceNorm", {"feature_axes": (0, 3)}, "InstanceNorm: feature_axes=(0, 3) holds the first axis", True),
    ("InstanceNorm", {"feature_axes": (3, 3)}, "InstanceNorm: feature_axes=(3, 3) names an axis of x twice", False),
]


@pytest.mark.case(66)
@pytest.mark.case(67)
@frameworks
@pytest.mark.parametrize(("kind", "settings", "words", "flax_too"), AXES, ids=lambda part: str(part)[:48])
def test_axes_that_break_a_rule_are_refused(framework, kind, settings, words, flax_too):
    with pytest.raises((ValueError, TypeError), match=re.escape(words)) as mine:
        call("normjax", framework, kind, settings)
    if flax_too:
        with pytest.raises((ValueError, TypeError, IndexError)) as theirs:
            call("flax", framework, kind, settings)
        assert isinstance(mine.value, theirs.type)


@pytest.mark.case(71)
@frameworks
def test_negative_axes_are_the_positive_ones(framework, rng):
    x = jnp.asarray(rng.normal(size=SHAPE), jnp.float32)
    for kind, one, other in (
        ("LayerNorm", {"reduction_axes": (-3, -2)}, {"reduction_axes": (1, 2)}),
        ("BatchNorm", {"axis": -1}, {"axis": 3}),
    ):
        outputs = []
        for settings in (one, other):
            if framework == "linen":
                mode = TRAIN if kind == "BatchNorm" else {}
                outputs.append(
                    LINEN["normjax"].__dict__[kind](**settings).init_with_output(jax.random.key(0), x, **mode)[0]
                )
            else:
                outputs.append(getattr(NNX["normjax"], kind)(8, **settings, rngs=flax_nnx.Rngs(0))(x))
        assert (outputs[0] == outputs[1]).all()


MASKS = [
    ((2, 3), bool, ValueError, "mask of shape (2, 3) does not broadcast to x of shape (2, 3, 4, 8)."),
    ((1, 2, 3, 4, 8), bool, ValueError, "mask of shape (1, 2, 3, 4, 8) does not broadcast to x of shape (2, 3, 4, 8)."),
    (SHAPE, "float32", TypeError, "mask must be boolean, or integers 0 and 1; got float32 of shape (2, 3, 4, 8)"),
]


@pytest.mark.case(34)
@pytest.mark.case(35)
@frameworks
@pytest.mark.parametrize("kind", ["BatchNorm", "LayerNorm"])
@pytest.mark.parametrize(("shape", "dtype", "error", "words"), MASKS)
def test_a_mask_that_is_none_is_refused(framework, kind, shape, dtype, error, words):
    with pytest.raises(error, match=re.escape(f"{kind}: {words}")):
        call("normjax", framework, kind, {}, mask=jnp.ones(shape, dtype))


@frameworks
@pytest.mark.parametrize(("kind", "pooled"), [("BatchNorm", "axis0 axis1 axis2"), ("LayerNorm", "axis3")])
@pytest.mark.case(48)
def test_a_mapped_axis_that_is_not_bound_is_named(framework, kind, pooled):
    """Initialisation and evaluation do not touch it; NameError is Flax's."""
    settings, x, mode = {"axis_name": "batch"}, jnp.ones(SHAPE), TRAIN if kind == "BatchNorm" else {}
    if framework == "linen":
        module = getattr(LINEN["normjax"], kind)(**settings)
        variables = module.init(jax.random.key(0), x, **mode)
        run = functools.partial(module.apply, variables, x, mutable=["batch_stats"])
    else:
        run = getattr(NNX["normjax"], kind)(8, **settings, rngs=flax_nnx.Rngs(0))
        run = functools.partial(run, x)
    words = f"{kind}: axis_names=\"{pooled} batch\": 'batch' is neither in layout"
    for error in (ValueError, NameError):
        with pytest.raises(error, match=re.escape(words)):
            run(**mode)
    if kind == "BatchNorm":
        run(**EVALUATE)


@frameworks
@pytest.mark.parametrize(
    ("settings", "arguments", "words"),
    [
        ({"layout": "N H W C"}, {}, "layout='N H W C', axis_names=None: give both, or neither"),
        ({"axis_names": "N H W"}, {}, "layout=None, axis_names='N H W': give both, or neither"),
        ({"layout": "N C", "axis_names": "N"}, {}, 'layout="N C" names two axes but x has four'),
        (
            {"layout": "N H W C", "axis_names": "N H W", "axis": "D"},
            {},
            "axis='D': 'D' is no axis of x; its axes are 'N'",
        ),
        ({"momentum": 1.5}, {}, "momentum=1.5 must lie between 0 and 1"),
        ({"epsilon": -1.0}, {}, "eps=-1.0 must be at least 0"),
        ({"derivative": "vpj"}, {}, "derivative='vpj' is not one of 'vjp', 'jvp', 'autodiff'"),
    ],
)
def test_other_settings_that_break_a_rule_are_refused(framework, settings, arguments, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        call("normjax", framework, "BatchNorm", settings, **arguments)


def test_a_running_that_does_not_move_statistics_is_refused():
    with pytest.raises(TypeError, match="running must be an Ema or a Cumulative; got float"):
        call("normjax", "nnx", "BatchNorm", {"running": 0.9})


@frameworks
def test_use_running_average_is_static_and_given_once(framework):
    with pytest.raises(ValueError, match="use_running_average"):
        call("normjax", framework, "BatchNorm", {"use_running_average": None}, use_running_average=None)
    with pytest.raises(TypeError, match="use_running_average is traced, but it chooses the program"):
        jax.jit(lambda flag: call("normjax", framework, "BatchNorm", {}, use_running_average=flag))(True)


def test_linen_takes_use_running_average_once():
    with pytest.raises(ValueError, match="use_running_average"):
        call("normjax", "linen", "BatchNorm", TRAIN, **TRAIN)


@pytest.mark.case(84)
@pytest.mark.parametrize("running", [None, nj.Cumulative()])
def test_missing_statistics_are_flax_s_error_with_the_cure(running):
    module = LINEN["normjax"].BatchNorm(running=running)
    variables = module.init(jax.random.key(0), jnp.ones((2, 3)), **TRAIN)
    for mode in (TRAIN, EVALUATE):
        with pytest.raises(Exception, match="batch_stats") as mine:
            module.apply({"params": variables["params"]}, jnp.ones((2, 3)), **mode)
        with pytest.raises(Exception, match="batch_stats") as theirs:
            LINEN["flax"].BatchNorm().apply({"params": variables["params"]}, jnp.ones((2, 3)), **mode)
        assert mine.type is theirs.type
        (note,) = [note for note in mine.value.__notes__ if "normjax" in note]
        assert "pass what init or training returned" in note
        assert ("batch_counts" in note) == (running is not None and mode is TRAIN)


@pytest.mark.case(82)
def test_statistics_that_cannot_be_kept_are_flax_s_error():
    """Training without mutable=["batch_stats"] would discard the update."""
    for library in ("normjax", "flax"):
        module = LINEN[library].BatchNorm(**TRAIN)
        variables = module.init(jax.random.key(0), jnp.ones((2, 3)))
        with pytest.raises(Exception, match="immutable") as raised:
            module.apply(variables, jnp.ones((2, 3)))
        assert raised.type.__name__ == "ModifyScopeVariableError"


@pytest.mark.parametrize("kind", ["BatchNorm", "LayerNorm"])
def test_features_of_another_size_are_refused_by_nnx_as_flax_does(kind):
    words = f"{kind}: scale has shape (5,), but x has sizes (8,) along its features 'axis3'"
    with pytest.raises(ValueError, match=re.escape(words)) as mine:
        call("normjax", "nnx", kind, {}, features=5)
    with pytest.raises(TypeError) as theirs:
        call("flax", "nnx", kind, {}, features=5)
    assert isinstance(mine.value, theirs.type)


def test_parameters_of_another_shape_are_refused_by_linen_as_flax_does():
    for library in ("normjax", "flax"):
        variables = {"params": {"scale": jnp.ones(5), "bias": jnp.ones(5)}}
        with pytest.raises(Exception, match="scale") as raised:
            LINEN[library].LayerNorm().apply(variables, jnp.ones(SHAPE))
        assert raised.type.__name__ == "ScopeParamShapeError"


@frameworks
def test_a_batch_of_one_entry_is_refused_in_training_rather_than_erased(framework):
    """Flax returns the bias, and a gradient of 0, for an example that vmap hides the batch of."""
    x = jnp.ones(8)
    if framework == "nnx":
        run = NNX["normjax"].BatchNorm(8, rngs=flax_nnx.Rngs(0))
    else:
        module = LINEN["normjax"].BatchNorm()
        run = functools.partial(module.apply, module.init(jax.random.key(0), x, **EVALUATE), mutable=["batch_stats"])
    with pytest.raises(ValueError, match=r"BatchNorm: x of shape \(8,\) has no axis left to pool"):
        run(x, **TRAIN)
