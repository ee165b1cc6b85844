"""Paired times: in every round each contestant is called in random order, and a ratio is formed within the round.

A turn is a pause, in which the threads of the one before come to rest; one call that is not timed; and some that are,
as many for every contestant, of which the median counts. Each result is dropped before the next call.
"""

import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

try:
    import resource
except ImportError:  # no such module on Windows
    resource = None

PAUSE_S = 0.002
TURN_S = 0.004
MOST_CALLS = 50

# What makes allocation equal for all contestants: see the help of `--memory`. glibc reads these when a process starts.
MEMORY = {
    "warm": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"},
    "fresh": {"MALLOC_MMAP_THRESHOLD_": str(2**17)},
}


def environment(memory: str) -> dict[str, str]:
    """A measuring process' variables: the allocator's, no stored programs, and OpenMP threads that rest soon."""
    return {**os.environ, **MEMORY[memory], "JAX_ENABLE_COMPILATION_CACHE": "0", "GOMP_SPINCOUNT": "10000"}


def page_faults() -> int:
    """The pages that this process has touched for the first time so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt if resource else 0


def calls_in_a_turn(call: Callable[[], Any]) -> int:
    """How many timed calls fill a turn."""
    call()
    start = time.perf_counter()
    call()
    return max(1, min(MOST_CALLS, round(TURN_S / (time.perf_counter() - start))))


def turn(call: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Median seconds of a call, and page faults per call."""
    time.sleep(PAUSE_S)
    call()
    before, times = page_faults(), []
    for _ in range(calls):
        start = time.perf_counter()
        result = call()
        times.append(time.perf_counter() - start)
        del result
    return statistics.median(times), (page_faults() - before) / calls


def alternate(
    contestants: Mapping[str, Callable[[], Any]], *, rounds: int, calls: int, rng: random.Random
) -> dict[str, list[tuple[float, float]]]:
    """Every contestant's turns, one in each round, in an order drawn anew for each."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in rng.sample(list(contestants), len(contestants)):
                turns[name].append(turn(contestants[name], calls))
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return turns
