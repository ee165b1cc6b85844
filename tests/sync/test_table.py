"""Each cell of the table of mappings equals one device on the concatenated batch: float64, to 1e-10."""

import jax
import numpy as np
import pytest

from tests.contract.table import pairs_of
from tests.sync.mappings import MAPPINGS
from tests.sync.problems import expected, inputs, norm
from tests.sync.table import COLUMNS, DERIVATIVES, Cell, cover, product

RESULTS = ("y", "dx", "dscale", "dbias", "running mean", "running variance")


def check(cell: Cell, rng):
    mapping = MAPPINGS[cell.mapping]
    with jax.enable_x64(True):
        program = mapping.program(norm(cell.family, mapping, cell.derivative))
        for mask in cell.masks:
            given = inputs(mapping, mask if cell.masked else None, rng)
            results = zip(RESULTS, program(*given), expected(cell.family, mapping, *given), strict=True)
            for name, actual, right in results:
                if "running" in name:  # one for all shards, or one from each of them
                    right, actual = np.broadcast_arrays(right, actual)
                np.testing.assert_allclose(actual, right, rtol=1e-10, atol=1e-10, err_msg=f"{name}, {mask}")


@pytest.mark.parametrize("cell", [cell for cell in cover() if not MAPPINGS[cell.mapping].members], ids=str)
def test_a_mapping_equals_one_device(cell, rng):
    check(cell, rng)


@pytest.mark.case(45)
@pytest.mark.parametrize("cell", [cell for cell in cover() if MAPPINGS[cell.mapping].members], ids=str)
def test_an_ensemble_around_or_inside_a_mapping_is_each_member_on_one_device(cell, rng):
    check(cell, rng)


@pytest.mark.matrix
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("mapping", MAPPINGS)
def test_the_full_product_equals_one_device(mapping, derivative, rng):
    for cell in product():
        if (cell.mapping, cell.derivative) == (mapping, derivative) and cell not in cover():
            check(cell, rng)


def test_each_pair_of_two_columns_meets_in_the_cover():
    met = set()
    for cell in cover():
        for mask in cell.masks:
            met |= pairs_of(cell._replace(masked=mask))
    named = {(a, x, "mask" if b == "masked" else b, y) for a, x, b, y in met}
    columns = list(COLUMNS)
    possible = {
        (a, x, b, y) for i, a in enumerate(columns) for b in columns[i + 1 :] for x in COLUMNS[a] for y in COLUMNS[b]
    }
    assert named == possible
