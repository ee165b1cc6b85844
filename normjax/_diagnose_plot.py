"""The picture of a report; it needs matplotlib."""

from typing import Any

import numpy as np
from matplotlib import pyplot

from normjax._diagnose_faults import TINY
from normjax._diagnose_report import Report

_FINE, _FAR, _LIMIT = "#0072B2", "#D55E00", "#555555"  # Okabe and Ito, and grey


def figure(report: Report) -> Any:
    """Two panels that share the layers as their rows."""
    rows = np.arange(len(report.layers))
    size = (9, 1.8 + 0.32 * max(3, len(rows)))
    drawn, (far, noisy) = pyplot.subplots(1, 2, figsize=size, layout="constrained", sharey=True, width_ratios=(2, 1))
    _distances(far, report)
    noises = np.asarray(report.noises, float)
    most = 1 / np.sqrt(TINY)
    noisy.barh(rows, np.nan_to_num(noises), color=[_FAR if noise > most else _FINE for noise in noises], height=0.5)
    noisy.axvline(most, color=_LIMIT, linestyle=":", label=f"that of {TINY} entries")
    noisy.set(xlabel="standard error of a batch mean (std)", title="Noise of batch means")
    noisy.set_xlim(0, max(0.5, 1.1 * float(np.nanmax(noises, initial=0))))
    faulty = {finding.layer for finding in report.findings}
    far.set_yticks(rows, [f"{name} *" if name in faulty else name for name in report.layers])
    if faulty.intersection(report.layers):
        far.set_ylabel("layer (* has a finding)")
    far.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    for axis in (far, noisy):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="x", alpha=0.3)
    handles = [*far.get_legend_handles_labels()[0], *noisy.get_legend_handles_labels()[0]]
    drawn.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
    found = ", ".join(dict.fromkeys(finding.fault for finding in report.findings))
    drawn.suptitle(f"found: {found}" if found else "nothing found", fontsize=11)
    return drawn


def _distances(axis: Any, report: Report) -> None:
    """A dot for each channel, and each layer's limit."""
    known = [each[np.isfinite(each)] for each in report.distances]
    largest = max([10.0, *(float(each.max()) for each in known if each.size)])
    for row, (each, limit) in enumerate(zip(known, report.limits, strict=True)):
        beyond = each > limit
        for part, colour in ((each[~beyond], _FINE), (each[beyond], _FAR)):
            axis.plot(part, np.full(part.size, row), "o", color=colour, markersize=4, alpha=0.5, markeredgewidth=0)
        if np.isfinite(limit):
            axis.plot([limit, limit], [row - 0.3, row + 0.3], color=_LIMIT, label=None if row else "limit of chance")
    axis.plot([], [], "o", color=_FINE, markersize=4, label="a channel")
    if any(np.any(each > limit) for each, limit in zip(known, report.limits, strict=True)):
        axis.plot([], [], "o", color=_FAR, markersize=4, label="a channel beyond it")
    axis.set_xscale("symlog", linthresh=10)
    ticks = [step * 10**power for power in range(20) for step in (1, 3) if 10 <= step * 10**power <= 2 * largest]
    axis.set_xticks([0, 5, *ticks], [f"{tick:g}" for tick in (0, 5, *ticks)])
    axis.set_xlim(0, 2 * largest)
    axis.set(xlabel="distance in standard errors (logarithmic from 10)", title="Batch moments from running statistics")
