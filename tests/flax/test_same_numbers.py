"""Every argument, dtype and mask: the reference's numbers, and Flax's where Flax is right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normjax import reference
from tests.closeness import close
from tests.flax.rows import KINDS, ROWS, SHAPE, Row
from tests.quick import quick_jit

DTYPES = ("float32", "bfloat16", "float16")
every_row = pytest.mark.parametrize("row", ROWS, ids=str)
one_of_each = pytest.mark.parametrize("row", [next(r for r in ROWS if r.kind == kind) for kind in KINDS], ids=str)


def combinations(row: Row, rng) -> dict[tuple, tuple]:
    """x and mask for each dtype, with and without a mask, and in training or not where that differs."""
    x = rng.normal(size=SHAPE) + 1
    mask = rng.random(SHAPE) < 0.8
    mask[:, 0, :2] = True  # no group is without entries, or has but one
    modes = (True, False) if row.batch else (True,)
    return {
        (dtype, masked, train): (jnp.asarray(x, dtype), jnp.asarray(mask) if masked else None)
        for dtype in DTYPES
        for masked in (False, True)
        for train in modes
    }


@every_row
def test_a_module_gives_the_numbers_of_the_reference_and_of_flax(row, rng):
    values, given = row.filled(rng), combinations(row, rng)

    @quick_jit
    def program(values, given):
        runs = {"linen": row.run_linen, "nnx": row.run_nnx}
        libraries = {"linen": ("normjax", "flax"), "nnx": ("normjax", "flax") if row.nnx_is_right else ("normjax",)}
        return {
            key: {
                (kind, library): run(library, values, *given[key], train=key[-1])
                for kind, run in runs.items()
                for library in libraries[kind]
            }
            for key in given
        }

    for key, results in program(values, given).items():
        y, stats = row.expected(values, *given[key], train=key[-1])
        m = int(np.prod(SHAPE))
        for kind in ("linen", "nnx"):
            ours, our_stats = results[kind, "normjax"]
            close(ours, y, m=m, k=4)
            assert our_stats.keys() == stats.keys()
            for name, value in stats.items():
                close(our_stats[name], value, m=m, k=4)
                assert our_stats[name].dtype == jnp.float32
            if (kind, "flax") not in results:
                continue
            theirs, their_stats = results[kind, "flax"]
            assert ours.dtype == theirs.dtype == jnp.float32
            # Theirs is E[x²] − E[x]²: each of both is within the bound of the reference.
            close(theirs, y, m=m, k=8)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * max(1, np.abs(y).max()))
            assert our_stats.keys() == their_stats.keys()
            for name in stats:
                close(our_stats[name], their_stats[name], m=m, k=8)


@every_row
def test_the_gradients_are_those_of_the_reference(row, rng):
    values = row.filled(rng)
    x, g = jnp.asarray(rng.normal(size=(2, *SHAPE)), jnp.float32)
    mask = jnp.asarray(rng.random(SHAPE) < 0.8).at[:, 0, :2].set(True)

    @quick_jit
    def program(values, x):
        runs = [lambda values, x, run=run: run("normjax", values, x, mask)[0] for run in (row.run_linen, row.run_nnx)]
        return [jax.vjp(run, values, x)[1](g) for run in runs]

    dx, dscale, dbias = row.gradients(values, x, g, np.asarray(mask))
    for got, got_dx in program(values, x):
        close(got_dx, dx, m=x.size)
        for name, value in (("scale", dscale), ("bias", dbias)):
            assert (name in got) == (value is not None)
            if value is not None:
                close(got[name], value, m=x.size)
        for name in ("mean", "var"):
            assert not np.any(got.get(name, 0))


@one_of_each
@pytest.mark.parametrize("fast", [True, False])
def test_a_large_mean_makes_no_answer_wrong_whatever_use_fast_variance_says(row, fast, rng):
    x = jnp.asarray(rng.normal(size=SHAPE) + 1000 * row.center, jnp.float32)
    values = row.filled(rng)
    runs = (row.run_linen, row.run_nnx)
    program = quick_jit(lambda values, x: [run("normjax", values, x, use_fast_variance=fast)[0] for run in runs])
    y, _ = row.expected(values, x)
    for ours in program(values, x):
        close(ours, y, k=32)


def test_flax_is_wrong_there():
    """What the last test is for: the error is a hundred times the bound."""
    x = np.float32(np.random.default_rng(0).normal(size=(64, 256)) + 1000)
    expected = reference.normalize(x, layout="N D", axis_names="D", eps=1e-6)
    (theirs, _), (ours, _) = (
        Row("LayerNorm", {"use_bias": False, "use_scale": False}, "D").run_linen(library, {}, x)
        for library in ("flax", "normjax")
    )
    assert np.abs(theirs - expected).max() > 1e-3
    assert np.abs(ours - expected).max() < 1e-6
