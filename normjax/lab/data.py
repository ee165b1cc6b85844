"""The images: scikit-learn's digits, split once and for all, and the order in which an epoch visits them."""

from typing import NamedTuple

import numpy as np

from normjax.lab.config import Config
from normjax.lab.errors import UserError

_SPLIT_SEED = 20150211  # fixed: no run's seed moves an image into or out of the held-out set


class Split(NamedTuple):
    """Images (n, 8, 8, 1) float32 in [0, 1] and labels (n,) int32."""

    images: np.ndarray
    labels: np.ndarray


class Digits(NamedTuple):
    """The two parts of the data set."""

    train: Split
    held_out: Split


def load_digits(config: Config) -> Digits:
    """The digits, with the same share of each of the ten classes held out.

    Raises:
        UserError: if `train.batch_size` is more than the training images.
    """
    from sklearn.datasets import load_digits as sklearn_digits
    from sklearn.model_selection import train_test_split

    pixels, target = sklearn_digits(return_X_y=True)
    images = (np.asarray(pixels) / 16.0).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = np.asarray(target).astype(np.int32)
    kept, held = train_test_split(
        np.arange(len(labels)), test_size=config.data.held_out, random_state=_SPLIT_SEED, stratify=labels
    )
    if config.train.batch_size > len(kept):
        raise UserError(
            f"train.batch_size is {config.train.batch_size}, but there are {len(kept)} training images; "
            f"make it {len(kept)} or less"
        )
    return Digits(Split(images[kept], labels[kept]), Split(images[held], labels[held]))


def epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """A permutation of `size` images by seed and epoch alone, so that any epoch can be replayed."""
    return np.random.default_rng([seed, epoch]).permutation(size).astype(np.int32)


def full_batches(size: int, batch_size: int) -> np.ndarray:
    """Indices (batches, batch_size) that visit every image; the last batch is filled up from the start.

    Whole batches keep split axes divisible and every batch's statistics over equally many images.
    """
    batches = -(-size // batch_size)
    return (np.arange(batches * batch_size) % size).reshape(batches, batch_size)
