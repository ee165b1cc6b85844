"""The table "how far from float64" of the README: ``python -m benchmarks.accuracy`` prints it.

All four normalise the same float32 inputs with eps = 1e-5 and without scale and bias. PyTorch's numbers come from
``golden/torch_accuracy.json``, written by the script beside it; the others are computed here.
"""

import json
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import jax
from flax import nnx

import normjax as nj
from benchmarks.arguments import Parser
from benchmarks.stress import AXIS_NAMES, EPS, LAYOUT, Stress, inputs

GOLDEN = Path(__file__).parent / "golden" / "torch_accuracy.json"


@partial(jax.jit, static_argnames="family")
def by_normjax(x, *, family: str) -> jax.Array:
    y, _ = nj.normalize(x, layout=LAYOUT, axis_names=AXIS_NAMES[family], center=family != "rms", eps=EPS)
    return y


@partial(jax.jit, static_argnames=("family", "fast"))
def by_flax(x, *, family: str, fast: bool) -> jax.Array:
    arguments = {"epsilon": EPS, "use_scale": False, "use_fast_variance": fast, "rngs": nnx.Rngs(0)}
    if family == "rms":
        return nnx.RMSNorm(x.shape[-1], **arguments)(x)
    if family == "layer":
        return nnx.LayerNorm(x.shape[-1], use_bias=False, **arguments)(x)
    return nnx.BatchNorm(x.shape[-1], use_bias=False, use_running_average=False, **arguments)(x)


CONTESTANTS: dict[str, Callable[..., jax.Array]] = {
    "normjax": by_normjax,
    "Flax default": partial(by_flax, fast=True),
    "Flax two-pass": partial(by_flax, fast=False),
}


def by_torch(golden: dict, stress: Stress) -> float:
    row = golden["rows"][f"{stress.family}: {stress.name}"]
    if row["input"] != stress.fingerprint():
        raise ValueError(f"{GOLDEN.name} was made from another '{stress.name}': run its script again")
    return row["error"]


def rows() -> list[tuple[str, str, dict[str, float]]]:
    """Name, family and each contestant's error, for every input."""
    golden = json.loads(GOLDEN.read_text())
    table = []
    for stress in inputs():
        errors = {
            name: stress.error(function(stress.x, family=stress.family)) for name, function in CONTESTANTS.items()
        }
        table.append((stress.name, stress.family, errors | {"PyTorch": by_torch(golden, stress)}))
    return table


def table() -> str:
    """The rows in Markdown, each error to one significant digit."""
    measured = rows()
    names = list(measured[0][2])
    lines = ["| input | norm | " + " | ".join(names) + " |", "| --- | --- |" + " ---: |" * len(names)]
    for name, family, errors in measured:
        lines.append(f"| {name} | {family} | " + " | ".join(_short(errors[key]) for key in names) + " |")
    return "\n".join(lines)


def versions() -> str:
    """What the numbers were measured with."""
    torch = json.loads(GOLDEN.read_text())["torch"].partition("+")[0]
    return f"jax {version('jax')}, flax {version('flax')}, torch {torch}, {jax.default_backend()}"


def _short(error: float) -> str:
    if error == 0 or error != error:
        return "0" if error == 0 else "NaN"
    return f"{error:.0e}".replace("e-0", "e-").replace("e+0", "e").replace("e0", "")


if __name__ == "__main__":
    Parser("python -m benchmarks.accuracy", description=__doc__).parse_args()
    print(table())
    print(f"\n{versions()}")
