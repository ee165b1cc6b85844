"""`normjax diagnose`: the report of a finished run, and its exit status."""

import jax
import numpy as np
import pytest

from normjax import cli
from normjax.lab import finished
from normjax.lab.models import network
from tests.lab.runners import tree


def test_a_healthy_run_has_no_errors_and_its_folder_stays_as_it_was(unbroken, capsys):
    before = tree(unbroken[0])
    assert cli.main(["diagnose", str(unbroken[0])]) == 0
    printed = capsys.readouterr().out
    assert "  error  " not in printed
    assert "pad_axis=" not in printed  # nobody can pass it here
    assert tree(unbroken[0]) == before


@pytest.mark.parametrize("others", [False, True], ids=["never updated", "of other data"])
def test_a_run_with_wrong_statistics_ends_with_status_1_and_names_them(unbroken, tmp_path, capsys, others):
    run = finished.read(unbroken[0])
    if others:
        stats = jax.tree.map(lambda leaf: leaf + 9 if np.issubdtype(leaf.dtype, np.floating) else leaf, run.state.stats)
    else:
        _, stats = network(run.config).init()
    finished.write(tmp_path / "wrong", run, run.state._replace(stats=stats))
    assert cli.main(["diagnose", str(tmp_path / "wrong")]) == 1
    printed = capsys.readouterr().out
    assert ("drift" if others else "never updated  blocks/0/norm/stats") in printed


def test_a_folded_network_is_no_run_to_diagnose(unbroken, tmp_path, capsys):
    assert cli.main(["fold", str(unbroken[0]), "--out", str(tmp_path / "folded")]) == 0
    capsys.readouterr()
    assert cli.main(["diagnose", str(tmp_path / "folded")]) == 2
    assert "holds a folded network; give the run that it was folded from" in capsys.readouterr().err
    assert cli.main(["fold", str(unbroken[0]), "--out", str(tmp_path / "folded")]) == 2
    assert "exists already and is not an empty folder; name another" in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_refused_in_one_line(tmp_path, capsys):
    assert cli.main(["diagnose", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("normjax: error: ")
    assert error.count("\n") == 1
