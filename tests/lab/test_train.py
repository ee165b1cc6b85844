import io
import json

import pytest
from rich.console import Console

from normjax.cli import main
from normjax.lab import config as configs
from normjax.lab import progress, runs, train
from normjax.lab.data import load_digits
from tests.lab.runners import EPOCH, TINY, checkpoint, tree


def test_a_run_folder_holds_config_metrics_curves_and_checkpoint(unbroken):
    folder, _ = unbroken
    assert {path.name for path in folder.iterdir()} == {"config.toml", "metrics.jsonl", "curves.png", "checkpoints"}
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_stored_config_is_the_resolved_one(unbroken):
    folder, _ = unbroken
    asked = dict(zip([flag.removeprefix("--") for flag in TINY[1::2]], TINY[2::2], strict=True))
    assert configs.load(str(folder / "config.toml")) == configs.load("digits", asked)


def test_metrics_have_one_line_a_step_and_the_held_out_accuracies_at_the_end_of_each_epoch(unbroken):
    records = [json.loads(line) for line in (unbroken[0] / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 3 * EPOCH + 1))
    assert [record["epoch"] for record in records] == [1] * EPOCH + [2] * EPOCH + [3] * EPOCH
    always = {"step", "epoch", "loss", "accuracy", "batch_mean", "running_mean"}
    at_the_end = always | {"held_out_loss", "held_out_accuracy", "held_out_accuracy_batch_stats"}
    for record in records:
        assert set(record) == (always if record["step"] % EPOCH else at_the_end)
    for ends_epoch, names in ((False, always), (True, at_the_end)):
        assert runs.metric_names(configs.load("digits"), ends_epoch=ends_epoch) == names


def test_the_logged_running_mean_moves_by_its_weight_towards_the_logged_batch_mean(unbroken):
    running = 0.0
    for record in runs.read_metrics(unbroken[0]):
        expected = running + 0.1 * (record["batch_mean"] - running)
        # Three float32 roundings, 2^-24 each, of numbers no larger than the two means together.
        rounding = 3 * 2.0**-24 * (abs(record["batch_mean"]) + abs(running))
        assert record["running_mean"] == pytest.approx(expected, rel=0, abs=rounding)
        running = record["running_mean"]


def test_the_checkpoint_holds_parameters_statistics_optimiser_state_step_and_data_order(unbroken):
    step, arrays = checkpoint(unbroken[0])
    assert step == 3 * EPOCH
    assert {path.split("'")[1] for path in arrays} == {"params", "stats", "opt_state", "step", "order"}
    assert len(arrays["['order']"][1]) == 4 * 1437


def test_output_without_a_terminal_is_plain_lines_and_ends_with_the_table(unbroken):
    folder, out = unbroken
    last = runs.read_metrics(folder)[-1]
    running, batch = last["held_out_accuracy"], last["held_out_accuracy_batch_stats"]
    assert "\x1b" not in out
    assert "\r" not in out
    lines = out.splitlines()
    assert lines[0] == f"run folder {folder}"
    assert lines[1].startswith(f"epoch 1/3  step {EPOCH}/{3 * EPOCH}  batch: loss ")
    assert lines[3].endswith(f"held out {running:.1%}  0 s left")
    assert lines[4:] == [
        f"360 held-out images after {3 * EPOCH} steps",
        f"  accuracy with running statistics  {running:.2%}",
        f"  accuracy with batch statistics    {batch:.2%}",
        f"  gap (running - batch)             {100 * (running - batch):+.2f} points",
        f"curves in {folder / 'curves.png'}",
    ]


def test_on_a_terminal_the_live_line_shows_loss_accuracy_and_time_left_and_the_table_has_a_frame():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120)
    live = progress.LiveProgress(console, epochs=3)
    record = {"step": 5, "epoch": 2, "loss": 0.12345, "accuracy": 0.5, "held_out_accuracy": 0.25}
    with live.running(4, 12):
        live.step(record)
    progress.print_summary(record | {"held_out_accuracy_batch_stats": 0.5}, 360, console)
    shown = screen.getvalue()
    for word in ["epoch 2/3", "5/12", "loss 0.1235", "accuracy 50.0%", "held out 25.0%", "left", "│ -25.00 points │"]:
        assert word in shown


def test_a_norm_without_running_statistics_has_no_gap(tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--norm.family", "none", "--model.features", "2", "--train.epochs", "1", "--train.batch_size", "400"]
    assert main(["train", "digits", *options, "--out", str(out)]) == 0
    assert "gap       none: no running statistics, one function for both modes" in capsys.readouterr().out
    expected = ["accuracy", "epoch", "held_out_accuracy", "held_out_loss", "loss", "step"]
    assert sorted(runs.read_metrics(out)[-1]) == expected
    assert sorted(runs.metric_names(configs.load("digits-none"), ends_epoch=True)) == expected


@pytest.mark.parametrize("preset", configs.presets())
def test_every_preset_can_be_traced(preset):
    config = configs.load(preset)
    first, _ = train.trace(config, load_digits(config))
    assert callable(first)


def test_a_run_without_out_gets_a_new_folder_under_runs_named_after_its_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(runs.next_folder("digits-group")) == "runs/digits-group-001"
    assert str(runs.next_folder("some/where/mine.toml")) == "runs/mine-001"
    (tmp_path / "runs" / "mine-001").mkdir(parents=True)
    assert str(runs.next_folder("mine.toml")) == "runs/mine-002"
    assert set(tree(tmp_path)) == {"runs", "runs/mine-001"}
