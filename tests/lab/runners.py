"""A run small enough for a test, and how to look at what it left."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from normjax.lab.config import Config
from normjax.lab.data import Digits
from normjax.lab.runs import RunFolder
from normjax.lab.train import steps_per_epoch

ROOT = Path(__file__).parents[2]
# Three epochs of many small steps: long enough to be interrupted in the middle of one.
TINY = ["digits", "--model.features", "2", "--train.epochs", "3", "--train.batch_size", "8"]
EPOCH = 1437 // 8


def start(*arguments: str, **options: Any) -> subprocess.Popen:
    """`python -m normjax` in a process of its own, with pipes for its output."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "normjax", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def opened(path: Path, config: Config, digits: Digits, *, resume: bool) -> RunFolder:
    """A run folder, new or to go on with."""
    if resume:
        return RunFolder.reopen(path, config, steps_per_epoch(config, digits))
    return RunFolder.create(path, config)


def checkpoint(folder: Path) -> tuple[int, dict[str, tuple[str, bytes]]]:
    """The step of the newest checkpoint, and the dtype and bytes of each of its arrays by path."""
    step = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    with ocp.CheckpointManager((folder / "checkpoints").absolute()) as manager:
        saved = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore())).state
    leaves, _ = jax.tree_util.tree_flatten_with_path(saved)
    return step, {
        jax.tree_util.keystr(path): (str(np.asarray(leaf).dtype), np.asarray(leaf).tobytes()) for path, leaf in leaves
    }


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder: the bytes of files, None for folders."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
