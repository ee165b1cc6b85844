"""`normjax check`: every norm passes here, and what is wrong is found, counted and told by the exit status."""

import itertools
import json
import math

import jax
import numpy as np
import pytest

from normjax import _check, _derivatives
from normjax._derivatives import _affine, _affine_bwd, _affine_fwd, _affine_jvp, _with_rules
from normjax.cli import main

# Every family once and every dtype twice; the others are for `-m matrix`.
EVERY_RUN = set(zip(_check.FAMILIES, itertools.cycle(_check.DTYPES), strict=False))


@pytest.fixture
def small(monkeypatch):
    """Two families in one dtype in the place of all."""
    monkeypatch.setattr(_check, "FAMILIES", {name: _check.FAMILIES[name] for name in ("layer", "sync")})
    monkeypatch.setattr(_check, "DTYPES", ("float32",))


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(*cell, marks=() if cell in EVERY_RUN else pytest.mark.matrix)
        for cell in itertools.product(_check.FAMILIES, _check.DTYPES)
    ],
)
def test_a_norm_is_within_rounding_by_all_three_rules(family, dtype):
    row = _check.row(family, dtype)
    assert (row.family, row.dtype, row.problem) == (family, dtype, "")
    assert tuple(row.gradient) == ("vjp", "jvp", "autodiff")
    # The large mean costs a digit or two of float64's sixteen, in the reference itself.
    assert 0 < max(row.output, *row.gradient.values()) < {"float32": 2e-6, "float64": 1e-11}.get(dtype, 1e-2)
    assert not jax.config.read("jax_enable_x64")


def test_the_table_has_a_line_for_each_row_and_the_collectives_of_all_devices(small, capsys):
    assert main(["check"]) == 0
    first, head, layer, sync, collectives, end = capsys.readouterr().out.splitlines()
    assert f"jax {jax.__version__}" in first
    assert first.endswith("platform cpu, device cpu, devices 8")
    assert head.split() == ["family", "dtype", "output", "vjp", "jvp", "autodiff", "of", "bound"]
    for name, line in (("layer", layer), ("sync", sync)):
        family, dtype, *numbers, share, verdict = line.split()
        assert (family, dtype, verdict) == (name, "float32", "ok")
        assert all(0 < float(number) < 2e-6 for number in numbers)
        assert share.endswith("%")
    assert collectives == "collectives of a synchronised value and gradient: 2 over 8 devices, 2 expected"
    assert end.startswith("all within rounding; ")


def broken_backward(form, saved, g):
    """A hand-written backward whose gradient of x is a thousandth too large."""
    first, dx, *others = _affine_bwd(form, saved, g)
    return first, 1.001 * dx, *others


def test_a_broken_backward_is_found_where_it_is_used_and_exits_1(small, monkeypatch, capsys):
    monkeypatch.setattr(_check, "FAMILIES", {"layer": _check.FAMILIES["layer"]})
    monkeypatch.setattr(_check, "collectives", lambda: None)
    rules = _with_rules(_affine, _affine_fwd, broken_backward, _affine_jvp)
    monkeypatch.setitem(_derivatives._AFFINE, "vjp", rules["vjp"])
    assert main(["check", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert not printed["ok"]
    for row in printed["rows"]:
        assert row["problem"] == "beyond rounding"
        assert row["share"] > 10
        assert row["gradient"]["vjp"] > 3e-4
        assert max(row["output"], row["gradient"]["jvp"], row["gradient"]["autodiff"]) < 2e-6


def test_json_has_the_machine_and_every_number(small, capsys):
    assert main(["check", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["jax"] == jax.__version__
    assert (printed["platform"], printed["device"], printed["devices"]) == ("cpu", "cpu", 8)
    assert (printed["collectives"], printed["ok"]) == (2, True)
    assert [(row["family"], row["dtype"]) for row in printed["rows"]] == [("layer", "float32"), ("sync", "float32")]
    assert printed["seconds"] > 0


def test_a_third_collective_exits_1(small, monkeypatch, capsys):
    monkeypatch.setattr(_check, "rows", lambda: iter(()))
    monkeypatch.setattr(_check, "collectives", lambda: 3)
    assert main(["check"]) == 1
    assert capsys.readouterr().out.splitlines()[-2:][0].endswith("3 over 8 devices, 2 expected")


def test_on_one_device_there_are_no_collectives_to_count(monkeypatch, capsys):
    one = jax.devices()[:1]
    monkeypatch.setattr(_check.jax, "local_devices", lambda: one)
    monkeypatch.setattr(_check, "rows", lambda: iter(()))
    assert main(["check"]) == 0
    assert "gradient: one device, none to count (on a CPU JAX_NUM_CPU_DEVICES=8 makes more)" in capsys.readouterr().out


def test_what_a_compiler_refuses_is_a_row_and_the_others_go_on(small, monkeypatch, capsys):
    def refuse(*_):
        raise RuntimeError("no such instruction\nand much more")

    layer = _check._measured
    monkeypatch.setattr(_check, "_measured", lambda name, dtype: refuse() if name == "layer" else layer(name, dtype))
    assert main(["check", "--json"]) == 1
    refused, sync = json.loads(capsys.readouterr().out)["rows"]
    assert refused["problem"] == "RuntimeError: no such instruction"
    assert refused["output"] is None
    assert sync["problem"] == ""


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_result_that_is_no_number_is_an_infinite_error(wrong):
    assert _check._error(np.array([1.0, wrong]), np.array([1.0, 2.0])) == math.inf
