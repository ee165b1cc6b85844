"""Keras on its JAX backend, through ``stateless_call``; only its batch norm has masks."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras

from benchmarks.cases import Case
from benchmarks.contestants import Apply, in_jax
from benchmarks.problems import EPS, NEW_WEIGHT


def _layer(case: Case) -> keras.Layer:
    options = {"epsilon": EPS, "dtype": {"float32": "float32", "bfloat16": "mixed_bfloat16"}[case.dtype]}
    if case.family == "batch":
        return keras.layers.BatchNormalization(axis=case.channel_axis, momentum=1 - NEW_WEIGHT, **options)
    if case.family == "layer":
        return keras.layers.LayerNormalization(axis=-1, **options)
    if case.family == "rms":
        return keras.layers.RMSNormalization(axis=-1, **options)
    return keras.layers.GroupNormalization(groups=case.groups or -1, axis=-1, **options)


def build(case: Case) -> Apply | None:
    """The layer's pure call with the given variables."""
    batch = case.family == "batch"
    if case.masked and not batch:
        return None
    layer = _layer(case)
    layer.build(case.shape)

    def apply(x, scale, bias, mean, var, where):
        trained = [scale] if bias is None else [scale, bias]
        if not batch:
            return layer.stateless_call(trained, [], x)[0], None
        mask = None if where is None else where[..., 0]
        y, new = layer.stateless_call(trained, [mean, var], x, training=case.train, mask=mask)
        return y, tuple(new) if case.train else None

    return apply


prepare = in_jax(build)
