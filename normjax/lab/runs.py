"""A run folder: the resolved config, one metrics line a step, and checkpoints; a crash at any moment leaves it whole.

Files are written beside their place and moved there; the metrics are on disk before the checkpoint that counts them;
what a crash left of steps after the last checkpoint is cut off when the run goes on.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import shlex
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import orbax.checkpoint as ocp

from normjax.lab import config as configs
from normjax.lab.config import Config
from normjax.lab.errors import UserError

CONFIG, METRICS, CURVES, CHECKPOINTS = "config.toml", "metrics.jsonl", "curves.png", "checkpoints"
DIGESTS = "sha256.json"


def next_folder(source: str, root: Path = Path("runs")) -> Path:
    """A folder under `root` that is not there yet, named after the preset or the file."""
    stem = Path(source).stem
    return next(path for n in itertools.count(1) if not (path := root / f"{stem}-{n:03d}").exists())


def check_free(folder: Path) -> None:
    """Refuse a folder that holds something already."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if (folder / CONFIG).exists():
        raise UserError(
            f"--out {folder}: this run folder exists; go on with it by {resume_command(folder)}, or name another"
        )
    if folder.exists() or folder.is_symlink():
        raise UserError(f"--out {folder}: exists already and is not an empty folder; name another")
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"--out {folder}: no folder can be made in {above}; name another place")


def resume_command(folder: Path) -> str:
    """What to type to go on with a run."""
    return f"normjax train --resume {shlex.quote(str(folder))}"


def resumed_config(folder: Path, source: str | None, overrides: Mapping[str, str]) -> Config:
    """The config of an existing run, which whatever else the command line gives must agree with, but for `devices`."""
    if not folder.is_dir():
        raise UserError(f"--resume {folder}: no such run folder; give the folder that --out named")
    if not (folder / CONFIG).is_file():
        raise UserError(f"--resume {folder}: has no {CONFIG}, so it is not a run folder; give the one that --out named")
    stored = configs.load(str(folder / CONFIG))
    asked = configs.load(source or str(folder / CONFIG), overrides)
    _agree(folder, asked, stored, "the run", "leave that out, or start a new run without --resume")
    return dataclasses.replace(stored, devices=asked.devices if "devices" in overrides else stored.devices)


def _agree(folder: Path, asked: Config, stored: Config, whose: str, mend: str) -> None:
    """Refuse to go on under another config; how many devices share the work is no part of what is computed."""
    asked = dataclasses.replace(asked, devices=stored.devices)
    if found := configs.differences(asked, stored):
        shown = ", ".join(f"{key} is {here!r} here and {there!r} in {whose}" for key, here, there in found)
        raise UserError(f"--resume {folder}: the config differs: {shown}; {mend}")


class RunFolder:
    """An open run folder; use as a context manager."""

    def __init__(self, path: Path):
        """Open the checkpoints of a folder that exists; `begin` opens the metrics."""
        self.path = path
        # Orbax wants an absolute path, writes to a temporary folder and renames it: no half checkpoint has the name.
        options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False, create=True)
        self._manager = ocp.CheckpointManager((path / CHECKPOINTS).absolute(), options=options)
        self._metrics: TextIO | None = None

    @classmethod
    def create(cls, path: Path, config: Config) -> "RunFolder":
        """A new folder with its config."""
        check_free(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_atomically(path / CONFIG, configs.to_toml(config).encode())
        except OSError as error:
            raise UserError(f"--out {path}: cannot be written ({error.strerror}); name another place") from None
        return cls(path)

    @classmethod
    def reopen(cls, path: Path, config: Config) -> "RunFolder":
        """An existing folder with a checkpoint of the same config and the metrics that led there."""
        steps = [int(found.name) for found in (path / CHECKPOINTS).glob("*") if found.name.isdigit()]
        if not steps:
            raise UserError(f"--resume {path}: holds no checkpoint yet; start anew: normjax train {path / CONFIG}")
        step = max(steps)
        if [record["step"] for record in read_metrics(path)[:step]] != list(range(1, step + 1)):
            raise UserError(f"--resume {path}: {METRICS} lacks steps up to {step}; it was changed: start a new run")
        folder = cls(path)
        saved = folder._read("config", ocp.args.JsonRestore())
        _agree(path, config, configs.resolve(saved, "checkpoint", {}), "its checkpoint", f"mend {path / CONFIG}")
        return folder

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._manager.close()

    def begin(self, step: int) -> None:
        """Cut the metrics off after `step` records and open them for more."""
        kept = read_metrics(self.path)[:step]
        write_atomically(self.path / METRICS, "".join(_line(record) for record in kept).encode())
        self._metrics = (self.path / METRICS).open("a", encoding="utf-8")

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one step's metrics; `begin` comes first."""
        assert self._metrics is not None
        self._metrics.write(_line(record))
        self._metrics.flush()

    def save(self, step: int, state: Any, config: Config) -> None:
        """Write the checkpoint after `step` steps, then drop the one before it."""
        assert self._metrics is not None
        if step in self._manager.all_steps():
            return
        os.fsync(self._metrics.fileno())
        state_item, config_item = ocp.args.StandardSave(state), ocp.args.JsonSave(configs.to_dict(config))
        self._manager.save(step, args=ocp.args.Composite(state=state_item, config=config_item))
        self._manager.wait_until_finished()
        self._write_digests(step)

    def restore(self, target: Any) -> Any:
        """The newest checkpoint, in the structure and dtypes of `target`."""
        return self._read("state", ocp.args.StandardRestore(target))

    def _read(self, item: str, args: Any) -> Any:
        """One item of the newest checkpoint."""
        step = self._manager.latest_step()
        assert step is not None  # `reopen` has seen a checkpoint
        self._check_digests(step)
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
        except Exception as error:  # orbax and tensorstore raise many kinds; the first line says which file
            said = str(error).partition(" [tensorstore_spec")[0] or type(error).__name__
            raise self._unreadable(step, textwrap.shorten(said, 240, placeholder=" …")) from error

    def _write_digests(self, step: int) -> None:
        """Beside the files, their digests: where orbax meets a damaged one, its threads go on to print tracebacks."""
        root = self.path / CHECKPOINTS / str(step)
        found = {str(file.relative_to(root)): _digest(file) for file in sorted(root.rglob("*")) if file.is_file()}
        write_atomically(root / DIGESTS, json.dumps(found, indent=1).encode())

    def _check_digests(self, step: int) -> None:
        root = self.path / CHECKPOINTS / str(step)
        if not (root / DIGESTS).exists():  # the run ended between the checkpoint and its digests
            return
        try:
            damaged = [
                name
                for name, digest in json.loads((root / DIGESTS).read_bytes()).items()
                if _digest(root / name) != digest
            ]
        except (OSError, ValueError) as error:
            raise self._unreadable(step, str(error)) from error
        if damaged:
            raise self._unreadable(step, f"{damaged[0]} is not what was written")

    def _unreadable(self, step: int, reason: str) -> UserError:
        return UserError(f"--resume {self.path}: checkpoint {step} cannot be read; start a new run ({reason})")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that its name never stands for half of it."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics, up to the first line that a crash cut short."""
    records = []
    try:
        content = (folder / METRICS).read_bytes()
    except OSError:
        return []
    for line in content.splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(record, dict) or "step" not in record:
            break
        records.append(record)
    return records


def _line(record: Mapping[str, Any]) -> str:
    """One line of metrics: no times, so that two runs of one seed have the same bytes."""
    return json.dumps(record, allow_nan=False) + "\n"
