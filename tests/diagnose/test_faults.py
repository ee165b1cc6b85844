"""Every fault planted in every network: `diagnose` finds exactly that one; in healthy networks it finds nothing."""

import itertools

import numpy as np
import pytest

import normjax as nj
from normjax.diagnose import FAULTS, diagnose
from tests.diagnose.models import KINDS, SHAPES
from tests.diagnose.plants import PLANTS, healthy

NETWORKS = list(itertools.product(KINDS, SHAPES))
OF_PARAMETERS = ("redundant bias", "scale near 0", "decayed norm")


def test_every_fault_is_planted():
    assert set(PLANTS) == set(FAULTS)


@pytest.mark.parametrize(("kind", "shape"), NETWORKS)
@pytest.mark.parametrize("fault", PLANTS)
def test_a_planted_fault_is_found_and_nothing_else(fault, kind, shape, rng):
    plant = PLANTS[fault](kind, shape, rng)
    options = dict(plant.options)
    if fault in OF_PARAMETERS:
        options = {"params": plant.params, "decay_mask": nj.decay_mask, **options}
    report = diagnose(plant.forward, plant.stats, plant.batch, **options)
    assert {finding.fault for finding in report.findings} == {fault}, str(report)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("kind", "shape"), NETWORKS)
def test_a_healthy_network_has_no_finding(kind, shape, seed):
    plant = healthy(kind, shape, np.random.default_rng(seed), seed=seed)

    def forward(tree, x, train):  # parameters among the statistics: one program serves all seeds
        y, stats = plant.apply(tree["params"], tree["stats"], x, train)
        return y, {**tree, "stats": stats}

    report = diagnose(forward, {"params": plant.params, "stats": plant.stats}, plant.batch)
    assert report.findings == (), str(report)
    assert len(report.layers) == 2


@pytest.mark.parametrize(("kind", "shape"), NETWORKS)
def test_a_healthy_network_with_everything_given_has_no_finding(kind, shape, rng):
    plant = healthy(kind, shape, rng)
    report = diagnose(plant.forward, plant.stats, plant.batch, params=plant.params, decay_mask=nj.decay_mask)
    assert report.findings == (), str(report)
