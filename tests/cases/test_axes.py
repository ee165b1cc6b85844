"""Cases of axis order, axis errors, channel position and what a family pools."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.cases.common import QUICK, close, each_how, same
from tests.quick import quick_jit

# --- 66: the order of names


@pytest.mark.case(66)
@each_how
def test_parameters_run_along_their_names_in_their_own_order(how, rng):
    x = np.asarray(rng.standard_normal((1, 2, 3, 4)), np.float32)
    scale, bias = np.asarray(rng.standard_normal((2, 4, 2)), np.float32)  # along W, then C
    options = {"layout": "N C H W", "axis_names": "W C"}
    apply = QUICK[how](lambda x, params: nj.layer_norm(x, params, **options)[0])
    y = apply(x, nj.Affine(scale, bias, "W C"))
    close(y, reference.normalize(x, scale, bias, names="W C", **options))
    same(y, apply(x, nj.Affine(scale.T, bias.T, "C W")))
    with pytest.raises(ValueError, match=r"layer_norm: params.scale has shape \(2, 4\), but axis 'W' of x"):
        apply(x, nj.Affine(scale.T, bias.T, "W C"))


@pytest.mark.case(66)
@pytest.mark.parametrize("order", list(itertools.permutations("ABC")), ids="".join)
def test_every_order_of_equal_sizes_is_honoured_in_values_gradients_and_state(order, rng):
    # With equal sizes a silent reordering would raise nothing.
    x, g = np.asarray(rng.standard_normal((2, 3, 2, 2, 2)), np.float32)
    scale, bias = np.asarray(rng.standard_normal((2, 2, 2, 2)), np.float32)
    axes = {"layout": "N A B C", "axis_names": "N"}
    state = nj.BatchStats.init(**dict.fromkeys(order, 2))

    def apply(x, scale, bias):
        return nj.batch_norm(x, nj.Affine(scale, bias, order), state, train=True, running=nj.Ema(1.0), **axes)

    @quick_jit
    def program(x, g, scale, bias):
        y, pullback, new = jax.vjp(apply, x, scale, bias, has_aux=True)
        return y, pullback(g), new, nj.batch_norm(x, None, new, train=False, **axes)[0]

    y, gradients, new, evaluated = program(x, g, scale, bias)
    close(y, reference.normalize(x, scale, bias, names=order, **axes))
    for actual, exact in zip(gradients, reference.backward(x, g, scale, bias, names=order, **axes), strict=True):
        close(actual, exact, m=x.size)
    mean, var, _ = reference.moments(x, **axes)
    close(new.mean, mean.transpose(["ABC".index(name) for name in order]))
    close(new.var, var.transpose(["ABC".index(name) for name in order]))
    close(evaluated, reference.normalize(x, **axes), k=64)


@pytest.mark.case(66)
@pytest.mark.parametrize("axis_names", ["B I", "I B", ("I", "B"), ["B", "I"]], ids=repr)
def test_the_order_in_which_pooled_axes_are_named_does_not_matter_at_rank_9(axis_names, rng):
    shape = (1, 3, 1, 2, 1, 1, 2, 1, 4)
    x = np.asarray(rng.standard_normal(shape), np.float32)
    scale = np.asarray(rng.standard_normal((4, 3)), np.float32)
    options = {"layout": "A B C D E F G H I", "axis_names": axis_names}
    y, _ = quick_jit(lambda x: nj.layer_norm(x, nj.Affine(scale, None, "I B"), **options))(x)
    close(y, x_hat_at_rank_9(x) * scale.T[None, :, None, None, None, None, None, None])


def x_hat_at_rank_9(x):
    wide = np.asarray(x, np.float64)
    mean, var = (f(wide, axis=(1, 8), keepdims=True) for f in (np.mean, np.var))
    return (wide - mean) / np.sqrt(var + 1e-5)


@pytest.mark.case(66)
@each_how
def test_factors_of_a_split_axis_are_taken_by_name_in_either_order(how, rng):
    x = np.asarray(rng.standard_normal((2, 12)), np.float32)
    scale = np.asarray(rng.standard_normal((3, 2, 2)), np.float32)
    for layout, names in (("N C=(A=2 B=3 K)", "B K A"), ("N C=(K=2 B=3 A)", "B A K")):
        options = {"layout": layout, "axis_names": "K B"}
        y = QUICK[how](lambda x: nj.group_norm(x, nj.Affine(scale, None, names), **options)[0])(x)  # noqa: B023
        close(y, reference.normalize(x, scale, names=names, **options))


# --- 67: names that do not fit

FAMILIES = [nj.batch_norm, nj.layer_norm, nj.instance_norm, nj.rms_norm]
SHAPE = (2, 3, 4, 5)
WRONG = {
    "unknown": ("N H W C", "Q", ["'Q' is neither in layout", "nor a mapped axis here"]),
    "unknown beside known": ("N H W C", "N Q", ["'Q' is neither in layout"]),
    "a typo": ("batch height width channel", "batch hieght", ["'hieght'", "Did you mean 'height'?"]),
    "run together": ("N H W C", "N HW", ["'HW'", 'write "N H W"']),
    "a number": ("N H W C", (0, 1), ["names are strings", "0"]),
    "a number as string": ("N H W C", "99", ["'99' is not a name"]),
    "pooled twice": ("N H W C", "C C", ["'C' is given twice"]),
    "pooled twice in a tuple": ("N H W C", ("H", "C", "H"), ["'H' is given twice"]),
    "pooled whole and by a factor": ("N H W=(A=2 B) C", "W A", ["'A' is given twice"]),
    "pooled by a factor and whole": ("N H W=(A=2 B) C", "A W", ["'A' is given twice"]),
    "nothing": ("N H W C", "", ["names no axis"]),
    "no names": ("N H W C", (), ["names no axis"]),
    "no unnamed axis": ("N H W C", "...", ["leaves none unnamed"]),
    "a layout that names an axis twice": ("N H H C", "N", ["'H' stands twice"]),
    "too few axes": ("N H W", "N", ["names three axes but x has four", "(2, 3, 4, 5)"]),
    "too many axes": ("N D H W C", "N", ["names five axes but x has four", "(2, 3, 4, 5)"]),
    "too many axes beside ...": ("N D H W C ...", "N", ["names five axes but x has four", "(2, 3, 4, 5)"]),
    "unseparated": ("NHWC", "N", ["names one axis but x has four", '"N H W C"']),
    "a factor that does not divide": ("N H W C=(G=2 K)", "K", ["size 5", "(2, 3, 4, 5)", "does not divide"]),
    "factors that do not multiply to the size": ("N H W=(A=3 B=2) C", "A", ["multiply to 6", "size 4", "(2, 3, 4, 5)"]),
    "two open factors": ("N H W=(A B) C", "A", ["at most one factor"]),
}


@pytest.mark.case(67)
@pytest.mark.parametrize("fn", FAMILIES, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(("layout", "axis_names", "words"), WRONG.values(), ids=WRONG)
def test_a_name_that_does_not_fit_is_an_error_that_says_which_and_why(layout, axis_names, words, fn):
    apply = lambda x: fn(x, layout=layout, axis_names=axis_names, train=True)[0]  # noqa: E731
    for how in (apply, quick_jit(apply)):
        with pytest.raises((ValueError, TypeError), match=f"^{fn.__name__}: ") as raised:
            how(np.ones(SHAPE, np.float32))
        for word in words:
            assert word in str(raised.value)


@pytest.mark.case(67)
@pytest.mark.parametrize(("layout", "axis_names", "words"), WRONG.values(), ids=WRONG)
def test_moments_normalize_and_describe_refuse_the_same(layout, axis_names, words):
    for name, call in {
        "moments": lambda **axes: nj.moments(np.ones(SHAPE, np.float32), **axes),
        "normalize": lambda **axes: nj.normalize(np.ones(SHAPE, np.float32), **axes),
        "describe": lambda **axes: nj.describe(SHAPE, **axes),
    }.items():
        if name == "describe" and words[0].startswith("'") and "twice" not in words[0] and "not a name" not in words[0]:
            continue  # it describes an unknown name as a mapped axis
        with pytest.raises((ValueError, TypeError), match=f"^{name}: ") as raised:
            call(layout=layout, axis_names=axis_names)
        assert all(word in str(raised.value) for word in words)


@pytest.mark.case(67)
@pytest.mark.parametrize(("names", "sizes"), [("Q", (5,)), ("C C", (5, 5)), ("N C", (5,)), ("C", (4,)), ("C", ())])
def test_parameters_along_a_wrong_axis_or_of_a_wrong_size_are_refused(names, sizes):
    params = nj.Affine(np.ones(sizes, np.float32), None, names)
    options = {"layout": "N H W C", "axis_names": "N H W", "train": True}
    with pytest.raises(ValueError, match=r"^batch_norm: params.scale") as raised:
        jax.eval_shape(lambda x: nj.batch_norm(x, params, **options), np.ones(SHAPE, np.float32))
    assert "C" in str(raised.value)


# --- 69: channels anywhere

CHANNELS = [
    ((2, 3, 4, 5), "N C H W"),
    ((10, 5, 6), "N C L"),
    ((10, 5, 7, 8), "N C H W"),
    ((2, 3, 4, 5), "N H C W"),
    ((3, 2, 4), "C N L"),
    ((5, 3), "C N"),
]


@pytest.mark.case(69)
@pytest.mark.parametrize(
    ("shape", "layout", "how"),
    [*((*row, "jit") for row in CHANNELS), (*CHANNELS[1], "eager"), (*CHANNELS[0], "vmap")],
)
def test_scale_bias_and_state_have_one_number_per_channel_wherever_channels_are(shape, layout, how, rng):
    x, g = np.asarray(rng.normal(2, 3, (2, *shape)), np.float32)
    place = layout.split().index("C")
    channels = shape[place]
    scale, bias = np.asarray(rng.standard_normal((2, channels)), np.float32)
    axes = {"layout": layout, "axis_names": [name for name in layout.split() if name != "C"]}

    def function(x, g, scale, bias):
        def apply(x, scale, bias):
            params, state = nj.Affine(scale, bias, "C"), nj.BatchStats.init(C=channels)
            return nj.batch_norm(x, params, state, train=True, **axes)

        y, pullback, state = jax.vjp(apply, x, scale, bias, has_aux=True)
        return y, state, pullback(g)

    y, state, gradients = QUICK[how](function)(x, g, scale, bias)
    last = np.moveaxis(np.asarray(x, np.float64), place, -1).reshape(-1, channels)
    flat = reference.normalize(last, scale, bias, names="C", layout="N C", axis_names="N")
    close(np.moveaxis(np.asarray(y), place, -1).reshape(-1, channels), flat)
    assert state.mean.shape == state.var.shape == state.weight.shape == gradients[1].shape == (channels,)
    close(state.mean, 0.1 * last.mean(0))
    close(state.var, 0.9 + 0.1 * last.var(0))
    exact = reference.backward(x, g, scale, bias, names="C", **axes)
    for actual, expected in zip(gradients, exact, strict=True):
        close(actual, expected, m=x.size)


@pytest.mark.case(69)
@pytest.mark.parametrize(("shape", "layout"), CHANNELS)
def test_evaluation_broadcasts_the_state_along_the_channels_too(shape, layout, rng):
    x = np.asarray(rng.normal(2, 3, shape), np.float32)
    place = layout.split().index("C")
    mean, var = np.asarray(rng.uniform(1, 2, (2, shape[place])), np.float32)
    state = nj.BatchStats(mean, var, jnp.array(1), np.ones_like(mean), "C")
    axes = {"layout": layout, "axis_names": [name for name in layout.split() if name != "C"]}
    y, _ = quick_jit(lambda x: nj.batch_norm(x, None, state, train=False, **axes))(x)
    along = [-1 if i == place else 1 for i in range(len(shape))]
    close(y, (np.float64(x) - mean.reshape(along)) / np.sqrt(np.float64(var.reshape(along)) + 1e-5))


# --- 71: parameters along declared axes


@pytest.mark.case(71)
@pytest.mark.parametrize(
    ("layout", "axis_names", "names", "sizes"),
    [
        ("N C H W", "C H", "C H", (6, 4)),
        ("N C H W", "C H", "H C", (4, 6)),
        ("N C H W", "C H", "H", (4,)),
        ("N C H W", "H W", "H W", (4, 3)),
        ("... C H W", "H C", "C", (6,)),
        ("N ... W", "...", "...", (6, 4)),
        ("N ...", "...", "...", (6, 4, 3)),
    ],
)
def test_layer_norm_over_inner_axes_has_parameters_along_the_axes_they_name(layout, axis_names, names, sizes, rng):
    x = np.asarray(rng.standard_normal((1, 6, 4, 3)), np.float32)
    scale, bias = np.asarray(rng.standard_normal((2, *sizes)), np.float32)
    axes = {"layout": layout, "axis_names": axis_names}
    y = quick_jit(lambda x: nj.layer_norm(x, nj.Affine(scale, bias, names), **axes)[0])(x)
    close(y, reference.normalize(x, scale, bias, names=names, **axes))


@pytest.mark.case(71)
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_group_norm_of_channels_at_any_place_is_that_of_channels_last(place, rng):
    x, g = np.asarray(rng.standard_normal((2, 1, 4, 3, 6)), np.float32)
    scale, bias = np.asarray(rng.standard_normal((2, 6)), np.float32)
    names = ["N", "H", "W"]
    names.insert(place, "C=(G=3 K)")
    axes = {"layout": " ".join(names), "axis_names": "H W K"}
    moved = np.moveaxis(x, 3, place)

    @quick_jit
    def program(x, g, scale, bias):
        y, pullback = jax.vjp(lambda x, s, b: nj.group_norm(x, nj.Affine(s, b, "C"), **axes)[0], x, scale, bias)
        return y, *pullback(g)

    y, dx, d_scale, d_bias = program(moved, np.moveaxis(g, 3, place), scale, bias)
    last = {"layout": "N H W C=(G=3 K)", "axis_names": "H W K"}
    close(np.moveaxis(np.asarray(y), place, 3), reference.normalize(x, scale, bias, names="C", **last))
    exact = reference.backward(x, g, scale, bias, names="C", **last)
    for actual, expected in zip((np.moveaxis(np.asarray(dx), place, 3), d_scale, d_bias), exact, strict=True):
        close(actual, expected, m=x.size)


@pytest.mark.case(71)
@pytest.mark.parametrize(("names", "sizes"), [("G", (3,)), ("K", (2,)), ("G K", (3, 2)), ("K G", (2, 3)), ("C", (6,))])
def test_group_norm_may_have_parameters_per_group_per_member_or_per_channel(names, sizes, rng):
    x = np.asarray(rng.standard_normal((2, 4, 6)), np.float32)
    scale, bias = np.asarray(rng.standard_normal((2, *sizes)), np.float32)
    axes = {"layout": "N L C=(G=3 K)", "axis_names": "L K"}
    y, _ = quick_jit(lambda x: nj.group_norm(x, nj.Affine(scale, bias, names), **axes))(x)
    close(y, reference.normalize(x, scale, bias, names=names, **axes))


# --- 72: which entries share a mean

POOLED = [
    ("N H W C", "C", 32, 3),
    ("N H W C", "H W C", 2, 48),
    ("... C", "C", 32, 3),
    ("N ...", "...", 2, 48),
    ("N ... C", "... C", 2, 48),
    ("N H W C", "N H W", 3, 32),
    ("N H W C", "H W", 6, 16),
    ("N H W C", "N H W C", 1, 96),
]


@pytest.mark.case(72)
@pytest.mark.parametrize(
    ("layout", "axis_names", "groups", "m", "how"),
    [*((*row, "jit") for row in POOLED), (*POOLED[0], "eager"), (*POOLED[3], "vmap")],
)
def test_the_axes_named_are_the_axes_pooled(layout, axis_names, groups, m, how, rng):
    x = np.asarray(rng.standard_normal((2, 4, 4, 3)), np.float32)
    axes = {"layout": layout, "axis_names": axis_names}
    y, moments = QUICK[how](lambda x: nj.normalize(x, **axes))(x)
    assert moments.mean.size == groups
    same(moments.count, np.full(moments.mean.shape, m, np.float32))
    close(y, reference.normalize(x, **axes))
    close(moments.mean, reference.moments(x, **axes)[0])


@pytest.mark.case(72)
@pytest.mark.parametrize(("layout", "axis_names", "groups", "m"), POOLED)
def test_describe_tells_how_many_groups_of_how_many_entries(layout, axis_names, groups, m):
    text = nj.describe((2, 4, 4, 3), layout=layout, axis_names=axis_names)
    assert f"groups: {groups}," in text
    assert text.splitlines()[2] == f"entries in a group: m = {m}"


@pytest.mark.case(72)
@pytest.mark.parametrize("fn", [nj.normalize, nj.moments, nj.describe, *FAMILIES, nj.group_norm, nj.sync_batch_norm])
def test_there_is_no_default_for_what_is_pooled(fn):
    with pytest.raises(TypeError, match="axis_names"):
        fn(np.ones(SHAPE, np.float32), layout="N H W C")
