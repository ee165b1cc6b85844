"""Runs the notebooks from their `.py` halves: `python -m notebooks.execute` rewrites the `.ipynb` beside each.

The `.py` (jupytext percent) is what people edit; the `.ipynb` is its pairing, executed, for reading on the web.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def execute(script: Path, folder: Path, timeout: float) -> nbformat.NotebookNode:
    """The notebook of a percent script after a run in `folder`; TimeoutError after `timeout` seconds in all."""
    notebook = jupytext.read(script, fmt="py:percent")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # random ids would change the file on every run
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    deadline = time.monotonic() + timeout
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout_func=lambda cell: max(1, int(deadline - time.monotonic())),
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": folder}},
    )
    client.execute(env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"})
    notebook.metadata.pop("language_info", None)  # it names the interpreter's patch version
    return notebook


def main() -> None:
    """Rewrites every `.ipynb` in this folder, or those whose number is given: `python -m notebooks.execute 02`."""
    for script in sorted(HERE.glob("[0-9]*.py")):
        if sys.argv[1:] and not script.name.startswith(tuple(sys.argv[1:])):
            continue
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(script, Path(folder), timeout=120)
        nbformat.write(notebook, script.with_suffix(".ipynb"))
        print(f"wrote {script.with_suffix('.ipynb').relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
