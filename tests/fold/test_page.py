"""docs/after_training.md on folding: its programs run as written and give what the page says."""

import contextlib
import dataclasses
import io
import os
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx as flax_nnx

from normjax.lab import config as configs
from normjax.lab import folding
from normjax.lab.models import network
from tests.closeness import close
from tests.fold.layers import LAYERS

PAGE = (Path(__file__).parents[2] / "docs" / "after_training.md").read_text()
SECTION = PAGE.split("\n## Folding\n", 1)[1].split("\n## ", 1)[0]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """What the section's programs define, each run after those above it, and what they print."""
    names, printed, here = {}, io.StringIO(), Path.cwd()
    config = configs.load("digits", {"model.features": "4"})
    plain = dataclasses.replace(config, norm=dataclasses.replace(config.norm, family="none"))
    os.chdir(tmp_path_factory.mktemp("page"))
    try:
        folding.write(Path("runs/mine-folded"), config, flax_nnx.to_pure_dict(network(plain).init()[0]))
        with contextlib.redirect_stdout(printed):
            for block in re.findall(r"^```python\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL):
                exec(block, names)
    finally:
        os.chdir(here)
    return names, printed.getvalue()


def test_the_folded_kernel_and_bias_give_what_the_norm_gives(page):
    names, _ = page
    # Nine products of eight channels, of numbers as large as s = 4.7 makes them.
    close(names["same"], names["y"], m=72)


def test_the_report_is_as_printed_and_the_folded_model_answers_as_before(page):
    names, printed = page
    (shown,) = re.findall(r"^```text\n(.*?)^```$", SECTION, re.MULTILINE | re.DOTALL)
    assert printed == shown
    close(names["smaller"](names["images"]), names["net"](names["images"]), m=72)


def test_the_folded_variables_give_what_the_module_gives(page):
    names, _ = page
    wanted = names["encoder"].apply(names["variables"], names["images"], train=False)
    close(names["encoded"], wanted, m=27)
    assert [row.layer for row in names["linen_report"]] == ["Conv_0"]
    assert "batch_stats" not in names["weights"]


def test_a_written_network_is_read_as_the_page_says(page):
    names, _ = page
    assert names["logits"].shape == (1, 10)
    assert len(jax.tree.leaves(names["model"].arrays[0])) == 4
    assert np.all(np.isfinite(names["logits"]))


ROWS = re.findall(r'layout="([^"]+)"(?:, channel="([^"]+)")?', SECTION.split("| kernel |", 1)[1].split("\n\n", 1)[0])


@pytest.mark.parametrize(("layout", "channel"), ROWS)
def test_a_layout_of_the_table_is_one_that_is_folded_in_the_tests(layout, channel):
    assert (layout, channel or None) in {(layer.layout, layer.channel) for layer in LAYERS.values()}
