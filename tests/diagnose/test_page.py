"""The page on what comes after training, its section on diagnosing: programs run as written and find what it says."""

import re
from pathlib import Path

import pytest

from normjax.diagnose import FAULTS

PAGE = (Path(__file__).parents[2] / "docs" / "after_training.md").read_text()
SECTION = re.search(r"^## Diagnosing\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL).group(1)
BLOCKS = re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page():
    """``page(text)``: the names defined once the block with this text has run, all in order; and what it printed."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    names, snapshots = {}, []
    for block in BLOCKS:
        printed = []
        names["print"] = lambda *parts, printed=printed: printed.append(" ".join(map(str, parts)))
        exec(block, names)
        snapshots.append((block, dict(names), printed))
    pyplot.close("all")

    def after(text):
        (found,) = ((names, printed) for block, names, printed in snapshots if text in block)
        return found

    return after


def test_the_table_is_the_one_that_is_printed(page):
    names, printed = page("drops the new statistics")
    (shown,) = re.findall(r"^```text\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    assert printed == [shown.rstrip("\n")]
    with pytest.raises(AssertionError, match="never updated"):
        names["report"].raise_if()


def test_with_the_state_kept_nothing_is_found(page):
    assert page("y, stats = forward")[0]["report"].findings == ()


def test_other_data_are_found_and_drawn(page):
    names, printed = page("shifted")
    assert re.fullmatch(r"error drift stats \d+ of 16 channels off, .*", printed[0])
    assert len(names["figure"].axes) == 2


def test_the_linen_example_has_the_two_faults_that_the_page_names(page):
    found = {finding.fault for finding in page("linen_report")[0]["linen_report"].findings}
    assert found == {"redundant bias", "decayed norm"}


def test_the_nnx_example_is_sound(page):
    assert page("nnx_report")[0]["nnx_report"].findings == ()


def test_padding_and_replicas_are_found_where_the_axis_is_told(page):
    names, _ = page("forgets_the_mask")
    assert [finding.fault for finding in names["padded"].findings] == ["padding pooled"]
    assert [finding.fault for finding in names["replicas"].findings] == ["replicas differ"]


def test_the_table_of_the_page_has_every_fault_with_its_severity():
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in SECTION.splitlines() if line.startswith("| ")]
    assert {row[0]: row[2] for row in rows[2:]} == {fault: kind.severity for fault, kind in FAULTS.items()}
