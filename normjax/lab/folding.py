"""`normjax fold`: a trained network whose batch norms are merged into its convolutions, in two files, and its speed."""

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx, traverse_util
from safetensors.numpy import load_file, save

import normjax as nj
from normjax import linen as our_linen
from normjax import nnx as our_nnx
from normjax._decay import path_names
from normjax._fold_flow import Folds
from normjax.fold import fold
from normjax.lab import runs
from normjax.lab.config import Config
from normjax.lab.data import full_batches
from normjax.lab.errors import UserError
from normjax.lab.finished import Finished
from normjax.lab.models import Classifier, LinenClassifier, classifier, network
from normjax.lab.progress import print_table

DESCRIPTION = (
    "Fold the batch norms of a run into its convolutions, write the network to a new folder, and compare outputs and "
    "times with those of the run."
)
MODEL = runs.FOLDED
ROUNDS, CALLS = 100, 5


def run(finished: Finished, out: Path) -> int:
    """`normjax fold`.

    Raises:
        UserError: another norm than batch norm.
    """
    params, pairs = folded(finished)
    write(out, finished.config, params)
    model = load(out)
    before, after = _trained(finished), _compiled(model.apply, *model.arrays)
    images, labels = finished.digits.held_out
    batches = full_batches(len(labels), finished.config.train.batch_size)
    logits = [np.concatenate([call(images[batch]) for batch in batches])[: len(labels)] for call in (before, after)]
    accuracies = [f"{np.mean(np.argmax(found, -1) == labels):.2%}" for found in logits]
    times = _times(before, after, images[batches[0]])
    print_table(
        f"folded network in {out / MODEL}",
        [
            *((norm, f"folded into {layer}") for norm, layer in pairs),
            ("largest difference of the logits", f"{np.max(np.abs(logits[0] - logits[1])):.1e}"),
            ("largest logit", f"{np.max(np.abs(logits[0])):.1f}"),
            (f"accuracy on {len(labels)} held-out images", " before, ".join(accuracies) + " after"),
            (
                f"time for {len(batches[0])} images",
                f"{times[0]:.0f} µs before, {times[1]:.0f} µs after (median ratio {times[2]:.2f})",
            ),
        ],
    )
    return 0


def folded(finished: Finished) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The parameters of the network without norms, as nested dicts, and each norm with the layer that has it now.

    Raises:
        UserError: another norm than batch norm.
    """
    config = finished.config
    if not config.norm.keeps_statistics:
        raise UserError(
            f"run folder {finished.path}: its norm.family is {config.norm.family!r}; batch norm alone folds, since it "
            "alone evaluates by fixed statistics"
        )
    by_kind = {"pure": _by_names, "nnx": _by_nnx, "linen": _by_linen}
    return by_kind[config.model.kind](finished)


def _by_names(finished: Finished) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Each block's norm, with the pure function."""
    norm, channel = finished.config.norm, finished.config.norm.channel
    params, stats = (nnx.to_pure_dict(tree) for tree in (finished.state.params, finished.state.stats))
    pairs = []
    for i, block in params["blocks"].items():
        own, held = block.pop("norm").get("params"), stats["blocks"][i]["norm"]["stats"]
        affine = own and nj.Affine(own.get("scale"), own.get("bias"), (channel,))
        kernel, bias = fold(
            block["conv"]["kernel"],
            block["conv"].get("bias"),
            affine or None,
            nj.BatchStats(**held, names=(channel,)),
            layout=f"height width channels_in {channel}",
            eps=norm.eps,
        )
        block["conv"] = {"kernel": kernel, "bias": bias}
        pairs.append((f"blocks.{i}.norm", f"blocks.{i}.conv"))
    return params, pairs


class _Evaluated(nnx.Module):
    """A classifier in evaluation, of which the logits alone are read."""

    def __init__(self, network: Classifier):
        self.network = network

    def __call__(self, images: jax.Array) -> jax.Array:
        return self.network(images, train=False)[0]


def _by_nnx(finished: Finished) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    graph, *_ = nnx.split(nnx.eval_shape(lambda: classifier(finished.config)), nnx.Param, ...)
    trained = _Evaluated(nnx.merge(graph, finished.state.params, finished.state.stats))
    model, report = our_nnx.fold(trained, finished.digits.held_out.images[:1])
    params = nnx.to_pure_dict(nnx.state(model.network, nnx.Param))
    return params, _pairs(report, "network.")


def _by_linen(finished: Finished) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    def logits(module: LinenClassifier, images: jax.Array) -> jax.Array:
        return module(images, train=False)[0]

    module = LinenClassifier(finished.config.model, finished.config.norm)
    variables = {"params": finished.state.params, **finished.state.stats}
    _, new, report = our_linen.fold(module, variables, finished.digits.held_out.images[:1], method=logits)
    return new["params"], _pairs(report, "")


def _pairs(report: Folds, prefix: str) -> list[tuple[str, str]]:
    assert not report.refused, report  # the network is ours
    return [(row.norm.removeprefix(prefix), row.layer.removeprefix(prefix)) for row in report]


class Model:
    """A folded network, read again."""

    def __init__(self, config: Config, arrays: tuple[Any, Any], apply: Callable[..., jax.Array]):
        """`apply(params, stats, images)` gives the logits; `arrays` are its first two arguments."""
        self.config, self.arrays, self.apply = config, arrays, apply
        self._call = _compiled(apply, *arrays)

    def __call__(self, images: Any) -> jax.Array:
        """Logits (n, classes) of images (n, 8, 8, 1)."""
        return self._call(images)


def write(out: Path, config: Config, params: dict[str, Any]) -> None:
    """A folder with the parameters by name and the config of the network that they are of, which has no norm.

    Raises:
        UserError: no folder can be made there.
    """
    plain = dataclasses.replace(config, norm=dataclasses.replace(config.norm, family="none"))
    arrays = {".".join(map(str, path)): np.asarray(leaf) for path, leaf in traverse_util.flatten_dict(params).items()}
    runs.make_folder(out, plain)
    runs.write_atomically(out / MODEL, save(arrays))


def load(path: str | Path) -> Model:
    """What `normjax fold RUN --out PATH` wrote: a function of images.

    Raises:
        UserError: the folder holds no folded network.
    """
    path = Path(path)
    config = runs.stored_config(path)
    if not (path / MODEL).is_file():
        raise UserError(f"folder {path}: has no {MODEL}; give the one that normjax fold wrote")
    net, held = network(config), load_file(path / MODEL)
    shapes, stats = jax.eval_shape(net.init)
    leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
    params = jax.tree.unflatten(structure, [held[_dotted(place)] for place, _ in leaves])
    return Model(config, (params, stats), _logits(config))


def _dotted(place: Iterable[Any]) -> str:
    """The name in the file of a leaf."""
    return ".".join(map(str, path_names(place)))


def _logits(config: Config) -> Callable[..., jax.Array]:
    net = network(config)
    return lambda params, stats, images: net.apply(params, stats, images, train=False)[0]


def _compiled(apply: Callable[..., jax.Array], *arrays: Any) -> Callable[[Any], jax.Array]:
    """A function of images; parameters and statistics are arguments of the program, not constants in it."""
    program = jax.jit(apply)
    return lambda images: program(*arrays, images)


def _trained(finished: Finished) -> Callable[[Any], jax.Array]:
    return _compiled(_logits(finished.config), finished.state.params, finished.state.stats)


def _times(
    before: Callable[[Any], jax.Array], after: Callable[[Any], jax.Array], images: Any
) -> tuple[float, float, float]:
    """Median microseconds of a call of each, and the median ratio of a round, in which both take a turn of calls."""
    order, rounds = random.Random(0), []
    for _ in range(ROUNDS):
        turns: dict[Callable[[Any], jax.Array], float] = {}
        for call in order.sample((before, after), 2):
            jax.block_until_ready(call(images))
            times = []
            for _ in range(CALLS):
                begin = time.perf_counter()
                jax.block_until_ready(call(images))
                times.append(time.perf_counter() - begin)
            turns[call] = statistics.median(times)
        rounds.append((1e6 * turns[before], 1e6 * turns[after], turns[after] / turns[before]))
    return tuple(map(statistics.median, zip(*rounds, strict=True)))  # type: ignore[return-value]
