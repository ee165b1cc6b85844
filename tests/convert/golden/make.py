"""Writes what PyTorch does after a checkpoint: torch.json, and model.safetensors, which docs/pytorch.md's model saves.

Run as ``python tests/convert/golden/make.py`` where PyTorch and safetensors are installed; JAX need not be. The groups
of the tracked norms have at most 8 entries, so that the variance that PyTorch stores is at least 8/7 of the other one,
and no mean is near 0.
"""

import inspect
import json
import os
import re
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "pytorch.md"
SHAPES = {
    "N C": (6, 3),
    "N C L": (2, 3, 4),
    "N C H W": (2, 3, 2, 2),
    "N D": (3, 6),
    "N H D": (2, 2, 3),
}
BATCHES = 5  # the further updates take them in turn
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


def cases():
    """Name of the case, class, its arguments, the layout of the input."""
    for momentum in (0.1, 0.3, None):
        for affine in (True, False):
            for layout, kind in (("N C", nn.BatchNorm1d), ("N C H W", nn.BatchNorm2d)):
                yield kind, {"num_features": 3, "momentum": momentum, "affine": affine}, layout
    for affine in (True, False):
        untracked = {"num_features": 3, "affine": affine, "track_running_stats": False}
        yield nn.BatchNorm1d, untracked, "N C"
        yield nn.BatchNorm2d, untracked, "N C H W"
        yield nn.InstanceNorm1d, untracked, "N C L"
        yield nn.InstanceNorm2d, untracked, "N C H W"
        tracked = {"num_features": 3, "affine": affine, "track_running_stats": True}
        yield nn.InstanceNorm1d, tracked | {"momentum": 0.1}, "N C L"
        yield nn.InstanceNorm2d, tracked | {"momentum": 0.3}, "N C H W"
        yield nn.InstanceNorm1d, tracked | {"momentum": None}, "N C L"
        yield nn.GroupNorm, {"num_groups": 1, "num_channels": 3, "affine": affine}, "N C L"
        yield nn.GroupNorm, {"num_groups": 3, "num_channels": 6, "affine": affine}, "N D"
        yield nn.LayerNorm, {"normalized_shape": 6, "elementwise_affine": affine}, "N D"
        yield nn.RMSNorm, {"normalized_shape": 6, "elementwise_affine": affine}, "N D"
    yield nn.BatchNorm1d, {"num_features": 3, "bias": False, "eps": 1e-2}, "N C L"
    yield nn.LayerNorm, {"normalized_shape": 6, "bias": False}, "N D"
    yield nn.LayerNorm, {"normalized_shape": (2, 3), "eps": 0.1}, "N H D"
    yield nn.RMSNorm, {"normalized_shape": 6, "eps": 0.1}, "N D"
    yield nn.RMSNorm, {"normalized_shape": (2, 3)}, "N H D"
    yield nn.BatchNorm1d, {"num_features": 3, "dtype": "float64"}, "N C"
    yield nn.BatchNorm2d, {"num_features": 3, "momentum": None, "dtype": "float64"}, "N C H W"
    yield nn.RMSNorm, {"normalized_shape": 6, "dtype": "float64"}, "N D"
    for dtype in ("bfloat16", "float16"):
        yield nn.BatchNorm2d, {"num_features": 3, "dtype": dtype}, "N C H W"
        yield nn.LayerNorm, {"normalized_shape": 6, "dtype": dtype}, "N D"
        yield nn.RMSNorm, {"normalized_shape": 6, "dtype": dtype}, "N D"


def batches(shape: tuple[int, ...]) -> torch.Tensor:
    """Batches of multiples of 1/32, which every dtype of the cases holds, with features of unlike means."""
    mean = torch.linspace(1, 3, shape[1]).reshape(-1, *[1] * (len(shape) - 2))
    noise = torch.randn(BATCHES, *shape, generator=torch.Generator().manual_seed(sum(shape)))
    return torch.round(32 * (noise + mean).clamp(-7.9, 7.9)) / 32


def numbers(tensor: torch.Tensor):
    """Nested lists of the shortest decimals that give the same number in the tensor's dtype."""
    if tensor.ndim:
        return [numbers(part) for part in tensor]
    return float(str(tensor.detach().float().numpy())) if tensor.dtype != torch.float64 else tensor.item()


def stored(module: nn.Module) -> dict:
    return {
        key: int(value) if key == "num_batches_tracked" else numbers(value)
        for key, value in module.state_dict().items()
    }


def statistics(module: nn.Module) -> dict:
    return {key: value for key, value in stored(module).items() if key not in ("weight", "bias")}


def played(kind: type, arguments: dict, layout: str) -> dict:
    """The checkpoint after some updates, and what its layer does from then on."""
    dtype = DTYPES.get(arguments.get("dtype"), torch.float32)
    module = kind(**arguments | {"dtype": dtype})
    generator = torch.Generator().manual_seed(len(layout))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.5 * torch.randn(parameter.shape, generator=generator).to(dtype)
    inputs = batches(SHAPES[layout]).to(dtype)
    for x in inputs[:3]:
        module(2 * x)
    row = {"class": kind.__name__, "arguments": arguments, "layout": layout, "checkpoint": stored(module)}
    row["evaluation"] = numbers(module.eval()(inputs[0]))
    # Statistics of 2 bytes are rounded at each update, which normjax would not do.
    if getattr(module, "track_running_stats", False) and dtype.itemsize > 2:
        row["training"] = numbers(module.train()(inputs[0]))
        row["after 1"] = statistics(module)
        for i in range(1, 100):
            module(inputs[i % BATCHES])
        row["after 100"] = statistics(module)
        row["evaluation after 100"] = numbers(module.eval()(inputs[0]))
    return row


def saved_by_the_page() -> dict:
    """Runs the page's program for PyTorch, which saves model.safetensors here, and says what its model does next."""
    (block,) = re.findall(r"^```python\n(import torch\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    os.chdir(HERE)
    names: dict = {}
    exec(block, names)
    model, x = names["model"], batches((7, 8))[0]
    evaluation = numbers(model.eval()(x))
    training = numbers(model.train()(x))
    return {"x": numbers(x), "evaluation": evaluation, "training": training, "after 1": statistics(model[1])}


def bfloat16_is_off_by(momentum: float) -> float:
    """The largest relative error that 100 updates in bfloat16 leave in a running mean or variance."""
    wide, narrow = nn.BatchNorm1d(64, momentum=momentum), nn.BatchNorm1d(64, momentum=momentum).bfloat16()
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        x = (2 + torch.randn(32, 64, generator=generator)).bfloat16()
        wide(x.float()), narrow(x)
    pairs = (wide.running_mean, narrow.running_mean), (wide.running_var, narrow.running_var)
    return max(((right - seen) / right).abs().max().item() for right, seen in pairs)


def defaults() -> dict[str, dict]:
    """The default arguments of each layer."""
    kinds = (nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm1d, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    named = ("momentum", "eps", "affine", "elementwise_affine", "bias", "track_running_stats")
    return {
        kind.__name__: {name: p.default for name, p in inspect.signature(kind).parameters.items() if name in named}
        for kind in kinds
    }


@torch.no_grad()
def rows() -> list[dict]:
    return [played(*case) for case in cases()]


def main() -> None:
    golden = {
        "torch": torch.__version__,
        "inputs": {layout: numbers(batches(shape)) for layout, shape in SHAPES.items()},
        "cases": rows(),
        "defaults": defaults(),
        "page": saved_by_the_page(),
        "bfloat16 off by": {momentum: round(bfloat16_is_off_by(momentum), 4) for momentum in (0.1, 0.01)},
    }
    text = json.dumps(golden, separators=(",", ":"))
    (HERE / "torch.json").write_text(
        re.sub(r'(?=\{"class"|"cases"|"defaults"|"page"|"bfloat16 off)', "\n", text) + "\n"
    )


if __name__ == "__main__":
    main()
