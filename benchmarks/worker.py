"""One process of a measurement: checks every contestant, then times them, and writes a JSON line for each.

``python -m benchmarks`` starts several, each with ``python -m benchmarks.worker`` and a JSON object of settings.
"""

import json
import os
import platform
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np

from benchmarks import contestants
from benchmarks.cases import CASES, Case
from benchmarks.contestants import Prepare, Ready
from benchmarks.problems import is_right, problem
from benchmarks.timing import alternate, calls_in_a_turn

PACKAGES = ("jax", "jaxlib", "normjax", "numpy", "flax", "dm-haiku", "equinox", "keras", "torch")


def machine() -> dict[str, Any]:
    """The device and the versions that a line was measured with."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "device": jax.devices()[0].device_kind,
        "processor": _processor(),
        "cpus": len(affinity(0)) if affinity else os.cpu_count(),
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def measure(case: Case, field: Mapping[str, Prepare], *, rounds: int, rng: random.Random) -> list[dict[str, Any]]:
    """One record for every contestant that has such a norm; times where normjax is right."""
    records: dict[str, dict[str, Any]] = {}
    ready: dict[str, Ready] = {}
    for name in rng.sample(list(field), len(field)):
        jax.clear_caches()  # or the first to trace a helper would pay for all
        try:
            contestant = field[name](case, problem(case))
            if contestant is None:
                continue
            errors = contestant.errors(contestant.call())
        except Exception as failure:
            records[name] = {"verdict": "failed", "why": f"{type(failure).__name__}: {failure}".splitlines()[0][:300]}
            continue
        verdict = "right" if is_right(case, errors, contract=name in contestants.GUARDED) else "wrong"
        records[name] = {"verdict": verdict, "errors": errors, "compile_s": contestant.compile_s}
        ready[name] = contestant
    if "normjax" in ready and records["normjax"]["verdict"] == "right":
        calls = calls_in_a_turn(ready["normjax"].call)
        entrants = {name: contestant.call for name, contestant in ready.items()}
        for name, turns in alternate(entrants, rounds=rounds, calls=calls, rng=rng).items():
            times, faults = zip(*turns, strict=True)
            records[name] |= {"times_s": times, "calls": calls, "faults": float(np.median(faults))}
    return [{"contestant": name, **record} for name, record in records.items()]


def run(
    cases: Iterable[Case],
    field: Mapping[str, Prepare],
    emit: Callable[[dict[str, Any]], None],
    *,
    process: int,
    rounds: int,
    memory: str,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Measures the cases in an order of this process's own, the modes of one problem together."""
    rng = random.Random(process)
    cases = list(cases)
    problems = list(dict.fromkeys(case.problem for case in cases))
    rng.shuffle(problems)
    about = {"process": process, "memory": memory, **machine()}
    jax.jit(lambda x: x + 1)(np.ones(8, np.float32)).block_until_ready()  # the first compilation starts the compiler
    ordered = [case for shared in problems for case in cases if case.problem == shared]
    for number, case in enumerate(ordered, 1):
        note(f"process {process}, {number}/{len(ordered)}: {case.key}")
        described = {"case": case.key, "family": case.family, "shape": case.shape, "dtype": case.dtype}
        for record in measure(case, field, rounds=rounds, rng=rng):
            emit({"kind": "time", **described, "mode": case.mode, **record, **about})


def main(settings: dict[str, Any]) -> None:
    """Appends the lines of one process to the file named in the settings."""
    wanted = set(settings["cases"])
    field = contestants.load(settings["contestants"])
    with open(settings["file"], "a") as file:

        def emit(record):
            file.write(json.dumps(record) + "\n")
            file.flush()

        run(
            [case for case in CASES if case.key in wanted],
            field,
            emit,
            process=settings["process"],
            rounds=settings["rounds"],
            memory=settings["memory"],
            note=lambda text: print(text, file=sys.stderr, flush=True),
        )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
