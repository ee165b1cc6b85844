"""Wrong inputs are refused by an error that names the function, the argument and what came; right ones are taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import normjax as nj
from tests.closeness import close

ROW = {"layout": "N D", "axis_names": "D"}
COLUMN = {"layout": "N C", "axis_names": "N"}
X = np.array([[1, 2, 4], [0, 3, 3], [7, 1, 2], [2, 2, 9]], np.float32)
ONES = np.ones(3, np.float32)
STATE = nj.BatchStats.init(C=3)
MOMENTS = nj.Moments(ONES, ONES, ONES, "C")
RAGGED = [[1.0], [1.0, 2.0]]

layer = functools.partial(nj.layer_norm, X, **ROW)
normalize = functools.partial(nj.normalize, X, **ROW)
train = functools.partial(nj.batch_norm, train=True, **COLUMN)
describe = functools.partial(nj.describe, axis_names="N")
Affine, Moments, BatchStats = nj.Affine, nj.Moments, nj.BatchStats


def stats(**leaves):
    return BatchStats(**{"mean": ONES, "var": ONES, "count": 0, "weight": ONES, "names": "C", **leaves})


def grouped(groups):
    """A mapped norm with the groups."""
    norm = lambda x: nj.normalize(x, layout="C", axis_names="data", axis_index_groups=groups)[0]  # noqa: E731
    return jax.vmap(norm, axis_name="data")(X)


def traced(argument):
    """The core with a flag that jit makes an array of."""
    return jax.jit(lambda value: nj.normalize(X, **ROW, **{argument: value})[0])(True)


# What is called, the error, and its words after the function's name.
LAYOUTS = {
    "list of axes": (
        lambda: nj.layer_norm(X, layout=["N", "D"], axis_names="D"),
        TypeError,
        r"layer_norm: layout .*\['N', 'D'\]",
    ),
    "array of axes": (
        lambda: nj.moments(X, layout=np.array(["N", "D"]), axis_names="D"),
        TypeError,
        r"moments: layout ",
    ),
    "list described": (lambda: describe((4, 3), layout=["N", "C"]), TypeError, r"describe: layout .*\['N', 'C'\]"),
    "factors run together": (
        lambda: nj.describe((4, 6), layout="N(A=2 B)", axis_names="A"),
        ValueError,
        r'describe: layout="N\(A=2 B\)"',
    ),
    "shape 5": (lambda: describe(5, layout="N"), TypeError, r"describe: shape .*got 5"),
    "shape None": (lambda: describe(None, layout="N"), TypeError, r"describe: shape .*got None"),
    "shape of letters": (lambda: describe("ab", layout="N C"), TypeError, r"describe: shape .*got 'ab'"),
    "shape of fractions": (lambda: describe((2.5, 3), layout="N C"), TypeError, r"describe: shape .*got \(2\.5, 3\)"),
    "negative shape": (lambda: describe((-2, 3), layout="N C"), TypeError, r"describe: shape .*got \(-2, 3\)"),
    "shape of lists": (
        lambda: describe([[1.0, 2.0], [3.0, 4.0]], layout="N C"),
        TypeError,
        r"describe: shape .*got \[\[",
    ),
    "groups 5": (lambda: grouped(5), (TypeError, ValueError), r"normalize: axis_index_groups=5 "),
    "groups of None": (lambda: grouped([None]), (TypeError, ValueError), r"normalize: axis_index_groups=\[None\]"),
    "flat groups": (
        lambda: grouped([0, 1, 2, 3]),
        (TypeError, ValueError),
        r"normalize: axis_index_groups=\[0, 1, 2, 3\]",
    ),
    "groups of letters": (
        lambda: grouped([[0, "a", 2, 3]]),
        (TypeError, ValueError),
        r"normalize: axis_index_groups=.*'a'",
    ),
    "groups of floats": (
        lambda: grouped([[0.0, 1.0], [2.0, 3.0]]),
        (TypeError, ValueError),
        r"normalize: axis_index_groups=.*0\.0",
    ),
}
NO_NUMBERS = [
    (np.array([object()]), "of dtype object"),
    (np.array(["a"]), "of dtype <U1"),
    (np.array(["2015-02-11"], "datetime64[D]"), r"of dtype datetime64\[D\]"),
    (np.array([1], "timedelta64[D]"), r"of dtype timedelta64\[D\], which JAX lacks: convert it first"),
    (np.zeros(2, "V4"), r"of dtype \|V4"),
    ({}, "dict"),
    (jax.ShapeDtypeStruct((4, 3), np.float32), "ShapeDtypeStruct"),
    ([[1, 2], [3]], "list: its parts differ in shape"),
    ((np.ones(2), jnp.ones(3)), "tuple: its parts differ in shape"),
    ([np.ones(2, bool), np.ones(3, bool)], "list: its parts differ in shape"),
    ([1, [2, "few"]], "list: it holds 'few'"),
    ([None, 1], "list: it holds None"),
    ([np.array(["a"])], "list: it holds an array of dtype <U1"),
    ([{"a": "b" * 100}], r"list: it holds \{'a': 'b+\.\.\."),
    ([10**400], "list: it holds an integer that is too large for JAX; make it a float"),
    (10**400, "int: it is too large for JAX; make it a float"),
]
ARRAYS = {
    "mask 'abc'": (lambda: layer(where="abc"), TypeError, r"layer_norm: where .*str"),
    "mask object": (lambda: layer(where=object()), TypeError, r"layer_norm: where .*object"),
    "ragged mask": (lambda: layer(where=[[True], [True, False]]), TypeError, r"layer_norm: where .*list"),
    "mask [None]": (lambda: layer(where=[None]), TypeError, r"layer_norm: where "),
    "scale object": (
        lambda: jax.eval_shape(lambda: layer(Affine(object(), None, "D"))),
        TypeError,
        r"layer_norm: params\.scale .*object",
    ),
    "bias 'many'": (lambda: layer(Affine(None, "many", "D")), TypeError, r"layer_norm: params\.bias .*str"),
    "ragged scale": (lambda: layer(Affine(RAGGED, None, "D")), TypeError, r"layer_norm: params\.scale .*list"),
    "scale of keys": (
        lambda: layer(Affine(jax.random.key(0), None, ())),
        TypeError,
        r"layer_norm: params\.scale .*key",
    ),
    **{
        f"x {number}, {words:.20}": (
            lambda value=value: nj.moments(value, **ROW),
            TypeError,
            rf"^moments: x must be an array of numbers, not {words}\.$",
        )
        for number, (value, words) in enumerate(NO_NUMBERS)
    },
    "merge without mean": (lambda: nj.merge(Moments(None, ONES, ONES, "C")), TypeError, r"merge: moments\.mean .*None"),
    "merge without count": (
        lambda: nj.merge(Moments(ONES, ONES, None, "C")),
        TypeError,
        r"merge: moments\.count .*None",
    ),
    "update without var": (
        lambda: nj.update(STATE, Moments(ONES, None, ONES, "C")),
        TypeError,
        r"update: moments\.var .*None",
    ),
    "given moments without mean": (
        lambda: normalize(moments=Moments(None, ONES, ONES, "D")),
        TypeError,
        r"normalize: moments\.mean .*None",
    ),
    "state without mean": (lambda: train(X, None, stats(mean=None)), TypeError, r"batch_norm: state\.mean .*None"),
    "state without count": (lambda: train(X, None, stats(count=None)), TypeError, r"batch_norm: state\.count .*None"),
    "complex variance": (
        lambda: nj.merge(Moments(ONES, ONES * 1j, ONES, "C")),
        TypeError,
        r"merge: moments\.var .*complex64",
    ),
    "complex running variance": (
        lambda: train(X, None, stats(var=ONES * 1j)),
        TypeError,
        r"batch_norm: state\.var .*complex64",
    ),
    "complex x, real state": (
        lambda: jax.eval_shape(lambda: train(X + 1j, None, STATE)),
        TypeError,
        r"batch_norm: state\.mean is float32 .*complex64",
    ),
    "names 5 of parameters": (lambda: layer(Affine(ONES, None, 5)), TypeError, r"names.*5"),
    "no names of parameters": (lambda: layer(Affine(ONES, None, None)), TypeError, r"names.*None"),
    "no names of moments": (lambda: nj.merge(Moments(ONES, ONES, ONES, None)), TypeError, r"names.*None"),
    "names 5 of a state": (lambda: train(X, None, stats(names=5)), TypeError, r"names.*5"),
    "scalar count": (
        lambda: nj.merge(*[Moments(ONES, ONES, np.float32(n), "C") for n in (1, 1, 100)]),
        ValueError,
        r"merge: .*mean \(3,\), var \(3,\), count \(\)",
    ),
    "short var": (lambda: nj.update(STATE, Moments(ONES, ONES[:1], ONES, "C")), ValueError, r"update: .*var \(1,\)"),
    "scalar count in update": (
        lambda: nj.update(STATE, Moments(ONES, ONES, np.float32(4), "C")),
        ValueError,
        r"update: .*count \(\)",
    ),
    "stack with a flat count": (
        lambda: nj.merge(Moments(X[:2], X[:2], ONES[:2], "C"), axis=1),
        ValueError,
        r"merge: .*mean \(2, 3\).* count \(2,\)",
    ),
    "moments of no names": (
        lambda: nj.update(STATE, Moments(ONES, ONES, ONES)),
        ValueError,
        r"update: state runs along 'C', but the moments run along no axis\. Give the moments their names, as in ",
    ),
    "scalar moments": (
        lambda: nj.update(STATE, Moments(1.0, 1.0, 4.0)),
        ValueError,
        r"update: state runs along 'C', but the moments run along no axis\. For a factor of a split axis ",
    ),
    "update of no names": (
        lambda: nj.update(stats(names=()), Moments(1.0, 1.0, 4.0)),
        ValueError,
        r"update: state\.mean has shape \(3,\), but it names no axis: a scalar \(pass names, .* If the further axis",
    ),
    "pooling no names": (
        lambda: nj.pool_stats(stats(names=()), "device"),
        ValueError,
        r"pool_stats: state\.mean has shape \(3,\), but it names no axis: a scalar \(pass names, .* If the further",
    ),
    "moments as an array": (
        lambda: normalize(moments=jnp.ones(3)),
        TypeError,
        r"normalize: moments must be .*; got an array\. Take them from normjax\.moments",
    ),
    "merge along a name": (lambda: nj.merge(MOMENTS, axis="a"), TypeError, r"merge: axis .*'a'"),
    "merge along 0.5": (lambda: nj.merge(MOMENTS, axis=0.5), TypeError, r"merge: axis .*0\.5"),
}
NUMBERS = {
    **{
        f"eps {eps!r:.12}": (lambda eps=eps: layer(eps=eps), ValueError, r"layer_norm: eps=.* must be at least 0")
        for eps in (np.float32(-1), jnp.float32(-1), np.int32(-1), np.float32("nan"), 10**400)
    },
    **{
        f"eps {eps!r:.12}": (lambda eps=eps: layer(eps=eps), TypeError, r"layer_norm: eps must be a real scalar; got ")
        for eps in (True, np.bool_(True), None, "a", 1j, [1e-5])
    },
    **{
        f"Ema {value!r}": (lambda value=value: nj.Ema(value), TypeError, r"Ema: new_weight must be a number .*got ")
        for value in (None, [0.1], "a", np.complex64(0.1), True)
    },
    "Ema object": (lambda: nj.Ema(object()), TypeError, r"Ema: new_weight must be a number .*got <object"),
    "Ema 1.5": (lambda: nj.Ema(jnp.float32(1.5)), ValueError, r"Ema: new_weight=.*1\.5"),
    "flag 'no'": (lambda: nj.Ema(0.1, unbiased="no"), TypeError, r"Ema: unbiased .*got 'no'"),
    "center 'yes'": (lambda: normalize(center="yes"), TypeError, r"normalize: center .*got 'yes'"),
    "center None": (lambda: nj.moments(X, center=None, **ROW), TypeError, r"moments: center .*got None"),
    "traced center": (lambda: traced("center"), TypeError, r"normalize: center is traced"),
    "derivative array": (
        lambda: normalize(derivative=np.array(["vjp", "jvp"])),
        ValueError,
        r"normalize: derivative=array",
    ),
}
DTYPES = {
    "complex for real": (
        lambda: layer(dtype=jnp.complex64),
        TypeError,
        r"layer_norm: dtype='complex64' must be a floating-point",
    ),
    "real for complex": (
        lambda: jax.eval_shape(lambda: nj.normalize(X + 1j, dtype=jnp.float32, **ROW)),
        TypeError,
        r"normalize: dtype='float32' must be a complex",
    ),
    "integer": (lambda: layer(dtype=jnp.int32), TypeError, r"layer_norm: dtype='int32' must be a floating-point"),
    "integer parameters": (lambda: Affine.init(dtype=int, C=3), TypeError, r"Affine\.init: dtype='int"),
    "no dtype for parameters": (lambda: Affine.init(dtype="nope", C=3), TypeError, r"Affine\.init: dtype='nope'"),
    "no dtype for a state": (lambda: BatchStats.init(dtype="nope", C=3), TypeError, r"BatchStats\.init: dtype='nope'"),
    "no dtype for moments": (lambda: Moments.init(dtype="nope", C=3), TypeError, r"Moments\.init: dtype='nope'"),
    "integer moments": (lambda: Moments.init(dtype=int, C=3), TypeError, r"Moments\.init: dtype='int"),
    "half moments": (
        lambda: Moments.init(dtype=np.float16, C=3),
        TypeError,
        r"Moments\.init: dtype='float16' must be float32",
    ),
    "start 'a'": (lambda: Affine.init(C=3, scale_init="a"), TypeError, r"Affine\.init: scale_init.*'a'"),
    "start None": (lambda: Affine.init(C=3, scale_init=None), TypeError, r"Affine\.init: scale_init.*None"),
    "name with a space": (lambda: Affine.init(**{"C H": 3}), ValueError, r"Affine\.init: 'C H' is not a name"),
    "axis called scale": (lambda: Affine.init(scale=3), TypeError, r"Affine\.init: scale .*got 3"),
}
BAD = LAYOUTS | ARRAYS | NUMBERS | DTYPES


@pytest.mark.parametrize(("call", "error", "words"), BAD.values(), ids=BAD)
def test_a_wrong_input_is_refused_by_function_argument_and_what_came(call, error, words):
    with pytest.raises(error, match=words):
        call()


# --- right inputs


@pytest.mark.parametrize("rule", [nj.Ema, nj.Ema.torch, nj.Ema.flax, nj.Ema.keras, nj.Ema.haiku])
def test_a_rule_may_be_made_of_an_array_inside_jit(rule):
    quarter = jnp.float32(0.25)
    moved = jax.jit(lambda x: train(x, None, STATE, running=rule(quarter))[1])(X)
    kept = rule in (nj.Ema.flax, nj.Ema.keras)
    share = 1.0 if rule == nj.Ema.haiku else 0.75 if kept else 0.25  # debiased, the first batch is all there is
    close(moved.mean, share * X.mean(0))


@pytest.mark.parametrize("is_training", [True, False])
def test_a_state_whose_leaves_are_lists_is_taken(is_training):
    listed = BatchStats([0.0] * 3, [1.0] * 3, 0, [0.0] * 3, "C")
    # As constants of the program: an argument's lists would be opened by jit.
    (y, state), (expected, moved) = (
        jax.jit(lambda x, old=old: nj.batch_norm(x, None, old, train=is_training, **COLUMN))(X)
        for old in (listed, STATE)
    )
    np.testing.assert_array_equal(y, expected)
    for leaf, wanted in zip((state.mean, state.var, state.weight), (moved.mean, moved.var, moved.weight), strict=True):
        np.testing.assert_array_equal(leaf, wanted)


@pytest.mark.parametrize("axis_names", ["H W", "H W K"])
def test_sizes_of_several_pooled_axes_may_be_symbolic(axis_names):
    norm = lambda x: nj.normalize(x, layout="B H W C=(G=2 K)", axis_names=axis_names)[0]  # noqa: E731
    shape = export.symbolic_shape("b, h, w, 4")
    exported = export.export(jax.jit(norm))(jax.ShapeDtypeStruct(shape, np.float32))
    x = np.arange(96, dtype=np.float32).reshape(2, 3, 4, 4) ** 1.5
    close(exported.call(x), np.asarray(jax.jit(norm)(x), np.float64), m=12)


def test_without_x64_a_dtype_of_64_bits_is_as_wide_as_jax_allows():
    assert jax.eval_shape(lambda: layer(dtype=float)[0]).dtype == np.float32
    assert Affine.init(C=3, dtype=np.float64).scale.dtype == np.float32


# --- numbers that were lost


HUGE = float(np.finfo(np.float32).max)


@functools.cache
def padded_slopes(derivative):
    where = np.arange(6)[:, None] < 4

    @jax.jit
    def slopes(x, params, eps):
        def loss(x, params, eps):
            y = nj.normalize(x, params, where=where, eps=eps, derivative=derivative, **COLUMN)[0]
            return jnp.sum(jnp.where(where, y, 0) ** 3)  # zero first: the power of an excluded output may overflow

        return jax.grad(loss, (0, 1, 2))(x, params, eps)

    return slopes


@pytest.mark.parametrize("column", ["any", "constant"])
@pytest.mark.parametrize("derivative", ["vjp", "jvp", "autodiff"])
def test_gradients_do_not_see_how_large_a_finite_padding_is(derivative, column):
    x = np.concatenate([X, np.zeros((2, 3), np.float32)])
    if column == "constant":  # 1/σ is 316: the largest of all
        x[:4, 1] = 3
    params = Affine(np.array([1, 2, 0.5], np.float32), ONES, "C")
    wanted = padded_slopes(derivative)(x, params, 1e-5)
    assert np.max(np.abs(wanted[1].scale)) > 1
    for value in (HUGE, -HUGE, 1e30, 1e37):
        x[4:] = value
        for slope, other in zip(
            *map(jax.tree.leaves, (padded_slopes(derivative)(x, params, 1e-5), wanted)), strict=True
        ):
            np.testing.assert_array_equal(slope, other)


@jax.jit
def over_shards(x, where):
    """Each row of x normalised with the others, over a mapped axis."""

    def norm(x, where):
        return nj.normalize(x, Affine(None, 0.5), layout="N", axis_names="N data", where=where)[0]

    return jax.vmap(norm, axis_name="data")(x, where)


@pytest.mark.parametrize(
    ("value", "shards", "first"),
    [
        (7.5e10 + 3.3e10j, 7, "full"),
        (7.5e10 + 3.3e10j, 40, "full"),
        (1e37, 40, "full"),
        (1e37, 40, "empty"),
        (4.15e8, 40, "empty"),
    ],
)
def test_a_constant_over_shards_gives_exactly_the_bias(value, shards, first):
    x = np.full((shards, 3), value).astype(np.complex64 if isinstance(value, complex) else np.float32)
    where = None if first == "full" else np.broadcast_to(np.arange(shards)[:, None] > 0, x.shape)
    y = np.asarray(over_shards(x, where))
    counted = np.ones(x.shape, bool) if where is None else where
    np.testing.assert_array_equal(y[counted], np.full(counted.sum(), 0.5, x.dtype))


@pytest.mark.parametrize("field", ["mean", "var"])
def test_a_batch_that_weighs_all_replaces_a_state_at_infinity(field):
    state = stats(**{field: ONES * np.inf})
    moved = jax.jit(functools.partial(nj.update, running=nj.Ema(1.0)))(state, MOMENTS)
    np.testing.assert_array_equal(getattr(moved, field), ONES)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_batch_that_weighs_nothing_leaves_the_state_whatever_it_holds(value):
    batch = Moments(ONES * value, ONES * value, ONES, "C")
    moved = jax.jit(functools.partial(nj.update, running=nj.Ema(0.0)))(stats(), batch)
    np.testing.assert_array_equal((moved.mean, moved.var), (ONES, ONES))
