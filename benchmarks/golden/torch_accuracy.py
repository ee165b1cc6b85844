"""Writes torch_accuracy.json, PyTorch's column of the table that ``python -m benchmarks.accuracy`` prints.

Run as ``python -m benchmarks.golden.torch_accuracy`` where PyTorch is installed; JAX need not be.
"""

import json
from pathlib import Path

import torch
from torch.nn import functional as F

from benchmarks.stress import EPS, Stress, inputs


def normalized(stress: Stress) -> torch.Tensor:
    """PyTorch's answer, without scale and bias."""
    x = torch.from_numpy(stress.x)
    if stress.family == "batch":
        return F.batch_norm(x, None, None, training=True, eps=EPS)
    norm = F.layer_norm if stress.family == "layer" else F.rms_norm
    return norm(x, x.shape[1:], eps=EPS)


def main() -> None:
    rows = {
        f"{stress.family}: {stress.name}": {
            "input": stress.fingerprint(),
            "error": stress.error(normalized(stress)),
        }
        for stress in inputs()
    }
    path = Path(__file__).with_suffix(".json")
    path.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
