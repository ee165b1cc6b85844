import importlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import normjax
from normjax.cli import main
from tests.lab.runners import ROOT, TINY, start, tree


def test_version_prints_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"normjax {normjax.__version__}\n"


def test_python_dash_m_normjax_is_the_command():
    process = start("--version")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, f"normjax {normjax.__version__}\n", "")


def test_help_names_the_commands_and_help_of_train_names_every_preset_and_key(capsys):
    from normjax.lab import config as configs

    assert main(["--help"]) == 0
    assert "train" in capsys.readouterr().out
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    for word in [*configs.presets(), *(f"--{key} VALUE" for key in configs.all_keys()), "--out DIR", "--resume DIR"]:
        assert word in shown


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with things that are no good."""
    monkeypatch.chdir(tmp_path)
    Path("broken.toml").write_text("[norm\n")
    Path("adir.toml").mkdir()
    Path("taken").mkdir()
    Path("taken/notes.txt").write_text("mine")
    Path("taken.txt").write_text("a file")
    Path("old").mkdir()
    Path("old/config.toml").write_text("seed = 0\n")
    return tmp_path


BAD_INPUT = {
    "": "which command? One of: train, diagnose, recalibrate, fold, check; normjax --help says more",
    "tain digits": "argument COMMAND: invalid choice: 'tain' (choose from",
    "--verbose": "unrecognized arguments: --verbose",
    "train": "give a preset (digits, digits-group, ",
    "train digit": "unknown preset 'digit'; the presets are digits, digits-group, digits-instance, digits-layer, ",
    "train absent.toml": "absent.toml: no such file; give a preset (digits, ",
    "train broken.toml": "broken.toml: is not TOML: ",
    "train adir.toml": "adir.toml: cannot be read (Is a directory); give a readable TOML file",
    "train digits digits": "unexpected argument 'digits'; give one preset or path, and options as --KEY VALUE",
    "train digits --norm.famly group": "unknown option --norm.famly; the options are --out, --resume, --seed, ",
    "train digits --norm.famly=group": "unknown option --norm.famly; the options are --out, --resume, --seed, ",
    "train digits --norm.family": "argument --norm.family: expected one argument",
    "train digits --norm.family gruop": "norm.family is 'gruop'; it must be one of batch, layer, ",
    "train digits --train.epochs 1.5": "--train.epochs: expected a whole number, not '1.5'",
    "train digits --train.batch_size 9999": "train.batch_size is 9999, but there are 1437 training images; make it",
    "train digits-group --model.features 12": 'config [norm]: group_norm: layout="N H W C=(G=8 K)": the factors of ',
    "train digits --norm.axis_names N+HW": 'config [norm]: batch_norm: axis_names="N+HW": ',
    "train digits --norm.axis_names C": "config [norm]: batch_norm: ",
    "train digits --norm.channel K": "config [norm]: batch_norm: ",
    "train digits-sync --devices 0": "digits-sync: devices is 0; it must be between 1 and 4096",
    "train digits-sync --devices 5": "train.batch_size is 64, which 5 devices do not divide; make it a multiple, such",
    "train digits-sync --devices 16": "devices is 16, but JAX sees 8 (cpu); make it 8 or less, or have the CPU stand",
    "train digits-sync --norm.axis_names H+data": "'H data' pools over devices (data) but not over all examples of",
    "train digits --devices 8": "devices is 8, but norm.axis_names 'N H W' pools on each of them apart; add 'data', as",
    "train digits --norm.axis_names N+rows": "config [norm]: batch_norm: axis_names=\"N rows\": 'rows' is neither in",
    "train digits --out taken": "--out taken: exists already and is not an empty folder; name another",
    "train digits --out taken.txt": "--out taken.txt: exists already and is not an empty folder; name another",
    "train digits --out taken.txt/run": "--out taken.txt/run: no folder can be made in ",
    "train digits --out old": "--out old: this run folder exists; name another, or go on training it by normjax",
    "train digits --out bad\udcffname": "bad\\udcffname' is no text in UTF-8; give another name",
    "train digits --out " + "a" * 300: "cannot be used (File name too long); give another name",
    "train digits --out here/a*b": "here/a*b: orbax cannot keep checkpoints under a path with '*', as in ",
    "train digits --out what?": "orbax cannot keep checkpoints under a path with '?', as in ",
    "train digits --out [1]": "orbax cannot keep checkpoints under a path with '[', as in ",
    "train digits --out a\\b": "orbax cannot keep checkpoints under a path with '\\\\', as in ",
    "train digits --out gs://bucket/run": "orbax cannot keep checkpoints under a path with ':/', as in ",
    "train digits --out /s3/bucket": "orbax cannot keep checkpoints under a path with '/s3/', as in ",
    "train --resume bad\udcffname": "run folder bad\\udcffname: ",
    "train --resume " + "a" * 300: "cannot be used (File name too long); give another name",
    "train --resume [1]": "run folder [1]: orbax cannot keep checkpoints under a path with '[', as in ",
    "train digits --new\u2028line\x1b": "unknown option --new\\u2028line\\x1b; the options are ",
    "train --out here --resume old": "--out and --resume exclude each other; --resume DIR writes into DIR",
    "train --resume absent": "run folder absent: there is none; give the folder that --out named",
    "train --resume taken": "run folder taken: has no config.toml, so it is none; give the one that --out",
    "train --resume old": "run folder old: holds no checkpoint yet; start anew: normjax train old/config.toml",
    "train --resume old --seed 1": "run folder old: the config differs: seed is 1 here and 0 in the run; leave that",
    "check --jason": "unrecognized arguments: --jason",
    "check digits": "unrecognized arguments: digits",
    "recalibrate": "the following arguments are required: RUN, --out",
    "recalibrate old": "the following arguments are required: --out",
    "recalibrate absent --out new": "run folder absent: there is none; give the folder that --out named",
    "recalibrate old --out taken": "--out taken: exists already and is not an empty folder; name another",
    "recalibrate old --out new": "run folder old: holds no checkpoint yet; start anew: normjax train old/config.toml",
    "train digits-none --resume old": "run folder old: the config differs: norm.family is 'none' here and 'batch' in",
    "fold": "the following arguments are required: RUN, --out",
    "fold old": "the following arguments are required: --out",
    "fold old --out taken": "--out taken: exists already and is not an empty folder; name another",
    "fold absent --out new": "run folder absent: there is none; give the folder that --out named",
    "fold old --out new": "run folder old: holds no checkpoint yet; start anew: normjax train old/config.toml",
}


@pytest.mark.parametrize("arguments", BAD_INPUT, ids=lambda arguments: arguments[:60])
def test_bad_input_is_one_line_on_stderr_exit_2_and_changes_nothing_on_disk(arguments, folder, capsys):
    jax.devices()  # a JAX that has started makes no further ones
    before = tree(folder)
    assert main([word.replace("+", " ") for word in arguments.split(" ") if word]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("normjax: error: ")
    assert BAD_INPUT[arguments].replace("N+HW", "N HW") in printed.err
    assert len(printed.err.splitlines()) == 1
    assert tree(folder) == before


def test_bad_input_in_a_process_of_its_own_leaves_no_traceback(tmp_path):
    process = start("train", "digits", "--norm.family", "gruop", cwd=tmp_path)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("normjax: error: digits: norm.family is 'gruop'; it must be one of ")
    assert err.count("\n") == 1
    assert tree(tmp_path) == {}


def test_a_missing_extra_is_named_with_the_command_that_brings_it(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("normjax.lab")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(normjax, "lab", raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["train", "digits"]) == 2
    message = 'normjax.lab needs rich: pip install "normjax[lab]"'
    assert capsys.readouterr().err == f"normjax: error: {message}\n"
    with pytest.raises(ImportError) as caught:
        importlib.import_module("normjax.lab")
    assert str(caught.value) == message
    assert main(["--version"]) == 0


def test_the_library_does_not_import_the_lab_or_the_command():
    code = "import sys, normjax; print([n for n in sys.modules if n.startswith(('normjax.lab', 'normjax.cli'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("arguments", [["--version"], ["train", "--help"]])
def test_a_reader_that_went_away_gets_no_complaint(arguments):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    gone, output = os.pipe()
    os.close(gone)
    command = [sys.executable, "-m", "normjax", *arguments]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, env=environment, cwd=ROOT, check=False)
    os.close(output)
    assert (done.returncode, done.stderr) == (1, b"")


def test_an_interrupt_before_training_says_so_and_exits_130(monkeypatch, capsys, tmp_path):
    from normjax.lab import config as configs

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(configs, "load", interrupted)
    assert main(["train", *TINY]) == 130
    assert capsys.readouterr().err == "normjax: interrupted; nothing was changed\n"
    assert tree(tmp_path) == {}
