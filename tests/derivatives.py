"""What the tests of derivatives share: float64 problems, cells that every run takes, and how near is near.

In float64 the analytic rules agree with the reference and with `jax.grad` of the plain formula to 1e-10 of the largest
entry: they differ by the order of a few hundred additions, and by the reciprocal spread of the narrowest masked group,
some 30, to the third power.
"""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from tests.contract import problems

DERIVATIVES = ("vjp", "jvp", "autodiff")
FAMILIES = tuple(problems.FUNCTIONS)


def dear(every_run, **columns):
    """A table of all combinations of which every run takes those of the rule, and `-m matrix` the others."""
    cells = [
        pytest.param(*cell, marks=() if every_run(*cell) else pytest.mark.matrix)
        for cell in itertools.product(*columns.values())
    ]
    return pytest.mark.parametrize(tuple(columns), cells)


def near(actual, expected, relative=1e-10):
    """Equal within a share of the largest expected entry."""
    size = float(np.max(np.abs(expected), initial=0.0)) or 1.0
    np.testing.assert_allclose(actual, expected, rtol=0, atol=relative * size)


def float64_inputs(given, mask):
    return problems.inputs(given, mask, jnp.float64, jnp.float64)


def first(values):
    """x, scale and bias; None where there is none."""
    return tuple(None if draws is None else draws[0] for draws in (values.xs, values.scales, values.biases))


def library(given, values, derivative, where):
    """f(x, scale, bias) → y."""
    norm = problems.library(given, derivative)
    return lambda *primals: norm(*primals, problems.stats(given, values, jnp.float64), where)[0]
