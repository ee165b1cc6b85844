"""A run that `normjax train` left, for what comes after training; its folder is only read."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from normjax.lab import devices, runs, train
from normjax.lab.config import Config
from normjax.lab.data import Digits, epoch_order, load_digits
from normjax.lab.models import network
from normjax.lab.train import Steps, TrainState


class Finished(NamedTuple):
    """What a run folder's newest checkpoint holds, and what it was trained with; on one device."""

    path: Path
    config: Config
    digits: Digits
    state: TrainState
    steps: Steps
    step: int
    order: np.ndarray

    def forward(
        self, params: Any, stats: Any, images: Any, *, train: bool, use_batch_stats: bool = False
    ) -> tuple[jax.Array, Any]:
        """The network's (logits, stats); only training moves the statistics."""

        def on_one(params, stats, images):
            return net.apply(params, stats, images, train=train, use_batch_stats=use_batch_stats)[:2]

        net = network(self.config)
        same, split = devices.SAME, devices.SPLIT
        mesh = devices.make_mesh(self.config)
        return devices.spread(mesh, on_one, (same, same, split), (split, same))(params, stats, images)

    def accuracy(self, state: TrainState) -> float:
        """The share of the held-out images that the network gets right, by the running statistics."""
        size = self.config.train.batch_size
        return train.evaluate(self.steps, state, self.digits.held_out, size, use_batch_stats=False)[1]


def read(path: Path) -> Finished:
    """The run in a folder, with the state of its newest checkpoint.

    Raises:
        UserError: what is wrong with the folder.
    """
    config = dataclasses.replace(runs.stored_config(path), devices=1)
    digits = load_digits(config)
    state, steps = train.build(config, digits)
    first = epoch_order(config.seed, 0, len(digits.train.labels))
    with runs.RunFolder.reopen(path, config, train.steps_per_epoch(config, digits)) as folder:
        state, step, order = train.restored(folder, state, first)
    return Finished(path, config, digits, state, steps, step, order)


def write(path: Path, finished: Finished, state: TrainState) -> None:
    """A new run folder: the finished run with another state, its metrics as they were.

    Raises:
        UserError: the folder holds something already, or cannot be made.
    """
    config = runs.stored_config(finished.path)
    with runs.RunFolder.create(path, config) as folder:
        runs.write_atomically(path / runs.METRICS, (finished.path / runs.METRICS).read_bytes())
        folder.begin(finished.step)
        folder.save(finished.step, train.checkpoint(state, finished.step, finished.order), config)
