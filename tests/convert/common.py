"""What PyTorch did after a checkpoint (golden/make.py), and the same layers here."""

import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import normjax as nj
from tests.quick import quick_jit

GOLDEN = Path(__file__).parent / "golden"
EVALUATION, STATISTICS = 5e-6, 2e-6  # how near docs/pytorch.md says that float32 is to PyTorch, all roundings counted
TORCH = json.loads((GOLDEN / "torch.json").read_text())


def dtype_of(case: dict):
    return jnp.dtype(case["arguments"].get("dtype", "float32"))


def inputs(case: dict) -> np.ndarray:
    """The batches that PyTorch was given, which it took in turn."""
    return np.asarray(TORCH["inputs"][case["layout"]], dtype_of(case))


def checkpoint(case: dict) -> dict[str, np.ndarray]:
    """The case's state_dict."""
    arrays = {key: np.asarray(value, dtype_of(case)) for key, value in case["checkpoint"].items()}
    if "num_batches_tracked" in arrays:
        arrays["num_batches_tracked"] = np.asarray(case["checkpoint"]["num_batches_tracked"], np.int64)
    return arrays


def names(case: dict) -> str:
    """The axes that the layer's parameters run along."""
    if case["class"] in ("LayerNorm", "RMSNorm"):
        return case["layout"].removeprefix("N ")
    return case["layout"].split()[1]


def call(case: dict) -> tuple[str, str, str]:
    """Function, layout and axis_names that are the case's layer."""
    kind, layout, arguments = case["class"], case["layout"], case["arguments"]
    positions = layout.split()[2:]
    if kind == "GroupNorm":
        channel = layout.split()[1]
        split = f"{channel}=(G={arguments['num_groups']} K)"
        return "group_norm", layout.replace(channel, split), " ".join(["K", *positions])
    if kind.startswith("InstanceNorm"):
        function = "batch_norm" if arguments.get("track_running_stats") else "instance_norm"
        return function, layout, " ".join(positions)
    if kind.startswith("BatchNorm"):
        return "batch_norm", layout, " ".join(["N", *positions])
    return {"LayerNorm": "layer_norm", "RMSNorm": "rms_norm"}[kind], layout, names(case)


@functools.cache
def program(function: str, layout: str, axis_names: str, eps: float, options: tuple):
    options = dict(options, layout=layout, axis_names=axis_names, eps=eps)
    return quick_jit(functools.partial(getattr(nj, function), **options))


def close(actual, expected, *, m: int, of=np.float32):
    """Within 16·eps·√m of the largest expected number, m being the roundings that add up: entries and updates."""
    expected = np.asarray(expected, np.float64)
    bound = 16 * float(jnp.finfo(of).eps) * np.sqrt(m) * max(1.0, np.abs(expected).max())
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=bound)
