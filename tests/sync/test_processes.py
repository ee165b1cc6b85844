"""Two processes with two devices each equal one process with four, by shard_map, jit and pmap."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from normjax import reference
from tests.sync import worker

ROOT = Path(__file__).parents[2]
PROCESSES, DEVICES_EACH = 2, 2
RESULTS = ("y", "dx", "dscale", "dbias", "mean", "var")
# What jax.distributed says of a port that is taken: jax 0.10 the first alone.
TAKEN = re.compile("No address added|in use")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_all(commands, logs, seconds: float) -> list[subprocess.Popen]:
    """Runs commands side by side until all have ended, one has failed or the time is up; none outlives this call."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("XLA_FLAGS", None)
    started, deadline = [], time.monotonic() + seconds
    try:
        for command, path in zip(commands, logs, strict=True):
            with path.open("w") as log:
                started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
        while time.monotonic() < deadline:
            codes = [process.poll() for process in started]
            if any(codes) or None not in codes:
                break
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
            process.wait()
    return started


def on_a_port(
    commands: Callable[[int], Sequence[list[str]]], logs: Sequence[Path], find: Callable[[], int] = free_port
) -> list[str]:
    """What each of the commands for a port wrote, once all have ended well; AssertionError with it otherwise.

    Where another program took the port in between, they have two more attempts.
    """
    for _ in range(3):
        # A few seconds are enough; a machine that is busy with other tests takes longer.
        ended = run_all(commands(find()), logs, seconds=100)
        said = [log.read_text() for log in logs]
        if all(process.returncode == 0 for process in ended):
            return said
        if not any(TAKEN.search(text) for text in said):
            break
    raise AssertionError("\n".join(said))


def held_by_processes(folder: Path) -> list[dict[str, np.ndarray]]:
    """What each process held in the end."""
    files = [folder / str(process) for process in range(PROCESSES)]

    def commands(port):
        return [
            [sys.executable, "-m", "tests.sync.worker", *map(str, (port, process, PROCESSES, DEVICES_EACH, path))]
            for process, path in enumerate(files)
        ]

    on_a_port(commands, [path.with_suffix(".log") for path in files])
    return [dict(np.load(path.with_suffix(".npz"))) for path in files]


def on_one_device() -> dict[str, np.ndarray]:
    x, g, where, scale, bias = worker.inputs(PROCESSES * DEVICES_EACH)
    spec = {"layout": "S N C", "axis_names": "S N", "where": where}
    y = reference.normalize(x, scale, bias, names="C", **spec)
    slopes = reference.backward(x, g, scale, bias, names="C", **spec)
    start = np.zeros(worker.FEATURES), np.ones(worker.FEATURES), np.zeros(worker.FEATURES)
    batch = reference.moments(x, **spec)
    moved = reference.update(*start, *batch, rule="ema", new_weight=0.5, unbiased=True)[:2]
    return dict(zip(RESULTS, (y, *slopes, *moved), strict=True))


def test_two_processes_equal_one_process_and_one_device(tmp_path, x64):
    held = held_by_processes(tmp_path)
    one_process = worker.results(jax.devices()[: PROCESSES * DEVICES_EACH])
    for name, exact in on_one_device().items():
        for way in worker.WAYS:
            key = f"{way} {name}"
            several = np.concatenate([process[key] for process in held])
            np.testing.assert_allclose(several, one_process[key], rtol=1e-10, atol=1e-10, err_msg=key)
            wanted = np.broadcast_to(exact, several.shape)
            np.testing.assert_allclose(several, wanted, rtol=1e-10, atol=1e-10, err_msg=key)


@pytest.mark.parametrize("other", ["import time; time.sleep(60)", "raise SystemExit(3)"])
def test_no_process_is_left_behind_by_one_that_hangs_or_fails(other, tmp_path):
    commands = [[sys.executable, "-c", code] for code in ("import time; time.sleep(60)", other)]
    began = time.monotonic()
    ended = run_all(commands, [tmp_path / "0.log", tmp_path / "1.log"], seconds=1)
    assert time.monotonic() - began < 30
    for process in ended:
        assert process.returncode != 0
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_a_port_that_another_program_took_is_tried_no_further(tmp_path):
    code = "import jax; jax.distributed.initialize('127.0.0.1:{0}', 1, 0); print({0}); jax.distributed.shutdown()"
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken, free = other.getsockname()[1], free_port()
        ports = iter([taken, free])
        said = on_a_port(
            lambda port: [[sys.executable, "-c", code.format(port)]], [tmp_path / "log"], lambda: next(ports)
        )
    assert str(free) in said[0].split()


def test_processes_that_fail_by_themselves_have_one_attempt(tmp_path):
    ports = iter([1])
    with pytest.raises(AssertionError, match="no such norm"):
        on_a_port(
            lambda port: [[sys.executable, "-c", "raise SystemExit('no such norm')"]],
            [tmp_path / "log"],
            lambda: next(ports),
        )
