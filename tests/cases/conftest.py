"""Which cells of the cases' tables every run covers; `-m matrix` runs the others too."""

import pytest

from tests.cases.common import FAMILY

# Which members meet it in every run: pooling and parameters along one axis or several, with a mean and without.
DEAR = {
    "eager": {"batch"},
    "vmap": {"batch", "group", "rms"},
    "jvp": {"batch", "rms"},
    "autodiff": {"layer"},
}


def every_run(params: dict) -> bool:
    """Each member compiled and with "vjp"; what costs a program more, for members that could fail by themselves."""
    norms = {name for name, norm in FAMILY.items() if norm in params.values()}
    if not norms:
        return True
    return all(norms & DEAR[value] for value in params.values() if isinstance(value, str) and value in DEAR)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "cases" and hasattr(item, "callspec") and not every_run(item.callspec.params):
            item.add_marker(pytest.mark.matrix)
