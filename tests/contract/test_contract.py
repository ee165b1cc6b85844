"""Each cell of the contract table against the reference, or float64 `jax.grad` of the plain formula where it has none.

The tolerance. Statistics are computed in float32 at least, and a sum of m rounded terms errs like a random walk: by
k·eps(statistics' dtype)·√m of the largest expected number, where k = 16 covers the few sums and products that follow
one another, and k = 64 the twice as many, twice nested, of a second derivative. A result in half precision is rounded
once more at the end, by eps(its dtype) of itself; a second derivative is made of several such results, and where it is
a sum of n of them, as a parameter's is, their roundings err by √n.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract import problems
from tests.contract.problems import Inputs, Problem
from tests.contract.table import COLUMNS, Cell, cover, pairs_of, product, why_impossible
from tests.quick import quick_jit

CELLS = cover()
# Where a mask leaves one entry, 1/√eps multiplies the others: of eps = 1e-3, terms of 10⁷ cancel to 10³.
SECOND_EPS = 1.0


def as_array(values, dtype):
    """The numbers as a JAX array, converted by NumPy: there would be a program to compile for each shape."""
    return jnp.asarray(np.asarray(values).astype(dtype))


class Run:
    """One cell: its problem, its inputs, the library's function, and how its numbers are compared."""

    def __init__(self, cell: Cell):
        self.cell = cell
        self.given: Problem = problems.problem(cell.family, cell.layout)
        self.x_dtype = jnp.dtype(cell.dtype.removesuffix(" in x64"))
        self.y_dtype = jnp.dtype(jnp.float32) if cell.dtype == "int32" else self.x_dtype
        self.param_dtype = jnp.promote_types(self.y_dtype, jnp.float32)
        self.values: Inputs = problems.inputs(self.given, cell.mask, self.x_dtype, self.param_dtype)
        self.where = None if self.values.where is None else jnp.asarray(self.values.where)
        self.norm = problems.library(self.given, cell.derivative)

    def x(self, draw: int = 0):
        return as_array(self.values.xs[draw], self.x_dtype)

    def scale(self, draw: int = 0):
        return None if self.values.scales is None else as_array(self.values.scales[draw], self.param_dtype)

    def bias(self, draw: int = 0):
        return None if self.values.biases is None else as_array(self.values.biases[draw], self.param_dtype)

    def state(self):
        return problems.stats(self.given, self.values)

    def cotangent(self):
        return as_array(self.values.g, self.y_dtype)

    def numbers(self, draw: int = 0, params: int = 0):
        """x, scale and bias in float64, for the reference."""
        scale = None if self.values.scales is None else self.values.scales[params]
        bias = None if self.values.biases is None else self.values.biases[params]
        return self.values.xs[draw], scale, bias

    def differentiable(self) -> tuple[int, ...]:
        primals = (None if self.cell.dtype == "int32" else self.x(), self.scale(), self.bias())
        return tuple(i for i, primal in enumerate(primals) if primal is not None)

    def close(self, actual, expected, dtype, *, m: int, k: int = 16, rounded_in=None, roundings: int = 1):
        expected = np.asarray(expected)
        dtype = jnp.dtype(dtype)
        rounded_in = dtype if rounded_in is None else rounded_in
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        size = max(1.0, float(np.max(np.abs(expected), where=np.isfinite(expected), initial=0.0)))
        exact = float(jnp.finfo(jnp.promote_types(dtype, jnp.float32)).eps) * k * np.sqrt(m) * size
        rounded = 0.0
        if jnp.finfo(rounded_in).bits < 32:
            rounded = float(jnp.finfo(rounded_in).eps) * roundings
            exact += rounded * size * np.sqrt(m / expected.size) if roundings > 1 else float(jnp.finfo(rounded_in).tiny)
        np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=rounded, atol=exact, equal_nan=True)

    def output_is_right(self, y, draw: int = 0, params: int = 0):
        expected = problems.output(self.given, self.values, *self.numbers(draw, params))
        self.close(y, expected, self.y_dtype, m=self.given.m)

    def state_is_right(self, state, draws: tuple[int, ...] = (0,)):
        mean, var, weight, count = problems.next_stats(self.given, self.values, self.values.xs[list(draws)])
        self.close(state.mean, mean, jnp.float32, m=self.given.m)
        self.close(state.var, var, jnp.float32, m=self.given.m)
        self.close(state.weight, weight, jnp.float32, m=1)
        assert state.count.dtype == jnp.int32
        assert int(state.count) == count
        assert state.names == tuple(self.given.state.split())

    def gradients_are_right(self, slopes):
        x, scale, bias = self.numbers()
        expected = problems.cotangents(self.given, self.values, x, self.values.g, scale, bias)
        for slope, i in zip(slopes, self.differentiable(), strict=True):
            self.close(slope, expected[i], (self.x_dtype, self.param_dtype, self.param_dtype)[i], m=x.size)


def eager(run: Run):
    y, state = run.norm(run.x(), run.scale(), run.bias(), run.state(), run.where)
    run.output_is_right(y)
    run.state_is_right(state)


def jit(run: Run):
    y, state = jax.jit(run.norm)(run.x(), run.scale(), run.bias(), run.state(), run.where)
    run.output_is_right(y)
    run.state_is_right(state)


def vmap(run: Run):
    def stacked(one):
        return None if one(0) is None else np.stack([np.asarray(one(0)), np.asarray(one(1))])

    norm = jax.jit(jax.vmap(run.norm, in_axes=(0, 0, 0, None, None)))
    results = norm(stacked(run.x), stacked(run.scale), stacked(run.bias), run.state(), run.where)
    y, state = jax.tree.map(np.asarray, results)
    for lane in (0, 1):
        run.output_is_right(y[lane], draw=lane, params=lane)
        run.state_is_right(jax.tree.map(lambda leaf: leaf[lane], state), draws=(lane,))  # noqa: B023


def scan_carry(run: Run):
    @jax.jit
    def train(xs, scale, bias, state):
        def step(state, x):
            y, state = run.norm(x, scale, bias, state, run.where)
            return state, y

        return jax.lax.scan(step, state, xs)

    xs = np.stack([np.asarray(run.x(i)) for i in range(3)])
    state, ys = jax.tree.map(np.asarray, train(xs, run.scale(), run.bias(), run.state()))
    for i in range(3):
        run.output_is_right(ys[i], draw=i)
    run.state_is_right(state, draws=(0, 1, 2))


def _gradient(run: Run, norm):
    def loss(g, state, *primals):
        y, new_state = norm(*primals, state, run.where)
        # The state joins the loss: it must carry no gradient.
        moved = sum(jnp.sum(leaf) for leaf in (new_state.mean, new_state.var))
        counted = jnp.ones(y.shape, bool) if run.where is None else run.where | jnp.isfinite(primals[0])
        terms = jnp.where(counted, (g * y).astype(run.param_dtype), 0)
        return jnp.sum(terms) + moved.astype(run.param_dtype)

    argnums = tuple(i + 2 for i in run.differentiable())
    slopes = jax.jit(jax.grad(loss, argnums))(run.cotangent(), run.state(), run.x(), run.scale(), run.bias())
    run.gradients_are_right(slopes)


def grad(run: Run):
    _gradient(run, run.norm)


def remat(run: Run):
    _gradient(run, jax.checkpoint(run.norm))


@functools.cache
def _plain_second_derivative(given: Problem, argnums: tuple[int, ...]):
    """Jitted and kept: cells that differ in mask, dtype or derivative share its compilation."""

    def slopes(g, where, mean, var, weights, *primals):
        counted = where | jnp.isfinite(primals[0])
        loss = problems.derivative_loss(lambda *p: problems.plain(given, *p, mean, var, where, SECOND_EPS), g, counted)
        return jax.grad(problems.projected_gradient(loss, weights, argnums), argnums)(*primals)

    return quick_jit(slopes)


def grad_of_grad(run: Run):
    argnums = run.differentiable()
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=np.shape(run.numbers()[i])) for i in argnums]
    counted = problems.full_mask(run.given, run.values) | np.isfinite(run.values.xs[0])
    wide = [as_array(w, run.param_dtype) for w in weights]
    layer = problems.library(run.given, run.cell.derivative, SECOND_EPS)
    norm = lambda *primals: layer(*primals, run.state(), run.where)[0]  # noqa: E731
    loss = problems.derivative_loss(norm, as_array(run.values.g, run.param_dtype), counted)
    second = jax.jit(jax.grad(problems.projected_gradient(loss, wide, argnums), argnums))
    slopes = second(run.x(), run.scale(), run.bias())
    with jax.enable_x64(True):
        where = np.array(problems.full_mask(run.given, run.values))
        expected = _plain_second_derivative(run.given, argnums)(
            run.values.g, where, run.values.mean, run.values.var, weights, *run.numbers()
        )
    for slope, wanted, i in zip(slopes, expected, argnums, strict=True):
        dtype = (run.x_dtype, run.param_dtype, run.param_dtype)[i]
        # y, its cotangent, dx and what they are multiplied by are each rounded to y's dtype on the way.
        run.close(slope, wanted, dtype, m=run.values.g.size, k=64, rounded_in=run.y_dtype, roundings=8)


def eval_shape(run: Run):
    x, scale, bias = run.numbers()
    y, state = jax.eval_shape(run.norm, run.x(), run.scale(), run.bias(), run.state(), run.where)
    expected = problems.output(run.given, run.values, x, scale, bias)
    assert (y.shape, y.dtype) == (expected.shape, run.y_dtype)
    now = run.state()
    for leaf, kept in zip(jax.tree.leaves(state), jax.tree.leaves(now), strict=True):
        assert (leaf.shape, leaf.dtype) == (kept.shape, kept.dtype)
    assert jax.tree.structure(state) == jax.tree.structure(now)


TRANSFORMS = {
    "eager": eager,
    "jit": jit,
    "vmap": vmap,
    "grad": grad,
    "grad of grad": grad_of_grad,
    "scan carry": scan_carry,
    "remat": remat,
    "eval_shape": eval_shape,
}


def check(cell: Cell):
    with jax.enable_x64(cell.dtype in ("float64", "float32 in x64")):
        TRANSFORMS[cell.transform](Run(cell))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_cell_of_the_cover_agrees_with_the_reference(cell):
    check(cell)


@pytest.mark.matrix
@pytest.mark.parametrize("transform", COLUMNS["transform"])
@pytest.mark.parametrize("layout", COLUMNS["layout"])
@pytest.mark.parametrize("family", COLUMNS["family"])
def test_the_full_product_agrees_with_the_reference(family, layout, transform):
    # A block of cells a test: tens of thousands of tests would cost every run the seconds to collect them.
    wrong = {}
    for cell in product(family=family, layout=layout, transform=transform):
        try:
            check(cell)
        except AssertionError as error:
            wrong[str(cell)] = str(error)
    assert not wrong


def test_each_possible_pair_of_two_columns_is_in_the_cover():
    possible = set().union(*map(pairs_of, product()))
    assert set().union(*map(pairs_of, CELLS)) == possible


def test_pairs_are_missing_from_the_product_only_where_the_rule_gives_a_reason():
    possible = set().union(*map(pairs_of, product()))
    for a, b in itertools.combinations(COLUMNS, 2):
        for x, y in itertools.product(COLUMNS[a], COLUMNS[b]):
            assert ((a, x, b, y) in possible) == (why_impossible(**{a: x, b: y}) is None)


def test_the_cover_is_the_same_in_each_run():
    assert cover() == CELLS


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_no_stored_dtype_depends_on_x64(dtype, x64):
    with jax.enable_x64(x64):
        for family in ("batch", "batch_eval"):
            run = Run(Cell(family, "channels last", "full", dtype, "vjp", "eval_shape"))
            _, state = jax.eval_shape(run.norm, run.x(), run.scale(), run.bias(), run.state(), run.where)
            dtypes = [leaf.dtype.name for leaf in jax.tree.leaves(state)]
            assert dtypes == ["float32", "float32", "int32", "float32"]
