"""A run folder: the resolved config, one metrics line a step, and checkpoints; a crash at any moment leaves it whole.

Files are written beside their place and moved there; the metrics are on disk before the checkpoint that counts them; a
checkpoint counts once its digests are there, which come last, and only then is the one before it dropped. What a crash
left of steps after the last checkpoint is cut off when the run goes on.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
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
FOLDED = "model.safetensors"  # what normjax fold writes beside a config


def next_folder(source: str, root: Path = Path("runs")) -> Path:
    """A folder under `root` that is not there yet, named after the preset or the file."""
    stem = Path(source).stem
    return next(path for n in itertools.count(1) if not (path := root / f"{stem}-{n:03d}").exists())


# Orbax takes its path for a pattern or a bucket's address, or turns \ into /: its files land elsewhere or nowhere.
_LOST_BY_ORBAX = re.compile(r"[*?\[\]\\]|:/|^/(?:gs|s3|az|hf)(?:/|$)")
_STEP = re.compile(r"0|[1-9]\d*", re.ASCII)


def _check_path(option: str, folder: Path) -> None:
    """Refuse a path that no folder can have, or under which orbax loses what it writes."""
    whole = str(folder.absolute())
    try:
        whole.encode()
        folder.lstat()
    except ValueError:
        raise UserError(f"{option} {folder}: {whole!r} is no text in UTF-8; give another name") from None
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise UserError(f"{option} {folder}: cannot be used ({error.strerror}); give another name") from None
    if found := _LOST_BY_ORBAX.search(whole):
        raise UserError(
            f"{option} {folder}: orbax cannot keep checkpoints under a path with {found.group()!r}, as in {whole!r}; "
            "give another place"
        )


def check_free(folder: Path) -> None:
    """Refuse a folder that holds something already, or that cannot be made."""
    _check_path("--out", folder)
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if (folder / CONFIG).exists() and not (folder / FOLDED).exists():
        raise UserError(
            f"--out {folder}: this run folder exists; name another, or go on training it by {resume_command(folder)}"
        )
    if folder.exists() or folder.is_symlink():
        raise UserError(f"--out {folder}: exists already and is not an empty folder; name another")
    above = next(parent for parent in folder.absolute().parents if parent.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"--out {folder}: no folder can be made in {above}; name another place")


def make_folder(path: Path, config: Config) -> None:
    """A new folder with a config in it."""
    check_free(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(path / CONFIG, configs.to_toml(config).encode())
    except OSError as error:
        raise UserError(f"--out {path}: cannot be written ({error.strerror}); name another place") from None


def resume_command(folder: Path) -> str:
    """What to type to go on with a run."""
    return f"normjax train --resume {shlex.quote(str(folder))}"


def stored_config(folder: Path) -> Config:
    """The config of an existing run."""
    _check_path("run folder", folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "there is none"
        raise UserError(f"run folder {folder}: {what}; give the folder that --out named")
    if not (folder / CONFIG).is_file():
        raise UserError(f"run folder {folder}: has no {CONFIG}, so it is none; give the one that --out named")
    return configs.load(str(folder / CONFIG))


def resumed_config(folder: Path, source: str | None, overrides: Mapping[str, str]) -> Config:
    """The config of an existing run, which whatever else the command line gives must agree with, but for `devices`."""
    stored = stored_config(folder)
    for path in (folder / METRICS, folder / CURVES):
        if taken := next((p for p in (path, _temporary(path)) if p.is_dir()), None):
            raise UserError(f"run folder {folder}: {taken.name} is a folder where the run writes a file; move it away")
    if not os.access(folder, os.W_OK):
        raise UserError(f"run folder {folder}: cannot be written; allow it, or copy the folder to another place")
    asked = configs.load(source or str(folder / CONFIG), overrides)
    _agree(folder, asked, stored, "the run", "leave that out, or start a new run without --resume")
    return dataclasses.replace(stored, devices=asked.devices if "devices" in overrides else stored.devices)


def _agree(folder: Path, asked: Config, stored: Config, whose: str, mend: str) -> None:
    """Refuse to go on under another config; how many devices share the work is no part of what is computed."""
    asked = dataclasses.replace(asked, devices=stored.devices)
    if found := configs.differences(asked, stored):
        shown = ", ".join(
            f"{key} is {configs.shown(here)} here and {configs.shown(there)} in {whose}" for key, here, there in found
        )
        raise UserError(f"run folder {folder}: the config differs: {shown}; {mend}")


class RunFolder:
    """An open run folder; use as a context manager."""

    def __init__(self, path: Path):
        """Open the checkpoints of a folder that exists; `begin` opens the metrics."""
        self.path = path
        # Orbax wants an absolute path, writes to a temporary folder and renames it: no half checkpoint has the name.
        options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False, create=True)
        self._manager = ocp.CheckpointManager((path / CHECKPOINTS).absolute(), options=options)
        self._metrics: TextIO | None = None
        self._step = 0  # of the newest whole checkpoint
        self._config: Config | None = None  # of the file

    @classmethod
    def create(cls, path: Path, config: Config) -> "RunFolder":
        """A new folder with its config."""
        make_folder(path, config)
        folder = cls(path)
        folder._config = config
        return folder

    @classmethod
    def reopen(cls, path: Path, config: Config, per_epoch: int) -> "RunFolder":
        """An existing folder with a checkpoint of the same config, and metrics in epochs of `per_epoch` steps."""
        steps = _steps(path)
        if not steps:
            if (path / FOLDED).exists():
                raise UserError(f"run folder {path}: holds a folded network; give the run that it was folded from")
            raise UserError(f"run folder {path}: holds no checkpoint yet; start anew: normjax train {path / CONFIG}")
        whole = [step for step in steps if (path / CHECKPOINTS / str(step) / DIGESTS).exists()]
        if not whole:
            reason = f"{DIGESTS} is missing, without which nobody can tell whether the other files are whole"
            raise _unreadable(path, max(steps), reason)
        folder = cls(path)
        folder._step = max(whole)
        folder._config = stored_config(path)
        saved = folder._read("config", ocp.args.JsonRestore())
        _agree(path, config, configs.resolve(saved, "checkpoint", {}), "its checkpoint", f"mend {path / CONFIG}")
        _check_metrics(path, folder._step, config, per_epoch)
        return folder

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        if self._metrics is not None:
            self._metrics.close()
        self._manager.close()

    def begin(self, step: int) -> None:
        """Cut off what is later than `step`, and open the metrics for more."""
        self._keep_only(step)
        kept = read_metrics(self.path)[:step]
        write_atomically(self.path / METRICS, "".join(_line(record) for record in kept).encode())
        self._metrics = (self.path / METRICS).open("a", encoding="utf-8")

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one step's metrics; `begin` comes first."""
        assert self._metrics is not None
        self._metrics.write(_line(record))
        self._metrics.flush()

    def save(self, step: int, state: Any, config: Config) -> None:
        """Write the checkpoint after `step` steps, then drop the one before it; a new number of devices is kept."""
        assert self._metrics is not None
        if step in self._manager.all_steps():
            return
        os.fsync(self._metrics.fileno())
        state_item, config_item = ocp.args.StandardSave(state), ocp.args.JsonSave(configs.to_dict(config))
        self._manager.save(step, args=ocp.args.Composite(state=state_item, config=config_item))
        self._manager.wait_until_finished()
        self._write_digests(step)
        if config != self._config:
            write_atomically(self.path / CONFIG, configs.to_toml(config).encode())
            self._config = config
        self._keep_only(step)

    def _keep_only(self, step: int) -> None:
        """Drop the checkpoints of other steps, whatever is left of them."""
        for other in _steps(self.path):
            if other != step:
                shutil.rmtree(self.path / CHECKPOINTS / str(other))
        self._manager.reload()

    def restore(self, target: Any) -> Any:
        """The newest checkpoint, in the structure and dtypes of `target`."""
        return self._read("state", ocp.args.StandardRestore(target))

    def _read(self, item: str, args: Any) -> Any:
        """One item of the newest checkpoint."""
        step = self._step
        self._check_digests(step)
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
        except Exception as error:  # orbax and tensorstore raise many kinds; the first line says which file
            said = str(error).partition(" [tensorstore_spec")[0] or type(error).__name__
            raise _unreadable(self.path, step, textwrap.shorten(said, 240, placeholder=" …")) from error

    def _write_digests(self, step: int) -> None:
        """Beside the files, their digests: where orbax meets a damaged one, its threads go on to print tracebacks."""
        root = self.path / CHECKPOINTS / str(step)
        found = {str(file.relative_to(root)): _digest(file) for file in sorted(root.rglob("*")) if file.is_file()}
        write_atomically(root / DIGESTS, json.dumps(found, indent=1).encode())

    def _check_digests(self, step: int) -> None:
        root = self.path / CHECKPOINTS / str(step)
        try:
            digests = json.loads((root / DIGESTS).read_bytes())
        except (OSError, ValueError, RecursionError):
            digests = None
        if not isinstance(digests, dict) or not digests:
            raise _unreadable(self.path, step, f"{DIGESTS} is not what was written")
        for name, digest in digests.items():
            try:
                whole = _digest(root / name) == digest
            except (OSError, ValueError):
                whole = False
            if not whole:
                raise _unreadable(self.path, step, f"{name} is not what was written")


def _steps(folder: Path) -> list[int]:
    """Steps after which there is a checkpoint, whole or not."""
    return [int(found.name) for found in (folder / CHECKPOINTS).glob("*") if _STEP.fullmatch(found.name)]


def _unreadable(folder: Path, step: int, reason: str) -> UserError:
    return UserError(f"run folder {folder}: checkpoint {step} cannot be read; start a new run ({reason})")


def metric_names(config: Config, *, ends_epoch: bool) -> set[str]:
    """The names on one line of the metrics."""
    names = {"step", "epoch", "loss", "accuracy"}
    names |= {"held_out_loss", "held_out_accuracy"} if ends_epoch else set()
    if config.norm.keeps_statistics:
        names |= {"batch_mean", "running_mean"} | ({"held_out_accuracy_batch_stats"} if ends_epoch else set())
    return names


def _check_metrics(folder: Path, step: int, config: Config, per_epoch: int) -> None:
    """Refuse to go on from `step` unless each line up to there is what the run wrote."""
    records = read_metrics(folder)[:step]
    for number, record in enumerate(records, 1):
        ends_epoch = number % per_epoch == 0
        place = {"step": number, "epoch": -(-number // per_epoch)}
        numbers = all(type(value) in (int, float) and abs(value) < math.inf for value in record.values())
        if not numbers or place.items() - record.items() or set(record) != metric_names(config, ends_epoch=ends_epoch):
            raise UserError(
                f"run folder {folder}: line {number} of {METRICS} is not what step {number} wrote; "
                "it was changed: start a new run"
            )
    if len(records) < step:
        raise UserError(
            f"run folder {folder}: checkpoint {step} is later than {METRICS}, which has {len(records)} whole lines; "
            "one of the two was changed: start a new run"
        )


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that its name never stands for half of it; an OSError names the file."""
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


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
        except (ValueError, RecursionError):
            break
        if not line.endswith(b"\n") or not isinstance(record, dict) or "step" not in record:
            break
        records.append(record)
    return records


def _line(record: Mapping[str, Any]) -> str:
    """One line of metrics: no times, so that two runs of one seed have the same bytes."""
    return json.dumps(record, allow_nan=False) + "\n"
