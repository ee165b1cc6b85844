"""Training: pure steps over (parameters, running statistics, optimiser state), and the loop that can stop anywhere."""

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import normjax as nj
from normjax.lab import devices
from normjax.lab.config import Config
from normjax.lab.data import Digits, Split, epoch_order, full_batches
from normjax.lab.errors import UserError
from normjax.lab.models import Network, network
from normjax.lab.progress import Progress
from normjax.lab.runs import RunFolder


class Interrupted(Exception):
    """The user asked to stop; everything up to `step` is saved."""

    def __init__(self, step: int):
        """After `step` steps."""
        super().__init__(step)
        self.step = step


class TrainState(NamedTuple):
    """What a step maps to its successor."""

    params: Any
    stats: Any
    opt_state: optax.OptState


class Steps(NamedTuple):
    """The compiled functions of one config.

    `train(state, images, labels) -> (state, metrics)`;
    `evaluate(params, stats, images, labels, use_batch_stats) -> (losses, hits)`, one of each per image.
    """

    train: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[..., tuple[jax.Array, jax.Array]]


def steps_per_epoch(config: Config, digits: Digits) -> int:
    """Full batches in one pass."""
    return len(digits.train.labels) // config.train.batch_size


def build(config: Config, digits: Digits) -> tuple[TrainState, Steps]:
    """The first state of a run, and its steps.

    Raises:
        UserError: what the norm's function says of its layout and axes.
    """
    first, steps = trace(config, digits)
    # One compilation instead of one for each operation.
    return jax.jit(first, out_shardings=devices.on_all(devices.make_mesh(config)))(), steps


def trace(config: Config, digits: Digits) -> tuple[Callable[[], TrainState], Steps]:
    """A function that makes the first state, and the steps, traced so that an impossible norm is refused early.

    Raises:
        UserError: what the norm's function says of its layout and axes.
    """
    total = steps_per_epoch(config, digits) * config.train.epochs
    optimiser = optax.adamw(
        optax.cosine_decay_schedule(config.train.learning_rate, total),
        weight_decay=config.train.weight_decay,
        mask=nj.decay_mask,
    )

    net = network(config)

    def first() -> TrainState:
        params, stats = net.init()
        return TrainState(params, stats, optimiser.init(params))

    steps = _steps(config, net, optimiser)
    state = jax.eval_shape(first)
    images = jax.ShapeDtypeStruct((config.train.batch_size, *digits.train.images.shape[1:]), jnp.float32)
    labels = jax.ShapeDtypeStruct((config.train.batch_size,), jnp.int32)
    jax.eval_shape(steps.train, state, images, labels)
    for use_batch_stats in (False, True):
        evaluate = partial(steps.evaluate, use_batch_stats=use_batch_stats)
        jax.eval_shape(evaluate, state.params, state.stats, images, labels)
    return first, steps


def _steps(config: Config, net: Network, optimiser: optax.GradientTransformation) -> Steps:
    """The two compiled functions."""
    mesh = devices.make_mesh(config)
    same, split = devices.SAME, devices.SPLIT

    def loss_fn(params, stats, images, labels):
        logits, stats, means = net.apply(params, stats, images, train=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        metrics = {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == labels)}
        metrics = devices.mean_over(mesh, metrics)
        return metrics["loss"], (stats, metrics | means)

    def train(state, images, labels):
        grads, (stats, metrics) = jax.grad(loss_fn, has_aux=True)(state.params, state.stats, images, labels)
        updates, opt_state = optimiser.update(grads, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(params, stats, opt_state), metrics

    @partial(jax.jit, static_argnames="use_batch_stats")
    def evaluate(params, stats, images, labels, use_batch_stats):
        def on_one(params, stats, images, labels):
            logits, *_ = net.apply(params, stats, images, train=False, use_batch_stats=use_batch_stats)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels), jnp.argmax(logits, -1) == labels

        return devices.spread(mesh, on_one, (same, same, split, split), split)(params, stats, images, labels)

    return Steps(jax.jit(devices.spread(mesh, train, (same, split, split), same)), evaluate)


def evaluate(
    steps: Steps, state: TrainState, split: Split, batch_size: int, *, use_batch_stats: bool
) -> tuple[float, float]:
    """Mean loss and accuracy over a split, in batches as large as those of training."""
    losses, hits = [], []
    for batch in full_batches(len(split.labels), batch_size):
        loss, hit = steps.evaluate(
            state.params, state.stats, split.images[batch], split.labels[batch], use_batch_stats=use_batch_stats
        )
        losses.append(np.asarray(loss, np.float64))
        hits.append(np.asarray(hit))
    seen = slice(len(split.labels))
    return float(np.concatenate(losses)[seen].mean()), float(np.concatenate(hits)[seen].mean())


def _evaluation(config: Config, steps: Steps, state: TrainState, held_out: Split) -> dict[str, float]:
    """What the metrics hold at the end of an epoch."""
    size = config.train.batch_size
    loss, accuracy = evaluate(steps, state, held_out, size, use_batch_stats=False)
    found = {"held_out_loss": loss, "held_out_accuracy": accuracy}
    if config.norm.keeps_statistics:
        found["held_out_accuracy_batch_stats"] = evaluate(steps, state, held_out, size, use_batch_stats=True)[1]
    return found


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that SIGINT sets, however often it comes: the loop, not the signal, decides where it stops."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGINT, lambda *_: asked.set())
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def fit(
    config: Config,
    digits: Digits,
    folder: RunFolder,
    progress: Progress,
    built: tuple[TrainState, Steps],
    stop: threading.Event,
    *,
    resume: bool,
) -> None:
    """Train to the end of the config, from the folder's checkpoint if `resume`.

    Raises:
        Interrupted: after `stop` was set, once the step under way and a checkpoint are done.
        UserError: where the loss is no longer finite.
    """
    state, steps = built
    per_epoch, size = steps_per_epoch(config, digits), config.train.batch_size
    total = per_epoch * config.train.epochs
    step, order = 0, epoch_order(config.seed, 0, len(digits.train.labels))
    if resume:
        state, step, order = restored(folder, state, order)
    folder.begin(step)
    if not resume:
        folder.save(0, checkpoint(state, 0, order), config)
    with progress.running(step, total):
        while step < total and not stop.is_set():
            epoch, position = divmod(step, per_epoch)
            if position == 0:
                order = epoch_order(config.seed, epoch, len(digits.train.labels))
            batch = order[position * size : (position + 1) * size]
            state, metrics = steps.train(state, digits.train.images[batch], digits.train.labels[batch])
            # On the CPU, JAX 0.10 aborts where steps with collectives pile up.
            jax.block_until_ready(state)
            step += 1
            record = {"step": step, "epoch": epoch + 1} | {name: float(value) for name, value in metrics.items()}
            ends_epoch = step % per_epoch == 0
            if ends_epoch:
                record |= _evaluation(config, steps, state, digits.held_out)
            _check_finite(record, config)
            folder.log(record)
            progress.step(record)
            if ends_epoch or stop.is_set():
                folder.save(step, checkpoint(state, step, order), config)
    # The flag may have come after the last look at it: nothing is lost, but the user did ask to stop.
    if stop.is_set():
        folder.save(step, checkpoint(state, step, order), config)
        raise Interrupted(step)


def checkpoint(state: TrainState, step: int, order: np.ndarray) -> dict[str, Any]:
    """Everything that the rest of a run depends on; `order` is the epoch's order of the images."""
    return {**state._asdict(), "step": step, "order": order}


def restored(folder: RunFolder, state: TrainState, order: np.ndarray) -> tuple[TrainState, int, np.ndarray]:
    """What `checkpoint` put together for the newest one; the state and the order given have its shapes."""
    saved = folder.restore(checkpoint(state, 0, order))
    return TrainState(*(saved[name] for name in TrainState._fields)), int(saved["step"]), np.asarray(saved["order"])


def _check_finite(record: dict[str, Any], config: Config) -> None:
    """Stop where every later number would be NaN."""
    if not all(math.isfinite(value) for value in record.values()):
        raise UserError(
            f"step {record['step']}: the loss is {record['loss']}; training diverged: "
            f"lower train.learning_rate (now {config.train.learning_rate}) in a new run"
        )
