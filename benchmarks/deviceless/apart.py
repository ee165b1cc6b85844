"""Compiles in a process of its own, with a time limit. Imports no JAX, since the process must choose how JAX starts."""

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT = 300.0
# No accelerator is here, and libtpu must not ask the network which one it is.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "-1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it locks a chip that is not here
}
_MARK = "normjax-deviceless:"


class CompileFailed(Exception):
    """The process that compiled crashed, hung or raised."""


def measure_apart(target: str, build: Callable, *arguments, timeout: float = TIMEOUT) -> dict[str, Any]:
    """Returns `targets.measure` of build(*arguments), a `targets.Program`, from a process of its own.

    Args:
      target: the chip, "h200" or "v5e".
      build: a function that can be imported by name.
      *arguments: what pickles.
      timeout: seconds.

    Raises:
      CompileFailed: with what the process wrote, if it did not end well.
    """
    job = pickle.dumps((target, build, arguments))
    command = [sys.executable, "-m", __name__]
    where = {"env": {**os.environ, **ENVIRONMENT}, "cwd": ROOT}
    try:
        done = subprocess.run(command, input=job, capture_output=True, timeout=timeout, check=False, **where)
    except subprocess.TimeoutExpired:
        raise CompileFailed(f"{target}, {build.__name__}{arguments}: no end after {timeout:.0f} seconds") from None
    for line in done.stdout.decode().splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    wrote = done.stderr.decode(errors="replace")[-4000:]
    raise CompileFailed(f"{target}, {build.__name__}{arguments}: exit code {done.returncode}\n{wrote}")


def _main() -> None:
    job = sys.stdin.buffer.read()
    from benchmarks.deviceless.targets import measure

    target, build, arguments = pickle.loads(job)
    print(_MARK + json.dumps(measure(target, build(*arguments))))


if __name__ == "__main__":
    _main()
