"""What `normjax.fold.fold` refuses, and how it says so."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.fold import fold
from tests.fold.layers import stats_of

STATS = stats_of(np.zeros(4, np.float32), np.ones(4, np.float32))
# Arguments beside a kernel of ones (3, 3, 2, 4), its bias, parameters and statistics along C, layout "h w I C".
ERRORS = [
    # the kernel and its names
    ({"layout": "h w I O"}, ValueError, ["stats runs along 'C', which layout \"h w I O\" lacks", 'channel="O"']),
    ({"layout": "hwIC"}, ValueError, ['but the kernel has four; separate names by spaces: "h w I C"']),
    ({"layout": "I C"}, ValueError, ['layout="I C" names two axes but the kernel has four (shape (3, 3, 2, 4))']),
    ({"layout": "h w C I"}, ValueError, ["stats.mean has shape (4,), but axis 'C' of the kernel's output", "size 2"]),
    ({"layout": 4}, TypeError, ["layout must be a string that names every axis of the kernel; got 4"]),
    ({"layout": "h w I C=(g=3 j)"}, ValueError, ["multiply to 3 times 'j', but that axis of the kernel has size 4"]),
    (
        {"kernel": np.ones((3, 3, 2, 4), int)},
        TypeError,
        ["kernel must have a floating-point or complex dtype; got int"],
    ),
    ({"kernel": "conv"}, TypeError, ["kernel must be an array of numbers, not str"]),
    # the channel
    ({"channel": "g j"}, ValueError, ["channel=\"g j\": 'g', 'j' is not in layout \"h w I C\""]),
    ({"channel": "I"}, ValueError, ['channel="I": stats runs along \'C\', which layout "h w I C" has itself']),
    ({"channel": ""}, ValueError, ['channel="" names no axis']),
    ({"channel": 3}, TypeError, ["channel must be a string"]),
    (
        {"layout": "h w I O", "channel": "h w"},
        ValueError,
        ["stats.mean has shape (4,), but axis 'C' of the kernel's output (layout \"C\", shape (9,)) has size 9"],
    ),
    (
        {"stats": nj.BatchStats.init(A=2, B=2), "params": None, "layout": "h w I O", "channel": "O"},
        ValueError,
        ["says what one output channel is made of, but stats runs along 'A', 'B'"],
    ),
    # the bias
    ({"bias": np.ones(3)}, ValueError, ["bias has shape (3,), but axis 'C' of the kernel's output", "size 4"]),
    ({"bias": np.ones((1, 4))}, ValueError, ["bias has shape (1, 4), but its names 'C' say one axis"]),
    ({"bias": np.ones(4, int)}, TypeError, ["bias must have a floating-point or complex dtype; got int"]),
    # parameters and statistics
    ({"params": {"scale": 1}}, TypeError, ["params must be a normjax.Affine or None; got dict"]),
    ({"params": nj.Affine.init(N=8, C=4)}, ValueError, ["params runs along 'N', but stats along 'C' alone"]),
    ({"params": nj.Affine.init(I=2)}, ValueError, ["params runs along 'I', but stats along 'C' alone"]),
    ({"params": nj.Affine.init(C=3)}, ValueError, ["params.scale has shape (3,)", "size 4"]),
    ({"params": nj.Affine("γ", None, "C")}, TypeError, ["params.scale must be an array of numbers, not str"]),
    ({"params": nj.Affine(np.ones(4, complex), None, "C")}, TypeError, ["kernel is float32, but the norm's"]),
    ({"stats": None}, TypeError, ["stats must be a normjax.BatchStats; got NoneType"]),
    ({"stats": nj.Moments.init(C=4)}, TypeError, ["stats must be a normjax.BatchStats; got Moments"]),
    ({"stats": nj.BatchStats.init(C=3)}, ValueError, ["stats.mean has shape (3,)", "size 4"]),
    (
        {"stats": stats_of(np.zeros(4, np.float16), np.ones(4, np.float16))},
        TypeError,
        ["stats.mean is float16; running statistics need float32 or more"],
    ),
    (
        {"stats": stats_of(np.zeros(4, np.complex64), np.ones(4, np.float32))},
        TypeError,
        ["bias is float32, but the norm's parameters or statistics are complex"],
    ),
    ({"stats": stats_of(np.zeros(4), np.ones(4), ""), "params": None}, ValueError, ["names no axis: a scalar"]),
    # eps
    ({"eps": -1e-5}, ValueError, ["eps=-1e-05 must be at least 0 and finite"]),
    ({"eps": "small"}, TypeError, ["eps must be a real scalar; got 'small'"]),
]


@pytest.mark.parametrize(("change", "kind", "words"), ERRORS, ids=[words[0] for *_, words in ERRORS])
def test_what_fold_cannot_take_is_refused_in_words(change, kind, words):
    given = {
        "kernel": jnp.ones((3, 3, 2, 4)),
        "bias": jnp.zeros(4),
        "params": nj.Affine.init(C=4),
        "stats": STATS,
        "layout": "h w I C",
    } | change
    arrays = [given.pop(name) for name in ("kernel", "bias", "params", "stats")]
    with pytest.raises(kind) as raised:
        fold(*arrays, **given)
    assert str(raised.value).startswith("fold: ")
    for text in words:
        assert re.sub(r"\s+", " ", text) in str(raised.value)
