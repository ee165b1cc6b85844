"""The grammar of layout and axis_names, its errors, and `describe`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import normjax as nj
from normjax import reference
from tests.closeness import close
from tests.quick import quick_jit

IMAGE = (2, 3, 4, 6)

# layout, axis_names, x's shape → names of the statistics, their shape, entries in a group
GOOD = [
    ("N H W C", "N H W", IMAGE, "C", (6,), 24),
    ("N C H W", "N H W", IMAGE, "C", (3,), 48),
    ("N H W C", ("N", "H", "W"), IMAGE, "C", (6,), 24),
    ("N H W C", ["W", "N", "H"], IMAGE, "C", (6,), 24),
    ("N H W C", "H W", IMAGE, "N C", (2, 6), 12),
    ("N H W C", "W H", IMAGE, "N C", (2, 6), 12),
    ("N H W C", "N H W C", IMAGE, "", (), 144),
    ("batch time feature", "batch time", (2, 5, 3), "feature", (3,), 10),
    ("  N   C ", "  N ", (4, 3), "C", (3,), 4),
    ("N_1 été", "N_1", (4, 3), "été", (3,), 4),
    ("N L C", "N L", (4, 5, 3), "C", (3,), 20),
    ("N", "N", (7,), "", (), 7),
    ("... D", "D", (2, 3, 5), "...", (2, 3), 5),
    ("... D", "D", (5,), "", (), 5),
    ("... D", "...", (2, 3, 5), "D", (5,), 6),
    ("N ...", "...", (2, 3, 5), "N", (2,), 15),
    ("N ... C", "N ...", (2, 3, 4, 5), "C", (5,), 24),
    ("N ... C", "N", (2, 3, 4, 5), "... C", (3, 4, 5), 2),
    ("...", "...", (2, 3), "", (), 6),
    ("N H W C=(G=2 K)", "H W K", IMAGE, "N G", (2, 2), 36),
    ("N H W C=(G K=3)", "H W K", IMAGE, "N G", (2, 2), 36),
    ("N H W C=(G=2 K=3)", "H W G", IMAGE, "N K", (2, 3), 24),
    ("N C=(A=2 B=3 D) L", "B L", (2, 12, 3), "N A D", (2, 2, 2), 9),
    ("N H W C=(G=2 K)", "H W C", IMAGE, "N", (2,), 72),
    ("N H W C=(G=2 K)", "G K", IMAGE, "N H W", (2, 3, 4), 6),
    ("N H W C=(G=2 K)", "N H W", IMAGE, "C", (6,), 24),
    ("N C = ( G = 2 K )", "K", (3, 4), "N G", (3, 2), 2),
    ("N=(B n=2) H C", "n H", (6, 3, 2), "B C", (3, 2), 6),
    ("(B n=2) C", "n", (6, 3), "B C", (3, 3), 2),
    ("(n=2 B) C", "n", (6, 3), "B C", (3, 3), 2),
    ("... C=(G=2 K)", "... K", (3, 2, 4), "G", (2,), 12),
    ("N=(B n=2) C=(G=2 K)", "n K", (4, 6), "B G", (2, 2), 6),
    ("N C=(G=6 K)", "K", (2, 6), "N G", (2, 6), 1),
    ("N C=(K)", "K", (2, 6), "N", (2,), 6),
]


@pytest.mark.case(66)
@pytest.mark.case(69)
@pytest.mark.case(71)
@pytest.mark.case(72)
@pytest.mark.parametrize(
    ("transform", "layout", "axis_names", "shape", "names", "stat_shape", "m"),
    [(quick_jit, *row) for row in GOOD] + [(lambda f: f, *row) for row in GOOD[::16]],
)
def test_the_named_axes_share_a_mean(transform, layout, axis_names, shape, names, stat_shape, m, rng):
    x = rng.normal(3.0, 2.0, shape).astype(np.float32)

    y, moments = transform(lambda x: nj.normalize(x, layout=layout, axis_names=axis_names))(x)

    expected = {"layout": layout.replace(" = ", "=").replace("( ", "(").replace(" )", ")"), "axis_names": axis_names}
    mean, var, count = reference.moments(x, **expected)
    assert moments.names == tuple(names.split())
    assert moments.mean.shape == moments.var.shape == moments.count.shape == stat_shape
    close(moments.mean, mean.reshape(stat_shape), m=m)
    close(moments.var, var.reshape(stat_shape), m=m)
    np.testing.assert_array_equal(moments.count, np.full(stat_shape, m, np.float32))
    np.testing.assert_array_equal(count.ravel(), np.full(int(np.prod(stat_shape)), m))
    # Groups of two or three entries can lie close together, which magnifies the rounding of x̂ by mean/deviation.
    np.testing.assert_allclose(y, reference.normalize(x, **expected), rtol=0, atol=1e-6 * np.sqrt(m))


def test_unnamed_split_axis_that_is_kept_whole_runs_along_its_factors(rng):
    x = rng.normal(size=(4, 6)).astype(np.float32)
    moments = nj.moments(x, layout="N (G=2 K)", axis_names="N")
    assert moments.names == ("G", "K")
    close(moments.mean, reference.moments(x, layout="N C", axis_names="N")[0].reshape(2, 3), m=4)


def test_order_of_reduced_names_changes_nothing(rng):
    x = rng.normal(size=IMAGE).astype(np.float32)
    one, other = (nj.normalize(x, layout="N H W C", axis_names=names)[0] for names in ("N H W", "W N H"))
    np.testing.assert_array_equal(one, other)


@pytest.mark.case(66)
@pytest.mark.parametrize("names", ["C H", "H C"])
def test_parameters_run_along_their_names_in_their_own_order(names, rng):
    x = rng.normal(size=(4, 3, 5)).astype(np.float32)
    sizes = {"C": 3, "H": 5}
    scale, bias = (rng.normal(size=[sizes[name] for name in names.split()]).astype(np.float32) for _ in range(2))
    layer = functools.partial(nj.normalize, layout="N C H", axis_names="C H")
    y, _ = quick_jit(layer)(x, nj.Affine(scale, bias, names))
    expected = reference.normalize(x, scale, bias, names=names, layout="N C H", axis_names="C H")
    close(y, expected, m=15)


# call(layout=…, axis_names=…) on zeros of a shape → the type of the error and the words that it must hold
FOUR = (8, 7, 7, 64)
NFC, NFD, MICRO, MU = "\u00e9", "e\u0301", "\u00b5", "\u03bc"
BAD = [
    # the layout's grammar
    (5, "N", (8, 6), TypeError, ["layout must be a string", '"N H W C"', "got 5"]),
    (("N", "C"), "N", (8, 6), TypeError, ["layout must be a string", "got ('N', 'C')"]),
    ("NHWC", "N", FOUR, ValueError, ['"NHWC"', "names one axis but x has four", 'by spaces: "N H W C"']),
    ("N,C", "N", (8, 6), ValueError, ['layout="N,C"', "'N,C' is not a name", "separated by spaces"]),
    ("N, C", "N", (8, 6), ValueError, ['layout="N, C"', "'N,' is not a name", "separated by spaces"]),
    ("N 2C", "N", (8, 6), ValueError, ["'2C' is not a name", "words such as N or time"]),
    ("N N", "N", (8, 6), ValueError, ['layout="N N"', "'N' stands twice", "a name of its own"]),
    ("N ... ...", "N", (8, 6), ValueError, ["'...' stands twice"]),
    ("N C=4", "N", (8, 6), ValueError, ["sizes stand only inside parentheses", '"C=(G=32 K)"', "'C=4'"]),
    ("N C=(G K)", "N", (8, 6), ValueError, ["at most one factor", "leaves its size out", "'G', 'K' do"]),
    ("N C=(G=2 G=3)", "N", (8, 6), ValueError, ["'G' stands twice"]),
    ("N C=(N=2 K)", "N", (8, 6), ValueError, ["'N' stands twice"]),
    ("N C=(C=2 K)", "N", (8, 6), ValueError, ["'C' stands twice"]),
    ("N C=(G=0 K)", "N", (8, 6), ValueError, ["size of factor 'G'", "positive integer", "not '0'"]),
    ("N C=(G=-1 K)", "N", (8, 6), ValueError, ["size of factor 'G'", "positive integer", "not '-1'"]),
    ("N C=(G=x K)", "N", (8, 6), ValueError, ["size of factor 'G'", "positive integer", "not 'x'"]),
    ("N C=(G=2.5 K)", "N", (8, 6), ValueError, ["size of factor 'G'", "positive integer", "not '2.5'"]),
    ("N C=(G= K)", "N", (8, 6), ValueError, ["C=(G= K)"]),
    (f"N C=(G={'1' * 5000} K)", "N", (8, 6), ValueError, ["factor 'G' has 5000 digits, more than any axis has"]),
    (f"N C=(G={'0' * 5000} K)", "N", (8, 6), ValueError, ["factor 'G' has 5000 digits"]),
    ("N C=(G=000 K)", "N", (8, 6), ValueError, ["size of factor 'G' must be a positive integer, not '000'"]),
    (f"N C=(G={10**18} K)", "N", (8, 6), ValueError, ["size of factor 'G' has 19 digits"]),
    (f"N C=(G={10**18 - 1} K)", "N", (8, 6), ValueError, [f"{10**18 - 1} does not divide"]),
    ("=(G=2 K) C", "G", (8, 6), ValueError, ["'=(G=2 K)' has no name before its =", '"C=(G=32 K)" or "(G=32 K)"']),
    ("= (G=2 K) C", "G", (8, 6), ValueError, ["'=(G=2 K)' has no name before its ="]),
    ("N C=(=2 K)", "K", (8, 6), ValueError, ["'' is not a name"]),
    ("N C=()", "N", (8, 6), ValueError, ["at least one factor inside its parentheses", '"C=(G=32 K)"']),
    ("N C=(G=2 (K))", "N", (8, 6), ValueError, ["parentheses do not pair up, or nest", '"C=(G=32 K)"']),
    ("N C=(G=2 K", "N", (8, 6), ValueError, ["parentheses do not pair up"]),
    ("N C)", "N", (8, 6), ValueError, ["parentheses do not pair up"]),
    ("N C=(G=2 ...)", "N", (8, 6), ValueError, ["'...' is not a name"]),
    # the layout against the shape
    ("N H W", "N", FOUR, ValueError, ["names three axes but x has four", str(FOUR), "or write ..."]),
    ("N H W C", "N", (8, 7, 7), ValueError, ["names four axes but x has three", "(8, 7, 7)", "once, in order"]),
    ("N ... H W C", "N", (8, 7, 7), ValueError, ["names four axes but x has three"]),
    ("", "N", (3,), ValueError, ["names no axes but x has one"]),
    ("N C=(G=4 K)", "N", (8, 6), ValueError, ["'C=(G=4 K)' multiply to 4 times 'K'", "size 6", "4 does not divide"]),
    ("N C=(G=2 K=2)", "N", (8, 6), ValueError, ["'C=(G=2 K=2)' multiply to 4", "size 6", "(8, 6)"]),
    ("N C=(G=12 K)", "K", (8, 6), ValueError, ["multiply to 12 times 'K'", "size 6", "12 does not divide"]),
    # axis_names
    ("N C", 3, (8, 6), TypeError, ["axis_names must be a string", "or a tuple of names", "got 3"]),
    ("N C", None, (8, 6), TypeError, ["axis_names must be a string", "got None"]),
    ("N C", ("N", 1), (8, 6), TypeError, ["names are strings", "got 1"]),
    ("N C", "", (8, 6), ValueError, ['axis_names=""', "names no axis", "whose entries share a mean"]),
    ("N C", (), (8, 6), ValueError, ["axis_names=", "names no axis"]),
    ("N C", "N N", (8, 6), ValueError, ['axis_names="N N"', "'N' is given twice"]),
    ("N C", ("N", "N"), (8, 6), ValueError, ["'N' is given twice"]),
    ("N ...", "... ...", (8, 6), ValueError, ["'...' is given twice"]),
    ("N C=(G=2 K)", "C K", (8, 6), ValueError, ['"C K"', "'K' is given twice", "its split axis'"]),
    ("N C=(G=2 K)", "K C", (8, 6), ValueError, ["'K' is given twice", "its split axis'"]),
    ("N C", "N,C", (8, 6), ValueError, ["'N,C' is not a name", "separate names by spaces"]),
    ("N C", "...", (8, 6), ValueError, ['axis_names="..."', "the unnamed axes", 'layout "N C" leaves none']),
    ("N C ...", "...", (8, 6), ValueError, ["the unnamed axes", 'layout "N C ..." leaves none']),
    ("N C", "N data", (8, 6), ValueError, ["'data'", "neither in layout", "shard_map, pmap or vmap"]),
    ("N chanel", "channel", (8, 6), ValueError, ["'channel' is neither in layout", "Did you mean 'chanel'?"]),
    ("N C", "n", (8, 6), ValueError, ["'n' is neither in layout", "Did you mean 'N'?"]),
    (f"{NFC} {NFD}", NFC, (8, 6), ValueError, [f"'{NFC}' stands twice"]),
    (f"N {NFC}", (NFC, NFD), (8, 6), ValueError, [f"'{NFC}' is given twice"]),
    (f"N {NFC}", NFD, (8, 6), ValueError, ["Two Unicode forms of one name: '\\xe9' there, 'e\\u0301' here"]),
    (f"N {NFD}", NFC, (8, 6), ValueError, ["'e\\u0301' there, '\\xe9' here; write '\\xe9' in both, as Python"]),
    (f"N {MICRO}", MU, (8, 6), ValueError, ["'\\xb5' there, '\\u03bc' here; write '\\u03bc' in both"]),
    ("N C", "NC", (8, 6), ValueError, ["'NC' is neither", 'For array axes write "N C".']),
]


@pytest.mark.case(67)
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(("layout", "axis_names", "shape", "error", "words"), BAD, ids=lambda part: f"{part!a:.40}")
def test_a_broken_axis_spec_says_what_came_and_how_to_mend_it(layout, axis_names, shape, error, words, transform):
    with pytest.raises(error) as caught:
        transform(lambda x: nj.moments(x, layout=layout, axis_names=axis_names))(np.zeros(shape, np.float32))
    message = str(caught.value)
    assert message.startswith("moments: ")
    for word in words:
        assert word in message


# layout, size of N → the words of the error, None where it works
SYMBOLIC = {
    (
        "N=(B n=32) C",
        "b",
    ): "b (shape (b, 16)), which 32 does not divide for every value; write the symbolic size as 32*b.",
    ("N=(B n=32) C", "16*b"): "which 32 does not divide for every value; write the symbolic size as 32*b.",
    ("N=(B n=32) C", "b + 1"): "which 32 does not divide for every value; write the symbolic size as 32*b.",
    ("N=(B=2 n=32) C", "b"): "which is not 64 for every value; give x that size, or leave one factor's size out.",
    ("N=(B n=32) C", "32*b"): None,
}


@pytest.mark.parametrize(("layout", "size"), SYMBOLIC)
def test_a_symbolic_size_that_a_split_does_not_divide_is_told_how_to_be_written(layout, size):
    x = jax.ShapeDtypeStruct(export.symbolic_shape(f"{size}, 16"), np.float32)
    norm = jax.jit(lambda x: nj.batch_norm(x, layout=layout, axis_names="n", train=True)[0])
    words = SYMBOLIC[layout, size]
    if words is None:
        assert export.export(norm)(x).in_avals[0].shape == x.shape
        return
    with pytest.raises(ValueError, match=r"^batch_norm: layout=") as caught:
        export.export(norm)(x)
    assert words in str(caught.value)


def test_names_that_look_alike_are_told_apart_wherever_an_array_runs_along_them():
    x, told = np.zeros((4, 3), np.float32), r"forms of one name: '\xb5' there, '\u03bc' here; write '\u03bc' in both"
    params, state = nj.Affine.init(**{MU: 3}), nj.BatchStats.init(**{MU: 3})
    spec = {"layout": f"N {MICRO}", "axis_names": "N"}
    moments = nj.moments(x, **spec)
    other = nj.BatchStats(*[np.ones(3, np.float32)] * 2, np.ones(3, int), np.ones(3, np.float32), names=MICRO)
    for call in (
        lambda: nj.batch_norm(x, params, train=True, **spec),
        lambda: nj.batch_norm(x, None, state, train=False, **spec),
        lambda: nj.update(state, moments),
        lambda: nj.pool_stats(other, MU),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            call()
        assert told in str(caught.value)


LAYERS = ["batch_norm", "sync_batch_norm", "layer_norm", "instance_norm", "group_norm", "rms_norm"]


@pytest.mark.parametrize("name", [*LAYERS, "normalize", "moments", "describe"])
def test_an_axis_error_names_the_function_that_was_called(name):
    call = getattr(nj, name)
    train = {"train": True} if "batch" in name else {}
    x = (8, 6) if name == "describe" else np.zeros((8, 6), np.float32)
    with pytest.raises(ValueError, match=rf"^{name}: layout=\"NC\" names one axis but x has two"):
        call(x, layout="NC", axis_names="N", **train)


EXACT = [
    (
        lambda: nj.batch_norm(np.zeros(FOUR), layout="N H W C", axis_names="N HW", train=True),
        'batch_norm: axis_names="N HW": \'HW\' is neither in layout "N H W C" nor a mapped axis here. '
        'For array axes write "N H W". To synchronise, call inside shard_map, pmap or vmap with the axis name '
        "'HW'; under jit over sharded arrays the batch is already global: drop it.",
    ),
    (
        lambda: nj.layer_norm(np.zeros((8, 64, 3)), nj.Affine.init(C=64), layout="N C D", axis_names="D"),
        "layer_norm: params runs along 'C', none of which axis_names=\"D\" reduces; layer norm scales the axes it "
        "pools.",
    ),
    (
        lambda: nj.batch_norm(
            np.zeros((8, 64, 7, 7)), nj.Affine.init(C=32), layout="N C H W", axis_names="N H W", train=True
        ),
        "batch_norm: params.scale has shape (32,), but axis 'C' of x (layout \"N C H W\", shape (8, 64, 7, 7)) has "
        "size 64.",
    ),
    (
        lambda: nj.batch_norm(np.zeros(FOUR), layout="NHWC", axis_names="N", train=True),
        'batch_norm: layout="NHWC" names one axis but x has four; separate names by spaces: "N H W C".',
    ),
]


@pytest.mark.parametrize(("call", "message"), EXACT, ids=["unbound", "layer", "size", "spaces"])
def test_the_messages_of_the_contract_are_word_for_word(call, message):
    with pytest.raises(ValueError, match=r".") as caught:
        call()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("shape", "layout", "axis_names", "lines"),
    [
        (
            (8, 7, 7, 64),
            "N H W C",
            "N H W",
            [
                'layout "N H W C", shape (8, 7, 7, 64), pooled over N H W',
                "groups: 64, one for each C",
                "entries in a group: m = 392",
                'statistics: shape (64,), names "C"',
                "parameters along kept axes, as of batch and instance norm: Affine.init(C=64)",
                "parameters along pooled axes, as of layer and RMS norm: Affine.init(N=8, H=7, W=7)",
            ],
        ),
        (
            (2, 5, 64),
            "N L C=(G=32 K)",
            ("L", "K"),
            [
                'layout "N L C=(G=32 K)", shape (2, 5, 64), pooled over L K',
                "groups: 64, one for each N G",
                "entries in a group: m = 10",
                'statistics: shape (2, 32), names "N G"',
                "parameters along kept axes, as of batch and instance norm: Affine.init(N=2, G=32)",
                "parameters along pooled axes, as of layer and RMS norm: Affine.init(L=5, K=2)",
            ],
        ),
        (
            (8, 6),
            "N C",
            "N data",
            [
                'layout "N C", shape (8, 6), pooled over N data',
                "groups: 6, one for each C",
                "entries in a group: m = 8 × the size of mapped axis 'data'",
                'statistics: shape (6,), names "C"',
                "parameters along kept axes, as of batch and instance norm: Affine.init(C=6)",
                "parameters along pooled axes, as of layer and RMS norm: Affine.init(N=8)",
            ],
        ),
        (
            (4,),
            "N",
            "N",
            [
                'layout "N", shape (4,), pooled over N',
                "groups: 1, all entries in one",
                "entries in a group: m = 4",
                'statistics: shape (), names ""',
                "parameters along kept axes, as of batch and instance norm: none",
                "parameters along pooled axes, as of layer and RMS norm: Affine.init(N=4)",
            ],
        ),
        (
            (2, 3, 4),
            "N ...",
            "N",
            [
                'layout "N ...", shape (2, 3, 4), pooled over N',
                "groups: 12, one for each ...",
                "entries in a group: m = 2",
                'statistics: shape (3, 4), names "..."',
                'parameters along kept axes, as of batch and instance norm: Affine(scale, bias, names="...")',
                "parameters along pooled axes, as of layer and RMS norm: Affine.init(N=2)",
            ],
        ),
    ],
)
def test_describe_says_groups_size_and_shapes(shape, layout, axis_names, lines):
    assert nj.describe(shape, layout=layout, axis_names=axis_names).splitlines() == lines


@pytest.mark.parametrize(("layout", "axis_names", "shape", "names", "stat_shape", "m"), GOOD)
def test_describe_agrees_with_the_moments(layout, axis_names, shape, names, stat_shape, m):
    text = nj.describe(shape, layout=layout, axis_names=axis_names)
    assert f"groups: {int(np.prod(stat_shape))}," in text
    assert f"entries in a group: m = {m}\n" in text
    assert f'statistics: shape {stat_shape}, names "{names}"' in text


def test_describe_takes_an_array_for_its_shape():
    spec = {"layout": "N C", "axis_names": "N"}
    assert nj.describe(jnp.zeros((4, 3)), **spec) == nj.describe((4, 3), **spec)
    assert nj.describe(jax.ShapeDtypeStruct((4, 3), jnp.float32), **spec) == nj.describe([4, 3], **spec)
