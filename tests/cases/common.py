"""What the cases share: the family on small layouts, ways to run a function, and derived tolerances."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax import reference
from tests.quick import quick_jit

ROW = {"layout": "N D", "axis_names": "D"}
COLUMN = {"layout": "N C", "axis_names": "N"}
EPS32 = float(np.finfo(np.float32).eps)
EPS64 = float(np.finfo(np.float64).eps)


@dataclasses.dataclass(frozen=True)
class Norm:
    """One member of the family on one layout: called like the library, and compared with the reference."""

    fn: Callable
    shape: tuple[int, ...]
    layout: str
    axis_names: str
    names: str  # what scale and bias run along
    sizes: tuple[int, ...]  # their shape
    groups: tuple[int, ...]  # the shape of the statistics
    center: bool = True

    @property
    def m(self) -> int:
        return math.prod(self.shape) // max(1, math.prod(self.groups))

    @property
    def axes(self) -> dict:
        return {"layout": self.layout, "axis_names": self.axis_names}

    def __call__(self, x, scale=None, bias=None, **options):
        """The output of the library; parameters are wrapped here."""
        return self.pair(x, scale, bias, **options)[0]

    def pair(self, x, scale=None, bias=None, state=None, **options):
        """The output and the new state, in training mode."""
        params = None if scale is None and bias is None else nj.Affine(scale, bias, self.names)
        return self.fn(x, params, state, **{"train": True, **self.axes, **options})

    def run(self, x, scale=None, bias=None, *, how="jit", eps=1e-5, where=None, **options):
        """The output by a program compiled once per family, dtype and option, however many tests ask for it."""
        scale, bias = self._whole(scale, bias, jnp.result_type(x))
        return _forward(self, how, tuple(options.items()))(x, scale, bias, np.float32(eps), where)

    def vjp(self, x, g, scale=None, bias=None, *, how="jit", eps=1e-5, where=None, **options):
        """The output and (dx, dscale, dbias, deps), by a program that is shared likewise."""
        scale, bias = self._whole(scale, bias, jnp.result_type(x))
        return _backward(self, how, tuple(options.items()))(x, g, scale, bias, np.float32(eps), where)

    def _whole(self, scale, bias, dtype):
        return (
            np.ones(self.sizes, dtype) if scale is None else scale,
            np.zeros(self.sizes, dtype) if bias is None else bias,
        )

    def exact(self, x, scale=None, bias=None, **options):
        """The reference's output, in float64."""
        return reference.normalize(x, scale, bias, names=self.names, center=self.center, **self.axes, **options)

    def exact_cotangents(self, x, g, scale=None, bias=None, **options):
        """The reference's (dx, dscale, dbias)."""
        return reference.backward(x, g, scale, bias, names=self.names, center=self.center, **self.axes, **options)

    def problem(self, rng, dtype=np.float32, mean=1.5):
        """Random x, cotangent, scale and bias."""
        x, g = rng.normal(mean, 2.0, self.shape), rng.normal(size=self.shape)
        scale, bias = rng.normal(size=(2, *self.sizes))
        return tuple(np.asarray(array, dtype) for array in (x, g, scale, bias))


@functools.cache
def _forward(norm: Norm, how: str, options: tuple):
    return HOW[how](lambda x, scale, bias, eps, where: norm(x, scale, bias, eps=eps, where=where, **dict(options)))


@functools.cache
def _backward(norm: Norm, how: str, options: tuple):
    def program(x, g, scale, bias, eps, where):
        def apply(x, scale, bias, eps):
            return norm(x, scale, bias, eps=eps, where=where, **dict(options))

        y, pullback = jax.vjp(apply, x, scale, bias, eps)
        return y, *pullback(g)

    return HOW[how](program)


FAMILY = {
    "batch": Norm(nj.batch_norm, (16, 5), "N C", "N", "C", (5,), (5,)),
    "batch, channels first": Norm(nj.batch_norm, (4, 3, 6), "N C L", "N L", "C", (3,), (3,)),
    "ghost": Norm(nj.batch_norm, (16, 5), "N=(B n=8) C", "n", "C", (5,), (2, 5)),
    "layer": Norm(nj.layer_norm, (6, 8), "... D", "D", "D", (8,), (6,)),
    "instance": Norm(nj.instance_norm, (3, 8, 4), "N L C", "L", "C", (4,), (3, 4)),
    "group": Norm(nj.group_norm, (3, 4, 6), "N L C=(G=2 K)", "L K", "C", (6,), (3, 2)),
    "rms": Norm(nj.rms_norm, (6, 8), "... D", "D", "D", (8,), (6,), center=False),
}
CENTRED = {name: norm for name, norm in FAMILY.items() if norm.center}
BATCH_LIKE = {name: norm for name, norm in FAMILY.items() if norm.fn is nj.batch_norm}

each_family = pytest.mark.parametrize("norm", FAMILY.values(), ids=FAMILY.keys())
each_centred = pytest.mark.parametrize("norm", CENTRED.values(), ids=CENTRED.keys())
each_batch_like = pytest.mark.parametrize("norm", BATCH_LIKE.values(), ids=BATCH_LIKE.keys())
each_derivative = pytest.mark.parametrize("derivative", ["vjp", "jvp", "autodiff"])


def _vmapped(function, jit=jax.jit):
    """The function on a stack of two, of which the first answer counts."""
    mapped = jit(jax.vmap(function))

    def first(*args):
        stacked = jax.tree.map(lambda a: np.stack([np.asarray(a), np.flip(np.asarray(a))]), args)
        return jax.tree.map(lambda y: y[0], mapped(*stacked))

    return first


HOW = {"eager": lambda function: function, "jit": jax.jit, "vmap": _vmapped}
# The same where the numbers do not depend on the optimiser.
QUICK = {**HOW, "jit": quick_jit, "vmap": functools.partial(_vmapped, jit=quick_jit)}
each_how = pytest.mark.parametrize("how", HOW)


def error(y, exact) -> float:
    """The largest error over max(1, |exact|): a float32 far from 0 cannot be closer than its own spacing."""
    exact = np.asarray(exact)
    return float(np.max(np.abs(np.asarray(y, np.float64) - exact) / np.maximum(1, np.abs(exact)), initial=0.0))


def close(actual, expected, *, eps=EPS32, m=1, k=16):
    """Equal within k·eps·√m of the largest expected number: m roundings of a sum add up like a random walk."""
    expected = np.asarray(expected)
    size = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    kind = np.complex128 if np.iscomplexobj(expected) else np.float64
    np.testing.assert_allclose(np.asarray(actual).astype(kind), expected, rtol=0, atol=k * eps * math.sqrt(m) * size)


def rounded_once(actual, exact, *, m=1, k=16):
    """The exact numbers to float32 accuracy, then cast once: half a unit in the last place of actual's dtype."""
    exact = np.asarray(exact, np.float64)
    info = jnp.finfo(actual.dtype)
    size = max(1.0, float(np.max(np.abs(exact), initial=0.0)))
    allowed = 0.5 * (float(info.eps) * np.abs(exact) + float(info.smallest_subnormal)) + k * EPS32 * math.sqrt(m) * size
    assert np.all(np.abs(np.asarray(actual, np.float64) - exact) <= allowed)


def same(actual, expected):
    """Equal in every bit, dtype included."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.result_type(a) == jnp.result_type(e)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))
