"""Compiles norms for an H200 and a TPU v5e that are not there, and prints what each program does."""

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.arguments import Parser, files, positive
from benchmarks.deviceless import programs
from benchmarks.deviceless.apart import TIMEOUT, CompileFailed, measure_apart
from benchmarks.deviceless.targets import TARGETS

REQUIREMENTS = "benchmarks/deviceless/requirements.txt"
EPILOG = f"""how to install it: in an environment of its own, as {REQUIREMENTS} says.
how long it takes: each program some seconds, in a process of its own.
the tests that hold these counts to their bounds: python -m pytest -m deviceless tests/benchmarks

columns: moved MB is what the kernels read and write together, block by block; × ideal is that over each input and
output once. The part "forward apart" is the forward of a gradient in a program of its own, with what it saves
(saved MB) for "backward apart"; "value and vjp" has both in one program, "checked" too, in a checked shard_map.
Collectives are in order, with their bytes.
"""
COLUMNS = (
    "program",
    "part",
    "by",
    "moved MB",
    "× ideal",
    "kernels",
    "temporaries MB",
    "peak MB",
    "saved MB",
    "collectives, bytes",
)


def cases() -> Iterator[tuple[str, str, str, Callable, tuple]]:
    """(program, part, implementation, function that builds it, its arguments)."""
    for implementation in programs.IMPLEMENTATIONS:
        for name in programs.NORMS:
            for part in programs.PASSES:
                yield name, part, implementation, programs.norm, (name, part, implementation)
        for part in programs.SYNCHRONISED:
            yield "batch norm, 8 chips", part, implementation, programs.synchronised, (part, implementation)
        yield "transformer", "training step", implementation, programs.transformer_step, (implementation,)


def measured(target: str, case, timeout: float) -> dict[str, Any]:
    """One row: what was compiled, and the counts or the error."""
    name, part, implementation, build, arguments = case
    row = {"target": target, "program": name, "part": part, "by": implementation}
    try:
        row.update(measure_apart(target, build, *arguments, timeout=timeout))
    except CompileFailed as failure:
        return row | {"error": str(failure)}
    if name in programs.NORMS:
        row["ideal"] = programs.ideal_bytes(name, part)
    return row


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    cells = [row["program"], row["part"], row["by"]]
    if "error" in row:
        return "| " + " | ".join([*cells, "failed: " + row["error"].splitlines()[-1]]) + " |"

    def megabytes(key):
        return "" if row.get(key) is None else f"{row[key] / 1e6:.1f}"

    ratio = f"{row['moved'] / row['ideal']:.2f}" if "ideal" in row else ""
    payloads = ", ".join(f"{name} {size}" for name, size in row["collectives"])
    memory = [megabytes(key) for key in ("temporaries", "peak", "saved")]
    cells += [megabytes("moved"), ratio, str(row["kernels"]), *memory, payloads]
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        "python -m benchmarks.deviceless",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--target", choices=TARGETS, nargs="+", default=TARGETS, help="chips (all)")
    parser.add_argument("--only", default="", help="programs whose name contains this")
    implementations = programs.IMPLEMENTATIONS
    parser.add_argument("--by", choices=implementations, nargs="+", default=implementations, help="whose norm (all)")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of the table")
    parser.add_argument("--out", type=Path, help="a file to write JSON lines to as well")
    parser.add_argument("--timeout", type=positive, default=int(TIMEOUT), help="seconds for each compile (%(default)s)")
    jobs = math.ceil((os.cpu_count() or 1) / 2)
    parser.add_argument("--jobs", type=positive, default=jobs, help="compiles at a time (%(default)s)")
    options = parser.parse_args(arguments)
    try:
        versions = {"jax": version("jax"), "libtpu": version("libtpu"), "cuda": version("jax-cuda13-pjrt")}
    except PackageNotFoundError as error:
        parser.error(f"{error.name} is not installed: in an environment of its own, follow {REQUIREMENTS}.")
    chosen = [case for case in cases() if options.only in case[0] and case[2] in options.by]
    if not chosen:
        parser.error(f"argument --only: no program's name contains {options.only!r}.")
    chosen.sort(key=lambda case: (case[0], case[1]))
    with files():
        out = open(options.out or os.devnull, "w")  # noqa: SIM115
    failed = False
    with ThreadPoolExecutor(options.jobs) as pool, out:
        for target in options.target:
            if not options.json:
                print(f"\n{target}, {versions}\n\n| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
            for row in pool.map(lambda case, target=target: measured(target, case, options.timeout), chosen):
                failed |= "error" in row
                record = json.dumps(row | versions)
                print(record, file=out, flush=True)
                print(record if options.json else line(row), flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
