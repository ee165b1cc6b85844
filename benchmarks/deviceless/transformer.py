"""A bf16 training step of a plain pre-norm transformer, the same but for its layer norm: for the peak of its memory."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

BLOCKS, WIDTH, HEADS, LENGTH, BATCH, WORDS = 12, 768, 12, 1024, 8, 8192
LEARNING_RATE = 1e-3


def parameters() -> dict:
    """Shapes of the float32 parameters."""

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def norm():
        return {"scale": array(WIDTH), "bias": array(WIDTH)}

    def block():
        return {
            "norm_1": norm(),
            "qkv": array(WIDTH, 3 * WIDTH),
            "out": array(WIDTH, WIDTH),
            "norm_2": norm(),
            "up": array(WIDTH, 4 * WIDTH),
            "down": array(4 * WIDTH, WIDTH),
        }

    return {"words": array(WORDS, WIDTH), "blocks": [block() for _ in range(BLOCKS)], "norm": norm()}


def tokens() -> jax.ShapeDtypeStruct:
    """Shape of a batch of word numbers, each row one longer than the model sees."""
    return jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)


def training_step(norm: Callable) -> Callable:
    """(parameters, tokens) ↦ (new parameters, loss) by gradient descent; norm(x, scale, bias) is the layer norm."""

    def step(params, tokens):
        loss, grads = jax.value_and_grad(_loss)(params, tokens, norm)
        return jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads), loss

    return step


def _loss(params, tokens, norm):
    words = params["words"].astype(jnp.bfloat16)
    x = words[tokens[:, :-1]]
    for block in params["blocks"]:
        x = x + _attention(block, norm(x, **block["norm_1"]))
        hidden = jax.nn.gelu(_times(norm(x, **block["norm_2"]), block["up"]))
        x = x + _times(hidden, block["down"])
    logits = _times(norm(x, **params["norm"]), words.T).astype(jnp.float32)
    right = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1, keepdims=True) - right)


def _attention(block, x):
    split = (*x.shape[:2], HEADS, WIDTH // HEADS)
    q, k, v = (part.reshape(split) for part in jnp.split(_times(x, block["qkv"]), 3, axis=-1))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return _times(mixed.reshape(x.shape), block["out"])


def _times(x, matrix):
    return x @ matrix.astype(x.dtype)
