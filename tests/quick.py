"""`quick_jit`: `jax.jit` for programs that run once or twice on small arrays.

To compile such a program well takes longer than to run it badly. For tests whose numbers do not depend on the
optimiser: float64, or which values reach which. What the optimiser makes of the norms is for those that use `jax.jit`.
"""

import contextlib
import functools
import gc
from collections.abc import Iterator

import jax


def _known(options: dict) -> bool:
    """Whether XLA has these options, which come and go with its versions."""
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except jax.errors.JaxRuntimeError:
        return False
    return True


_WANTED = {
    "xla_backend_optimization_level": 0,
    # One part to generate code for, not one for each core.
    "xla_cpu_parallel_codegen_split_count": 1,
    # Before jax 0.12 there is an older way to emit code, which takes half as long.
    "xla_cpu_use_fusion_emitters": False,
}


@functools.cache
def _options() -> dict:
    return {name: value for name, value in _WANTED.items() if _known({name: value})}


def quick_jit(function, **options):
    """The function compiled with as little effort as XLA allows; the options are those of `jax.jit`."""
    return jax.jit(function, compiler_options=_options(), **options)


@contextlib.contextmanager
def checking_leaks() -> Iterator[None]:
    """`jax.checking_leaks`, which collects garbage at every trace: what other tests have left is kept out of that."""
    gc.collect()
    gc.freeze()
    try:
        with jax.checking_leaks():
            yield
    finally:
        gc.unfreeze()
