"""`normjax recalibrate`: a finished run with the statistics of all its training images."""

import jax
import jax.numpy as jnp
import numpy as np

from normjax.cli import main
from normjax.lab import finished
from tests.lab.runners import tree


def first_norm(state):
    stats = state.stats["blocks"][0]["norm"]["stats"]
    return {name: np.asarray(stats[name][...]) for name in ("mean", "var", "count", "weight")}


def test_the_new_run_has_the_statistics_of_all_training_images_and_the_old_one_stays(unbroken, tmp_path, capsys, x64):
    path, out = unbroken[0], tmp_path / "new"
    before = tree(path)
    assert main(["recalibrate", str(path), "--out", str(out)]) == 0
    assert tree(path) == before
    old, new = finished.read(path), finished.read(out)
    images = np.asarray(old.digits.train.images, np.float64)
    kernel = np.asarray(old.state.params["blocks"][0]["conv"]["kernel"][...], np.float64)
    given = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    found = first_norm(new.state)
    # The convolution adds up nine products in float32.
    np.testing.assert_allclose(found["mean"], jnp.mean(given, (0, 1, 2)), rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose(found["var"], jnp.var(given, (0, 1, 2)), rtol=2e-6)
    assert found["count"] == 180
    np.testing.assert_array_equal(found["weight"], 1)
    jax.tree.map(np.testing.assert_array_equal, new.state.params, old.state.params)
    before, after = (run.accuracy(run.state) for run in (old, new))
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "360 held-out images",
        f"accuracy with the averages of training {before:.2%}",
        f"accuracy with the statistics of 1437 training images {after:.2%}",
        f"change {100 * (after - before):+.2f} points",
        f"run folder {out}",
    ]


def test_a_norm_without_running_statistics_is_refused_in_one_line(tmp_path, capsys):
    options = ["--norm.family", "none", "--model.features", "2", "--train.epochs", "1", "--train.batch_size", "400"]
    run, out = tmp_path / "run", tmp_path / "new"
    assert main(["train", "digits", *options, "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["recalibrate", str(run), "--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"normjax: error: run folder {run}: norm.family is none, which keeps no running statistics to estimate anew; "
        "give a run with batch norm\n"
    )
    assert not out.exists()
