"""The timing suite: ``python -m benchmarks --help``."""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import contestants, render, results
from benchmarks.arguments import Parser, files, positive, refuse, say
from benchmarks.cases import CASES, FAMILIES, Case, select
from benchmarks.imports import ROOT, import_times
from benchmarks.timing import MEMORY, environment
from benchmarks.worker import machine

DESCRIPTION = """\
Times normjax against other libraries, and says how close it comes to a copy of the same bytes.

  python -m benchmarks                       everything: about half an hour on two cores
  python -m benchmarks --quick               the main rows, in under two minutes
  python -m benchmarks --only "layer.*bf16"  the rows whose name the expression is found in
  python -m benchmarks list                  the rows' names
  python -m benchmarks render --out DIR      table and plot again, from the lines stored in DIR

The other libraries: pip install -r benchmarks/requirements.txt. Any that is absent is left out, and named.
"""

METHOD = """\
how it is measured:
  Every contestant gets the same arrays (standard normal, mean 0.5), and its answer is compared with normjax.reference
  in float64 before it is timed, batch norm's new running statistics too (but for PyTorch's, which change in place).
  normjax is held to its contract, x̂ and running statistics within 1e-6; the others to what correct code rounds. One
  that is off is marked `wrong` or `failed` in the table; if it is normjax, the exit status is 1. Times never change
  the exit status.

  forward+backward is the value and its VJP with a random cotangent (gradients of x, scale and bias) in one program. In
  JAX everything is compiled, but for the rows "eager call"; PyTorch is eager, with as many threads as JAX.

  Several processes one after the other, in each of them rounds. In a round every contestant has a turn, in random
  order, and the ratio normjax/other is formed within the round: first the median over the rounds, then median and range
  over the processes. Compiling is timed apart.

  Equal allocation: a result is dropped before the next call of the same contestant. With --memory warm (the default)
  the C allocator keeps what was freed, so that nobody pays for fresh pages; with --memory fresh it gives everything
  back, so that everybody pays for every large array, outputs and temporaries alike. The page faults of each call are in
  the lines and in a table of the report. (These are settings of glibc; elsewhere the column shows what happens.)

what is written to DIR:
  times.jsonl   a line for each contestant, case and process, with device and versions
  table.md      the ratios, compile times and page faults
  ratios.png    the plot, where matplotlib is installed

Where no rows are picked, the time of `import normjax` beyond that of `import jax` is measured too, in seven processes
of its own. What cannot be done ends with one line and status 2.
"""


def expression(text: str) -> str:
    """A regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
    return text


def known(text: str) -> list[str]:
    """Names of contestants, from a list with commas."""
    for name in (names := text.split(",")):
        if name not in contestants.NAMES:
            raise argparse.ArgumentTypeError(f"no contestant {name!r}; there are {', '.join(contestants.NAMES)}")
    return names


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = Parser(
        prog="python -m benchmarks",
        description=DESCRIPTION,
        epilog=METHOD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("action", nargs="?", choices=["run", "list", "render"], default="run")
    options.add_argument("--quick", action="store_true", help="the main rows, one process, five rounds")
    options.add_argument(
        "--only", metavar="REGEX", type=expression, help="rows whose name, as `list` prints it, the expression is in"
    )
    options.add_argument("--family", action="append", default=[], choices=FAMILIES, help="may be given several times")
    options.add_argument(
        "--against",
        metavar="NAMES",
        type=known,
        help=f"comma-separated contestants, instead of all: {', '.join(contestants.NAMES[1:])}",
    )
    options.add_argument("--processes", type=positive, metavar="N", help="how many processes (5; quick: 1)")
    options.add_argument("--rounds", type=positive, metavar="N", help="rounds in each process (11; quick: 5)")
    options.add_argument("--memory", choices=MEMORY, help="how results are allocated, see below")
    options.add_argument(
        "--out", type=Path, metavar="DIR", help="default: runs/benchmarks, or runs/benchmarks-quick; replaced"
    )
    return options


def launch(settings: dict[str, Any]) -> None:
    """Runs one measuring process to its end."""
    command = [sys.executable, "-m", "benchmarks.worker", json.dumps(settings)]
    status = subprocess.run(command, cwd=ROOT, env=environment(settings["memory"])).returncode
    if status:
        raise SystemExit(f"benchmarks: process {settings['process']} ended with status {status}")


# What `list` and `render` make of the options; a run takes all.
TAKEN = {
    "list": ("measures nothing", {"quick", "only", "family"}),
    "render": ("shows every stored line", {"quick", "out"}),
}


def check_taken(options: argparse.Namespace) -> None:
    """Refuses options that the action would not heed."""
    if options.action in TAKEN:
        does, taken = TAKEN[options.action]
        for name, value in vars(options).items():
            if name != "action" and value and name not in taken:
                refuse(f"`{options.action}` {does}, and takes no --{name}")


def chosen(given: Sequence[str] | None) -> list[str]:
    """The contestants asked for that are installed; the absent ones are named on stderr."""
    names = list(contestants.NAMES) if given is None else ["normjax", *given]
    absent = [name for name in contestants.missing() if name in names]
    if absent:
        say(f"not installed, left out: {', '.join(absent)} (pip install -r benchmarks/requirements.txt)")
    return [name for name in contestants.NAMES if name in names and name not in absent]


def measure(
    cases: Sequence[Case],
    file: Path,
    *,
    names: Sequence[str],
    processes: int,
    rounds: int,
    memory: str,
    imports: bool,
    launch: Callable[[dict[str, Any]], None],
) -> None:
    """Writes the lines of all processes to the file, and with `imports` how long importing takes."""
    with files():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    common = {"cases": [case.key for case in cases], "contestants": list(names), "file": str(file.resolve())}
    for process in range(processes):
        launch({**common, "process": process, "rounds": rounds, "memory": memory})
    if imports:
        about = machine()
        with file.open("a") as lines:
            for record in import_times():
                lines.write(json.dumps(record | about) + "\n")


def show(out: Path) -> list[dict[str, Any]]:
    """Prints the table of the stored lines, writes it and the plot beside them, and returns the lines."""
    with files():
        try:
            lines = results.read(out / "times.jsonl")
        except ValueError as error:
            refuse(str(error))
    text = render.report(lines)
    with files():
        (out / "table.md").write_text(text)
    print(text)
    try:
        with files():
            drawn = render.plot(lines, out / "ratios.png")
    except ModuleNotFoundError as absent:
        say(f"no plot: {absent.name} is not installed (pip install -r benchmarks/requirements.txt)")
        drawn = False
    say(f"written to {out}: times.jsonl, table.md{', ratios.png' if drawn else ''}")
    return lines


def main(arguments: Sequence[str] | None = None, launch: Callable[[dict[str, Any]], None] = launch) -> int:
    """Returns the exit status: 1 where an answer of normjax is wrong."""
    options = parser().parse_args(arguments)
    check_taken(options)
    out = options.out or Path("runs") / ("benchmarks-quick" if options.quick else "benchmarks")
    cases = select(CASES, quick=options.quick, only=options.only, families=options.family)
    if not cases:
        refuse("no row matches; `python -m benchmarks list` prints their names")
    if options.action == "list":
        with contextlib.suppress(BrokenPipeError):  # `... | head`
            print("\n".join(case.key for case in cases), flush=True)
        return 0
    if options.action == "run":
        start = time.perf_counter()
        measure(
            cases,
            out / "times.jsonl",
            names=chosen(options.against),
            processes=options.processes or (1 if options.quick else 5),
            rounds=options.rounds or (5 if options.quick else 11),
            memory=options.memory or "warm",
            imports=not (options.only or options.family),
            launch=launch,
        )
        say(f"measured in {time.perf_counter() - start:.0f} s")
    wrong = results.wrong_answers(show(out))
    for line in wrong:
        say(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
