"""Which parameters weight decay should reach."""

from typing import Any

import jax

from normjax._normalize import Affine
from normjax._running import BatchStats

_NORM_LEAVES = {"scale", "bias", "mean", "var", "count", "weight"}


def decay_mask(params) -> Any:
    """Returns a tree of bools like `params`: False for the scales and biases of norms, True for all other leaves.

    Args:
      params: any pytree: `Affine`s anywhere in it, or Flax's (a module whose only parameters are `scale` and `bias`;
        the bias of a layer with a kernel is no norm's and decays).

    Returns:
      A mask for `optax.adamw(…, mask=decay_mask)`.

    Example:
      >>> import normjax as nj
      >>> print(decay_mask({"dense": {"kernel": 1.0, "bias": 0.0}, "norm": {"scale": 1.0, "bias": 0.0}}))
      {'dense': {'bias': True, 'kernel': True}, 'norm': {'bias': False, 'scale': False}}
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params, is_leaf=_is_norm)
    names = [[_name(key) for key in path] for path, _ in leaves]
    names = [path[:-1] if path and path[-1] == "value" else path for path in names]
    siblings: dict[tuple, set] = {}
    for path in names:
        siblings.setdefault(tuple(path[:-1]), set()).add(path[-1] if path else None)
    masks = []
    for path, (_, leaf) in zip(names, leaves, strict=True):
        family = siblings[tuple(path[:-1])] if path else set()
        norm = _is_norm(leaf) or (bool({"scale", "bias"} & family) and family <= _NORM_LEAVES)
        masks.append(jax.tree.map(lambda _, decays=not norm: decays, leaf))
    return jax.tree.unflatten(structure, masks)


def _is_norm(node) -> bool:
    return isinstance(node, (Affine, BatchStats))


def _name(key) -> Any:
    return next((getattr(key, field) for field in ("key", "name", "idx") if hasattr(key, field)), str(key))
