"""After a checkpoint of PyTorch's, normjax does what PyTorch does: values made by PyTorch, see golden/make.py."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import normjax as nj
from normjax.convert import Imported, from_torch
from tests.convert.common import (
    EVALUATION,
    GOLDEN,
    STATISTICS,
    TORCH,
    call,
    checkpoint,
    close,
    dtype_of,
    inputs,
    names,
    program,
)


def label(case: dict) -> str:
    return " ".join([case["class"], case["layout"], *(f"{key}={value}" for key, value in case["arguments"].items())])


CASES = TORCH["cases"]
TRACKED = [case for case in CASES if "after 100" in case]
each_case = pytest.mark.parametrize("case", CASES, ids=label)
each_tracked_case = pytest.mark.parametrize("case", TRACKED, ids=label)


@pytest.fixture(autouse=True)
def precision(case):
    with jax.enable_x64(True) if dtype_of(case) == np.float64 else contextlib.nullcontext():
        yield


def imported(case: dict) -> Imported:
    """The case's checkpoint by the arguments that the layer was built with in PyTorch."""
    given = case["arguments"]
    options = {key: given[key] for key in ("momentum", "eps", "bias", "track_running_stats") if key in given}
    options["affine"] = given.get("affine", given.get("elementwise_affine"))
    if "Instance" in case["class"] and given.get("momentum", 0.1) is None:
        options["momentum"] = 0.0
    if "eps" not in given and case["checkpoint"].keys() <= {"weight"}:
        options["eps"] = None if case["class"] == "RMSNorm" else 1e-5
    if case["class"] == "RMSNorm":
        options["bias"] = False
    return from_torch(checkpoint(case), names=names(case), **options)


def run(case: dict, layer: Imported, x, state, *, train: bool):
    function, layout, axis_names = call(case)
    options = {"train": train}
    if function == "batch_norm" and train:
        options["running"] = layer.running
    elif function == "batch_norm":
        options["use_batch_stats"] = state is None  # without statistics PyTorch evaluates by the batch's
    return program(function, layout, axis_names, layer.eps, tuple(options.items()))(x, layer.params, state)


def close_state(case: dict, state: nj.BatchStats, expected: dict, updates: int):
    """The statistics are PyTorch's, rounded otherwise: the entries of a group, and at each update."""
    dtype = dtype_of(case)
    assert state.mean.dtype == state.var.dtype == dtype
    close(state.mean, expected["running_mean"], m=8 + updates, of=dtype)
    close(state.var, expected["running_var"], m=8 + updates, of=dtype)
    if "Batch" in case["class"]:  # InstanceNorm does not count
        assert int(state.count) == expected["num_batches_tracked"]


@each_case
def test_evaluation_is_that_of_pytorch(case):
    layer, x = imported(case), inputs(case)[0]
    y, state = run(case, layer, x, layer.state, train=False)
    assert state is None or all(map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(layer.state)))
    assert y.dtype == x.dtype
    close(y, case["evaluation"], m=8, of=dtype_of(case))
    if dtype_of(case) == np.float32:
        np.testing.assert_allclose(y, case["evaluation"], rtol=0, atol=EVALUATION)


@each_tracked_case
def test_the_state_after_1_and_100_updates_is_that_of_pytorch(case):
    layer, batches = imported(case), inputs(case)
    y, state = run(case, layer, batches[0], layer.state, train=True)
    close(y, case["training"], m=8, of=dtype_of(case))
    close_state(case, state, case["after 1"], 1)
    for i in range(1, 100):
        _, state = run(case, layer, batches[i % len(batches)], state, train=True)
    close_state(case, state, case["after 100"], 100)
    for leaf, key in ((state.mean, "running_mean"), (state.var, "running_var")):
        np.testing.assert_allclose(leaf, case["after 100"][key], rtol=0, atol=STATISTICS)
    y, _ = run(case, layer, batches[0], state, train=False)
    close(y, case["evaluation after 100"], m=108, of=dtype_of(case))


@each_tracked_case
def test_the_golden_values_would_show_the_other_divisor_and_a_start_from_nothing(case):
    x = inputs(case)[0].astype(np.float64)
    pooled = tuple(i for i in range(x.ndim) if i != 1 and (i or "Batch" in case["class"]))
    m = np.prod([x.shape[axis] for axis in pooled])
    biased, stored = (x.var(pooled, ddof=ddof).reshape(-1, 3).mean(0) for ddof in (0, 1))
    assert np.all(stored >= 1.1 * biased)
    assert 2 <= m <= 8
    assert np.abs(x.mean(pooled)).min() > 0.1
    before, after = (np.asarray(case[key]["running_var"]) for key in ("checkpoint", "after 1"))
    momentum = case["arguments"].get("momentum", 0.1)
    if "Instance" in case["class"] and momentum is None:
        np.testing.assert_array_equal(after, before)
        return
    share = 1 / 4 if momentum is None else momentum
    assert np.abs(before - 1).min() > 0.01
    np.testing.assert_allclose(after, (1 - share) * before + share * stored, rtol=1e-5)


@pytest.mark.parametrize("case", [{"arguments": {}}], ids=["golden"])
def test_the_golden_files_are_small_and_hold_every_kind(case):
    assert all(file.stat().st_size <= 50_000 for file in GOLDEN.iterdir() if file.is_file())
    kinds = {case["class"].rstrip("12d") for case in CASES}
    assert kinds == {"BatchNorm", "InstanceNorm", "LayerNorm", "GroupNorm", "RMSNorm"}
    assert {case["arguments"].get("momentum", 0.1) for case in TRACKED} == {0.1, 0.3, None}
    assert {dtype_of(case) for case in CASES} == {*map(jnp.dtype, ("float16", "bfloat16", "float32", "float64"))}
