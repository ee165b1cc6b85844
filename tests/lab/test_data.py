import numpy as np
import pytest

from normjax.lab import config as configs
from normjax.lab.data import epoch_order, full_batches, load_digits
from normjax.lab.errors import UserError


def test_the_held_out_split_does_not_depend_on_the_seed():
    one, other = (load_digits(configs.load("digits", {"seed": seed})) for seed in ("0", "1"))
    for part, again in zip(one, other, strict=True):
        np.testing.assert_array_equal(part.images, again.images)
        np.testing.assert_array_equal(part.labels, again.labels)


def test_the_split_holds_every_image_once():
    from sklearn.datasets import load_digits as originals

    digits = load_digits(configs.load("digits"))
    images = np.concatenate([digits.train.images, digits.held_out.images]).reshape(-1, 64) * 16
    assert sorted(map(tuple, images)) == sorted(map(tuple, originals().data))


def test_each_class_has_the_same_share_held_out():
    digits = load_digits(configs.load("digits", {"data.held_out": "0.25"}))
    held, kept = (np.bincount(part.labels, minlength=10) for part in (digits.held_out, digits.train))
    # Stratified: each class is off its exact quarter by less than one image.
    assert np.all(np.abs(held - 0.25 * (held + kept)) < 1)


def test_images_are_float32_between_0_and_1_with_one_channel():
    images, labels = load_digits(configs.load("digits")).train
    assert (images.shape, images.dtype, labels.dtype) == ((1437, 8, 8, 1), np.float32, np.int32)
    assert (images.min(), images.max()) == (0, 1)


def test_a_batch_larger_than_the_training_images_is_refused_with_their_number():
    with pytest.raises(UserError, match=r"train\.batch_size is 1438, but there are 1437 training images; make it 1437"):
        load_digits(configs.load("digits", {"train.batch_size": "1438"}))


def test_an_epochs_order_is_a_permutation_that_seed_and_epoch_determine():
    orders = {(seed, epoch): epoch_order(seed, epoch, 50) for seed in (0, 1) for epoch in (0, 1)}
    for (seed, epoch), order in orders.items():
        assert sorted(order) == list(range(50))
        np.testing.assert_array_equal(order, epoch_order(seed, epoch, 50))
    assert len({tuple(order) for order in orders.values()}) == 4


@pytest.mark.parametrize(("size", "batch_size"), [(360, 64), (360, 36), (5, 8), (1, 1)])
def test_full_batches_visit_every_image_in_order_and_fill_the_last_from_the_start(size, batch_size):
    batches = full_batches(size, batch_size)
    assert batches.shape == (-(-size // batch_size), batch_size)
    np.testing.assert_array_equal(batches.ravel()[:size], np.arange(size))
    assert batches.max() == size - 1
