"""Faults that the parameters show: decay of norms, scales near 0, biases right before batch norm."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr

from normjax._decay import decay_mask, path_names
from normjax._diagnose_faults import finding
from normjax._diagnose_layers import replaced
from normjax._diagnose_measure import SEED, Forward, Measured, differ
from normjax._diagnose_report import Finding
from normjax._normalize import Affine
from normjax._stats_tree import COLLECTIONS, wide

CENTRED = 0.25  # of a scale's median: weight decay seldom brings γ there from 1
NO_SCALE = 1e-3  # of γ = 1: what the channel adds is lost in half precision
HALF_GRADIENT = 1.0  # where anything is in half precision: sums of rounded cotangents hide a 0, outputs must show it
SHIFTED = 0.05  # of training's outputs: what rounding to half precision stays below
SCALED = 0.5  # of a variance's logarithm: twice a kernel or gain is beyond that, a shift in half precision is not
NO_GRADIENT = 1e-3  # of evaluation's, with the same statistics: float32 sums of a million terms that cancel


def _named(params) -> list[tuple[str, Any]]:
    """The leaves with their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return [("/".join(map(str, path_names(keys))), leaf) for keys, leaf in leaves]


def decayed(params, mask: Any) -> list[Finding]:
    """The γ and β that a mask of optax lets decay; a zero-centred γ may, since 0 stands for 1 there.

    A scale of Flax's parameters does not say so itself: one that is about 0 in the median channel is taken for such.
    """
    spared = decay_mask(params)
    given = jax.tree.broadcast(mask(params) if callable(mask) else mask, params)
    centred = jax.tree_util.tree_map_with_path(_centred, params, is_leaf=lambda node: isinstance(node, Affine))
    triples = zip(*map(jax.tree.leaves, (spared, given, centred)), strict=True)
    wrong = [bool(decays) and not may and not zero for may, decays, zero in triples]
    names = [name for (name, _), is_wrong in zip(_named(params), wrong, strict=True) if is_wrong]
    if not names:
        return []
    shown = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
    return [finding("decayed norm", "the mask", f"lets {len(names)} decay: {shown}")]


def _centred(keys, node) -> Any:
    if not isinstance(node, Affine):
        return path_names(keys)[-1:] == ("scale",) and float(np.median(np.abs(wide(node)))) < CENTRED
    return Affine(
        None if node.scale is None else node.zero_centered,
        None if node.bias is None else False,
        node.names,
        node.zero_centered,
    )


def zero_scales(params, forward: Forward, found: list[Measured]) -> list[Finding]:
    """Channels whose γ is about 0."""
    findings = []
    for keys, node in jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda node: isinstance(node, Affine))[0]:
        path = path_names(keys)
        if isinstance(node, Affine):
            if node.scale is None:
                continue
            scale = wide(node.scale) + (1 if node.zero_centered else 0)
            near = np.abs(scale) < NO_SCALE
        elif path and path[-1] == "scale":
            path, scale = path[:-1], wide(node)
            near = _near_zero(path, scale, forward, found)
        else:
            continue
        if near.any():
            name = "/".join(map(str, path)) or "params"
            evidence = f"|γ| < {NO_SCALE:g} in {int(near.sum())} of {near.size} channels"
            findings.append(finding("scale near 0", name, evidence))
    return findings


def _near_zero(path: tuple, scale: np.ndarray, forward: Forward, found: list[Measured]) -> np.ndarray:
    """Where a scale in Flax's parameters is 0, which may also store γ − 1.

    Where the layer keeps statistics, γ is not 0 if evaluation moves with those of the channel. Elsewhere a layer whose
    scales are mostly near 0 is taken for a zero-centred one.
    """
    near = np.abs(scale) < NO_SCALE
    name = "/".join(map(str, path[1:] if path and path[0] in ("params", *COLLECTIONS) else path))
    layer = next(
        (each.layer for each in found if each.name == name and each.running["mean"].shape == scale.shape), None
    )
    if not near.any():
        return near
    if layer is None:
        return near if np.median(np.abs(scale)) > 0.5 else np.zeros_like(near)
    mean = forward.leaves[layer.fields["mean"]]
    pushed = replaced(forward.leaves, layer, mean=np.where(near, mean + 1, mean))
    base, moved = forward.evaluate(forward.leaves), forward.evaluate(pushed)
    if not differ(base, moved):
        return near
    size = max(float(np.max(np.abs(a - b), initial=0)) for a, b in zip(base, moved, strict=True))
    scale_of = max(float(np.sqrt(np.mean(np.abs(a) ** 2))) for a in base)
    return near if size < 10 * NO_SCALE * scale_of else np.zeros_like(near)


def redundant_biases(params, forward: Forward, found: list[Measured]) -> list[Finding] | str:
    """Leaves whose gradient is 0 in training and not in evaluation by the same statistics.

    Parameters that forward closes over are constants of its jaxpr: they are found there by identity. A text says why it
    could not be told.
    """
    leaves, zeros = list(forward.leaves), list(forward.leaves)
    for each in found:
        if each.mean is not None and each.moved:
            leaves = replaced(leaves, each.layer, mean=each.mean, var=np.maximum(each.var, 0))
            zeros = replaced(zeros, each.layer, mean=0, var=0)
    names = {id(leaf): name for name, leaf in _named(params)}
    (training, nothing), (evaluation, _) = (_gradients(forward, leaves, names, train=train) for train in (True, False))
    both = [name for name in training if name in evaluation]
    if not both:
        return "redundant bias: let forward close over the very arrays of params, as jax arrays, and not be jitted"
    unmoved = [name for name in both if training[name] <= nothing * evaluation[name] and evaluation[name] > 0]
    return [
        finding(
            "redundant bias",
            name,
            f"its gradient is {training[name]:.1e} in training, {evaluation[name]:.1e} in evaluation",
        )
        for name in _shifts(forward, zeros, names, unmoved)
    ]


def _shifts(forward: Forward, zeros: list, names: dict[int, str], candidates: list[str]) -> list[str]:
    """Those of the parameters whose change training's outputs do not show, nor any variance.

    Kernels and gains before a norm scale its variance.
    """
    if not candidates:
        return []

    def seen(leaves, batch):
        y, fields = forward.call(leaves, batch, train=True)
        return [each["var"] for each in fields], [one for one in y if jnp.issubdtype(one.dtype, jnp.inexact)]

    opened = _Opened(seen, zeros, forward.batch, names)
    layers = len(forward.layers)
    before = [wide(one) for one in opened.call(opened.values)]

    def moves(name: str) -> bool:
        changed = [
            2 * value + 1 if of == name else value for of, value in zip(opened.names, opened.values, strict=True)
        ]
        pairs = list(zip([wide(one) for one in opened.call(changed)], before, strict=True))
        with np.errstate(all="ignore"):
            scaled = any(np.any(np.abs(np.log(new / old)) > SCALED) for new, old in pairs[:layers])
        return scaled or any(
            np.mean(np.abs(new - old) ** 2) > SHIFTED**2 * np.mean(np.abs(old) ** 2) for new, old in pairs[layers:]
        )

    return [name for name in candidates if not moves(name)]


class _Opened:
    """A function of statistics and batch whose captured parameters, found by identity, are its arguments.

    Attributes:
      names: of the parameters.
      values: theirs.
      call: from values to what the function returns, flat; compiled.
      jaxpr: its program.
    """

    def __init__(self, function, leaves: list, batch, names: dict[int, str]):
        closed = jax.make_jaxpr(function)(leaves, batch)
        consts, inputs = closed.consts, jax.tree.leaves((leaves, batch))
        at = [i for i, const in enumerate(consts) if id(const) in names and jnp.issubdtype(const.dtype, jnp.inexact)]
        self.names, self.values = [names[id(consts[i])] for i in at], [consts[i] for i in at]
        self.jaxpr = closed.jaxpr

        def call(values):
            new = list(consts)
            for i, value in zip(at, values, strict=True):
                new[i] = value
            return eval_jaxpr(closed.jaxpr, new, *inputs)

        self.call = jax.jit(call)


def _gradients(forward: Forward, leaves: list, names: dict[int, str], *, train: bool) -> tuple[dict[str, float], float]:
    """The largest gradient of each parameter found, for a random cotangent of the outputs, and what share is none."""

    def outputs(leaves, batch):
        return [y for y in forward.call(leaves, batch, train=train)[0] if jnp.issubdtype(y.dtype, jnp.inexact)]

    opened = _Opened(outputs, leaves, forward.batch, names)

    @jax.jit
    def pulled(values):
        y, pullback = jax.vjp(opened.call, values)
        rng = np.random.default_rng(SEED)
        (gradients,) = pullback([jnp.asarray(rng.normal(size=each.shape), each.dtype) for each in y])
        return gradients

    gradients = pulled(opened.values)
    largest = {name: float(np.max(np.abs(wide(g)), initial=0)) for name, g in zip(opened.names, gradients, strict=True)}
    half = re.search(r":b?f16\[", str(opened.jaxpr))
    return largest, HALF_GRADIENT if half else NO_GRADIENT
