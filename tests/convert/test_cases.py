"""Cases of conversion: whose momentum, which variance, where a number lands, and where eps stands."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import normjax as nj
from normjax import convert
from normjax.convert import from_flax, from_torch, to_flax
from tests.convert.common import close
from tests.quick import quick_jit

# --- 96: momentum is the share that is kept, or the weight of the new batch


def imported(framework: str, momentum: float, old: float, dtype="float32"):
    """A batch norm of one channel whose statistics are `old` and 1."""
    arrays = [np.array([value], dtype) for value in (1, 0, old, 1)]
    if framework == "torch":
        return from_torch(
            dict(zip(("weight", "bias", "running_mean", "running_var"), arrays, strict=True)), momentum=momentum
        )
    return from_flax(dict(zip(("scale", "bias", "mean", "var"), arrays, strict=True)), momentum=momentum)


@pytest.mark.case(96)
@pytest.mark.parametrize(("dtype", "transform"), [("float16", "jit"), ("bfloat16", "vmap"), ("float32", "jit")])
@pytest.mark.parametrize(
    ("framework", "momentum", "old", "batch", "new"),
    [
        ("torch", 0.1, 0.0, 10.0, 1.0),
        ("flax", 0.9, 0.0, 10.0, 1.0),
        ("torch", 0.9, 0.0, 10.0, 9.0),
        ("flax", 0.1, 0.0, 10.0, 9.0),
        ("torch", 0.3, 2.0, -8.0, -1.0),
        ("flax", 0.7, 2.0, -8.0, -1.0),
        ("torch", 0.0, 2.0, -8.0, 2.0),
        ("flax", 1.0, 2.0, -8.0, 2.0),
    ],
)
def test_momentum_means_what_it_means_in_its_framework(framework, momentum, old, batch, new, transform, dtype):
    layer = imported(framework, momentum, old, dtype)

    def moved(x):
        options = {"layout": "N C", "axis_names": "N", "train": True, "running": layer.running}
        return nj.batch_norm(x, layer.params, layer.state, **options)[1].mean

    x = batch + np.array([[-1.0], [1.0], [0.0], [0.0]], dtype)
    found = quick_jit(moved)(x) if transform == "jit" else quick_jit(jax.vmap(moved))(x[None])
    np.testing.assert_allclose(np.ravel(found), [new], rtol=1e-6)


# --- 97: normalise by the biased variance, store the unbiased


@pytest.mark.case(97)
@pytest.mark.parametrize(("framework", "momentum", "stored"), [("torch", 1.0, 12.0), ("flax", 0.0, 8.0)])
@pytest.mark.parametrize(("shape", "layout", "axis_names"), [((3, 1), "N C", "N"), ((1, 1, 3), "N C L", "N L")])
def test_the_variance_that_is_stored_is_the_frameworks_own(framework, momentum, stored, shape, layout, axis_names):
    layer = imported(framework, momentum, 5.0)
    x = np.array([0.0, 0.0, 6.0], np.float32)

    @quick_jit
    def apply(x):
        options = {"layout": layout, "axis_names": axis_names, "train": True, "running": layer.running}
        return nj.batch_norm(x, layer.params, layer.state, eps=layer.eps, **options)

    y, state = apply(x.reshape(shape))
    close(np.ravel(y), (np.float64(x) - 2) / np.sqrt(8 + 1e-5), m=3)
    np.testing.assert_allclose(state.mean, [2.0], rtol=1e-6)
    np.testing.assert_allclose(state.var, [stored], rtol=1e-6)


# --- 98: LayerNorm(12): the feature count lands in epsilon


@pytest.mark.case(98)
def test_everything_but_the_arrays_is_given_by_name():
    for function, arrays in ((from_torch, 1), (from_flax, 1), (to_flax, 2)):
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        assert set(kinds[:arrays]) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
        assert set(kinds[arrays:]) == {inspect.Parameter.KEYWORD_ONLY}
        with pytest.raises(TypeError, match="positional argument"):
            function(*[None] * arrays, 12)
    with pytest.raises(TypeError, match="positional argument"):
        nj.layer_norm(np.ones((2, 12)), None, None, 12)


@pytest.mark.case(98)
@pytest.mark.parametrize("statistics", [False, True])
def test_eps_is_by_default_that_of_the_framework(statistics):
    torch = {"weight": np.ones(12), "bias": np.ones(12)}
    flax = {"scale": np.ones(12), "bias": np.ones(12)}
    if statistics:
        torch |= {"running_mean": np.ones(12), "running_var": np.ones(12)}
        flax |= {"mean": np.ones(12), "var": np.ones(12)}
    assert from_torch(torch).eps == 1e-5
    assert from_flax(flax).eps == (1e-5 if statistics else 1e-6)
    layer = linen.BatchNorm(use_running_average=True) if statistics else linen.LayerNorm()
    assert from_flax(flax).eps == layer.epsilon
    assert from_torch(torch, eps=12).eps == 12.0


# --- 99: eps inside the root, of the framework's size


@pytest.mark.case(99)
@pytest.mark.parametrize("shape", [(2,), (3, 2)])
@pytest.mark.parametrize(
    ("framework", "eps", "expected"),
    [
        ("torch", {}, 0.30151),
        ("flax", {}, 0.70711),
        ("torch", {"eps": 1e-6}, 0.70711),
        ("flax", {"eps": 1e-5}, 0.30151),
    ],
)
def test_a_small_input_shows_where_eps_stands(framework, eps, expected, shape):
    arrays = {"weight" if framework == "torch" else "scale": np.ones(2, "f"), "bias": np.zeros(2, "f")}
    layer = getattr(convert, f"from_{framework}")(arrays, names="D", **eps)
    x = jnp.broadcast_to(jnp.array([1e-3, -1e-3], jnp.float32), shape)
    options = {"layout": "... D", "axis_names": "D", "eps": layer.eps}
    y = quick_jit(lambda x: nj.layer_norm(x, layer.params, **options)[0])(x)
    np.testing.assert_allclose(y, np.broadcast_to([expected, -expected], shape), atol=1e-5)


@pytest.mark.case(99)
def test_rms_norm_without_an_eps_has_pytorchs():
    layer = from_torch({"weight": np.ones(2, "f")}, names="D", eps=None)
    y, _ = nj.rms_norm(jnp.array([1e-3, -1e-3]), layer.params, layout="D", axis_names="D", eps=layer.eps)
    np.testing.assert_allclose(y, np.array([1, -1]) / np.sqrt(1 + 2.0**-23 / 1e-6), rtol=1e-6)
