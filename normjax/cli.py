"""The `normjax` command: 0 done, 2 bad input in one line on standard error, 130 interrupted with everything saved."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NoReturn

from normjax import __version__

_COMMANDS = {
    "train": "train a small classifier of real images with a norm of your choice",
    "diagnose": "look for what is wrong with the normalisation of a finished run",
    "recalibrate": "estimate a finished run's running statistics anew over its training images",
    "fold": "fold the batch norms of a finished run into its convolutions",
    "check": "hold every norm against float64 on the devices and versions that are here",
}
# Of the commands, those on a finished run: each a module with `DESCRIPTION` and `run(finished) -> status`, or
# `run(finished, out) -> status` where it writes a folder.
_AFTER_TRAINING = {
    "diagnose": "normjax.lab.diagnose",
    "recalibrate": "normjax.lab.recalibrate",
    "fold": "normjax.lab.folding",
}


class _UsageError(Exception):
    """Wrong arguments; the message is one line."""


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are ours to print."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage over several lines."""
        raise _UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what its encoding lacks, a path's letters say, is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = _command(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except _UsageError as error:
        return _complain(f"normjax: error: {error}", 2)
    except KeyboardInterrupt:
        return _complain("normjax: interrupted; nothing was changed", 130)
    except BrokenPipeError:  # whoever read our output went away
        _drop_output()
        return 1
    except OSError as error:
        _drop_output()
        return _complain(f"normjax: error: {error}", 1)


def _command(arguments: list[str]) -> int:
    try:
        if arguments and arguments[0] in _COMMANDS:
            name, rest = arguments[0], arguments[1:]
            if name in _AFTER_TRAINING:
                return _after_training(name, rest)
            return _check(rest) if name == "check" else _train(rest)
        _top_parser().parse_args(arguments)
    except SystemExit as done:  # argparse's way to end --help and --version
        return int(done.code or 0)
    raise _UsageError(f"which command? One of: {', '.join(_COMMANDS)}; normjax --help says more")


def _drop_output() -> None:
    """Where what was printed cannot be written, keep the interpreter from complaining at its last flush."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str, status: int) -> int:
    """Print one line, whatever line breaks and control characters an argument brought into it."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
    print(line, file=sys.stderr, flush=True)
    return status


def _top_parser() -> argparse.ArgumentParser:
    commands = "\n".join(f"  {name:<12} {what}" for name, what in _COMMANDS.items())
    parser = _Parser(
        prog="normjax",
        description="Normalisation layers for JAX in which the caller names the axes that share a mean.",
        epilog=f"commands:\n{commands}\n\nnormjax COMMAND --help says more about one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"normjax {__version__}")
    parser.add_argument("command", nargs="?", choices=list(_COMMANDS), metavar="COMMAND", help="what to do")
    return parser


def _train_parser() -> argparse.ArgumentParser:
    from normjax.lab import config as configs

    parser = _Parser(
        prog="normjax train",
        description="Train a small convolutional classifier on the digits of scikit-learn and compare its accuracy "
        "with running and with batch statistics.",
        epilog="examples: normjax train digits | normjax train digits --norm.family group --train.epochs 3 | "
        "normjax train my.toml --out runs/mine | normjax train --resume runs/mine",
        allow_abbrev=False,
    )
    parser.add_argument(
        "config", nargs="?", help=f"a preset ({', '.join(configs.presets())}) or the path of a .toml file"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="the run folder (default: a new one under runs/)")
    parser.add_argument("--resume", metavar="DIR", type=Path, help="go on with the run in this folder")
    group = parser.add_argument_group("keys of the config, each over what the file says")
    for key, field in configs.all_keys().items():
        doc = field.metadata["doc"].replace("%", "%%")
        flags = [f"--{name}" for name in (field.metadata["short"], key) if name]
        group.add_argument(*flags, metavar="VALUE", dest=key, help=f"{doc} (the default: {_shown(field.default)})")
    return parser


def _shown(value: Any) -> str:
    """A default as one would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _check(arguments: list[str]) -> int:
    """`normjax check`, which needs no extra."""
    parser = _Parser(
        prog="normjax check",
        description="Hold every norm, in each dtype, against NumPy float64 on this machine: values, gradients by three "
        "rules, and the collectives of synchronising over its devices. Exits 1 where an error is beyond rounding.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON with all numbers in the place of the table")
    options = parser.parse_args(arguments)
    from normjax import _check

    return _check.run(as_json=options.json)


def _after_training(name: str, arguments: list[str]) -> int:
    """A command on the folder of a run, which it only reads."""
    try:
        module = import_module(_AFTER_TRAINING[name])
    except ImportError as error:
        raise _UsageError(str(error)) from None
    from normjax.lab import finished, runs
    from normjax.lab.errors import UserError

    parser = _Parser(prog=f"normjax {name}", description=module.DESCRIPTION, allow_abbrev=False)
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run of normjax train; it stays as it is")
    writes = "out" in signature(module.run).parameters
    if writes:
        parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="the new folder")
    options = parser.parse_args(arguments)
    try:
        if writes:
            runs.check_free(options.out)
        read = finished.read(options.run)
        return module.run(read, options.out) if writes else module.run(read)
    except UserError as error:
        raise _UsageError(str(error)) from error
    except KeyboardInterrupt:
        if not writes or not options.out.exists():
            raise
        return _complain(f"normjax: interrupted; {options.out} may lack something", 130)


def _train(arguments: list[str]) -> int:
    """`normjax train`."""
    try:
        from normjax.lab import config as configs
    except ImportError as error:
        raise _UsageError(str(error)) from None
    from normjax.lab.errors import UserError

    options, unknown = _train_parser().parse_known_args(arguments)
    if unknown:
        flags = [text for text in unknown if text.startswith("--")]
        if flags:
            known = ", ".join(f"--{key}" for key in ("out", "resume", *configs.all_keys()))
            raise _UsageError(f"unknown option {flags[0].partition('=')[0]}; the options are {known}")
        raise _UsageError(f"unexpected argument {unknown[0]!r}; give one preset or path, and options as --KEY VALUE")
    overrides = {key: value for key in configs.all_keys() if (value := getattr(options, key)) is not None}
    try:
        return _run(options.config, options.out, options.resume, overrides)
    except UserError as error:
        raise _UsageError(str(error)) from error


def _run(source: str | None, out: Path | None, resume: Path | None, overrides: dict[str, str]) -> int:
    """Check everything, and only then make or touch a folder."""
    from normjax.lab import config as configs
    from normjax.lab.errors import UserError

    if resume is None and source is None:
        raise UserError(f"give a preset ({', '.join(configs.presets())}), the path of a .toml file, or --resume DIR")
    if resume is not None and out is not None:
        raise UserError("--out and --resume exclude each other; --resume DIR writes into DIR")
    if source is not None:
        configs.load(source, overrides)  # a wrong key is told before the seconds that the imports below take

    from normjax.lab import devices, plots, progress, runs, train
    from normjax.lab.data import load_digits

    with ExitStack() as stack:
        if resume is not None:
            config = runs.resumed_config(resume, source, overrides)
            path = resume
        else:
            config = configs.load(str(source), overrides)
            path = out or runs.next_folder(str(source))
            runs.check_free(path)
        devices.make_cpu_devices(config.devices)  # before orbax starts JAX
        digits = load_digits(config)
        folder = None
        if resume is not None:
            folder = stack.enter_context(runs.RunFolder.reopen(path, config, train.steps_per_epoch(config, digits)))
        built = train.build(config, digits)
        stop = stack.enter_context(train.stop_on_interrupt())
        folder = folder or stack.enter_context(runs.RunFolder.create(path, config))
        print(f"run folder {path}", flush=True)
        if config.devices > 1:
            print(devices.describe(config), flush=True)
        shown = progress.make_progress(config.train.epochs)
        try:
            train.fit(config, digits, folder, shown, built, stop, resume=resume is not None)
        except train.Interrupted as done:
            return _complain(f"interrupted; saved at step {done.step}; go on with: {runs.resume_command(path)}", 130)
        records = runs.read_metrics(path)
        progress.print_summary(records[-1], len(digits.held_out.labels))
        title = f"digits, {config.norm.family} norm" if config.norm.family != "none" else "digits, no norm"
        runs.write_atomically(path / runs.CURVES, plots.curves_png(records, title))
        print(f"curves in {path / runs.CURVES}", flush=True)
    return 0
