"""What of speed can be counted, or is a row of the timing suite: collectives, transposes, shapes. Never a time."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import normjax as nj
from benchmarks.cases import BOTH, CASES, FORWARD
from benchmarks.contestants import NAMES, load
from benchmarks.problems import problem

SYNC = {"layout": "N H C", "axis_names": "N H data"}
NCHW = {"layout": "N C H W", "axis_names": "N H W"}
GHOST = {"layout": "N=(B n=16) C", "axis_names": "n"}

each_checking = pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])


def parameters(channels):
    return nj.Affine.init(C=channels), nj.BatchStats.init(C=channels)


def value_and_vjp(apply):
    """The program that everything is counted in: output, cotangents of x and parameters, new state."""

    def program(x, g, params, state):
        y, pullback, new = jax.vjp(lambda x, params: apply(x, params, state), x, params, has_aux=True)
        return y, pullback(g), new

    return program


def over_devices(function, inputs, outputs, *, checked):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=checked)


def operations(compiled) -> list[str]:
    """The name of every operation of an optimised program, those inside fusions too."""
    return re.findall(r" = .+? ([a-z][a-z0-9-]*)\(", compiled.as_text())


def all_reduces(compiled) -> int:
    names = operations(compiled)
    return names.count("all-reduce") + names.count("all-reduce-start")


@pytest.mark.case(101)
@each_checking
def test_a_synchronised_norm_reduces_once_in_the_forward_and_once_in_the_backward(checked, rng):
    x, g = rng.normal(size=(2, 16, 3, 5)).astype(np.float32)
    params, state = parameters(5)
    norm = functools.partial(nj.sync_batch_norm, train=True, **SYNC)
    forward = over_devices(norm, (P("data"), P(), P()), (P("data"), P()), checked=checked)
    assert all_reduces(jax.jit(forward).lower(x, params, state).compile()) == 1

    def both(x, g, params, state):
        y, (dx, d_params), new = value_and_vjp(norm)(x, g, params, state)
        # Unchecked, each device has its own share of the parameters' gradients, and the caller sums them.
        return y, dx, d_params if checked else jax.tree.map(lambda leaf: leaf[None], d_params), new

    outputs = (P("data"), P("data"), P() if checked else P("data"), P())
    program = over_devices(both, (P("data"), P("data"), P(), P()), outputs, checked=checked)
    assert all_reduces(jax.jit(program).lower(x, g, params, state).compile()) == 2


@pytest.mark.case(102)
@each_checking
@pytest.mark.parametrize(
    ("policy", "backward"),
    [
        (jax.checkpoint_policies.save_only_these_names("normjax_stats"), 1),
        (jax.checkpoint_policies.nothing_saveable, 2),
    ],
    ids=["statistics saved", "nothing saved"],
)
def test_a_checkpoint_that_saves_the_statistics_does_not_repeat_their_collective(policy, backward, checked, rng):
    x, g = rng.normal(size=(2, 16, 3, 5)).astype(np.float32)
    params, state = parameters(5)
    norm = jax.checkpoint(functools.partial(nj.sync_batch_norm, train=True, **SYNC), policy=policy)
    sharded = over_devices(norm, (P("data"), P(), P()), (P("data"), P()), checked=checked)

    @jax.jit
    def forward(x, params):
        y, pullback, _ = jax.vjp(lambda x, params: sharded(x, params, state), x, params, has_aux=True)
        return y, pullback

    # Two programs, as in training a deep network: in one, the compiler would see the repetition and remove it.
    compiled = forward.lower(x, params).compile()
    assert all_reduces(compiled) == 1
    _, pullback = jax.block_until_ready(compiled(x, params))
    assert all_reduces(jax.jit(lambda pullback, g: pullback(g)).lower(pullback, g).compile()) == backward


@pytest.mark.case(103)
def test_what_exact_statistics_cost_is_a_row_beside_fast_and_two_pass_variance():
    measured = [case for case in CASES if 103 in case.numbers and case.shape == (64, 1024)]
    assert {case.mode for case in measured} == {FORWARD, BOTH}
    for name in ("linen", "linen two-pass"):
        prepare = load([name])[name]
        assert all(prepare(case, problem(case)) is not None for case in measured)


@pytest.mark.case(104)
def test_parameters_state_and_gradients_have_the_shape_of_the_channels_alone(rng):
    x = rng.normal(size=(8, 4, 4, 256)).astype(np.float32)
    apply = functools.partial(nj.batch_norm, layout="N H W C", axis_names="N H W", train=True)
    params, state = parameters(256)
    _, (_, gradients), new = jax.eval_shape(value_and_vjp(apply), x, x, params, state)
    assert {leaf.shape for leaf in jax.tree.leaves([params, gradients])} == {(256,)}
    assert {leaf.shape for held in (state, new) for leaf in (held.mean, held.var, held.weight)} == {(256,)}


@pytest.mark.case(105)
def test_few_features_and_a_gather_before_the_norm_are_rows_beside_the_plain_formula():
    measured = [case for case in CASES if 105 in case.numbers]
    layer = {(case.channels, case.mode) for case in measured if case.family == "layer"}
    assert layer == {(features, mode) for features in (8, 16, 32, 64) for mode in (FORWARD, BOTH)}
    assert {case.mode for case in measured if case.gather and case.family == "batch"} == {FORWARD, BOTH}
    assert "autodiff" in NAMES


@pytest.mark.case(106)
def test_channels_first_is_normalised_without_a_transpose(rng):
    x, g = rng.normal(size=(2, 4, 16, 7, 7)).astype(np.float32)
    program = value_and_vjp(functools.partial(nj.batch_norm, train=True, **NCHW))
    compiled = jax.jit(program).lower(x, g, *parameters(16)).compile()
    assert "transpose" not in operations(compiled)
    # Nor one in disguise: a copy into another order in memory.
    assert set(re.findall(r"f32\[4,16,7,7\](\{[\d,]+)", compiled.as_text())) == {"{3,2,1,0"}


@pytest.mark.case(106)
def test_ghost_batches_are_a_reshape_without_a_loop_or_a_collective(rng):
    x, g = rng.normal(size=(2, 1024, 32)).astype(np.float32)
    lowered = jax.jit(value_and_vjp(functools.partial(nj.batch_norm, train=True, **GHOST))).lower(x, g, *parameters(32))
    split = re.findall(r"(\w+) %\w+ : \(tensor<1024x32xf32>\) -> (tensor\S+)", lowered.as_text())
    assert set(split) == {("reshape", "tensor<64x16x32xf32>")}
    assert lowered.as_text().count("(tensor<64x16x32xf32>) -> tensor<1024x32xf32>") == 2
    moving = {"while", "transpose", "gather", "scatter", "concatenate", "dynamic-slice"}
    assert not moving & set(operations(lowered.compile()))


@pytest.mark.case(106)
def test_ghost_batches_on_several_devices_need_no_collective(rng):
    x = rng.normal(size=(8 * 32, 4)).astype(np.float32)
    params, _ = parameters(4)

    def local(x, params):
        y, pullback = jax.vjp(lambda *given: nj.batch_norm(*given, train=True, **GHOST)[0], x, params)
        return y, jax.tree.map(lambda leaf: leaf[None], pullback(x))

    program = over_devices(local, (P("data"), P()), P("data"), checked=False)
    assert all_reduces(jax.jit(program).lower(x, params).compile()) == 0
