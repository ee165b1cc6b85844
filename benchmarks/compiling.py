"""Seconds to trace and compile the gradient of 50 norms in a row: ``python -m benchmarks.compiling``.

Of "dense" a block is x ↦ tanh(layer_norm(x w)), of "bare" it is layer_norm(x) alone; the gradient is that of the sum
of the result's squares, by x and all parameters, in float32. Each is measured in a process of its own, so that nothing
is traced or compiled yet, by the CPU time of all its threads. Bare norms of linen take most of a minute a size.
"""

import argparse
import json
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.arguments import Parser, positive, refuse, say
from benchmarks.cases import Case
from benchmarks.contestants import build_normjax, missing
from benchmarks.worker import machine

NETWORKS = ("dense", "bare")
SIZES = ("32x64", "64x512", "256x512")
CONTESTANTS = ("normjax", "linen")
DEPTH = 50


def norm(by: str, shape: tuple[int, ...]):
    """f(x, scale, bias), the layer norm of a contestant of the timing suite."""
    case = Case("layer", "compiling", shape, "N C", "C")
    if by == "normjax":
        apply = build_normjax(case)
    else:
        from benchmarks.peers import linen

        apply = linen.build(case)
    return lambda x, scale, bias: apply(x, scale, bias, None, None, None)[0]


def gradient(by: str, network: str, shape: tuple[int, ...], depth: int = DEPTH):
    """The function to compile, and the shapes of its arguments, x and a list of parameters."""
    of, width = norm(by, shape), shape[-1]

    def loss(x, blocks):
        for block in blocks:
            if network == "dense":
                x = jnp.tanh(of(x @ block["w"], block["scale"], block["bias"]))
            else:
                x = of(x, block["scale"], block["bias"])
        return jnp.sum(x * x)

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    block = {"scale": array(width), "bias": array(width)}
    if network == "dense":
        block["w"] = array(width, width)
    return jax.grad(loss, argnums=(0, 1)), (array(*shape), [block] * depth)


def cpu_seconds(by: str, network: str, shape: tuple[int, ...], depth: int = DEPTH) -> float:
    """CPU seconds of this process to trace, lower and compile."""
    function, arguments = gradient(by, network, shape, depth)
    jax.jit(lambda x: x + 1).lower(1.0).compile()  # the first compilation starts the compiler
    start = time.process_time()
    jax.jit(function).lower(*arguments).compile()
    return time.process_time() - start


def size(text: str) -> tuple[int, int]:
    """Rows and features, as in 32x64."""
    rows, _, features = text.partition("x")
    try:
        return positive(rows), positive(features)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 32x64") from None


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Prints a JSON line for each measurement, with device and versions, and returns them."""
    parser = Parser(
        "python -m benchmarks.compiling", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=NETWORKS, nargs="+", default=NETWORKS)
    parser.add_argument("--size", type=size, nargs="+", default=[size(text) for text in SIZES], metavar="ROWSxFEATURES")
    parser.add_argument("--by", choices=CONTESTANTS, nargs="+", default=CONTESTANTS)
    parser.add_argument("--depth", type=positive, default=DEPTH, help="how many norms")
    options = parser.parse_args(arguments)
    if absent := set(options.by) & set(missing()):
        refuse(f"not installed: {', '.join(absent)} (pip install -r benchmarks/requirements.txt)")
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "0"  # of the processes to come
    about, lines = machine(), []
    spawn = multiprocessing.get_context("spawn")
    for network in options.network:
        for shape in options.size:
            for by in options.by:
                with ProcessPoolExecutor(1, mp_context=spawn) as apart:
                    seconds = apart.submit(cpu_seconds, by, network, shape, options.depth).result()
                line = {"kind": "compile", "network": network, "shape": shape, "depth": options.depth}
                lines.append(line | {"contestant": by, "cpu_s": seconds} | about)
                print(json.dumps(lines[-1]), flush=True)
                say(f"{options.depth} x {network} {shape[0]}x{shape[1]}, {by}: {seconds:.2f} CPU seconds")
    return lines


if __name__ == "__main__":
    main()
