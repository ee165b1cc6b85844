"""A run read again for what comes after training."""

import numpy as np
import pytest

from normjax.lab import finished, runs
from normjax.lab.errors import UserError
from tests.lab.runners import checkpoint, tree


def test_a_run_read_again_has_the_accuracy_it_ended_with_and_its_folder_stays_as_it_was(unbroken):
    path = unbroken[0]
    before = tree(path)
    run = finished.read(path)
    assert run.accuracy(run.state) == runs.read_metrics(path)[-1]["held_out_accuracy"]
    assert tree(path) == before


def test_forward_evaluates_by_the_running_statistics_and_moves_them_in_training_alone(unbroken):
    run = finished.read(unbroken[0])
    images = run.digits.held_out.images[: run.config.train.batch_size]
    logits, same = run.forward(run.state.params, run.state.stats, images, train=False)
    alone, _ = run.forward(run.state.params, run.state.stats, images[:1], train=False)
    np.testing.assert_allclose(alone[0], logits[0], rtol=1e-5, atol=1e-5)
    assert same is run.state.stats
    _, moved = run.forward(run.state.params, run.state.stats, images, train=True)
    assert not np.allclose(
        moved["blocks"][0]["norm"]["stats"]["mean"][...], same["blocks"][0]["norm"]["stats"]["mean"][...]
    )


def test_a_run_written_anew_is_the_same_run_and_leaves_the_first_alone(unbroken, tmp_path):
    path, copy = unbroken[0], tmp_path / "copy"
    before = tree(path)
    run = finished.read(path)
    finished.write(copy, run, run.state)
    assert checkpoint(copy) == checkpoint(path)
    assert finished.read(copy).accuracy(run.state) == run.accuracy(run.state)
    assert (copy / "metrics.jsonl").read_bytes() == (path / "metrics.jsonl").read_bytes()
    assert tree(path) == before
    with pytest.raises(UserError, match="this run folder exists"):
        finished.write(copy, run, run.state)
