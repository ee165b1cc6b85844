"""Counts of programs compiled for an H200 and a TPU v5e that are not there.

They need the compilers of benchmarks/deviceless/requirements.txt: run with ``-m deviceless``. Without them every test
here fails. Each bound is a multiple of the bytes that a program must move, or a count of collectives.
"""

import functools

import pytest

from benchmarks.deviceless import programs
from benchmarks.deviceless.apart import measure_apart

pytestmark = pytest.mark.deviceless

FLOAT = 4
CHANNELS = programs.SHARDED_IMAGES[-1]
ANALYTIC = ("vjp", "jvp")
each_target = pytest.mark.parametrize("target", ["h200", "v5e"])
each_derivative = pytest.mark.parametrize("derivative", programs.IMPLEMENTATIONS[:3])


@functools.cache
def counts(target, build, *arguments):
    return measure_apart(target, build, *arguments)


def moved(target, norm, part, implementation):
    return counts(target, programs.norm, norm, part, implementation)["moved"] / programs.ideal_bytes(norm, part)


def collectives(target, part, implementation):
    return [size for _, size in counts(target, programs.synchronised, part, implementation)["collectives"]]


# Norm, part: at most how many times the bytes that it must move on an H200. A forward reads x for the statistics and
# again for y, and an eighth of it for the shift: 1.56. A backward reads x and g for the sums and again for dx: 1.67.
# Both in one program: at least three passes over x and two over g, of which the rules allow one more.
BOUNDS = {
    ("layer norm", "forward"): 1.6,
    ("layer norm", "backward apart"): 1.75,
    ("layer norm", "value and vjp"): 2.3,
    ("rms norm", "forward"): 1.6,
    ("rms norm", "backward apart"): 1.75,
    ("rms norm", "value and vjp"): 2.3,
    ("batch norm", "forward"): 1.6,
    ("batch norm", "backward apart"): 1.75,
    ("batch norm", "value and vjp"): 2.3,
    ("batch norm in evaluation", "forward"): 1.02,
}


@pytest.mark.parametrize("derivative", ANALYTIC)
@pytest.mark.parametrize(("norm", "part"), BOUNDS)
def test_a_norm_moves_little_more_than_it_must(norm, part, derivative):
    ratio = moved("h200", norm, part, derivative)
    assert ratio <= BOUNDS[norm, part], f"{ratio:.2f} × the ideal"


# Part: at most how many kernels on an H200, and four more by "jvp", whose backward is the transpose of a tangent map.
# Sums over a few long groups take two kernels, a shift takes one; x̂ is never a kernel of its own.
KERNELS = {"forward": 8, "backward apart": 5, "value and vjp": 11}


@pytest.mark.parametrize("derivative", ANALYTIC)
@pytest.mark.parametrize(("norm", "part"), BOUNDS)
def test_a_norm_takes_few_kernels_and_no_temporary_of_xs_size(norm, part, derivative):
    found = counts("h200", programs.norm, norm, part, derivative)
    x = programs.NORMS[norm][1][0]
    assert found["temporaries"] <= x.size * x.dtype.itemsize / 16, f"{found['temporaries']} bytes"
    assert found["kernels"] <= KERNELS[part] + 4 * (derivative == "jvp"), f"{found['kernels']} kernels"


@each_target
@pytest.mark.parametrize("norm", ["layer norm", "long layer norm", "rms norm"])
def test_a_norm_over_features_moves_no_more_than_autodiff_of_the_textbook(norm, target):
    ours, textbook = (moved(target, norm, "value and vjp", by) for by in ("vjp", "textbook"))
    assert ours <= textbook * 1.01, f"{ours:.2f} × the ideal, autodiff {textbook:.2f} ×"


@pytest.mark.parametrize("norm", [name for name in programs.NORMS if "evaluation" not in name])
@pytest.mark.parametrize("derivative", ANALYTIC)
def test_x_and_small_statistics_are_all_that_goes_from_the_forward_to_the_backward(norm, derivative):
    x = programs.NORMS[norm][1][0]
    saved = counts("h200", programs.norm, norm, "forward apart", derivative)["saved"]
    groups = x.size // x.shape[-1] if norm != "batch norm" else x.shape[-1]
    allowed = x.size * x.dtype.itemsize + FLOAT * (4 * groups + 2 * x.shape[-1] + 16)
    assert saved <= allowed, f"{saved} bytes"
    textbook = counts("h200", programs.norm, norm, "forward apart", "textbook")["saved"]
    assert saved < textbook, f"{saved} bytes, autodiff {textbook}"


@each_target
@each_derivative
@pytest.mark.parametrize("part", ["value and vjp", "checked"])
def test_value_and_gradient_over_eight_chips_take_two_collectives(part, derivative, target):
    payloads = collectives(target, part, derivative)
    assert len(payloads) == 2, payloads
    forward, backward = payloads
    assert forward <= FLOAT * programs.CHIPS * (2 * CHANNELS + 1), payloads
    assert backward <= FLOAT * 2 * CHANNELS, payloads


@each_target
@each_derivative
def test_a_checkpoint_that_saves_the_statistics_adds_no_collective(derivative, target):
    payloads = collectives(target, "checkpointed", derivative)
    assert len(payloads) == 2, payloads


@each_target
def test_evaluation_over_eight_chips_takes_no_collective(target):
    assert collectives(target, "evaluation", "vjp") == []


@each_target
def test_one_more_collective_would_be_noticed(target):
    more = counts(target, programs.synchronised_with_one_more, "vjp")["collectives"]
    assert len(more) == len(collectives(target, "value and vjp", "vjp")) + 1, more


def test_a_transformers_training_step_needs_less_memory_than_with_flax():
    ours, flax = (counts("h200", programs.transformer_step, by)["peak"] for by in ("vjp", "linen"))
    assert ours < flax, f"{ours / 1e6:.1f} MB, Flax {flax / 1e6:.1f} MB"
