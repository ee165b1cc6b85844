"""Who is timed: a name, and a function that makes ready to answer a case.

Every contestant in JAX is an ``apply(x, scale, bias, mean, var, where) -> (y, new statistics or None)``; what is put
around it (gather, ghost batches, the VJP, compiling) is the same for all, and stands here. A contestant that has no
such norm says so with None.
"""

import dataclasses
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import normjax as nj
from benchmarks.cases import Case
from benchmarks.problems import EPS, NEW_WEIGHT, OUTPUTS, RUNNING, Problem, errors

Apply = Callable[..., tuple[Any, Any]]


class Ready(NamedTuple):
    """A contestant with its inputs in place.

    Attributes:
      call: runs once and waits for the result, which it returns.
      errors: how far each output in a result is from the reference, by name.
      compile_s: seconds to trace, lower and compile; where nothing is compiled, of the first call.
    """

    call: Callable[[], Any]
    errors: Callable[[Any], dict[str, float]]
    compile_s: float


Prepare = Callable[[Case, Problem], Ready | None]


def in_jax(build: Callable[[Case], Apply | None]) -> Prepare:
    """A contestant from the function that builds its `Apply` for a case."""

    def prepare(case: Case, problem: Problem) -> Ready | None:
        apply = _around(build, case)
        return None if apply is None else _program(case, problem, apply)

    return prepare


def _around(build: Callable[[Case], Apply | None], case: Case) -> Apply | None:
    """The built function with ghost batches by vmap, for those who have no such thing, and x gathered first."""
    if case.ghost and build not in _OWN_GHOSTS:
        single = dataclasses.replace(case, ghost=None, shape=(case.ghost, case.channels), layout="N C", axis_names="N")
        one = build(single)
        if one is None:
            return None

        def apply(x, scale, bias, mean, var, where):
            ghosts = x.reshape(-1, *single.shape)
            y, new = jax.vmap(lambda ghost: one(ghost, scale, bias, mean, var, where))(ghosts)
            return y.reshape(x.shape), jax.tree.map(lambda leaf: jnp.mean(leaf, 0), new)
    else:
        apply = build(case)
    return apply


def _program(case: Case, problem: Problem, apply: Apply) -> Ready:
    """Forward, or the value with its VJP, as one compiled program of x, g and the parameters."""
    given = jax.tree.map(jnp.asarray, problem)

    def forward(x, g, scale, bias, mean, var, where, index):
        del g
        x = x if index is None else x[index]
        y, new = apply(x, scale, bias, mean, var, where)
        return y.astype(x.dtype), new

    def both(x, g, scale, bias, mean, var, where, index):
        def of(x, scale, bias):
            return forward(x, None, scale, bias, mean, var, where, index)

        y, pullback, new = jax.vjp(of, x, scale, bias, has_aux=True)
        return y, *pullback(g), new

    program = both if case.backward else forward
    start = time.perf_counter()
    if case.eager:
        jax.block_until_ready(program(*given))
    else:
        program = jax.jit(program).lower(*given).compile()
    compile_s = time.perf_counter() - start

    def check(result) -> dict[str, float]:
        *outputs, new = result
        answer = dict(zip(OUTPUTS, outputs, strict=False))
        if case.family == "batch" and case.train:
            answer |= dict(zip(RUNNING, map(np.ravel, new), strict=True))  # Haiku keeps the pooled axes
        return errors(case, answer)

    return Ready(lambda: jax.block_until_ready(program(*given)), check, compile_s)


def build_normjax(case: Case, derivative: str = "vjp") -> Apply:
    """The library, called as its README says."""
    norm = getattr(nj, f"{case.family}_norm")
    options = {"layout": case.layout, "axis_names": case.axis_names, "eps": EPS, "derivative": derivative}
    if case.family != "batch":
        return lambda x, scale, bias, mean, var, where: norm(x, nj.Affine(scale, bias, "C"), where=where, **options)
    count, weight = jnp.ones((), jnp.int32), jnp.ones(case.channels, jnp.float32)
    running = nj.Ema(NEW_WEIGHT)

    def apply(x, scale, bias, mean, var, where):
        state = nj.BatchStats(mean, var, count, weight, "C")
        y, new = norm(x, nj.Affine(scale, bias, "C"), state, train=case.train, running=running, where=where, **options)
        return y, (new.mean, new.var) if case.train else None

    return apply


def build_autodiff(case: Case) -> Apply:
    """The same formula, differentiated by JAX."""
    return build_normjax(case, "autodiff")


_OWN_GHOSTS = (build_normjax, build_autodiff)


def prepare_copy(case: Case, problem: Problem) -> Ready:
    """The limit: x copied, and with a backward the cotangent too. Nothing is computed."""
    given = tuple(jnp.asarray(array) for array in ((problem.x, problem.g) if case.backward else (problem.x,)))
    start = time.perf_counter()
    program = jax.jit(lambda *arrays: [jnp.copy(array) for array in arrays]).lower(*given).compile()
    compile_s = time.perf_counter() - start

    def check(result) -> dict[str, float]:
        return {
            name: float(np.max(np.abs(np.asarray(copied, np.float64) - np.asarray(array, np.float64))))
            for name, array, copied in zip("xg", given, result, strict=False)
        }

    return Ready(lambda: jax.block_until_ready(program(*given)), check, compile_s)


class Peer(NamedTuple):
    """A contestant of another library: the function beside this file, as module:name, and what must be installed."""

    prepare: str
    needs: str


OWN: dict[str, Prepare] = {
    "normjax": in_jax(build_normjax),
    "autodiff": in_jax(build_autodiff),
    "copy": prepare_copy,
}

# What must be right, as the contract has it, for the suite to pass: the others' errors are theirs.
GUARDED = ("normjax", "autodiff")

PEERS = {
    "linen": Peer("linen:prepare", "flax"),
    "linen two-pass": Peer("linen:prepare_two_pass", "flax"),
    "nnx": Peer("nnx:prepare", "flax"),
    "haiku": Peer("haiku:prepare", "haiku"),
    "equinox": Peer("equinox:prepare", "equinox"),
    "keras": Peer("keras:prepare", "keras"),
    "torch": Peer("torch:prepare", "torch"),
}

NAMES = (*OWN, *PEERS)


def missing() -> list[str]:
    """The contestants whose library is not installed."""
    return [name for name, peer in PEERS.items() if importlib.util.find_spec(peer.needs) is None]


def load(names) -> dict[str, Prepare]:
    """The named contestants, their libraries imported."""
    found = {}
    for name in names:
        if name in OWN:
            found[name] = OWN[name]
        else:
            module, _, function = PEERS[name].prepare.partition(":")
            found[name] = getattr(importlib.import_module(f"benchmarks.peers.{module}"), function)
    return found
