"""The notebooks: each runs from its `.py`, proves its claim, and has an `.ipynb` that is its executed pairing."""

import ast
import re

import jupytext
import nbformat
import pytest

from notebooks.execute import HERE, execute

SCRIPTS = sorted(HERE.glob("[0-9]*.py"))
LIMIT = 60  # seconds for each; about ten are needed on two idle cores
LARGEST = 400_000  # bytes of an .ipynb, so that it opens at once on the web
of_each = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def outputs(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def pictures(notebook):
    return [output for output in outputs(notebook) if "image/png" in output.get("data", {})]


def sources(notebook):
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def paired(script):
    """The executed notebook beside a script."""
    return nbformat.read(script.with_suffix(".ipynb"), as_version=4)


def test_the_notebooks_of_the_course_are_here():
    names = ["01_axes", "02_forward_backward", "03_train_eval", "04_sync", "05_per_example", "06_after_training"]
    assert [path.stem for path in SCRIPTS] == names


@of_each
def test_a_notebook_runs_from_its_script_within_a_minute(script, tmp_path):
    notebook = execute(script, tmp_path, timeout=LIMIT)
    assert len(pictures(notebook)) == len(pictures(paired(script)))
    assert list(tmp_path.iterdir()) == []


def test_a_claim_that_fails_fails_the_run(tmp_path):
    (tmp_path / "false.py").write_text("# %%\nassert 1 == 2\n")
    with pytest.raises(Exception, match="AssertionError"):
        execute(tmp_path / "false.py", tmp_path, timeout=LIMIT)


@of_each
def test_the_last_cell_asserts_the_claim(script):
    last = jupytext.read(script, fmt="py:percent").cells[-1]
    assert last.cell_type == "code"
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(last.source)))


@of_each
def test_a_notebook_asks_predicts_experiments_and_says_what_it_means(script):
    text = "\n".join(cell.source for cell in jupytext.read(script, fmt="py:percent").cells)
    places = [text.find(f"**{step}") for step in ("Question", "Prediction", "Experiment", "Picture", "Meaning")]
    assert -1 not in places
    assert places == sorted(places)


@of_each
def test_the_notebook_in_the_tree_is_the_pairing_of_its_script(script):
    assert sources(paired(script)) == sources(jupytext.read(script, fmt="py:percent")), (
        f"{script.stem}: run python -m notebooks.execute"
    )


@of_each
def test_the_notebook_in_the_tree_was_executed_without_a_fault(script):
    notebook = paired(script)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert len(pictures(notebook)) >= 2
    assert not [
        output for output in outputs(notebook) if output.output_type == "error" or output.get("name") == "stderr"
    ]


@of_each
def test_the_notebook_in_the_tree_is_small_and_names_no_machine(script):
    assert script.with_suffix(".ipynb").stat().st_size < LARGEST
    notebook = paired(script)
    assert notebook.metadata.kernelspec.name == "python3"
    for output in pictures(notebook):
        del output.data["image/png"]  # base64 may spell anything
    assert not re.search(r"/(root|home|tmp|usr|work|Users)/", nbformat.writes(notebook))
    assert not [cell for cell in notebook.cells if "execution" in cell.metadata]  # that is where timings stand
