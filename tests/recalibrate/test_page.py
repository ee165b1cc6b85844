"""docs/after_training.md on recalibrating: its programs run as written and give what the page says."""

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "after_training.md").read_text()
SECTION = PAGE.split("## Re-estimating running statistics\n", 1)[1].split("\n## ", 1)[0]


@pytest.fixture(scope="module")
def names():
    """What the section's programs define, each run after those above it."""
    defined = {}
    for block in re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL):
        exec(block, defined)
    return defined


def test_the_first_norm_has_the_statistics_that_numpy_finds(names):
    assert names["error"] < 1e-6
    np.testing.assert_array_equal(names["stats"]["norm_0"]["mean"], 0)


def test_the_nnx_model_evaluates_with_what_was_found(names):
    given = names["images"].astype(np.float64) @ np.asarray(names["net"].layers[0].kernel[...], np.float64)
    np.testing.assert_allclose(names["net"].layers[1].mean[...], given.mean(0), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(names["net"].layers[1].var[...], given.var(0), rtol=2e-6)


def test_layer_by_layer_differs_in_the_second_norm_by_what_the_page_says(names):
    np.testing.assert_array_equal(names["by_layer"]["norm_0"]["var"], names["new_stats"]["norm_0"]["var"])
    assert round(float(names["gap"]), 2) == 0.02
