"""Every numbered case of these files is claimed by a test of its own file; see the marker `case` in pyproject.toml."""

import importlib
import inspect

import pytest

SECTIONS = {
    "cases.numerics": {1, 3, 6, 7, 8, 14},
    "cases.zero_variance": {4, 11, 12},
    "cases.half_precision": {16, 17, 18, 19, 21, 23},
    "cases.dtype": {20, 25, 27, 28},
    "cases.mask": {29, 34, 35},
    "cases.nothing_to_pool": {30, 31},
    "cases.derivatives": {57, 58, 59, 64},
    "cases.transforms": {51, 52, 54, 61, 62, 65},
    "cases.axes": {66, 67, 69, 71, 72},
    "cases.state": {75, 76, 78, 82, 84},
    "cases.merging": {79, 80},
    "cases.weight_decay": {86},
    "convert.cases": {96, 97, 98, 99},
    "sync.unequal": {36, 37},
    "sync.gradients": {39, 40, 41, 43},
    "sync.groups": {44},
    "sync.table": {45},
    "sync.unsynchronised": {47},
    "sync.limits": {48, 50},
    "flax.dtypes": {20},
    "flax.errors": {34, 35, 48, 66, 67, 71, 82, 84},
    "flax.beyond_flax": {29, 30, 36, 44, 51},
    "flax.replace": {56, 78},
    "flax.transforms": {51, 52, 54, 55, 56, 57, 61, 62, 65},
    "flax.state": {75, 76, 78, 79, 80, 86},
    "per_example.gradients": {55},
    "recalibrate.recalibrate": {80},
    "fold.cases": {88, 89, 90, 91, 94},
    "benchmarks.perf": {101, 102, 103, 104, 105, 106},
}


def claimed(section: str) -> set[int]:
    """The numbers in the case markers of a file's tests that are not skipped."""
    folder, _, name = section.partition(".")
    module = importlib.import_module(f"tests.{folder}.test_{name}")
    numbers = set()
    for name, function in inspect.getmembers(module, inspect.isfunction):
        marks = getattr(function, "pytestmark", [])
        runs = name.startswith("test_") and not {mark.name for mark in marks} & {"skip", "skipif", "xfail"}
        numbers |= {mark.args[0] for mark in marks if mark.name == "case" and runs}
    return numbers


@pytest.mark.parametrize("section", SECTIONS)
def test_every_case_of_a_section_is_claimed_in_its_file_and_no_other(section):
    assert claimed(section) == SECTIONS[section]
