"""Plants one fault at a time in a copy of the repository and asks whether the suite notices.

    python -m tests.mutants [--jobs 2] [words of a fault's name]

Each fault replaces one piece of text. The tests most likely to notice run first, and the whole suite where they do not.
Only failing tests kill a mutant: a suite that cannot be collected, or that fails on the unchanged copy, says nothing,
and the run is refused. Exit status: 0 if every mutant was killed, 1 if one lives, 2 if the run was refused.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Whether the faults still apply is no question to ask where one has been applied.
IGNORED = "--ignore=tests/test_mutants.py"
PASSED, FAILED = 0, 1  # pytest's exit codes; every other one means that it could not run
THEORY, PROPERTIES = ("tests/test_theory.py", "-k"), ("tests/test_theory_properties.py", "-k")
CONTRACT, GRADIENT = ("tests/contract", "-k"), ("tests/test_gradient.py", "-k")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault: `old`, which stands once in `file`, becomes `new`; `first` are pytest's arguments to try first."""

    name: str
    file: str
    old: str
    new: str
    first: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Plants the fault under `root`; ValueError where its text does not stand there exactly once."""
        path = root / self.file
        text = path.read_text()
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its text stands {found} times in {self.file}, not once: {self.old!r}")
        path.write_text(text.replace(self.old, self.new))


MUTANTS = (
    Mutant(
        "one-pass variance, E[x²] − E[x]²",
        "normjax/_derivatives.py",
        "checkpoint_name(kept(_shift(pooling, x, wide, where), wide), STATS_NAME)",
        "checkpoint_name(jnp.zeros_like(_shift(pooling, x, wide, where)), STATS_NAME)",
        (*PROPERTIES, "any_finite_input"),
    ),
    Mutant(
        "mean(u) dropped from the backward",
        "normjax/_derivatives.py",
        "-(r * sum_u)",
        "0 * (r * sum_u)",
        (*THEORY, "one_gamma"),
    ),
    Mutant(
        "x̂ mean(u x̂) dropped from the backward",
        "normjax/_derivatives.py",
        "d_var = -0.5 * (r",
        "d_var = 0.0 * (r",
        (*THEORY, "one_gamma"),
    ),
    Mutant(
        "γ pulled out of the layer-norm backward",
        "normjax/_derivatives.py",
        "sum_u, sum_ux = _group_sums(g, near, offset, r, gamma)",
        "sum_u, sum_ux = (total * jnp.mean(gamma) for total in _group_sums(g, near, offset, r))",
        (*THEORY, "one_gamma"),
    ),
    Mutant(
        "unbiased variance in the forward",
        "normjax/_derivatives.py",
        "    return Statistics(shift, offset, checkpoint_name(var, STATS_NAME), count)\n",
        "    m = _group_count(pooling, wide, where)\n"
        "    var = var * (m / jnp.maximum(m - 1, 1))\n"
        "    return Statistics(shift, offset, checkpoint_name(var, STATS_NAME), count)\n",
        (*THEORY, "one_three_five_seven"),
    ),
    Mutant(
        "mask ignored in the count",
        "normjax/_derivatives.py",
        "jnp.sum(where, pooling.axes, dtype",
        "jnp.sum(jnp.ones_like(where), pooling.axes, dtype",
        (*PROPERTIES, "any_split"),
    ),
    Mutant(
        "bfloat16 accumulation",
        "normjax/_inputs.py",
        "    return x, x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)\n",
        "    return x, x\n",
        (*CONTRACT, "bfloat16 and grad"),
    ),
    Mutant(
        "averaging weights swapped",
        "normjax/_running.py",
        "(1 - share) * r + share * b",
        "share * r + (1 - share) * b",
        (*THEORY, "biased_variance"),
    ),
    Mutant(
        "what rounding left out of a device's mean dropped",
        "normjax/_mapped.py",
        "joined((left - HALF) * _unit(means))",
        "joined(0 * left)",
        ("tests/sync/test_collectives.py", "-k", "ten_thousand"),
    ),
    Mutant(
        "state updated in evaluation",
        "normjax/_batch_norm.py",
        "        return y, state\n    _refuse_single_examples",
        "        _, seen = normalize_by(spec, x, wide, None, where=where, eps=eps, dtype=None, derivative=derivative)\n"
        "        return y, updated(fn, state, seen, running)\n"
        "    _refuse_single_examples",
        (*THEORY, "evaluation"),
    ),
    Mutant(
        "state updated in evaluation with batch statistics",
        "normjax/_batch_norm.py",
        "    if train and state is not None:\n",
        "    if state is not None:\n",
        ("tests/test_family.py", "-k", "mode_table"),
    ),
    Mutant(
        "parameters matched by position instead of name",
        "normjax/_axes.py",
        "        array = jnp.reshape(array, [self.expanded[i] for i in order])\n",
        "        last = list(range(len(self.expanded) - len(order), len(self.expanded)))\n"
        "        if [self.expanded[i] for i in last] == [self.expanded[i] for i in order]:\n"
        "            order = last\n"
        "        array = jnp.reshape(array, [self.expanded[i] for i in order])\n",
        (*CONTRACT, "signal and (jit or grad or vmap)"),
    ),
    Mutant(
        "an excluded NaN reaching dγ",
        "normjax/_derivatives.py",
        "        d, g = jnp.where(lost, 0, d), jnp.where(lost, 0, g)\n",
        "        g = jnp.where(lost, 0, g)\n",
        (*GRADIENT, "under_each_mask and NaN"),
    ),
    Mutant(
        "the layer's bias not scaled in folding",
        "normjax/fold.py",
        "    shift = shift * scale\n",
        "    shift = (shift + mean) - mean * scale\n",
        ("tests/fold/test_cases.py", "-k", "bias"),
    ),
    Mutant(
        "a short batch counted as a whole one",
        "normjax/recalibrate.py",
        "np.where(seen, m, 0.0)",
        "np.where(seen, 1.0, 0.0)",
        ("tests/recalibrate", "-k", "three_norms"),
    ),
    Mutant(
        "drift sought ten times as far away",
        "normjax/_diagnose_faults.py",
        "    return float(-stdtrit(",
        "    return 10 * float(-stdtrit(",
        ("tests/diagnose/test_page.py", "-k", "other_data"),
    ),
    Mutant(
        "a distance of one moment taken with the certainty of the other",
        "normjax/_diagnose_faults.py",
        "grave = (errors > beyond) & (offsets > DRIFT)",
        "grave = np.any(errors > beyond, 0) & (offsets > DRIFT)",
        ("tests/diagnose/test_told_apart.py", "-k", "same_moment"),
    ),
    Mutant(
        "an unbiased running variance taken for a biased one",
        "normjax/recalibrate.py",
        "        if self.inverse_m:\n",
        "        if False:\n",
        ("tests/recalibrate", "-k", "whatever_average"),
    ),
    Mutant(
        "folded though another module has the norm's scope",
        "normjax/_linen_fold.py",
        "if others := kinds[places[part.number]] - {type(part.module)}:",
        "if others := kinds[places[part.number]] - kinds[places[part.number]]:",
        ("tests/fold/test_linen.py", "-k", "stays"),
    ),
)


class RefusedError(Exception):
    """The run would say nothing about the suite."""


def copy_repository(to: Path) -> Path:
    """The tracked files as they are now, in a folder of their own."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def run_in(copy: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in a copy, which is where Python looks for packages first; pytest loads no plugin it can spare."""
    own = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, cwd=copy, env={**os.environ, **own}, capture_output=True, text=True)


def run_tests(copy: Path, tests: Sequence[str]) -> bool:
    """Whether the tests pass in a copy; RefusedError where pytest could not run them."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", IGNORED, *tests]
    done = run_in(copy, command)
    if done.returncode not in (PASSED, FAILED):
        raise RefusedError(f"pytest could not run {' '.join(tests)} (exit {done.returncode}):\n{done.stdout[-2000:]}")
    return done.returncode == PASSED


def check_unchanged(tests: Sequence[str]) -> None:
    """Raises RefusedError unless the tests pass on a copy without a fault, and import the package from that copy."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_repository(Path(folder).resolve())
        found = run_in(copy, [sys.executable, "-c", "import normjax; print(normjax.__file__)"]).stdout.strip()
        if not found.startswith(str(copy)):
            raise RefusedError(f"the copy's tests would import normjax from {found or 'nowhere'}")
        if not run_tests(copy, tests):
            raise RefusedError(f"the unchanged copy fails {' '.join(tests) or 'the suite'}")


def is_killed(mutant: Mutant, tests: Sequence[str]) -> bool:
    """Whether a test fails in a copy with the fault; RefusedError where none could be run."""
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_repository(Path(folder).resolve())
        mutant.apply(copy)
        return not run_tests(copy, tests)


def killed_by(mutants: Sequence[Mutant], jobs: int, *, everything: bool) -> set[str]:
    """The names of the mutants that their first tests, or the whole suite, kill."""
    selections = [() if everything else mutant.first for mutant in mutants]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(check_unchanged, dict.fromkeys(selections)))
        killed = set()
        for mutant, dead in zip(mutants, pool.map(is_killed, mutants, selections), strict=True):
            print(f"{'killed' if dead else 'lives so far'}: {mutant.name}", flush=True)
            killed |= {mutant.name} if dead else set()
    return killed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the mutants whose names hold the given words, all by default; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="words of the faults' names")
    parser.add_argument("--jobs", type=int, default=2, help="how many pytest processes at a time")
    given = parser.parse_args(arguments)
    mutants = [mutant for mutant in MUTANTS if all(word in mutant.name for word in given.words)]
    try:
        if not mutants:
            raise RefusedError(f"no fault's name holds {' '.join(given.words)}")
        killed = killed_by(mutants, given.jobs, everything=False)
        if alive := [mutant for mutant in mutants if mutant.name not in killed]:
            killed |= killed_by(alive, given.jobs, everything=True)
    except (RefusedError, ValueError) as error:
        print(f"refused: {error}", file=sys.stderr)
        return 2
    print(f"{len(killed)} of {len(mutants)} mutants killed")
    for mutant in mutants:
        if mutant.name not in killed:
            print(f"lives: {mutant.name} ({mutant.file})")
    return 0 if len(killed) == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
