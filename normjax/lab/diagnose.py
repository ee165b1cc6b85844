"""`normjax diagnose RUN`: what is wrong with the normalisation of a finished run."""

import dataclasses

import jax
import numpy as np

import normjax as nj
from normjax.diagnose import diagnose
from normjax.lab.errors import UserError
from normjax.lab.finished import Finished

DESCRIPTION = (
    "Look for what is wrong with a run's normalisation, on the training images that its next step would take: "
    "statistics that are never updated, discarded or of other data, groups that are too small, and the like. "
    "The exit status is 1 where an error was found, 0 otherwise."
)


def run(finished: Finished) -> int:
    """Print the report of `normjax.diagnose`; 1 where it holds an error.

    Raises:
        UserError: the run's norm keeps no running statistics.
    """
    config, state = finished.config, finished.state
    if not config.norm.keeps_statistics:
        raise UserError(
            f"run folder {finished.path}: norm.family is {config.norm.family}, which keeps no running statistics to "
            "diagnose; give a run with batch norm"
        )
    batch = finished.digits.train.images[finished.order[: config.train.batch_size]]

    def forward(stats, images, train):
        return finished.forward(state.params, stats, images, train=train)

    report = diagnose(
        forward,
        state.stats,
        np.asarray(batch),
        params=state.params,
        decay_mask=nj.decay_mask if config.train.weight_decay else jax.tree.map(lambda _: False, state.params),
    )
    # A run has neither padding nor replicas.
    asked = [text for text in report.not_checked if "pad_axis" not in text and "replica_axis" not in text]
    report = dataclasses.replace(report, not_checked=tuple(asked))
    print(report, flush=True)
    return int(any(finding.severity == "error" for finding in report.findings))
