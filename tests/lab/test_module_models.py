"""`--model linen` and `--model nnx`: the pure network's parameters, losses and accuracies, by the modules of Flax."""

import threading
from contextlib import contextmanager
from functools import partial

import jax
import numpy as np
import pytest

from normjax.cli import main
from normjax.lab import config as configs
from normjax.lab import runs, train
from normjax.lab.data import load_digits
from tests.lab.runners import checkpoint, tree
from tests.quick import quick_jit

MODULES = ("linen", "nnx")
LOSSES = ("loss", "held_out_loss")
SHORT = ["digits", "--model.features", "2", "--train.epochs", "1", "--train.batch_size", "56"]
SMALL = {"model.features": "8", "train.epochs": "1", "train.batch_size": "56"}
GHOSTS = {"norm.layout": "N=(B n=4) H W C", "norm.axis_names": "n H W"}
# The plain preset is trained by the command, below.
CASES = {name: (name, {}) for name in configs.presets() if name not in ("digits", "digits-sync")} | {
    "ghosts": ("digits", GHOSTS | {"norm.debias": "true", "norm.unbiased": "true", "norm.derivative": "jvp"}),
    "two devices": ("digits-sync", {"devices": "2", "norm.scale": "false"}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_starts_from_the_same_parameters_and_has_the_same_losses(case, x64):
    preset, options = CASES[case]
    settings = [configs.load(preset, SMALL | options | {"model.kind": kind}) for kind in configs.KINDS]
    digits = load_digits(settings[0])
    with jax.enable_x64(False):
        firsts, kinds = zip(*(train.trace(config, digits) for config in settings), strict=True)
        states = quick_jit(lambda: [first() for first in firsts])()
    pure, *others = (sorted(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.params)) for state in states)
    assert [other == pure for other in others] == [True, True]

    # One program for all kinds takes half the time to compile.
    @quick_jit
    def step(states, images, labels):
        found = [steps.train(state, images, labels) for steps, state in zip(kinds, states, strict=True)]
        return [state for state, _ in found], [metrics["loss"] for _, metrics in found]

    def evaluate(states, *batch):
        return [
            [steps.evaluate(*state[:2], *batch, use_batch_stats=flag)[0] for flag in (False, True)]
            for steps, state in zip(kinds, states, strict=True)
        ]

    # Five steps may enlarge the roundings of sums in another order, 1e-16 each, by ten million.
    close = partial(np.testing.assert_allclose, rtol=1e-9, atol=0)
    states = jax.tree.map(lambda a: a.astype(np.float64) if a.dtype == np.float32 else a, states)
    for batch in np.arange(5 * 56).reshape(5, 56):
        images, labels = digits.train.images[batch].astype(np.float64), digits.train.labels[batch]
        states, (loss, *losses) = jax.block_until_ready(step(states, images, labels))
        assert loss.dtype == np.float64
        close(losses, [loss] * 2)
    if case == "ghosts":
        wanted, *found = quick_jit(evaluate)(states, images, labels)
        close(found, [wanted] * 2)


class AfterLooks(threading.Event):
    """An interrupt that comes after so many looks at it."""

    def __init__(self, looks: int):
        super().__init__()
        self.left = looks

    def is_set(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self.set()
        return super().is_set()


@pytest.fixture(scope="module")
def quick_build():
    """`train.build`, which compiles the steps of each kind once, and quickly."""
    built = {}

    def build(config, digits):
        kind = config.model.kind
        if kind not in built:
            first, steps = train.trace(config, digits)
            by = [quick_jit(partial(steps.evaluate, use_batch_stats=flag)) for flag in (False, True)]
            evaluate = lambda *given, use_batch_stats: by[use_batch_stats](*given)  # noqa: E731
            built[kind] = quick_jit(first)(), train.Steps(quick_jit(steps.train), evaluate)
        return built[kind]

    return build


@pytest.fixture(scope="module")
def by_functions(quick_build, tmp_path_factory):
    """The run folder of one epoch in float32."""
    path = tmp_path_factory.mktemp("pure") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build", quick_build)
        assert main(["train", *SHORT, "--out", str(path)]) == 0
    return path


@pytest.mark.parametrize("kind", MODULES)
def test_a_run_is_interrupted_goes_on_and_ends_as_that_of_the_pure_functions(
    kind, by_functions, quick_build, tmp_path, capsys, monkeypatch
):
    path = tmp_path / "run"

    @contextmanager
    def interrupt():
        yield AfterLooks(20)

    monkeypatch.setattr(train, "build", quick_build)
    with monkeypatch.context() as patch:
        patch.setattr(train, "stop_on_interrupt", interrupt)
        assert main(["train", *SHORT, "--model", kind, "--out", str(path)]) == 130
    assert 0 < checkpoint(path)[0] < 25
    before = tree(path)
    capsys.readouterr()
    assert main(["train", "--resume", str(path), "--model", "pure"]) == 2
    assert f"differs: model.kind is 'pure' here and '{kind}' in the run; leave" in capsys.readouterr().err
    assert tree(path) == before

    assert main(["train", "--resume", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-5] == "360 held-out images after 25 steps"
    assert (path / "curves.png").read_bytes().startswith(b"\x89PNG")
    records, expected = map(runs.read_metrics, (path, by_functions))
    for record, wanted in zip(records, expected, strict=True):
        assert set(record) == set(wanted)
        # Seen to the bit. 1e-6 is what eight float32 roundings, 2^-23 each, of each number would leave.
        for name in record.keys() - {name for name in record if "accuracy" in name}:
            assert record[name] == pytest.approx(wanted[name], rel=1e-6, abs=1e-6 * (name not in LOSSES)), name
    for way in ("held_out_accuracy", "held_out_accuracy_batch_stats"):
        assert records[-1][way] == pytest.approx(expected[-1][way], rel=0, abs=1.5 / 360)


REFUSED = {
    "--model torch": "digits: model.kind is 'torch'; it must be one of pure, linen, nnx",
    "--model nnx --norm.family rms --norm.bias true": "norm.bias is true; it must be false where model.kind is nnx, ",
    "--model linen --norm.family group --norm.channel K": "config [norm]: channel is 'K'; GroupNorm scales the axis ",
    "--model linen --norm.channel K": "config [norm]: BatchNorm: axis='K': 'K' is no axis of x; its axes are 'N', 'H'",
    "--model nnx --norm.axis_names N+rows": "config [norm]: BatchNorm: axis_names=\"N rows\": 'rows' is neither in ",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_a_kind_lacks_is_told_in_one_line_before_a_folder_is_made(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", *(word.replace("+", " ") for word in arguments.split())]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert REFUSED[arguments] in line
    assert tree(tmp_path) == {}


def test_a_run_without_the_key_is_one_of_the_pure_functions():
    assert configs.load("digits").model.kind == "pure"
