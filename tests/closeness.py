"""How near a result must come to the float64 reference: a bound from the dtype and the length of the sums."""

import numpy as np


def close(actual, expected, *, m: int = 1, k: int = 16, dtype=np.float32):
    """Equal within k·eps·√m of the largest expected number: m roundings of a sum add up like a random walk."""
    expected = np.asarray(expected)
    size = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    bound = k * float(np.finfo(dtype).eps) * np.sqrt(m) * size
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=0, atol=bound)


def close64(actual, expected, *, m: int = 1, k: int = 32):
    """The same for float64."""
    close(actual, expected, m=m, k=k, dtype=np.float64)
