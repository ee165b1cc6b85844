"""Configuration of every test: eight CPU devices, one store of compiled programs, and a random key of its own."""

import os
import shutil
import tempfile
import zlib

import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)


def pytest_configure(config):
    # A run's workers share what they compile, each of them inheriting the folder that the first process made.
    if "NORMJAX_TEST_PROGRAMS" not in os.environ:
        programs = os.environ["NORMJAX_TEST_PROGRAMS"] = tempfile.mkdtemp(prefix="normjax-test-programs-")
        config.add_cleanup(lambda: shutil.rmtree(programs, ignore_errors=True))
    jax.config.update("jax_compilation_cache_dir", os.environ["NORMJAX_TEST_PROGRAMS"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.02)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # A program that another worker is just writing is compiled again, with this warning.
    config.addinivalue_line("filterwarnings", "ignore:Error reading persistent compilation cache entry")


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A NumPy generator seeded by the test's name, so that each test has its own data and always the same."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def x64():
    """Float64 for one test."""
    with jax.enable_x64(True):
        yield
