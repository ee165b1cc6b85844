"""`from_torch`: which keys, shapes and values it takes, what it makes of them, and what it says of others."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import normjax as nj
from normjax.convert import from_torch

HALVES = ("bfloat16", "float16")


def batch(size: int = 3, *, updates=7, dtype="float32", **changes) -> dict[str, np.ndarray]:
    """The state_dict of a batch norm; a change to None leaves the key out."""
    arrays = {
        "weight": np.linspace(1, 2, size).astype(dtype),
        "bias": np.linspace(-1, 0, size).astype(dtype),
        "running_mean": np.linspace(3, 4, size).astype(dtype),
        "running_var": np.linspace(5, 6, size).astype(dtype),
        "num_batches_tracked": np.array(updates),
    } | changes
    return {key: array for key, array in arrays.items() if array is not None}


def under(prefix: str, arrays: dict) -> dict:
    return {prefix + key: array for key, array in arrays.items()}


MODEL = {
    "conv1.weight": np.ones((4, 3, 3, 3)),
    **under("bn1.", batch(4)),
    **under("layer1.0.bn1.", batch(3)),
    **under("layer1.0.bn10.", batch(5)),
    "fc.weight": np.ones((2, 3)),
    "fc.bias": np.ones(2),
    "step": None,
}


def refusal(tensors, **options) -> str:
    with pytest.raises(ValueError, match=r"^from_torch: ") as raised:
        from_torch(tensors, **options)
    return str(raised.value)


def same(actual, wanted):
    assert jax.tree.structure(actual) == jax.tree.structure(wanted)
    for leaf, right in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        assert leaf.dtype == right.dtype
        np.testing.assert_array_equal(leaf, right)


# --- what comes back


def test_a_whole_model_gives_the_layer_at_the_prefix():
    params, state, running, eps = from_torch(MODEL, prefix="layer1.0.bn1.")
    wanted = batch(3)
    np.testing.assert_array_equal(params.scale, wanted["weight"])
    np.testing.assert_array_equal(params.bias, wanted["bias"])
    np.testing.assert_array_equal(state.mean, wanted["running_mean"])
    np.testing.assert_array_equal(state.var, wanted["running_var"])
    assert (state.count, state.count.dtype, state.weight.dtype) == (7, jnp.int32, jnp.float32)
    assert params.names == state.names == ("C",)
    assert running == nj.Ema(0.1, unbiased=True)
    assert eps == 1e-5


@pytest.mark.parametrize(
    ("momentum", "updates", "running", "count", "weight"),
    [
        (0.1, 7, nj.Ema(0.1, unbiased=True), 7, 1),
        (np.float32(0.5), 7, nj.Ema(0.5, unbiased=True), 7, 1),
        (0, 7, nj.Ema(0.0, unbiased=True), 7, 1),
        (None, 7, nj.Cumulative(by="updates", unbiased=True), 7, 7),
        (0.1, 0, nj.Ema(0.1, unbiased=True), 1, 1),  # instance norm does not count, and has statistics all the same
        (0.1, None, nj.Ema(0.1, unbiased=True), 1, 1),  # nor did PyTorch before 0.4.1
    ],
)
def test_momentum_and_counter_become_running_count_and_weight(momentum, updates, running, count, weight):
    counter = None if updates is None else np.array(updates)
    layer = from_torch(batch(num_batches_tracked=counter), momentum=momentum)
    assert layer.running == running
    assert isinstance(getattr(layer.running, "new_weight", 0.0), float)
    assert int(layer.state.count) == count
    np.testing.assert_array_equal(layer.state.weight, [weight] * 3)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("counter", [np.array(0), None])
def test_statistics_as_new_rest_on_nothing(momentum, counter):
    if counter is None and momentum is None:
        return
    new = batch(running_mean=np.zeros(3), running_var=np.ones(3), num_batches_tracked=counter)
    state = from_torch(new, momentum=momentum).state
    assert int(state.count) == 0
    np.testing.assert_array_equal(state.weight, 0)


@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_parameters_keep_their_dtype_and_statistics_have_float32(dtype):
    arrays = batch(dtype=dtype)
    params, state, *_ = from_torch(arrays)
    assert params.scale.dtype == params.bias.dtype == dtype
    assert state.mean.dtype == state.var.dtype == jnp.float32
    np.testing.assert_array_equal(state.var, arrays["running_var"].astype(np.float32))
    options = {"layout": "N C", "axis_names": "N", "train": True}
    y, _ = jax.eval_shape(lambda x: nj.batch_norm(x, params, state, **options), np.ones((4, 3), dtype))
    assert y.dtype == dtype


def test_float64_stays_where_jax_has_it(x64):
    params, state, *_ = from_torch(batch(dtype="float64"))
    assert params.scale.dtype == state.mean.dtype == state.var.dtype == jnp.float64


@pytest.mark.parametrize(
    ("weight", "eps"),
    [(np.ones(3, "float32"), 2.0**-23), (np.ones(3, "float64"), 2.0**-52)]
    + [(np.ones(3, half), 2.0**-23) for half in HALVES],
    ids=lambda value: str(getattr(value, "dtype", "")),
)
def test_no_eps_is_that_of_rms_norm(weight, eps):
    layer = from_torch({"weight": weight}, names="D", eps=None)
    assert (layer.eps, layer.state, layer.params.bias) == (eps, None, None)
    assert isinstance(layer.eps, float)


def test_several_names_are_those_of_the_shape():
    arrays = {"weight": np.ones((2, 4)), "bias": np.zeros((2, 4))}
    params, state, *_ = from_torch(arrays, names="H D", sizes={"D": 4})
    assert (params.names, params.scale.shape, state) == (("H", "D"), (2, 4), None)
    assert from_torch(arrays, names=("H", "D")).params.names == ("H", "D")


def test_a_norm_without_arrays_is_asked_for():
    layer = from_torch(MODEL, prefix="layer2.norm.", affine=False, eps=0.1)
    assert layer == (None, None, nj.Ema.torch(0.1), 0.1)
    assert from_torch({}, affine=False, eps=None).eps == 2.0**-23


def test_the_leaves_are_copies():
    wanted, arrays = batch(), batch()
    params, state, *_ = from_torch(arrays)
    for array in arrays.values():
        array += 1
    np.testing.assert_array_equal(params.scale, wanted["weight"])
    np.testing.assert_array_equal(state.mean, wanted["running_mean"])
    leaves = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((params, state))]
    assert len(set(leaves)) == len(leaves)


class Tensor:
    """What `from_torch` needs of a PyTorch tensor: NumPy takes none with gradient, on a device or of bfloat16."""

    def __init__(self, array, *, bare=False):
        self.array, self.bare, self.dtype = np.asarray(array), bare, f"torch.{np.asarray(array).dtype}"

    def detach(self):
        return Tensor(self.array)

    def cpu(self):
        return Tensor(self.array, bare=True)

    def float(self):
        return Tensor(self.array.astype(np.float32), bare=self.bare)

    def __array__(self, dtype=None, copy=None):
        if not self.bare or self.dtype == "torch.bfloat16":
            raise TypeError("can't convert")
        return self.array if dtype is None else self.array.astype(dtype)


@pytest.mark.parametrize("kind", [Tensor, jnp.asarray], ids=["tensors", "jax"])
@pytest.mark.parametrize("dtype", [*HALVES, "float32"])
def test_tensors_and_jax_arrays_are_read_as_numpy_arrays_are(kind, dtype):
    arrays = batch(dtype=dtype)
    same(from_torch({key: kind(array) for key, array in arrays.items()})[:2], from_torch(arrays)[:2])


# --- files


@pytest.mark.parametrize("dtype", [*HALVES, "float32", "float64"])
@pytest.mark.parametrize("as_path", [str, Path])
def test_a_safetensors_file_gives_what_its_arrays_give_and_takes_them_back(as_path, dtype, tmp_path, x64):
    arrays = under("bn.", batch(dtype=dtype)) | {"fc.weight": np.ones((2, 3))}
    path = tmp_path / "model.safetensors"
    save_file(arrays, path)
    for momentum in (0.1, None):
        layer = from_torch(as_path(path), prefix="bn.", momentum=momentum)
        wanted = from_torch(arrays, prefix="bn.", momentum=momentum)
        assert layer[2:] == wanted[2:]
        same(layer[:2], wanted[:2])
    params, state, *_ = layer
    back = {"weight": params.scale, "bias": params.bias, "running_mean": state.mean, "running_var": state.var}
    back = {key: np.asarray(array) for key, array in back.items()} | {"num_batches_tracked": np.asarray(state.count)}
    save_file(back, path)
    same(from_torch(path, momentum=None)[:2], layer[:2])


def test_of_a_safetensors_file_the_other_keys_are_listed_as_those_of_a_state_dict_are(tmp_path):
    save_file({**under("bn.", batch()), "bn.kernel": np.ones(1)}, tmp_path / "model.safetensors")
    assert "unexpected: kernel" in refusal(tmp_path / "model.safetensors", prefix="bn.")
    assert "Near it: 'bn.'" in refusal(tmp_path / "model.safetensors", prefix="bn1.")


def test_without_safetensors_the_error_says_which_pip_install_brings_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=re.escape('needs safetensors: pip install "normjax[lab]"')):
        from_torch("model.safetensors")


def test_another_file_is_an_error_that_says_how_to_read_it():
    assert "model.pt' is no .safetensors file" in refusal("model.pt")
    assert "weights_only=True" in refusal(Path("model.bin"))


# --- what is refused


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        (batch(running_var=None), {}, ["missing: running_var"]),
        (batch(running_mean=None, running_var=None), {}, ["missing: running_mean, running_var"]),
        (batch(weight=None), {}, ["missing: weight"]),
        (batch(bias=None), {"affine": True}, ["missing: bias"]),
        (batch(num_batches_tracked=None), {"momentum": None}, ["missing: num_batches_tracked"]),
        (
            {"weight": np.ones(3), "bias": np.ones(3)},
            {"track_running_stats": True},
            ["missing: running_mean, running_var"],
        ),
        (batch(), {"affine": False}, ["unexpected: weight, bias"]),
        (batch(), {"affine": True, "bias": False}, ["unexpected: bias"]),
        (batch(), {"track_running_stats": False}, ["unexpected: running_mean, running_var, num_batches_tracked"]),
        (batch(kernel=np.ones(3)), {}, ["unexpected: kernel"]),
        (MODEL, {}, ["unexpected: conv1.weight, bn1.weight", "and 11 more"]),
        (
            batch(running_mean=np.ones(4)),
            {},
            ["shapes differ: weight and bias and running_var (3,), running_mean (4,)"],
        ),
        (batch(), {"sizes": {"C": 4}}, ["weight, bias, running_mean, running_var: shape (3,), but C must have size 4"]),
        (batch(), {"names": "H C"}, ['shape (3,), but names="H C" is two axes']),
        (batch(weight=np.ones((3, 1))), {}, ['weight: shape (3, 1), but names="C" is one axis', "shapes differ"]),
        (batch(weight=np.ones(3, int)), {}, ["weight must be of a floating-point dtype, not int64"]),
        (batch(running_var=np.ones(3, complex)), {}, ["running_var must be of a floating-point dtype, not complex128"]),
        (batch(bias="zeros"), {}, ["bias is no array: str of dtype"]),
        (batch(bias=[[1.0], [1.0, 2.0]]), {}, ["bias is no array: "]),
        (batch(num_batches_tracked=np.array(-1)), {}, ["num_batches_tracked must be one integer", "int64 -1"]),
        (batch(num_batches_tracked=np.array(2**31)), {}, ["num_batches_tracked must be one integer", "2147483648"]),
        (batch(num_batches_tracked=np.array(0.5)), {}, ["num_batches_tracked must be one integer", "0.5"]),
        (batch(num_batches_tracked=np.ones(3, int)), {}, ["num_batches_tracked must be one integer", "[1, 1, 1]"]),
        (batch(running_var=np.array([1, -2.5, 1])), {}, ["running_var must be at least 0, not -2.5"]),
        (batch(running_var=np.array([1, -np.inf, 1])), {}, ["running_var must be at least 0, not -inf"]),
        (batch(running_var=np.array([1, 1e300, 1])), {}, ["running_var: 1e+300 overflows float32; enable jax_enable"]),
        (batch(weight=np.full(3, -1e39)), {}, ["weight: -1e+39 overflows float32"]),
        (batch(updates=0), {"momentum": None}, ["num_batches_tracked is 0, but", "pass momentum=0 for it"]),
        ({"weight": np.ones(3)}, {}, ["eps must be given", "RMSNorm"]),
        ({}, {"affine": False}, ["eps must be given"]),
        (batch(), {"eps": None}, ["eps=None is a default of RMSNorm"]),
        ({"weight": np.ones(3), "bias": np.ones(3)}, {"eps": None}, ["eps=None is a default of RMSNorm"]),
    ],
)
def test_a_checkpoint_that_is_not_the_norm_asked_for_is_refused(arrays, options, words):
    message = refusal(under("bn.", arrays), prefix="bn.", **options)
    assert message.startswith('from_torch: at prefix="bn." stands no norm along names=')
    for word in words:
        assert word in message


def test_all_that_is_wrong_is_said_at_once():
    wrong = batch(running_var=None, bias=np.ones(5), weight=np.ones((3, 3)), kernel=np.ones(2))
    message = refusal(under("bn.", wrong), prefix="bn.", sizes={"C": 4}, momentum=None, eps=None)
    assert message == (
        'from_torch: at prefix="bn." stands no norm along names="C":\n'
        "  - missing: running_var\n"
        "  - unexpected: kernel\n"
        '  - weight: shape (3, 3), but names="C" is one axis\n'
        "  - bias: shape (5,), but C must have size 4\n"
        "  - running_mean: shape (3,), but C must have size 4\n"
        "  - shapes differ: weight (3, 3), bias (5,), running_mean (3,)\n"
        "  - eps=None is a default of RMSNorm, which has neither bias nor statistics"
    )


@pytest.mark.parametrize(
    ("prefix", "near"),
    [
        ("bn2.", "Near it: 'bn1.'"),
        ("0.bn1.", "Near it: 'layer1.0.bn1.'"),
        ("module.layer1.0.bn1.", "'layer1.0.bn1.'"),
        ("head.", "among 19 arrays. A norm that has no arrays: affine=False"),
    ],
)
def test_a_prefix_with_nothing_under_it_is_an_error_that_names_what_is_near(prefix, near):
    assert near in refusal(MODEL, prefix=prefix)


def test_a_prefix_without_its_dot_is_no_other_layer():
    message = refusal(MODEL, prefix="layer1.0.bn1")
    assert "unexpected: .weight, .bias, .running_mean" in message
    assert 'the prefix lacks its dot: prefix="layer1.0.bn1." has weight, bias, running_mean, running_var' in message
    message = refusal({"bn.weight": np.ones(3), "bn.bias": np.ones(3)}, prefix="bn")
    assert 'the prefix lacks its dot: prefix="bn." has weight, bias' in message


def test_what_is_infinite_in_the_checkpoint_or_fits_under_x64_is_no_overflow(x64):
    arrays = batch(running_var=np.array([1e300, np.inf, np.nan]))
    np.testing.assert_array_equal(from_torch(arrays).state.var, arrays["running_var"])


@pytest.mark.parametrize(
    ("tensors", "options", "words"),
    [
        ([np.ones(3)], {}, "tensors must be a state_dict, with a string for each array"),
        ({1: np.ones(3)}, {}, "tensors must be a state_dict"),
        (batch(), {"prefix": None}, "prefix must be a string"),
        (batch(), {"names": 3}, "names must be a string"),
        (batch(), {"momentum": "0.1"}, "momentum must be a number"),
        (batch(), {"momentum": True}, "momentum must be a number"),
        (batch(), {"eps": "1e-5"}, "eps must be a number"),
    ],
)
def test_an_argument_of_another_type_is_a_type_error(tensors, options, words):
    with pytest.raises(TypeError, match=f"^from_torch: {words}"):
        from_torch(tensors, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"names": "... C"}, 'each axis needs a name of its own; "..." is none'),
        ({"names": "C C"}, "'C' is given twice"),
        ({"names": ""}, "names no axis"),
        ({"sizes": {"D": 3}}, "sizes has 'D', but names are 'C'"),
        ({"momentum": 1.5}, "momentum=1.5 must lie between 0 and 1"),
        ({"eps": -1e-5}, "eps=-1e-05 must be at least 0 and finite"),
        ({"eps": float("nan")}, "eps=nan must be at least 0 and finite"),
    ],
)
def test_an_argument_out_of_its_range_is_a_value_error(options, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        from_torch(batch(), **options)
