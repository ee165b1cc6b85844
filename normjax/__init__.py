"""Normalisation in which the caller names the axes that share a mean.

The rooms:
  _grammar.py      layout and axis_names: the grammar
  _axes.py         both resolved for a shape: `Spec`, every axis error, `describe`
  _inputs.py       what may come in, and the words for anything else
  _derivatives.py  the two maps that a norm is made of, and the only backward
  _sums.py         sums over groups, and what else XLA's CPU backend has to be told
  _sharding.py     what an Explicit mesh shards
  _mapped.py       statistics across vmap, pmap and shard_map axes
  _moments.py      `Moments`: count, mean and variance of a group; `merge`
  _normalize.py    `Affine` and the core, `normalize`
  _running.py      `BatchStats`, `Ema`, `Cumulative`, `update`, `pool_stats`
  _batch_norm.py   `batch_norm`, `sync_batch_norm`: checks, then running statistics or the core
  _family.py       `layer_norm` … `rms_norm`: checks, then the core
  _decay.py        `decay_mask`
  _pytree.py       what the three pytrees share
  convert.py       checkpoints of PyTorch and Flax, there and back
  fold.py          batch norm in evaluation merged into the layer before it; for models: _nnx_fold.py, _linen_fold.py,
                   and _fold_flow.py, which finds the pairs
  per_example.py   one gradient for each example, and which examples couple
  recalibrate.py   population statistics over a data set; _stats_tree.py finds a norm's in any framework's tree
  diagnose.py      what is wrong with a model's running statistics; also _diagnose_*.py
  linen.py         Flax linen's norms, by the core
  nnx.py           Flax nnx's norms, too; also _nnx_batch.py (batch norm), _nnx_replace.py and _nnx_swap.py (`replace`)
  _flax.py         Flax's arguments in the core's words, for both; the axes in _flax_axes.py
  reference.py     the textbook in NumPy float64, to test against
  _check.py        `normjax check`: every norm on the devices that are here, against the reference
  lab/, cli.py     `normjax train` and what comes after it
"""

from normjax._axes import describe
from normjax._batch_norm import batch_norm, sync_batch_norm
from normjax._decay import decay_mask
from normjax._family import group_norm, instance_norm, layer_norm, rms_norm
from normjax._moments import Moments, merge, moments
from normjax._normalize import Affine, normalize
from normjax._pytree import teach_flax as _teach_flax
from normjax._running import BatchStats, Cumulative, Ema, pool_stats, update

__version__ = "0.1.0"

__all__ = [
    "Affine",
    "BatchStats",
    "Cumulative",
    "Ema",
    "Moments",
    "batch_norm",
    "decay_mask",
    "describe",
    "group_norm",
    "instance_norm",
    "layer_norm",
    "merge",
    "moments",
    "normalize",
    "pool_stats",
    "rms_norm",
    "sync_batch_norm",
    "update",
]

_teach_flax()
