"""`Finding` and `Report`: what was found, as a table, as a picture, and as an error for CI."""

import dataclasses
import textwrap
from typing import Any

import numpy as np

from normjax._extras import require

SEVERITIES = ("warning", "error")
WIDTH = 100  # of the lines that say cause and cure


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault of one layer.

    Attributes:
      fault: its name, one of `normjax.diagnose.FAULTS`.
      layer: its path in the statistics' tree, or in that of the parameters.
      evidence: the numbers that show it.
      cause: what brings it about.
      cure: what to do.
      severity: "error" where evaluation gives wrong numbers, "warning" where accuracy or parameters are wasted.
    """

    fault: str
    layer: str
    evidence: str
    cause: str
    cure: str
    severity: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What `diagnose` found; `print` shows a table.

    Attributes:
      findings: errors first.
      not_checked: what could not be, and what to pass for it.
      layers: the layers with running statistics, by path.
      distances: for each of them, how far its batch moments are from the running ones: the larger of mean and log
        variance of each channel, in standard errors; what cannot be known is left out.
      limits: for each of them, the distance beyond which chance no longer explains it.
      noises: for each of them, the standard error of a batch mean in standard deviations, that of the channels' root
        mean square.
    """

    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...]
    layers: tuple[str, ...]
    distances: tuple[np.ndarray, ...]
    limits: tuple[float, ...]
    noises: tuple[float, ...]

    def __str__(self) -> str:
        """The findings as a table, then each fault's cause and cure, then what was not checked."""
        parts = [_table(self.findings) if self.findings else f"nothing found in {_counted(len(self.layers), 'layer')}"]
        for fault in dict.fromkeys((f.fault, f.cause, f.cure) for f in self.findings):
            parts.append("\n".join([fault[0], _indented("cause", fault[1]), _indented("cure", fault[2])]))
        if self.not_checked:
            parts.append("\n".join(_indented("not checked", text, margin="") for text in self.not_checked))
        return "\n\n".join(parts)

    def raise_if(self, severity: str = "error") -> None:
        """Returns nothing where nothing so severe was found; for tests and CI.

        Args:
          severity: "error", or "warning" for both.

        Raises:
          AssertionError: with the report as its message.
          ValueError: another severity.
        """
        if severity not in SEVERITIES:
            raise ValueError(f'Report.raise_if: severity={severity!r} must be "error" or "warning".')
        grave = SEVERITIES[SEVERITIES.index(severity) :]
        if found := [finding for finding in self.findings if finding.severity in grave]:
            raise AssertionError(f"diagnose found {_counted(len(found), 'fault')}:\n\n{self}")

    def plot(self) -> Any:
        """Returns a figure: how far batches are from the running statistics, and how noisy batch means are, by layer.

        Raises:
          ModuleNotFoundError: matplotlib is missing.
        """
        require("diagnose.Report.plot", "lab", "matplotlib")
        from normjax._diagnose_plot import figure

        return figure(self)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _table(findings) -> str:
    rows = [("severity", "fault", "layer", "evidence")]
    rows += [(f.severity, f.fault, f.layer, f.evidence) for f in findings]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0], rule, *lines[1:]])


def _indented(label: str, text: str, margin: str = "  ") -> str:
    return textwrap.fill(f"{label}: {text}", WIDTH, initial_indent=margin, subsequent_indent=f"{margin}  ")
