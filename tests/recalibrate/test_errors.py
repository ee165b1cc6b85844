"""What recalibrate cannot know or was given wrongly is said with its cure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.recalibrate import recalibrate
from tests.recalibrate.nets import LAYERS, WIDTHS, pure

X = np.random.default_rng(0).normal(size=(24, 2)).astype(np.float32)
BATCHES = [X[:16], X[16:]]
FRESH = nj.BatchStats.init(C=2)


def step(stats, x, **options):
    x, where = x if isinstance(x, tuple) else (x, None)
    options = {"layout": "N C", "axis_names": "N", "train": True, "where": where, **options}
    return nj.batch_norm(x, None, stats, **options)[1]


def twice(stats, x):
    return step(step(stats, x), x)


def no_average(stats, x):
    return {"mean": stats["mean"] + x.mean(0), "var": stats["var"] + x.var(0)}


def hardly(stats, x):
    return {name: np.float32(0.99987654) * stats[name] + np.float32(0.00012346) * x.mean(0) for name in stats}


def random(stats, x, drawn=np.random.default_rng(0)):  # noqa: B008
    return step(stats, np.where(drawn.random(x.shape) < 0.5, x, 0), running=nj.Ema.torch(0.1))


PAIR = {"mean": jnp.zeros(2), "var": jnp.ones(2)}
WRONG = {
    "no batches": ((step, FRESH, []), {}, "recalibrate: batches holds none."),
    "evaluation": (
        (lambda stats, x: stats, FRESH, BATCHES),
        {},
        "step moved no statistics; it must be a pass in training mode that returns them.",
    ),
    "no statistics": (
        (step, {"kernel": jnp.ones(2)}, BATCHES),
        {},
        "stats has no norm, which is a mean and a var side by side, of one shape; got dict. Pass BatchStats, linen's",
    ),
    "half precision": (
        (step, {"a": {name: leaf.astype(jnp.bfloat16) for name, leaf in PAIR.items()}}, BATCHES),
        {},
        "a/mean is bfloat16; statistics need float32 or more: cast them, as in x.astype('float32').",
    ),
    "y besides": (
        (lambda stats, x: (x, step(stats, x)), FRESH, BATCHES),
        {},
        'step returned tuple without the mean and var of "stats"; it must return a tree like stats: not y besides',
    ),
    "twice a pass": (
        (twice, FRESH, BATCHES),
        {},
        'step moved "stats" twice; one call must be one pass over one batch.',
    ),
    "sums": (
        (no_average, PAIR, BATCHES),
        {},
        '"stats" kept 1 to 1 of its old mean; an average keeps one share, from 0 up to 1, whatever the batch.',
    ),
    "a weight lost in float32": (
        (hardly, PAIR, BATCHES),
        {},
        '"stats" gives the new batch a weight of about 0.000123, which in float32 cannot be measured to 1e-6. Give',
    ),
    "a mask": (
        (step, FRESH, [(x, x > 0) for x in BATCHES]),
        {},
        "how many entries a batch has cannot be seen in arrays of shapes [(16, 2), (16, 2)] (the first batch: ",
    ),
    "arrays that grow differently": (
        (lambda stats, batch: step(stats, batch[0]), FRESH, [(BATCHES[0], np.ones(3)), (BATCHES[1], np.ones(3))]),
        {},
        "cannot be seen in arrays of shapes [(8, 2), (3,)] (the first batch: [(16, 2), (3,)]",
    ),
    "images of another size": (
        (lambda stats, x: step(stats, x.reshape(-1, 2)), FRESH, [BATCHES[0], BATCHES[0].reshape(4, -1)]),
        {},
        "how many entries a batch has cannot be seen in arrays of shapes [(4, 8)] (the first batch: [(16, 2)]",
    ),
    "no step": ((None, FRESH, BATCHES), {}, "step must be a function (stats, batch) → stats; got NoneType."),
    "batches that are none": (
        (step, FRESH, None),
        {},
        "batches must be an iterable of batches, such as a list; got NoneType.",
    ),
    "one batch": ((step, FRESH, BATCHES[0]), {}, "batches must be an iterable of batches, such as a list; got"),
    "no examples": ((step, FRESH, [X[:0], X[:0]]), {}, "no batch has an example."),
    "no number of entries": (
        (step, FRESH, BATCHES),
        {"entries": lambda x: x},
        "entries(batch) must be a number of at least 0; got array(",
    ),
    "no entry at all": (
        (step, FRESH, BATCHES),
        {"entries": lambda x: 0},
        "entries(batch) is 0 in all.",
    ),
    "unbiased by chance": (
        (random, FRESH, BATCHES),
        {"unbiased": True},
        '"stats" has another mean on the first batch twice over, so m cannot be measured. Make step deterministic',
    ),
    "unbiased, of a fixed number of examples": (
        (lambda stats, x: step(stats, jnp.broadcast_to(x, (16, 2))), FRESH, [X[:16]]),
        {"unbiased": True},
        "unbiased=True: m cannot be measured, since step takes neither half of a batch nor one twice over (",
    ),
    "no flag": ((step, FRESH, BATCHES), {"unbiased": 1}, "unbiased must be a Python or NumPy bool; got 1."),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_with_its_cure(case):
    arguments, options, words = WRONG[case]
    with pytest.raises((ValueError, TypeError)) as caught:
        recalibrate(*arguments, **options)
    assert str(caught.value).startswith("recalibrate: ")
    assert words in str(caught.value)


def test_under_jit_it_is_refused():
    with pytest.raises(TypeError, match="recalibrate: mean is traced; call it outside jit, grad and vmap"):
        jax.jit(lambda stats: recalibrate(step, stats, BATCHES))(FRESH)


def batches():
    return list(np.random.default_rng(1).normal(size=(2, 16, WIDTHS[0])).astype(np.float32))


NET = pure()
LAYERED = {
    "an iterator": (NET.step, lambda: iter(batches()), LAYERS, "batches is used up after one layer; with layers pass"),
    "no layers": (NET.step, batches, [], "layers must be a list of the norms' paths; got []."),
    "one layer": (NET.step, batches, "norm0", "layers must be a list of the norms' paths; got 'norm0'."),
    "no such norm": (NET.step, batches, ("norm9",), 'no norm stands at \'norm9\'; there are "norm0", "norm1", "norm2"'),
    "the wrong order": (
        NET.step,
        batches,
        LAYERS[::-1],
        'the inputs of "norm2" changed when later ones were set; give',
    ),
    "all train": (
        lambda stats, x, layer: NET.step(stats, x),
        batches,
        LAYERS,
        'step moved "norm1" in the pass for another layer; there it must evaluate.',
    ),
    "none trains": (
        lambda stats, x, layer: stats,
        batches,
        LAYERS,
        'in the pass for layer "norm0" step left "norm0" as it was: it must train.',
    ),
}


@pytest.mark.parametrize("case", LAYERED)
def test_layers_that_are_none_or_do_not_evaluate_or_are_out_of_order_are_refused(case):
    one, data, layers, words = LAYERED[case]
    with pytest.raises(ValueError, match="recalibrate: ") as caught:
        recalibrate(one, NET.stats, data(), layers=layers)
    assert words in str(caught.value)
