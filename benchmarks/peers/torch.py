"""PyTorch on the CPU: eager (no ``torch.compile``), with as many threads as there are CPUs to run on, like JAX.

Channels last is PyTorch's own memory format, so the bytes are those of the JAX contestants. The forward alone runs
under ``no_grad``. There are no masks, and no ghost batches without a copy of x. Its running statistics move in place,
by the unbiased variance: they are no result of the call, and the one thing that is not compared.
"""

import functools
import os
import time

import jax
import ml_dtypes
import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.cases import Case
from benchmarks.contestants import Ready
from benchmarks.problems import EPS, NEW_WEIGHT, OUTPUTS, Problem, errors


def _function(case: Case, problem: Problem):
    if case.family == "layer":
        return lambda x, scale, bias: F.layer_norm(x, (case.channels,), scale, bias, EPS)
    if case.family == "rms":
        return lambda x, scale, bias: F.rms_norm(x, (case.channels,), scale, EPS)
    if case.family == "group":
        return lambda x, scale, bias: F.group_norm(x, case.groups, scale, bias, EPS)
    if case.family == "instance":
        return lambda x, scale, bias: F.instance_norm(x, None, None, scale, bias, eps=EPS)
    mean, var = _tensor(problem.mean), _tensor(problem.var)
    index = None if problem.index is None else torch.from_numpy(problem.index.astype(np.int64))

    def batch(x, scale, bias):
        x = x if index is None else x[index]
        return F.batch_norm(x, mean, var, scale, bias, case.train, NEW_WEIGHT, EPS)

    return batch


def _tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def prepare(case: Case, problem: Problem) -> Ready | None:
    """The functional form on tensors of its own."""
    if case.masked or case.ghost or jax.default_backend() != "cpu":
        return None
    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    function = _function(case, problem)
    move = functools.partial(torch.movedim, source=case.channel_axis, destination=1)
    back = functools.partial(torch.movedim, source=1, destination=case.channel_axis)
    if case.family in ("layer", "rms"):
        move = back = lambda tensor: tensor
    # RMS norm warns that it is not fused unless the dtypes agree; the others take float32 parameters as they are.
    scale = problem.scale.astype(case.dtype) if case.family == "rms" else problem.scale
    inputs = [move(_tensor(problem.x)), _tensor(scale)]
    if problem.bias is not None:
        inputs.append(_tensor(problem.bias))
    inputs = [tensor.requires_grad_() for tensor in inputs] if case.backward else inputs
    g = move(_tensor(problem.g))

    def call():
        if not case.backward:
            with torch.no_grad():
                return (function(*inputs, *[None] * (3 - len(inputs))),)
        y = function(*inputs, *[None] * (3 - len(inputs)))
        return (y, *torch.autograd.grad(y, inputs, g))

    def check(result) -> dict[str, float]:
        images = [_array(back(tensor)) for tensor in result[:2]]
        return errors(case, dict(zip(OUTPUTS, images + [_array(tensor) for tensor in result[2:]], strict=False)))

    start = time.perf_counter()
    call()
    return Ready(call, check, time.perf_counter() - start)
