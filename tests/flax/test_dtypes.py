"""Flax's promotion without a wide copy of x, statistics that keep their dtype, and complex input."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import normjax as nj
from normjax import linen, nnx, reference
from tests.closeness import close, close64
from tests.flax.rows import KINDS, LINEN, NNX, ROWS, SHAPE, Row
from tests.quick import quick_jit
from tests.test_residuals import bytes_saved

FIRST = {kind: next(row for row in ROWS if row.kind == kind) for kind in KINDS}
every_kind = pytest.mark.parametrize("kind", KINDS)
frameworks = pytest.mark.parametrize("framework", ["linen", "nnx"])


def output(library: str, framework: str, kind: str, x, **settings):
    """y of a new module in training."""
    settings = {**FIRST[kind].arguments, **settings}
    if framework == "nnx":
        return getattr(NNX[library], kind)(x.shape[-1], **settings, rngs=flax_nnx.Rngs(0))(x)
    mode = {"use_running_average": False} if kind == "BatchNorm" else {}
    return getattr(LINEN[library], kind)(**settings).init_with_output(jax.random.key(0), x, **mode)[0]


@frameworks
@every_kind
def test_the_dtype_of_y_is_flax_s(kind, framework):
    for x_dtype, dtype, param_dtype, affine in itertools.product(
        ("float32", "bfloat16", "int32"), (None, "bfloat16"), ("float32", "bfloat16", "float16"), (True, False)
    ):
        bias = {} if kind == "RMSNorm" else {"use_bias": affine}
        settings = {"dtype": dtype, "param_dtype": jnp.dtype(param_dtype), "use_scale": affine, **bias}
        x = jax.ShapeDtypeStruct((2, 3, 8), x_dtype)
        mine, theirs = (
            jax.eval_shape(functools.partial(output, library, framework, kind, **settings), x)
            for library in ("normjax", "flax")
        )
        assert mine.dtype == theirs.dtype, (x_dtype, settings)


@frameworks
@every_kind
def test_a_dtype_that_is_no_float_is_the_error_that_flax_raises(kind, framework):
    for library in ("normjax", "flax"):
        with pytest.raises(ValueError, match="Dtype must be inexact"):
            output(library, framework, kind, jnp.ones((2, 3, 8)), dtype=jnp.int32)


def test_an_nnx_module_promotes_by_the_function_it_is_given():
    calls = []

    def promote(given, *, dtype):
        calls.append(len(given))
        return given

    x = jnp.ones((4, 3, 8), jnp.bfloat16)
    for kind, number in (("BatchNorm", 5), ("LayerNorm", 3), ("RMSNorm", 2)):
        settings = {"use_scale": False, "promote_dtype": promote}
        mine, theirs = (output(library, "nnx", kind, x, **settings) for library in ("normjax", "flax"))
        assert mine.dtype == theirs.dtype
        assert calls[-2:] == [number, number]


@frameworks
@every_kind
def test_a_half_precision_x_is_saved_in_half_precision(kind, framework, rng):
    row, shape = FIRST[kind], (16, 16, 16, 8)
    x = jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    run = {"linen": row.run_linen, "nnx": row.run_nnx}[framework]
    values = row.filled(rng)
    saved = {
        library: bytes_saved(lambda values, x, library=library: run(library, values, x)[0], values, x)
        for library in ("normjax", "flax")
    }
    groups = x.size // (8 if kind in ("LayerNorm", "RMSNorm") else 16 * 16)
    parameters = sum(value.nbytes for value in values.values())
    assert x.nbytes <= saved["normjax"] <= x.nbytes + 16 * groups + 4 * parameters + 64
    assert saved["flax"] >= 2 * x.nbytes
    y = jax.eval_shape(lambda values, x: run("normjax", values, x)[0], values, x)
    assert y.dtype == jnp.float32


# --- stored statistics


@frameworks
def test_stored_statistics_are_not_rounded_to_the_compute_dtype(framework, rng):
    row = Row("BatchNorm", {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "momentum": 0.5}, "N H W")
    x, values = jnp.asarray(rng.normal(size=SHAPE), jnp.bfloat16), row.filled(rng)
    run = {"linen": row.run_linen, "nnx": row.run_nnx}[framework]
    y, stats = run("normjax", values, x)
    expected = row.expected(values, x)
    assert y.dtype == jnp.bfloat16
    for name in ("mean", "var"):
        assert stats[name].dtype == jnp.float32
        close(stats[name], expected[1][name], m=60)
    evaluated, _ = run("normjax", values, x, train=False)
    exact, _ = row.expected(values, x, train=False)
    # One rounding, that of y.
    np.testing.assert_allclose(np.float64(evaluated), exact, rtol=2.0**-8, atol=1e-6)


def test_flax_nnx_rounds_them(rng):
    row = Row("BatchNorm", {"dtype": jnp.bfloat16}, "N H W")
    x, values = jnp.asarray(rng.normal(size=SHAPE), jnp.bfloat16), row.filled(rng)
    exact, _ = row.expected(values, x, train=False)
    theirs, _ = row.run_nnx("flax", values, x, train=False)
    assert np.any(np.abs(np.float64(theirs) - exact) > 2.0**-8 * np.abs(exact) + 1e-3)


@pytest.mark.case(20)
@pytest.mark.parametrize(
    "running", [None, nj.Cumulative(), nj.Ema(0.1, debias=True)], ids=["ema", "cumulative", "debias"]
)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_linen_statistics_are_a_stable_scan_carry_under_x64(dtype, running, rng, x64):
    norm = linen.BatchNorm(use_running_average=False, momentum=0.9, running=running)
    xs = jnp.asarray(rng.normal(size=(3, 8, 4)), dtype)
    variables = norm.init(jax.random.key(0), xs[0])
    params, state = variables.pop("params"), variables

    def step(state, x):
        y, new = norm.apply({"params": params, **state}, x, mutable=list(state))
        return new, y

    final, _ = quick_jit(lambda state, xs: jax.lax.scan(step, state, xs))(state, xs)
    dtypes = {"mean": "float32", "var": "float32", "count": "int32", "weight": "float32"}
    for path, leaf in jax.tree_util.tree_flatten_with_path(final)[0]:
        assert leaf.dtype == dtypes[path[-1].key]
    by_hand = state
    for x in xs:
        by_hand, _ = step(by_hand, x)
    for one, other in zip(jax.tree.leaves(final), jax.tree.leaves(by_hand), strict=True):
        close(one, other, m=8)


@pytest.mark.case(20)
def test_nnx_statistics_keep_their_dtype_under_x64(rng, x64):
    norm = nnx.BatchNorm(4, rngs=flax_nnx.Rngs(0))

    @flax_nnx.scan(in_axes=(flax_nnx.Carry, 0), out_axes=(flax_nnx.Carry, 0))
    def steps(norm, x):
        return norm, norm(x)

    x = jnp.asarray(rng.normal(size=(3, 8, 4)))
    norm, y = steps(norm, x)
    assert y.dtype == jnp.float64
    assert norm.mean[...].dtype == norm.var[...].dtype == jnp.float32


def test_statistics_start_in_a_wider_param_dtype_where_reductions_need_not_be_float32(x64):
    for param_dtype, wanted in (("float64", "float64"), ("bfloat16", "float32")):
        norm = linen.BatchNorm(param_dtype=jnp.dtype(param_dtype), force_float32_reductions=False)
        stats = norm.init(jax.random.key(0), jnp.ones((2, 3)), use_running_average=True)["batch_stats"]
        assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {jnp.dtype(wanted)}


def test_half_precision_statistics_of_a_checkpoint_are_widened_once(rng):
    x = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32)
    norm = linen.BatchNorm(force_float32_reductions=False, param_dtype=jnp.bfloat16)
    half = {"mean": jnp.ones(3, jnp.bfloat16), "var": jnp.full(3, 2, jnp.bfloat16)}
    params = {"scale": jnp.ones(3, jnp.bfloat16), "bias": jnp.zeros(3, jnp.bfloat16)}
    y = norm.apply({"params": params, "batch_stats": half}, x, use_running_average=True)
    np.testing.assert_allclose(y, (x - 1) / np.sqrt(2 + 1e-5), rtol=1e-5, atol=1e-6)
    _, new = norm.apply({"params": params, "batch_stats": half}, x, use_running_average=False, mutable=["batch_stats"])
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} == {jnp.dtype("float32")}


@frameworks
@every_kind
def test_float64_asked_for_is_float64_computed(kind, framework, rng, x64):
    row = FIRST[kind]
    x = jnp.asarray(rng.normal(size=SHAPE), jnp.float32)
    values = {name: value.astype(jnp.float64) for name, value in row.filled(rng).items()}
    more = {"dtype": jnp.float64, "param_dtype": jnp.float64}
    y, _ = {"linen": row.run_linen, "nnx": row.run_nnx}[framework]("normjax", values, x, **more)
    expected, _ = row.expected(values, x)
    close64(y, expected, m=x.size)


# --- complex numbers


@frameworks
@every_kind
def test_complex_input_gives_the_numbers_of_the_reference(kind, framework, rng):
    row = FIRST[kind]
    x = jnp.asarray(rng.normal(size=SHAPE) + 1j * rng.normal(size=SHAPE), jnp.complex64)
    values = {name: value for name, value in row.filled(rng).items() if name in ("scale", "bias")}
    if row.batch:
        values |= {"mean": jnp.zeros(8, jnp.complex64), "var": jnp.ones(8)}
    run = {"linen": row.run_linen, "nnx": row.run_nnx}[framework]
    y, stats = run("normjax", values, x)
    axes = {"layout": row.layout, "axis_names": row.axis_names}
    expected = reference.normalize(
        np.asarray(x), values["scale"], values.get("bias"), names="C", center=row.center, eps=row.eps, **axes
    )
    assert y.dtype == jnp.complex64
    close(y, expected, m=x.size)
    if row.batch:
        mean, var, _ = reference.moments(np.asarray(x), **axes)
        close(stats["mean"], 0.01 * mean, m=60)
        close(stats["var"], 0.99 + 0.01 * var, m=60)


def test_complex_statistics_start_complex_and_stay_so(rng):
    x = jnp.asarray(rng.normal(size=(8, 3)) + 1j, jnp.complex64)
    norm = linen.BatchNorm(use_running_average=False)
    variables = norm.init(jax.random.key(0), x)
    _, new = norm.apply(variables, x, mutable=["batch_stats"])
    for stats in (variables["batch_stats"], new["batch_stats"]):
        assert (stats["mean"].dtype, stats["var"].dtype) == (jnp.complex64, jnp.float32)
    module = nnx.BatchNorm(3, rngs=flax_nnx.Rngs(0))  # it has seen no x: the mean becomes complex
    module(x)
    assert (module.mean[...].dtype, module.var[...].dtype) == (jnp.complex64, jnp.float32)
    np.testing.assert_allclose(module.mean[...].imag, 0.01, rtol=1e-5)


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_real_input_with_complex_parameters_gives_complex_output_as_flax_does(framework, rng):
    x = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32)
    mine, theirs = (
        output(library, framework, "LayerNorm", x, param_dtype=jnp.complex64) for library in ("normjax", "flax")
    )
    assert mine.dtype == theirs.dtype == jnp.complex64
    np.testing.assert_allclose(mine, theirs, atol=4e-6)
