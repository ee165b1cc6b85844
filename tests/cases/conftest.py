"""Which cells of the cases' tables every run covers; `-m matrix` runs the others too."""

import pytest

from tests.cases.common import FAMILY


def every_run(params: dict) -> bool:
    """Eager only for batch and layer norm, the rules besides "vjp" only for batch, layer and RMS norm."""
    norms = {name for name, norm in FAMILY.items() if norm in params.values()}
    if not norms:
        return True
    if "eager" in params.values() and not norms & {"batch", "layer"}:
        return False
    return params.get("derivative", "vjp") == "vjp" or bool(norms & {"batch", "layer", "rms"})


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "cases" and hasattr(item, "callspec") and not every_run(item.callspec.params):
            item.add_marker(pytest.mark.matrix)
