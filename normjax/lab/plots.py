"""The curves of one run, drawn from its metrics alone."""

import io
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_TRAIN, _HELD_OUT, _BATCH = "#9aa5b1", "#1f5fa8", "#d9822b"


def curves_png(records: list[dict[str, Any]], title: str) -> bytes:
    """A PNG with loss, accuracy and, where there is one, a layer's running mean against its batch means.

    Args:
        records: the lines of `metrics.jsonl`.
        title: what was trained.
    """
    with_statistics = "running_mean" in records[0]
    panels = 3 if with_statistics else 2
    figure = Figure(figsize=(3.6 * panels, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, panels)
    figure.suptitle(title, fontsize=11)
    _loss(axes[0], records)
    _accuracy(axes[1], records)
    if with_statistics:
        _means(axes[2], records)
    for axis in axes:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, framealpha=0.9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def _column(records: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of the records that have a value of this name."""
    pairs = [(record["step"], record[name]) for record in records if name in record]
    return tuple(np.array(pairs).T) if pairs else (np.array([]), np.array([]))


def _loss(axis: Any, records: list[dict[str, Any]]) -> None:
    axis.semilogy(*_column(records, "loss"), color=_TRAIN, lw=0.9, label="training, each batch")
    axis.semilogy(*_column(records, "held_out_loss"), color=_HELD_OUT, marker="o", ms=3, label="held out")
    axis.set_title("Loss", fontsize=10)
    axis.set_ylabel("cross-entropy (nats)")


def _accuracy(axis: Any, records: list[dict[str, Any]]) -> None:
    def percent(name: str) -> tuple[np.ndarray, np.ndarray]:
        steps, values = _column(records, name)
        return steps, 100 * values

    batch_steps, batch_values = percent("held_out_accuracy_batch_stats")
    axis.plot(*percent("accuracy"), color=_TRAIN, lw=0.9, label="training, each batch")
    label = "held out, running statistics" if len(batch_steps) else "held out"
    axis.plot(*percent("held_out_accuracy"), color=_HELD_OUT, marker="o", ms=3, label=label)
    if len(batch_steps):
        axis.plot(
            batch_steps, batch_values, color=_BATCH, marker="x", ms=4, ls="--", label="held out, batch statistics"
        )
    axis.set_ylim(min(80, *percent("held_out_accuracy")[1]) - 2, 101)
    axis.set_title("Accuracy", fontsize=10)
    axis.set_ylabel("accuracy (%)")


def _means(axis: Any, records: list[dict[str, Any]]) -> None:
    axis.plot(*_column(records, "batch_mean"), color=_TRAIN, lw=0.9, label="batch mean")
    axis.plot(*_column(records, "running_mean"), color=_HELD_OUT, lw=1.8, label="running mean")
    axis.set_title("Last norm layer, channel 0", fontsize=10)
    axis.set_ylabel("mean of the layer's input")
