import pytest

from tests.lab.runners import TINY, start


@pytest.fixture(scope="package")
def unbroken(tmp_path_factory):
    """One small run from beginning to end, in a process of its own and without a terminal: its folder, its output."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    process = start("train", *TINY, "--out", str(folder))
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    return folder, out
