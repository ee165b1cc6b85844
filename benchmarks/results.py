"""From JSON lines to ratios: what a stored measurement says, without measuring anything."""

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cases import CASES
from benchmarks.contestants import GUARDED, NAMES

Line = Mapping[str, Any]


class Ratio(NamedTuple):
    """normjax's time over a contestant's: the median over the processes, the least and the greatest.

    `right` is whether the contestant's answer was.
    """

    median: float
    low: float
    high: float
    right: bool


class Row(NamedTuple):
    """What was measured of one case.

    Attributes:
      key: the case's.
      label: the key without the mode.
      mode: forward, or forward+backward.
      seconds: of each contestant that was timed, the median over processes and rounds.
      ratios: of each contestant but normjax; a word where it was not timed.
      compile_s: of each contestant, the median over processes.
      faults: page faults of each contestant's call, the median over processes.
    """

    key: str
    label: str
    mode: str
    seconds: dict[str, float]
    ratios: dict[str, Ratio | str]
    compile_s: dict[str, float]
    faults: dict[str, float]


_ABOUT = {"process", "device", "processor", "cpus", "python", "versions"}
_KEYS = {
    "time": _ABOUT | {"memory", "case", "mode", "contestant", "verdict"},
    "import": _ABOUT | {"jax_s", "normjax_s"},
}


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; ValueError where there is none, or one that is not of a measurement."""
    lines = []
    for number, text in enumerate(path.read_text(errors="replace").splitlines(), 1):
        try:
            line = json.loads(text)
            whole = _KEYS[line["kind"]] <= line.keys()
        except (ValueError, LookupError, TypeError):
            whole = False
        if not whole:
            raise ValueError(f"{path}, line {number}: no line of a measurement: {text[:60]!r}")
        lines.append(line)
    if not lines:
        raise ValueError(f"{path} holds no line")
    return lines


def paired_ratio(own: Sequence[float], other: Sequence[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


def rows(lines: Iterable[Line]) -> list[Row]:
    """A row for each case that has lines, in the order of the suite."""
    by_case: dict[str, list[Line]] = {}
    for line in lines:
        if line["kind"] == "time":
            by_case.setdefault(line["case"], []).append(line)
    order = {case.key: number for number, case in enumerate(CASES)}
    return [_row(key, by_case[key]) for key in sorted(by_case, key=lambda key: order.get(key, len(order)))]


def _row(key: str, lines: list[Line]) -> Row:
    names = [name for name in NAMES if any(line["contestant"] == name for line in lines)]
    of = {name: [line for line in lines if line["contestant"] == name] for name in names}
    timed = {name: [line for line in of[name] if "times_s" in line] for name in names}
    mode = lines[0]["mode"]

    def median(lines_of, name, number):
        values = [number(line) for line in lines_of[name]]
        return {name: statistics.median(values)} if values else {}

    seconds, compile_s, faults = {}, {}, {}
    for name in names:
        seconds |= median(timed, name, lambda line: statistics.median(line["times_s"]))
        compile_s |= median(timed, name, lambda line: line["compile_s"])
        faults |= median(timed, name, lambda line: line["faults"])
    return Row(
        key=key,
        label=key.removesuffix(f" {mode}"),
        mode=mode,
        seconds=seconds,
        ratios={name: _ratio(of[name], timed["normjax"]) for name in names if name != "normjax" and "normjax" in of},
        compile_s=compile_s,
        faults=faults,
    )


def _ratio(lines: list[Line], own: list[Line]) -> Ratio | str:
    verdicts = {line["verdict"] for line in lines}
    if "failed" in verdicts:
        return "failed"
    times = {line["process"]: line["times_s"] for line in lines if "times_s" in line}
    ratios = [paired_ratio(line["times_s"], times[line["process"]]) for line in own if line["process"] in times]
    if not ratios:
        return "wrong" if "wrong" in verdicts else ""
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), "wrong" not in verdicts)


def wrong_answers(lines: Iterable[Line]) -> list[str]:
    """What makes the suite fail: each case in which an answer of normjax is not right."""
    return [
        f"{line['case']}: {line['contestant']} {line['verdict']} in process {line['process']}: "
        f"{line.get('why') or line['errors']}"
        for line in lines
        if line["kind"] == "time" and line["contestant"] in GUARDED and line["verdict"] != "right"
    ]
