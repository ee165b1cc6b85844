"""Inputs that are hard to normalise in float32, and the error of an answer to them.

NumPy alone, so that the script of any framework sees the same numbers.
"""

import runpy
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

EPS = 1e-5
LAYOUT = "N D"
AXIS_NAMES = {"layer": "D", "rms": "D", "batch": "N"}

# By path: importing the package would import JAX, which the environment of another framework may lack.
_reference = runpy.run_path(str(Path(__file__).parents[1] / "normjax" / "reference.py"))


class Stress(NamedTuple):
    """An input, the norm it is hard for, and its name in the table."""

    name: str
    family: str
    x: np.ndarray

    def fingerprint(self) -> int:
        """A checksum by which two scripts know that they saw the same input."""
        return zlib.crc32(self.x.tobytes())

    def error(self, y) -> float:
        """The largest error of ``y`` against the float64 answer x̂ to this float32 input, over max(1, |x̂|).

        A float32 far from 0 cannot be closer than its own spacing: there the error is relative. NaN anywhere gives NaN.
        """
        exact = _reference["normalize"](
            self.x, layout=LAYOUT, axis_names=AXIS_NAMES[self.family], center=self.family != "rms", eps=EPS
        )
        return float(np.max(np.abs(np.asarray(y, np.float64) - exact) / np.maximum(1, np.abs(exact))))


def inputs() -> list[Stress]:
    """Every input, float32, the same on every machine."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        # On a grid, so that the last bit of a machine's logarithm cannot show.
        return np.round(rng.standard_normal(shape) * 2**16) / 2**16

    constants = np.repeat([[1e6], [0.1], [7.5e10], [1.5678]], 7, axis=1)
    late = normal(64, 1024) + 1e4
    late[:, :128] = 0
    spike = normal(64, 1024)
    spike[:, 0] = 1e6
    one_hot = np.zeros((1, 4096))
    one_hot[0, 0] = 100
    table = [
        ("normal + 2 000, 64 × 256", "layer", normal(64, 256) + 2000),
        ("normal + 10⁴, 64 × 1 024", "layer", normal(64, 1024) + 1e4),
        ("normal + 10⁶, 64 × 1 024", "layer", normal(64, 1024) + 1e6),
        ("40 000, 40 001, 40 002, 40 003", "layer", 40000 + np.arange(4.0)[None]),
        ("constant rows: 10⁶, 0.1, 7.5·10¹⁰, 1.5678", "layer", constants),
        ("rows of ±10²⁰ and ±10³⁰", "layer", np.array([[1e20], [1e30]]) * [1, -1, 1, -1]),
        ("0 in the first eighth, then normal + 10⁴", "layer", late),
        ("one entry of 10⁶ among normal ones", "layer", spike),
        ("0.1 · normal + (0, 10², 10⁴) by column, 4 096 × 3", "batch", 0.1 * normal(4096, 3) + [0, 1e2, 1e4]),
        ("normal + 10⁴, 200 000 × 4", "batch", normal(200_000, 4) + 1e4),
        ("one entry of 100 among 4 096 zeros", "rms", one_hot),
        ("rows of ±10²⁰ and ±10³⁰", "rms", np.array([[1e20], [1e30]]) * [1, -1, 1, -1]),
    ]
    return [Stress(name, family, x.astype(np.float32)) for name, family, x in table]
