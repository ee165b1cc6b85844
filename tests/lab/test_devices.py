"""Runs that are split over devices compute what one device computes, and go on on any number of devices."""

import shutil
import threading
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from normjax.cli import main
from normjax.lab import config as configs
from normjax.lab import progress, runs, train
from normjax.lab.data import Digits, Split, load_digits
from tests.lab.runners import EPOCH, TINY, opened, start, tree
from tests.quick import quick_jit

# Two epochs of 25 steps.
SMALL = {"model.features": "4,8", "train.epochs": "2", "train.batch_size": "56", "seed": "3"}


class Job:
    """One config in float64, its compiled steps shared by its runs."""

    def __init__(self, preset: str, count: int):
        self.config = configs.load(preset, SMALL | {"devices": str(count)})
        digits = load_digits(self.config)
        self.digits = Digits(*(Split(part.images.astype(np.float64), part.labels) for part in digits))
        with jax.enable_x64(False):
            state, steps = train.build(self.config, digits)
        evaluations = {flag: quick_jit(partial(steps.evaluate, use_batch_stats=flag)) for flag in (False, True)}
        self.train = quick_jit(steps.train)
        self.evaluate = lambda *arguments, use_batch_stats: evaluations[use_batch_stats](*arguments)
        self.state = jax.tree.map(lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, state)

    def fit(self, path, *, resume=False, stop_after=None):
        """Train in `path`, at most to the given step."""
        stop, taken = threading.Event(), 0

        def step(*arguments):
            nonlocal taken
            taken += 1
            if taken == stop_after:
                stop.set()
            return self.train(*arguments)

        with ExitStack() as stack:
            folder = stack.enter_context(opened(path, self.config, self.digits, resume=resume))
            built = self.state, train.Steps(step, self.evaluate)
            shown = progress.PlainProgress(self.config.train.epochs)
            if stop_after is not None:
                stack.enter_context(pytest.raises(train.Interrupted))
            train.fit(self.config, self.digits, folder, shown, built, stop, resume=resume)
        return path


JOBS = {"one": ("digits", 1), "mesh of one": ("digits-sync", 1), "eight": ("digits-sync", 8)}


@pytest.fixture(scope="module")
def jobs():
    with jax.enable_x64(True):
        return {name: Job(*arguments) for name, arguments in JOBS.items()}


@pytest.fixture(scope="module")
def whole(jobs, tmp_path_factory):
    """Fifty steps on one device, as without any mesh."""
    with jax.enable_x64(True):
        return jobs["one"].fit(tmp_path_factory.mktemp("whole") / "run")


def saved(folder) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint by its path."""
    with ocp.CheckpointManager((folder / "checkpoints").absolute()) as manager:
        state = manager.restore(manager.latest_step(), args=ocp.args.Composite(state=ocp.args.StandardRestore())).state
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_run(folder, expected):
    """To 1e-9: fifty steps may enlarge the roundings of sums in another order, 1e-16 each, by ten million."""
    here, there = runs.read_metrics(folder), runs.read_metrics(expected)
    assert [record["step"] for record in here] == list(range(1, 51))
    for record, wanted in zip(here, there, strict=True):
        # These two are logged in float32: a share of hits, and a mean through statistics that start afresh.
        in_float32 = {"accuracy", "batch_mean"}
        assert record == {
            name: pytest.approx(value, rel=0, abs=1e-6 if name in in_float32 else 1e-9)
            for name, value in wanted.items()
        }
    arrays, wanted = saved(folder), saved(expected)
    assert set(arrays) == set(wanted)
    for path, array in arrays.items():
        assert array.dtype == wanted[path].dtype, path
        np.testing.assert_allclose(array, wanted[path], rtol=0, atol=1e-9, err_msg=path)


@pytest.mark.parametrize("name", ["mesh of one", "eight"])
def test_fifty_steps_in_float64_are_those_of_one_device(name, jobs, whole, tmp_path, x64):
    folder = jobs[name].fit(tmp_path / "run")
    assert {array.dtype for path, array in saved(folder).items() if "'params'" in path} == {np.dtype("float64")}
    assert_same_run(folder, whole)


@pytest.mark.parametrize(("first", "then"), [("eight", "mesh of one"), ("mesh of one", "eight")])
def test_a_run_goes_on_on_another_number_of_devices(first, then, jobs, whole, tmp_path, x64):
    folder = jobs[first].fit(tmp_path / "run", stop_after=20)
    assert runs.resumed_config(folder, None, {}) == jobs[first].config
    jobs[then].fit(folder, resume=True)
    assert_same_run(folder, whole)
    # What `--resume` alone goes on with, if the run is stopped once more.
    assert runs.resumed_config(folder, None, {}) == jobs[then].config


@pytest.fixture(scope="module")
def synchronised(tmp_path_factory):
    """358 steps on eight devices, in a process that has to make them: its folder, its output."""
    folder = tmp_path_factory.mktemp("synchronised") / "run"
    process = start("train", "digits-sync", *TINY[1:], "--train.epochs", "2", "--devices", "8", "--out", str(folder))
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    return folder, out


def test_three_hundred_steps_on_devices_that_the_process_makes_come_to_an_end_and_it_says_so(synchronised):
    folder, out = synchronised
    assert out.splitlines()[:2] == [
        f"run folder {folder}",
        "8 devices (cpu, made by jax_num_cpu_devices); each takes 1 of a batch's 8 images",
    ]
    assert len(runs.read_metrics(folder)) == 2 * EPOCH > 300


def test_in_float32_the_first_loss_is_that_of_one_device(synchronised, unbroken):
    first, expected = (runs.read_metrics(folder)[0] for folder, _ in (synchronised, unbroken))
    assert first["loss"] == pytest.approx(expected["loss"], rel=0, abs=1e-6)


def test_the_command_goes_on_on_the_devices_it_is_given_and_otherwise_on_those_of_the_run(
    synchronised, tmp_path, capsys
):
    path = tmp_path / "run"
    shutil.copytree(synchronised[0], path)
    assert runs.resumed_config(path, None, {}).devices == 8
    assert (
        runs.resumed_config(
            path, "digits-sync", {"model.features": "2", "train.epochs": "2", "train.batch_size": "8"}
        ).devices
        == 8
    )
    before = tree(path)
    assert main(["train", "--resume", str(path), "--devices", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[1:-1] == synchronised[1].splitlines()[-5:-1]
    assert tree(path) == before


def test_more_devices_than_an_accelerator_has_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(platform="gpu")] * 4)
    assert main(["train", "digits-sync", "--devices", "8"]) == 2
    expected = (
        "devices is 8, but JAX sees 4 (gpu); make it 4 or less, or have the CPU stand for them: JAX_PLATFORMS=cpu"
    )
    assert capsys.readouterr().err == f"normjax: error: {expected}\n"
    assert tree(tmp_path) == {}


@pytest.mark.parametrize("family", [family for family in configs.FAMILIES if family != "batch"])
def test_a_norm_that_does_not_pool_examples_needs_no_name_for_the_devices(family):
    config = configs.load("digits", {"norm.family": family, "devices": "2"})
    train.trace(config, load_digits(config))


@pytest.mark.matrix  # two whole runs of 264 steps
def test_in_float32_the_final_accuracies_are_within_three_images_of_one_devices(tmp_path):
    for name, options in {"one": ["digits"], "eight": ["digits-sync", "--devices", "8"]}.items():
        assert main(["train", *options, "--out", str(tmp_path / name)]) == 0
    last, expected = (runs.read_metrics(tmp_path / name)[-1] for name in ("eight", "one"))
    for way in ("held_out_accuracy", "held_out_accuracy_batch_stats"):
        assert round(360 * abs(last[way] - expected[way])) <= 3
