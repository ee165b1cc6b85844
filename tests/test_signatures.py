"""The public names and their signatures, and what parameters and statistics start as."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj

LAYER = "x, params=None, state=None, *, layout, axis_names, train=None, where=None, eps=1e-05, dtype=None, "
BATCH = (
    "x, params=None, state=None, *, layout, axis_names, train, where=None, eps=1e-05, dtype=None, "
    "running=Ema(new_weight=0.1, unbiased=False, debias=False), use_batch_stats=False, axis_index_groups=None, "
    "derivative='vjp'"
)
SIGNATURES = {
    nj.batch_norm: BATCH,
    nj.sync_batch_norm: BATCH,
    nj.layer_norm: LAYER + "derivative='vjp'",
    nj.instance_norm: LAYER + "derivative='vjp'",
    nj.group_norm: LAYER + "derivative='vjp'",
    nj.rms_norm: LAYER + "derivative='vjp'",
    nj.normalize: "x, params=None, *, layout, axis_names, moments=None, center=True, where=None, eps=1e-05, "
    "dtype=None, axis_index_groups=None, derivative='vjp'",
    nj.moments: "x, *, layout, axis_names, center=True, where=None, axis_index_groups=None",
    nj.merge: "*moments, axis=None",
    nj.update: "state, moments, *, running=Ema(new_weight=0.1, unbiased=False, debias=False)",
    nj.pool_stats: "state, axis_names",
    nj.describe: "shape, *, layout, axis_names",
    nj.decay_mask: "params",
    nj.Affine.init: "*, scale=True, bias=True, scale_init=1.0, dtype=float32, zero_centered=False, **sizes",
    nj.BatchStats.init: "*, dtype=float32, **sizes",
    nj.Moments.init: "*, dtype=float32, **sizes",
    nj.Affine: "scale, bias, names=(), zero_centered=False",
    nj.BatchStats: "mean, var, count, weight, names=()",
    nj.Moments: "mean, var, count, names=()",
    nj.Ema: "new_weight=0.1, unbiased=False, debias=False",
    nj.Cumulative: "by='entries', unbiased=False",
}


def rendered(call) -> str:
    """A signature without its annotations; dtypes by their names."""
    parts, keyword_only = [], False
    for parameter in inspect.signature(call).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            parts.append(f"*{parameter.name}")
            keyword_only = True
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            parts.append("*")
            keyword_only = True
        if parameter.kind is parameter.VAR_KEYWORD:
            parts.append(f"**{parameter.name}")
        elif parameter.default is parameter.empty:
            parts.append(parameter.name)
        else:
            default = "float32" if parameter.default is jnp.float32 else repr(parameter.default)
            parts.append(f"{parameter.name}={default}")
    return ", ".join(parts)


@pytest.mark.case(28)
@pytest.mark.case(98)
@pytest.mark.parametrize("call", SIGNATURES, ids=lambda call: call.__qualname__)
def test_a_signature_is_the_contract_to_the_letter(call):
    assert rendered(call) == SIGNATURES[call]


def test_the_public_names_are_those_of_the_contract():
    extras = {"Affine", "BatchStats", "Moments", "Ema", "Cumulative"}
    functions = {call.__name__ for call in SIGNATURES if inspect.isfunction(call)}
    assert set(nj.__all__) == functions | extras


def test_the_parts_start_as_documented():
    params = nj.Affine.init(N=2, C=3, dtype=jnp.bfloat16, scale_init=0.5)
    assert params.names == ("N", "C")
    np.testing.assert_array_equal(params.scale, np.full((2, 3), 0.5, jnp.bfloat16))
    np.testing.assert_array_equal(params.bias, np.zeros((2, 3), jnp.bfloat16))
    assert params.scale.dtype == params.bias.dtype == jnp.bfloat16
    bare = nj.Affine.init(C=3, scale=False, bias=False)
    assert bare.scale is None
    assert bare.bias is None
    scalar = nj.Affine.init(zero_centered=True, scale_init=3.0)
    assert (float(scalar.scale), scalar.scale.shape, scalar.names) == (2.0, (), ())

    state = nj.BatchStats.init(C=3)
    for leaf, value, dtype in [(state.mean, 0, "float32"), (state.var, 1, "float32"), (state.weight, 0, "float32")]:
        np.testing.assert_array_equal(leaf, np.full(3, value))
        assert leaf.dtype == dtype
    assert (int(state.count), state.count.dtype, state.count.shape) == (0, jnp.int32, ())

    empty = nj.Moments.init(C=3)
    for leaf in jax.tree.leaves(empty):
        np.testing.assert_array_equal(leaf, np.zeros(3, np.float32))


@pytest.mark.parametrize("size", [3.0, -1, "a", True, None])
@pytest.mark.parametrize("kind", [nj.Affine, nj.BatchStats, nj.Moments])
def test_a_size_that_is_no_size_says_so(kind, size):
    words = rf"^{kind.__name__}\.init: C={size!r}: the size of an axis must be a non-negative integer"
    with pytest.raises(TypeError, match=words):
        kind.init(C=size)
