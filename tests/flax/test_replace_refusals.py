"""`normjax.nnx.replace`: what it refuses, with nothing changed, and what it leaves alone."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors
from flax import nnx as flax_nnx

from normjax import nnx
from normjax.nnx import replace
from tests.flax.nested import nested, variables
from tests.quick import quick_jit


class Mine(flax_nnx.BatchNorm):
    pass


class Ours(nnx.BatchNorm):
    pass


def moved(kind=nnx.BatchNorm, **settings):
    norm = kind(8, rngs=flax_nnx.Rngs(0), **settings)
    if hasattr(norm, "mean"):
        norm.mean.set_value(jnp.ones(8))
    return norm


def frozen():
    norm = moved()
    replace(norm, "frozen")
    return norm


def tied():
    model = flax_nnx.Sequential(moved(), flax_nnx.LayerNorm(8, rngs=flax_nnx.Rngs(0)))
    model.layers[1].bias = model.layers[0].bias
    return model


def called_with_a_mode():
    class Model(flax_nnx.Module):
        def __init__(self):
            self.norm = moved()

        def __call__(self, x):
            return self.norm(x, use_running_average=False)

    return Model()


X = jnp.ones((2, 4, 8))


@pytest.mark.parametrize(
    ("make", "to", "options", "words"),
    [
        (lambda: moved(Mine), None, {}, "(the model): Mine is a subclass, and what it adds would be lost"),
        (lambda: moved(Ours), "frozen", {}, "Ours is a subclass"),
        (lambda: moved(axis=1), "group", {"num_groups": 2}, "has axis=1; of a group norm the channels are last"),
        (lambda: moved(axis=(1, 2)), "group", {"num_groups": 2}, "has axis=(1, 2)"),
        (lambda: moved(axis=1), "group", {"example": (X[:, 0],), "num_groups": 8}, "x has shape (2, 8)"),
        (lambda: moved(axis=-2), "group", {"example": (X.swapaxes(1, 2),)}, "has axis=-2 and x of shape (2, 8, 4)"),
        (lambda: moved(), "group", {"example": (X[0, 0],)}, "has axis=-1 and x of shape (8,)"),
        (called_with_a_mode, "group", {"example": (X,)}, "norm: is called with use_running_average"),
        (lambda: moved(axis_name="data"), "group", {"num_groups": 2}, "pools over the mapped axis 'data'"),
        (lambda: moved(layout="N C", axis_names="N"), "group", {"num_groups": 2}, "has layout='N C'"),
        (lambda: moved(promote_dtype=lambda x, dtype: x), "group", {"num_groups": 2}, "has a promote_dtype of its own"),
        (frozen, "group", {"num_groups": 2}, "is frozen"),
        (frozen, "sync", {"axis_name": "data"}, "is frozen, and pools nothing"),
        (lambda: moved(axis_index_groups=[[0]]), "sync", {"axis_name": "data"}, "they would begin to count"),
        (
            lambda: moved(axis_name="data", axis_index_groups=[[0]]),
            "sync",
            {"axis_name": ("data", "model")},
            "has axis_index_groups, which are of one mapped axis",
        ),
        (lambda: nested(), "frozen", {}, "again: its running statistics are still 0 and 1"),
        (tied, "frozen", {"train_params": False}, "layers.0: its bias is also layers.1.bias"),
        (lambda: nested(), "group", {"only": flax_nnx.PathContains("heads")}, "leaves out again."),
        (lambda: flax_nnx.Linear(2, 2, rngs=flax_nnx.Rngs(0)), None, {}, "there is no norm of flax.nnx or normjax.nnx"),
        (lambda: nnx.LayerNorm(8, rngs=flax_nnx.Rngs(0)), "group", {}, "there is no batch norm"),
        (nested, "sync", {}, 'give axis_name for to="sync"'),
        (nested, "group", {"axis_name": "data"}, "and for nothing else"),
    ],
)
def test_what_would_change_meaning_is_refused_and_changes_nothing(make, to, options, words):
    model = make()
    before, held = flax_nnx.graphdef(model), variables(model)
    with pytest.raises(ValueError, match=re.escape(words)):
        replace(model, to, **options)
    assert flax_nnx.graphdef(model) == before
    after = variables(model)
    assert all(after[path] is held[path] for path in held)


# Flax's kind, settings, words: what Flax's norm takes and ours refuses once it is called
TAKEN_BY_FLAX = [
    ("LayerNorm", {"reduction_axes": (-1, -2)}, "has reduction_axes=(-1, -2); here axes are in the order of x"),
    ("LayerNorm", {"reduction_axes": (1, -1, 0)}, "has reduction_axes=(1, -1, 0)"),
    ("LayerNorm", {"feature_axes": (3, 1)}, "has feature_axes=(3, 1)"),
    ("LayerNorm", {"reduction_axes": [2, 2]}, "each once"),
    ("LayerNorm", {"reduction_axes": ()}, "has reduction_axes=(), which pools nothing"),
    ("RMSNorm", {"reduction_axes": (2, 1)}, "has reduction_axes=(2, 1)"),
    ("InstanceNorm", {"feature_axes": (3, 3)}, "has feature_axes=(3, 3)"),
    ("GroupNorm", {"num_groups": 8, "reduction_axes": (3, 2)}, "has reduction_axes=(3, 2)"),
    ("BatchNorm", {"axis_name": "data-0"}, "'data-0' is not a name"),
    ("BatchNorm", {"momentum": 1.5}, "momentum=1.5 must lie between 0 and 1"),
    ("RMSNorm", {"epsilon": -1e-6}, "has epsilon=-1e-06; it must be at least 0"),
]


@pytest.mark.parametrize(
    ("to", "kind", "settings", "words"),
    [(to, *row) for row in TAKEN_BY_FLAX for to in ([None, "sync", "frozen"] if row[0] == "BatchNorm" else [None])],
    ids=lambda part: str(part)[:40],
)
def test_settings_that_only_flax_takes_are_refused_before_anything_changes(to, kind, settings, words):
    norm = moved(getattr(flax_nnx, kind), **settings)
    before = flax_nnx.graphdef(norm)
    with pytest.raises(ValueError, match="nothing changed") as error:
        replace(norm, to, **({"axis_name": "data"} if to == "sync" else {}))
    assert words in str(error.value)
    assert flax_nnx.graphdef(norm) == before


def group_norms():
    """Every choice of axes beside the last, from the front, of x of two to four axes, and one, two or eight groups."""
    for rank in (2, 3, 4):
        for number in range(rank):
            for axes in itertools.combinations(range(rank - 1), number):
                for groups in (1, 2, 8):
                    yield rank, (*axes, rank - 1), groups


def test_a_group_norm_is_replaced_where_flax_s_numbers_are_right_and_nowhere_else(rng):
    """Where Flax cannot run, there is nothing that could change."""
    refused = 0
    for rank, axes, groups in group_norms():
        x = jnp.asarray(rng.normal(size=(2, 3, 5, 8)[-rank:]), jnp.float32)
        settings = {"num_groups": groups, "reduction_axes": axes, "use_fast_variance": False}
        norm = flax_nnx.GroupNorm(8, **settings, rngs=flax_nnx.Rngs(0))
        if len(axes) == rank:
            replace(norm)
            continue
        mine = nnx.GroupNorm(8, **settings, rngs=flax_nnx.Rngs(0))
        if np.allclose(*quick_jit(lambda x, pair=(norm, mine): [norm(x) for norm in pair])(x), atol=1e-5):
            assert len(replace(norm)) == 1
            continue
        with pytest.raises(ValueError, match=r"reduction_axes=.* Flax spreads the statistics of its groups"):
            replace(norm)
        refused += 1
    assert refused == 6


def test_a_group_norm_whose_axes_count_from_the_back_is_refused_since_they_fit_any_rank():
    norm = flax_nnx.GroupNorm(8, 2, reduction_axes=(1, 2, -1), rngs=flax_nnx.Rngs(0))
    with pytest.raises(ValueError, match="count all of them from the front"):
        replace(norm)
    norm.reduction_axes = (1, 2, 3)
    assert len(replace(norm)) == 1
    replace(flax_nnx.GroupNorm(8, 8, reduction_axes=(1, 2, -1), rngs=flax_nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("batch",), {}, "to must be None"),
        (("group",), {"num_groups": 0}, "num_groups must be a positive integer; got 0"),
        (("group",), {"num_groups": 4.0}, "num_groups must be a positive integer; got 4.0"),
        (("group",), {"example": X}, "example must be a tuple of the arguments, such as (x,)"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments, options, words):
    with pytest.raises(TypeError, match=re.escape(words)):
        replace(nested(), *arguments, **options)


def test_a_model_of_another_trace_is_refused_before_anything_changes():
    model = nested()
    before = flax_nnx.graphdef(model)
    with pytest.raises(errors.TraceContextError, match="trace"):
        jax.jit(lambda: replace(model) and 0)()
    assert flax_nnx.graphdef(model) == before
    with pytest.raises(ValueError, match="Expected a node of type"):
        flax_nnx.jit(lambda model: replace(model) and 0)(model)


def test_a_subclass_of_ours_stays_as_it_is_and_others_around_it_change():
    model = flax_nnx.Sequential(moved(Ours), flax_nnx.LayerNorm(8, rngs=flax_nnx.Rngs(0)), moved(Mine))
    (change,) = replace(model, only=lambda path, norm: not isinstance(norm, Mine))
    assert change.path == "layers.1"
    assert [type(layer) for layer in model.layers] == [Ours, nnx.LayerNorm, Mine]
