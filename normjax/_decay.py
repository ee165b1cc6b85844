"""Which parameters weight decay should reach."""

import re
from typing import Any

import jax

from normjax._normalize import Affine
from normjax._running import BatchStats

_NORM_LEAVES = {"scale", "bias", "mean", "var", "count", "weight"}


def decay_mask(params) -> Any:
    """Returns a tree of bools like `params`: False for the scales and biases of norms, True for all other leaves.

    Args:
      params: any pytree: `Affine`s anywhere in it, or Flax's, nested or flattened (with keys such as "bn/scale",
        "bn.scale" or ("bn", "scale")). There, a norm is a place whose only parameters are `scale` and `bias`, or a
        `bias` alone if nothing is nested below: the bias of a layer with a kernel decays, though optax has masked
        the kernel away.

    Returns:
      A mask for `optax.adamw(…, mask=decay_mask)`.

    Example:
      >>> import normjax as nj
      >>> print(decay_mask({"dense": {"kernel": 1.0, "bias": 0.0}, "norm": {"scale": 1.0, "bias": 0.0}}))
      {'dense': {'bias': True, 'kernel': True}, 'norm': {'bias': False, 'scale': False}}
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda node: _is_norm(node) or _gone(node))
    paths = [path_names(keys) for keys, _ in leaves]
    family: dict[tuple, set] = {}
    nested = set()
    for path in paths:
        family.setdefault(path[:-1], set()).add(path[-1] if path else None)
        nested.update(path[:depth] for depth in range(len(path) - 1))
    masks = []
    for path, (_, leaf) in zip(paths, leaves, strict=True):
        place = path[:-1]
        named = family[place] & {"scale", "bias"} if family[place] <= _NORM_LEAVES else set()
        norm = _is_norm(leaf) or "scale" in named or ("bias" in named and place not in nested)
        masks.append(jax.tree.map(lambda _, decays=not norm: decays, leaf))
    return jax.tree.unflatten(structure, masks)


def _is_norm(node) -> bool:
    return isinstance(node, (Affine, BatchStats))


def _gone(node) -> bool:
    """Whether this is optax's `MaskedNode`, which has no leaves; the core does not import optax."""
    return isinstance(node, tuple) and not node and type(node).__name__ == "MaskedNode"


def path_names(keys) -> tuple:
    """The names on the way to a leaf, those of flattened trees taken apart; nnx ends with a variable's value."""
    parts = [part for key in keys for part in _names(key)]
    return tuple(parts[:-1] if parts and parts[-1] == "value" else parts)


def _names(key) -> list:
    name = next((getattr(key, field) for field in ("key", "name", "idx") if hasattr(key, field)), str(key))
    if isinstance(name, str):
        return re.split(r"[/.]", name)
    return list(name) if isinstance(name, tuple) else [name]
