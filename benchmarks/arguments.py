"""What the command lines share: a mistake ends with one line on stderr and status 2."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from typing import NoReturn


def say(text: str) -> None:
    """Prints to stderr, where the progress goes."""
    print(text, file=sys.stderr, flush=True)


def refuse(why: str) -> NoReturn:
    """Ends the command."""
    say(f"benchmarks: {why}")
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """One that does not print its usage with every mistake."""

    def error(self, message: str) -> NoReturn:
        """Ends the command."""
        refuse(message)


def positive(text: str) -> int:
    """A whole number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


@contextlib.contextmanager
def files() -> Iterator[None]:
    """Refuses where a file cannot be read or written."""
    try:
        yield
    except OSError as error:
        refuse(f"{error.strerror}: {str(error.filename)!r}")
