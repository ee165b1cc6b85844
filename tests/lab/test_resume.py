import dataclasses
import io
import shutil
import signal
import threading
import time
from contextlib import ExitStack

import pytest

from normjax.cli import main
from normjax.lab import config as configs
from normjax.lab import progress, runs, train
from normjax.lab.data import load_digits
from normjax.lab.errors import UserError
from tests.lab.runners import EPOCH, TINY, checkpoint, opened, start, tree


def test_a_run_stopped_by_sigint_in_mid_epoch_and_resumed_equals_an_unbroken_one_byte_for_byte(unbroken, tmp_path):
    folder = tmp_path / "a run"
    process = start("train", *TINY, "--out", str(folder))
    metrics = folder / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    step, _ = checkpoint(folder)
    assert step % EPOCH, "the signal came at the end of an epoch"
    assert step < 3 * EPOCH
    assert err == f"interrupted; saved at step {step}; go on with: normjax train --resume '{folder}'\n"
    assert [record["step"] for record in runs.read_metrics(folder)] == list(range(1, step + 1))

    process = start("train", "--resume", str(folder))
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-5:-1] == unbroken[1].splitlines()[-5:-1]
    assert checkpoint(folder) == checkpoint(unbroken[0])
    for name in ("config.toml", "metrics.jsonl", "curves.png"):
        assert (folder / name).read_bytes() == (unbroken[0] / name).read_bytes()


class Job:
    """Runs of one small config that share its compiled steps: two epochs of four steps."""

    def __init__(self):
        options = {"model.features": "2", "train.epochs": "2", "train.batch_size": "300", "seed": "3"}
        self.config = configs.load("digits", options)
        self.digits = load_digits(self.config)
        self.state, self.steps = train.build(self.config, self.digits)

    def fit(self, path, *, resume=False, wrap=None, stop=None):
        """Train in `path`, each training step seen by `wrap(count)` first."""
        count = 0

        def step(*arguments):
            nonlocal count
            count += 1
            if wrap is not None:
                wrap(count)
            return self.steps.train(*arguments)

        with ExitStack() as stack:
            stop = stop or stack.enter_context(train.stop_on_interrupt())
            folder = stack.enter_context(opened(path, self.config, self.digits, resume=resume))
            steps = train.Steps(step, self.steps.evaluate)
            shown = progress.PlainProgress(self.config.train.epochs)
            train.fit(self.config, self.digits, folder, shown, (self.state, steps), stop, resume=resume)


@pytest.fixture(scope="module")
def job():
    return Job()


@pytest.fixture(scope="module")
def whole(job, tmp_path_factory):
    """The folder of an unbroken run of the job."""
    path = tmp_path_factory.mktemp("job") / "whole"
    job.fit(path)
    return path


def assert_equal_runs(one, other):
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    assert checkpoint(one) == checkpoint(other)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(job, whole, tmp_path):
    job.fit(tmp_path / "again")
    assert_equal_runs(whole, tmp_path / "again")
    other = Job.__new__(Job)
    other.__dict__ |= job.__dict__ | {"config": dataclasses.replace(job.config, seed=4)}
    other.fit(tmp_path / "other")
    assert (whole / "metrics.jsonl").read_bytes() != (tmp_path / "other" / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("at", [1, 3, 4, 8])  # the first step, in mid-epoch, at an epoch's end, the last step
def test_an_interrupt_at_any_step_even_repeated_while_saving_loses_and_repeats_nothing(
    at, job, whole, tmp_path, monkeypatch
):
    write = runs.ocp.CheckpointManager.save

    def interrupted_save(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        result = write(*arguments, **options)
        signal.raise_signal(signal.SIGINT)
        return result

    def interrupt(count):
        if count == at:
            signal.raise_signal(signal.SIGINT)
            monkeypatch.setattr(runs.ocp.CheckpointManager, "save", interrupted_save)

    path, before = tmp_path / "run", signal.getsignal(signal.SIGINT)  # a job in the background ignores it
    with pytest.raises(train.Interrupted) as caught:
        job.fit(path, wrap=interrupt)
    monkeypatch.undo()
    assert caught.value.step == at
    assert signal.getsignal(signal.SIGINT) is before
    job.fit(path, resume=True)
    assert_equal_runs(path, whole)


def test_an_interrupt_before_the_first_step_saves_the_start(job, whole, tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(train.Interrupted) as caught:
        job.fit(tmp_path / "run", stop=stop)
    assert caught.value.step == 0
    job.fit(tmp_path / "run", resume=True)
    assert_equal_runs(tmp_path / "run", whole)


class Crash(Exception):
    """The process dies here."""


def crash_at(step):
    def wrap(count):
        if count == step:
            raise Crash

    return wrap


@pytest.mark.parametrize(("at", "logged", "saved"), [(1, 0, 0), (3, 2, 0), (5, 4, 4), (7, 6, 4)])
def test_after_a_crash_the_steps_since_the_last_checkpoint_are_done_again_and_logged_once(
    at, logged, saved, job, whole, tmp_path
):
    path = tmp_path / "run"
    with pytest.raises(Crash):
        job.fit(path, wrap=crash_at(at))
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # a line cut short
    assert len(runs.read_metrics(path)) == logged
    assert checkpoint(path)[0] == saved
    job.fit(path, resume=True)
    assert_equal_runs(path, whole)


def test_a_checkpoint_that_failed_to_be_written_leaves_the_one_before(job, whole, tmp_path, monkeypatch):
    path = tmp_path / "run"
    with pytest.raises(Crash):
        job.fit(path, wrap=crash_at(6))
    before = checkpoint(path)
    (path / "checkpoints" / "6.orbax-checkpoint-tmp").mkdir()
    (path / "checkpoints" / "6.orbax-checkpoint-tmp" / "half").write_bytes(b"x")
    assert checkpoint(path) == before
    job.fit(path, resume=True)
    assert_equal_runs(path, whole)


@pytest.mark.parametrize(("moment", "left"), [("_write_digests", 0), ("_keep_only", 4)])
def test_a_crash_between_a_checkpoint_and_the_end_of_the_one_before_goes_on_from_the_newest_whole_one(
    moment, left, job, whole, tmp_path, monkeypatch
):
    path, finish = tmp_path / "run", getattr(runs.RunFolder, moment)

    def crash(folder, step):
        if step == 4:
            raise Crash
        finish(folder, step)

    monkeypatch.setattr(runs.RunFolder, moment, crash)
    with pytest.raises(Crash):
        job.fit(path)
    monkeypatch.undo()
    assert {folder.name for folder in (path / "checkpoints").iterdir()} == {"0", "4"}
    steps = []
    job.fit(path, resume=True, wrap=steps.append)
    assert len(steps) == 8 - left
    assert_equal_runs(path, whole)
    assert [folder.name for folder in (path / "checkpoints").iterdir()] == ["8"]


def test_resuming_a_finished_run_draws_its_table_and_curves_again_and_changes_nothing(unbroken, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(unbroken[0], path)
    (path / "curves.png").unlink()
    assert main(["train", "--resume", str(path)]) == 0
    table = capsys.readouterr().out.splitlines()[1:-1]
    assert table == unbroken[1].splitlines()[-5:-1]
    assert tree(path) == tree(unbroken[0])


def test_a_resume_that_repeats_the_runs_config_is_allowed(unbroken):
    options = {flag.removeprefix("--"): text for flag, text in zip(TINY[1::2], TINY[2::2], strict=True)}
    assert runs.resumed_config(unbroken[0], "digits", options) == configs.load("digits", options)


def test_a_run_goes_on_whatever_letters_its_folder_has_and_the_output_lacks(unbroken, tmp_path, monkeypatch):
    path, printed = tmp_path / "é", io.BytesIO()
    shutil.copytree(unbroken[0], path)
    (path / "checkpoints" / "²").mkdir()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(printed, encoding="ascii"))
    assert main(["train", "--resume", str(path)]) == 0
    first, *_, last = printed.getvalue().splitlines()
    assert first == f"run folder {tmp_path}/\\xe9".encode()
    assert last == f"curves in {tmp_path}/\\xe9/curves.png".encode()


def line(number, content):
    """A spoiler that puts `content` into the place of a line of metrics; None takes the line out."""

    def spoil(path):
        lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
        lines[number - 1 : number] = [] if content is None else [content + "\n"]
        (path / "metrics.jsonl").write_text("".join(lines))

    return spoil


def digests(content):
    """A spoiler that puts `content` into the place of the digests; None takes them away."""

    def spoil(path):
        (path / "checkpoints/537/sha256.json").unlink()
        if content is not None:
            (path / "checkpoints/537/sha256.json").write_text(content)
        (path / "checkpoints/537/state/_METADATA").write_bytes(b"{")

    return spoil


def folder_for(name):
    """A spoiler that puts a folder where there is a file."""

    def spoil(path):
        (path / name).unlink(missing_ok=True)
        (path / name).mkdir()

    return spoil


def spoil_config(path):
    text = (path / "config.toml").read_text()
    (path / "config.toml").write_text(text.replace("seed = 0", "seed = 1"))


def spoil_arrays(path):
    for file in (path / "checkpoints").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])


def copy_checkpoint(path):
    shutil.copytree(path / "checkpoints/537", path / "checkpoints/9999")


NO_DIGESTS = "checkpoint 537 cannot be read; start a new run (sha256.json is missing, without which nobody can tell "
BAD_DIGESTS = "checkpoint 537 cannot be read; start a new run (sha256.json is not what was written)"
SPOILED = {
    "config": (spoil_config, "the config differs: seed is 1 here and 0 in its checkpoint; mend "),
    "no checkpoint": (
        lambda path: shutil.rmtree(path / "checkpoints"),
        "holds no checkpoint yet; start anew: normjax train ",
    ),
    "later checkpoint": (
        copy_checkpoint,
        "checkpoint 9999 is later than metrics.jsonl, which has 537 whole lines; one",
    ),
    "line away": (line(537, None), "checkpoint 537 is later than metrics.jsonl, which has 536 whole lines; one of the"),
    "step away": (line(6, None), "line 6 of metrics.jsonl is not what step 6 wrote; it was changed: start a new run"),
    "no keys": (
        line(1, '{"step": 1}'),
        "line 1 of metrics.jsonl is not what step 1 wrote; it was changed: start a new",
    ),
    "last line": (line(537, '{"step": 537}'), "line 537 of metrics.jsonl is not what step 537 wrote; it was changed"),
    "epoch": (
        line(1, '{"step": 1, "epoch": 2, "accuracy": 0, "batch_mean": 0, "loss": 2, "running_mean": 0}'),
        "line 1 of metrics.jsonl is not what step 1 wrote",
    ),
    "no number": (
        line(1, '{"step": 1, "epoch": 1, "accuracy": NaN, "batch_mean": 0, "loss": 2, "running_mean": 0}'),
        "line 1 of metrics.jsonl is not what step 1 wrote",
    ),
    "deep line": (line(2, "[" * 100_000), "checkpoint 537 is later than metrics.jsonl, which has 1 whole lines; one"),
    "no digests": (digests(None), NO_DIGESTS),
    "digests in a list": (digests("[]"), BAD_DIGESTS),
    "no digest": (digests("{}"), BAD_DIGESTS),
    "digests cut short": (digests('{"state'), BAD_DIGESTS),
    "deep digests": (digests("[" * 100_000), BAD_DIGESTS),
    "digest of a folder": (
        digests('{"state": 1}'),
        "checkpoint 537 cannot be read; start a new run (state is not what",
    ),
    "folder for curves": (folder_for("curves.png"), "curves.png is a folder where the run writes a file; move it away"),
    "folder for metrics": (folder_for("metrics.jsonl"), "metrics.jsonl is a folder where the run writes a file; move"),
    "folder on the way": (folder_for(".curves.png.tmp"), ".curves.png.tmp is a folder where the run writes a file"),
}


def test_unreadable_arrays_leave_no_traceback_at_the_end_of_the_process(unbroken, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(unbroken[0], path)
    spoil_arrays(path)
    process = start("train", "--resume", str(path))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err.startswith(f"normjax: error: run folder {path}: checkpoint 537 cannot be read; start a new run (")
    assert err.count("\n") == 1


def test_another_config_is_told_in_the_words_of_a_file(unbroken, capsys):
    options = ["--model.features", "32,64", "--norm.bias", "false", "--norm.family", "none"]
    assert main(["train", "--resume", str(unbroken[0]), *options]) == 2
    words = "model.features is [32, 64] here and [2] in the run, norm.family is 'none' here and 'batch' in the run, "
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_run_folder_is_refused_in_one_line_and_left_as_it_is(case, unbroken, tmp_path, capsys):
    path = tmp_path / "run"
    shutil.copytree(unbroken[0], path)
    spoil, words = SPOILED[case]
    spoil(path)
    before = tree(path)
    assert main(["train", "--resume", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"normjax: error: run folder {path}: {words}")
    assert printed.err.count("\n") == 1
    assert tree(path) == before


def test_a_loss_that_is_no_longer_finite_stops_the_run(job, tmp_path):
    diverged = Job.__new__(Job)
    metrics = {"loss": float("nan"), "accuracy": 0.1}
    diverged.__dict__ |= job.__dict__ | {"steps": train.Steps(lambda state, *_: (state, metrics), job.steps.evaluate)}
    with pytest.raises(UserError, match=r"step 1: the loss is nan; .* lower train\.learning_rate \(now 0\.003\)"):
        diverged.fit(tmp_path / "run")
