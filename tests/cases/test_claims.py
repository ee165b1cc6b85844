"""Every numbered case of these files is claimed by a test of its own file."""

import importlib
import inspect

import pytest

SECTIONS = {
    "numerics": {1, 3, 6, 7, 8, 14},
    "zero_variance": {4, 11, 12},
    "half_precision": {16, 17, 18, 19, 21, 23},
    "dtype": {20, 25, 27, 28},
    "mask": {29, 34, 35},
    "nothing_to_pool": {30, 31},
    "derivatives": {57, 58, 59, 64},
    "transforms": {61, 62, 65},
    "axes": {66, 67, 69, 71, 72},
    "state": {75, 76, 78, 82, 84},
    "merging": {79, 80},
    "weight_decay": {86},
}


def claimed(section: str) -> set[int]:
    """The numbers in the case markers of a file's tests that are not skipped."""
    module = importlib.import_module(f"{__package__}.test_{section}")
    numbers = set()
    for name, function in inspect.getmembers(module, inspect.isfunction):
        marks = getattr(function, "pytestmark", [])
        runs = name.startswith("test_") and not {mark.name for mark in marks} & {"skip", "skipif", "xfail"}
        numbers |= {mark.args[0] for mark in marks if mark.name == "case" and runs}
    return numbers


@pytest.mark.parametrize("section", SECTIONS)
def test_every_case_of_a_section_is_claimed_in_its_file_and_no_other(section):
    assert claimed(section) == SECTIONS[section]
