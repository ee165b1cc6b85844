"""Configuration of every test: eight CPU devices, and a random key that depends on the test's own name."""

import zlib

import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A NumPy generator seeded by the test's name, so that each test has its own data and always the same."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def x64():
    """Float64 for one test."""
    with jax.enable_x64(True):
        yield
