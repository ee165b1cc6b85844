"""`normjax recalibrate`: a finished run's running statistics estimated anew over its training images."""

import dataclasses
from pathlib import Path

import jax

from normjax.lab import finished, progress
from normjax.lab.errors import UserError
from normjax.lab.finished import Finished
from normjax.recalibrate import recalibrate

DESCRIPTION = (
    "Estimate the running statistics of a finished run anew, exactly over all its training images in one pass, and "
    "print the held-out accuracy before and after; the run with the new statistics is written to a new folder."
)


def run(run: Finished, out: Path) -> int:
    """The command; the run's own folder stays as it is.

    Raises:
        UserError: the run's norm keeps no running statistics, or does not take a last short batch.
    """
    config, images = run.config, run.digits.train.images
    if not config.norm.keeps_statistics:
        raise UserError(
            f"run folder {run.path}: norm.family is {config.norm.family}, which keeps no running statistics to "
            "estimate anew; give a run with batch norm"
        )
    # Any weight but 0 will do, and the variance as it is merged.
    norm = dataclasses.replace(config.norm, new_weight=0.5, unbiased=False)
    passing = run._replace(config=dataclasses.replace(config, norm=norm))

    @jax.jit
    def step(stats, images):
        return passing.forward(run.state.params, stats, images, train=True)[1]

    size = config.train.batch_size
    batches = [images[start : start + size] for start in range(0, len(images), size)]
    state = run.state._replace(stats=recalibrate(step, run.state.stats, batches))
    before, after = run.accuracy(run.state), run.accuracy(state)
    finished.write(out, run, state)
    progress.print_table(
        f"{len(run.digits.held_out.labels)} held-out images",
        [
            ("accuracy with the averages of training", f"{before:.2%}"),
            (f"accuracy with the statistics of {len(images)} training images", f"{after:.2%}"),
            ("change", f"{100 * (after - before):+.2f} points"),
        ],
    )
    print(f"run folder {out}", flush=True)
    return 0
