"""What a run prints: a live line on a terminal, a line per epoch elsewhere, a table at the end."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table


class Progress(Protocol):
    """Told of each step's metrics."""

    def running(self, done: int, total: int) -> AbstractContextManager[None]:
        """While steps are taken, from `done` of `total`."""
        ...

    def step(self, record: dict[str, Any]) -> None:
        """One step is done."""


def _of_batch(record: dict[str, Any]) -> str:
    """The last step's own numbers."""
    return f"batch: loss {record['loss']:.4f}, accuracy {record['accuracy']:.1%}"


class LiveProgress:
    """A line that is redrawn: epoch, step, bar, loss, accuracy, held-out accuracy, time left."""

    def __init__(self, console: Console, epochs: int):
        """On a terminal."""
        self._epochs = epochs
        self._held_out = "–"
        self._bar = RichProgress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
        )

    @contextmanager
    def running(self, done: int, total: int) -> Iterator[None]:
        """Show the line, and leave it standing."""
        self._task = self._bar.add_task("compiling", total=total, completed=done, epoch=f"–/{self._epochs}")
        with self._bar:
            yield

    def step(self, record: dict[str, Any]) -> None:
        """Redraw the line."""
        if "held_out_accuracy" in record:
            self._held_out = f"{record['held_out_accuracy']:.1%}"
        self._bar.update(
            self._task,
            advance=1,
            epoch=f"{record['epoch']}/{self._epochs}",
            description=f"{_of_batch(record)}  held out {self._held_out}",
        )


class PlainProgress:
    """A line at the end of each epoch, without colours or cursor movements."""

    def __init__(self, epochs: int):
        """On standard output."""
        self._epochs = epochs

    @contextmanager
    def running(self, done: int, total: int) -> Iterator[None]:
        """The clock starts after the first step, which compiles."""
        self._began, self._first, self._total = 0.0, done + 1, total
        yield

    def step(self, record: dict[str, Any]) -> None:
        """Print where an epoch ends."""
        if record["step"] == self._first:
            self._began = time.monotonic()
        if "held_out_accuracy" not in record:
            return
        per_step = (time.monotonic() - self._began) / max(record["step"] - self._first, 1)
        print(
            f"epoch {record['epoch']}/{self._epochs}  step {record['step']}/{self._total}  "
            f"{_of_batch(record)}  held out {record['held_out_accuracy']:.1%}  "
            f"{per_step * (self._total - record['step']):.0f} s left",
            flush=True,
        )


def make_progress(epochs: int) -> Progress:
    """Live on a terminal, plain elsewhere."""
    console = Console()
    return LiveProgress(console, epochs) if console.is_terminal else PlainProgress(epochs)


def summary_rows(record: dict[str, Any]) -> list[tuple[str, str]]:
    """The last table, as label and value."""
    accuracy = record["held_out_accuracy"]
    if "held_out_accuracy_batch_stats" not in record:
        return [("accuracy", f"{accuracy:.2%}"), ("gap", "none: no running statistics, one function for both modes")]
    batch = record["held_out_accuracy_batch_stats"]
    return [
        ("accuracy with running statistics", f"{accuracy:.2%}"),
        ("accuracy with batch statistics", f"{batch:.2%}"),
        ("gap (running - batch)", f"{100 * (accuracy - batch):+.2f} points"),
    ]


def print_summary(record: dict[str, Any], held_out: int, console: Console | None = None) -> None:
    """The accuracies on the held-out images, and the gap between the two ways to evaluate."""
    print_table(f"{held_out} held-out images after {record['step']} steps", summary_rows(record), console)


def print_table(title: str, rows: list[tuple[str, str]], console: Console | None = None) -> None:
    """Labels and values below a title; without a terminal in plain lines."""
    console = console or Console()
    if not console.is_terminal:
        width = max(len(label) for label, _ in rows)
        print(title, *(f"  {label:<{width}}  {value}" for label, value in rows), sep="\n", flush=True)
        return
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
