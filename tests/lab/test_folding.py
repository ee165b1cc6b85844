"""`normjax fold`: the network without its norms, in files that are read again."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from normjax.cli import main
from normjax.lab import config as configs
from normjax.lab import finished, folding
from normjax.lab.errors import UserError
from normjax.lab.models import network
from tests.closeness import close
from tests.lab.runners import tree
from tests.quick import quick_jit


@pytest.fixture(scope="module")
def run(unbroken):
    return finished.read(unbroken[0])


def of_kind(run, kind):
    """A run of another kind of network, with parameters and statistics that training could have left."""
    config = dataclasses.replace(run.config, model=dataclasses.replace(run.config.model, kind=kind))
    params, stats = network(config).init()
    rng = np.random.default_rng(0)

    params = jax.tree.map(lambda leaf: leaf + rng.normal(size=leaf.shape).astype(leaf.dtype), params)
    stats = jax.tree.map(lambda leaf: leaf + rng.random(leaf.shape).astype(leaf.dtype), stats)
    return run._replace(config=config, state=run.state._replace(params=params, stats=stats))


@pytest.mark.parametrize("kind", ["pure", "nnx", "linen"])
def test_the_folded_network_read_again_gives_the_logits_of_the_run(kind, run, tmp_path):
    run = of_kind(run, kind)
    params, pairs = folding.folded(run)
    folding.write(tmp_path / "new", run.config, params)
    model = folding.load(tmp_path / "new")
    images = run.digits.held_out.images[:16]
    apply = quick_jit(lambda params, stats, images: network(run.config).apply(params, stats, images, train=False)[0])
    wanted = apply(run.state.params, run.state.stats, images)
    assert len(pairs) == len(run.config.model.features)
    # A convolution of 9 products, and a head of 32.
    close(model(images), wanted, m=9 * 32)
    assert np.abs(wanted).max() > 0.1
    assert model.config.norm.family == "none"


def test_the_command_writes_two_files_prints_what_came_of_it_and_leaves_the_run_alone(unbroken, tmp_path, capsys):
    path, out = unbroken[0], tmp_path / "new"
    before = tree(path)
    assert main(["fold", str(path), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert tree(path) == before
    assert sorted(tree(out)) == ["config.toml", "model.safetensors"]
    for pattern in (
        r"blocks\.0\.norm +folded into blocks\.0\.conv",
        r"largest difference of the logits +\d\.\de-\d\d",
        r"accuracy on 360 held-out images +(\S+) before, \1 after",
        r"time for 8 images +\d+ µs before, \d+ µs after \(median ratio \d\.\d\d\)",
    ):
        assert re.search(pattern, shown), shown
    arrays = load_file(out / "model.safetensors")
    assert sorted(arrays) == ["blocks.0.conv.bias", "blocks.0.conv.kernel", "head.bias", "head.kernel"]
    difference, largest = (float(re.search(rf"{text} +(\S+)", shown)[1]) for text in ("of the logits", "largest logit"))
    assert difference <= 64 * np.finfo(np.float32).eps * max(1, largest)


def test_another_norm_than_batch_norm_is_refused_in_one_line(run):
    group = configs.load("digits-group", {})
    with pytest.raises(UserError, match=r"its norm\.family is 'group'; batch norm alone folds") as raised:
        folding.folded(run._replace(config=group))
    assert "\n" not in str(raised.value)


def test_the_command_refuses_a_run_of_another_norm_and_makes_no_folder(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(finished, "read", lambda path: run._replace(config=configs.load("digits-layer", {}), path=path))
    assert main(["fold", "old", "--out", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err.startswith("normjax: error: run folder old: its norm.family is 'layer'; batch norm")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("begun", [True, False])
def test_an_interrupt_says_whether_there_is_a_new_folder(begun, run, tmp_path, capsys, monkeypatch):
    new = tmp_path / "new"

    def interrupted(run, out):
        if begun:
            out.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(finished, "read", lambda path: run)
    monkeypatch.setattr(folding, "run", interrupted)
    assert main(["fold", "old", "--out", str(new)]) == 130
    said = f"{new} may lack something" if begun else "nothing was changed"
    assert capsys.readouterr().err == f"normjax: interrupted; {said}\n"


def test_a_folder_without_a_folded_network_is_refused(unbroken, tmp_path):
    with pytest.raises(UserError, match=r"has no model\.safetensors; give the one that normjax fold wrote"):
        folding.load(unbroken[0])
    with pytest.raises(UserError, match="there is none"):
        folding.load(tmp_path / "absent")


def test_a_folder_that_cannot_be_made_is_named(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="no folder can be made"):
        folding.write(tmp_path / "file" / "new", run.config, {})
