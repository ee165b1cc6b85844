"""The table and the plot of stored lines."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.cases import BOTH, CASES, FORWARD
from benchmarks.contestants import NAMES
from benchmarks.results import Line, Ratio, Row, rows

# One colour and mark for each contestant, the same in every plot.
MARKS = {
    "autodiff": ("tab:gray", "X"),
    "linen": ("tab:blue", "o"),
    "nnx": ("tab:cyan", "s"),
    "haiku": ("tab:purple", "v"),
    "equinox": ("tab:green", "^"),
    "keras": ("tab:red", "P"),
    "torch": ("tab:orange", "D"),
    "copy": ("black", "|"),
}
LABELS = {"autodiff": 'derivative="autodiff"', "torch": "PyTorch", "copy": "copy (the limit)"}


def report(lines: Sequence[Line]) -> str:
    """Everything that is known from the lines, in Markdown."""
    measured = rows(lines)
    parts = [conditions(lines)]
    plotted = {case.key for case in CASES if case.plot}
    for mode in (BOTH, FORWARD):
        short = [row for row in measured if row.mode == mode and row.key in plotted and row.label.endswith("f32")]
        if short:
            parts += [f"### {mode}, in short", short_table(short)]
    for mode in (BOTH, FORWARD):
        of_mode = [row for row in measured if row.mode == mode]
        if of_mode:
            parts += [f"### {mode}", ratio_table(of_mode)]
    if measured:
        parts += ["### Seconds to trace and compile", number_table(measured, lambda row: row.compile_s, ".2f")]
        parts += ["### Page faults in a call", number_table(measured, lambda row: row.faults, ".0f")]
    if any(line["kind"] == "import" for line in lines):
        parts.append(imports(lines))
    return "\n\n".join(parts) + "\n"


def conditions(lines: Iterable[Line]) -> str:
    """What was measured with, and how to read the numbers."""
    timed = [line for line in lines if "times_s" in line]
    about = sorted({_about(line) for line in timed})
    processes = len({line["process"] for line in timed})
    rounds = sorted({len(line["times_s"]) for line in timed})
    return (
        f"Time of normjax over another's: below 1 normjax is faster. Median over {processes} processes of the median "
        f"of {'/'.join(map(str, rounds))} paired rounds; in brackets the least and the greatest process. `wrong`: its "
        "answer is not that of the reference. An empty cell: no such norm there, or not installed.\n\n"
        + "\n\n".join(about)
    )


def _about(line: Line) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in line["versions"].items() if name != "normjax")
    memory = f", {line['memory']} memory" if "memory" in line else ""
    where = f"{line['device']}: {line['processor']}, {line['cpus']} CPUs{memory}"
    return f"{where}. Python {line['python']}, {versions}."


def ratio_table(measured: Sequence[Row]) -> str:
    """A row for each case: normjax's milliseconds and compile time, and the ratio to each contestant."""
    names = [name for name in NAMES if any(name in row.ratios for row in measured)]
    cells = []
    for row in measured:
        own = row.seconds.get("normjax")
        first = ["wrong", ""] if own is None else [f"{own * 1e3:.3g}", f"{row.compile_s['normjax']:.2f}"]
        cells.append([row.label, *first, *(_cell(row.ratios.get(name, "")) for name in names)])
    return _markdown(["case", "normjax, ms", "compile, s", *names], cells)


def short_table(measured: Sequence[Row]) -> str:
    """A row for each case, and medians alone."""
    names = [name for name in ("linen", "nnx", "keras", "torch", "copy") if any(name in row.ratios for row in measured)]
    cells = []
    for row in measured:
        medians = [row.ratios.get(name) for name in names]
        cells.append(
            [row.label, f"{row.seconds['normjax'] * 1e3:.3g}" if "normjax" in row.seconds else "wrong"]
            + [f"{ratio.median:.2f}" if isinstance(ratio, Ratio) and ratio.right else "" for ratio in medians]
        )
    return _markdown(["norm", "normjax, ms", *(LABELS.get(name, name) for name in names)], cells)


def number_table(measured: Sequence[Row], number: Callable[[Row], dict[str, float]], form: str) -> str:
    """A row for each case, and one of its numbers for each contestant."""
    names = [name for name in NAMES if any(name in number(row) for row in measured)]
    cells = []
    for row in measured:
        numbers = number(row)
        cells.append([row.key, *(format(numbers[name], form) if name in numbers else "" for name in names)])
    return _markdown(["case", *names], cells)


def imports(lines: Iterable[Line]) -> str:
    """How long `import normjax` takes when JAX is there already."""
    found = [line for line in lines if line["kind"] == "import"]
    ours, jax = ([line[key] * 1e3 for line in found] for key in ("normjax_s", "jax_s"))
    return (
        f"`import normjax` adds {statistics.median(ours):.0f} ms ({min(ours):.0f}–{max(ours):.0f}) to the "
        f"{statistics.median(jax):.0f} ms of `import jax`, in {len(found)} fresh processes. "
        + " ".join(sorted({_about(line) for line in found}))
    )


def _cell(ratio: Ratio | str) -> str:
    if isinstance(ratio, str):
        return ratio
    spread = "" if ratio.low == ratio.high else f" ({ratio.low:.2f}–{ratio.high:.2f})"
    return f"{ratio.median:.2f}{spread}{'' if ratio.right else ', wrong'}"


def _markdown(head: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(lines: Iterable[Line], path: Path) -> bool:
    """Writes a PNG of the ratios of the plotted cases; returns whether there were any."""
    chosen = {case.key for case in CASES if case.plot}
    measured = [row for row in rows(lines) if row.key in chosen and row.ratios]
    if not measured:
        return False
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [(mode, [row for row in measured if row.mode == mode]) for mode in (BOTH, FORWARD)]
    panels = [(mode, rows_of) for mode, rows_of in panels if rows_of]
    heights = [len(rows_of) + 1 for _, rows_of in panels]
    size = (9, 0.4 * sum(heights) + 1.8)
    figure, axes = plt.subplots(
        len(panels), 1, figsize=size, sharex=True, squeeze=False, layout="constrained", height_ratios=heights
    )
    for axis, (mode, rows_of) in zip(axes[:, 0], panels, strict=True):
        _panel(axis, mode, rows_of)
    handles = {}
    for axis in axes[:, 0]:
        drawn, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel(
        "time of normjax / time of the other (left of 1: normjax is faster)\nlines: the range over processes",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return True


def _panel(axis, mode: str, measured: Sequence[Row]) -> None:
    """One mode: a line for each case, a mark for each contestant's ratio, and its range."""
    for line, row in enumerate(measured):
        if line % 2:
            axis.axhspan(line - 0.5, line + 0.5, color="0.95", zorder=0)
        for number, (name, (colour, mark)) in enumerate(MARKS.items()):
            ratio = row.ratios.get(name)
            if isinstance(ratio, Ratio) and ratio.right:
                place = line if name == "copy" else line + 0.7 * ((number + 0.5) / (len(MARKS) - 1) - 0.5)
                axis.plot([ratio.low, ratio.high], [place, place], color=colour, linewidth=1, alpha=0.6)
                face = {} if mark == "|" else {"markeredgecolor": "white", "markeredgewidth": 0.5}
                size = 13 if mark == "|" else 6
                label = LABELS.get(name, name)
                axis.plot(ratio.median, place, mark, color=colour, markersize=size, label=label, zorder=3, **face)
    axis.axvline(1, color="0.3", linewidth=1)
    axis.set_xscale("log")
    axis.set_yticks(range(len(measured)), [row.label for row in measured], fontsize=9)
    axis.set_ylim(len(measured) - 0.5, -0.5)
    low, high = axis.get_xlim()
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if low <= tick <= high]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.grid(axis="x", color="0.85", linewidth=0.6)
    axis.set_title(mode, fontsize=10, loc="left")
