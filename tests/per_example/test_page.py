"""docs/per_example.md: its programs run as written and give what the page says."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from matplotlib import pyplot

PAGE = (Path(__file__).parents[2] / "docs" / "per_example.md").read_text()


@pytest.fixture(scope="module")
def names():
    """What the page's programs define, each run after those above it."""
    defined = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, defined)
    pyplot.close("all")
    return defined


def close(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), got, wanted)


def test_chunks_give_the_same_rows_which_are_those_of_a_loop(names):
    loss, params, images, targets = (names[name] for name in ("loss", "params", "images", "targets"))
    assert names["each"]["in"].shape == (32, 8, 8)
    close(names["same"], names["each"])
    one = jax.grad(loss)(params, images[7], targets[7])
    close(jax.tree.map(lambda leaf: leaf[7], names["each"]), one)


def test_the_module_has_a_gradient_for_each_example_too(names):
    one = jax.grad(names["nnx_loss"])(names["weights"], names["images"][3], names["targets"][3])
    close(jax.tree.map(lambda leaf: leaf[3], names["of_net"]), one)


def test_each_example_has_a_mask_of_its_own_under_dropout(names):
    given = names["weights"], names["images"][3], names["targets"][3], names["mask_keys"][3]
    close(jax.tree.map(lambda leaf: leaf[3], names["of_dropout"]), jax.grad(names["dropout_loss"])(*given))
    dropped = np.asarray(names["of_dropout"]["head"]["kernel"][...]) == 0  # (32, 8, 2)
    assert len({row.tobytes() for row in dropped.all(-1)}) > 1


def test_the_clipped_sum_is_within_its_bound_and_the_noise_is_added_to_it(names):
    total = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(names["total"])))
    assert 0 < total <= 32 * names["clip"]
    difference = jax.tree.map(lambda a, b: a * 32 - b, names["private"], names["total"])
    noise = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(difference)])
    np.testing.assert_allclose(noise.std(), 1.1, rtol=4 / np.sqrt(2 * noise.size))


def test_a_bare_vmap_through_batch_norm_is_all_zeros(names):
    np.testing.assert_array_equal(names["useless"], np.zeros((8, 4, 3)))


def test_coupled_rows_add_up_to_the_batch_gradient(names):
    whole = jax.grad(lambda weights: names["losses"](weights, names["x"]).sum())(names["kernel"])
    np.testing.assert_allclose(names["rows"].sum(0), whole, rtol=1e-4, atol=1e-4)
    assert np.all(np.abs(names["rows"]).max((1, 2)) > 0.1)


def test_ghosts_of_four_are_two_blocks(names):
    np.testing.assert_array_equal(names["coupling"] > 0, np.kron(np.eye(2), np.ones((4, 4))))
    assert names["picture"].get_title() == "ghost batches of 4"


def test_the_tangent_is_that_of_the_formula(names):
    x, ones = names["x"], np.ones_like(names["x"])
    _, wanted = jax.jvp(lambda x: names["logits"](x, "autodiff"), (x,), (ones,))
    np.testing.assert_allclose(names["tangent"], wanted, rtol=1e-4, atol=1e-5)
