"""Layers whose kernels name their axes in every way, and norms for their outputs."""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import lax

import normjax as nj


def conv(numbers, **options):
    """A convolution whose dimension numbers are those of x, kernel and y."""
    return lambda x, kernel: lax.conv_general_dilated(
        x, kernel, (options.get("stride", 1),) * (x.ndim - 2), options.get("padding", "SAME"),
        dimension_numbers=numbers, feature_group_count=options.get("groups", 1),
    )  # fmt: skip


def transposed(transpose_kernel: bool):
    """Flax's ConvTranspose."""
    return lambda x, kernel: lax.conv_transpose(x, kernel, (2, 2), "SAME", transpose_kernel=transpose_kernel)


def pytorchs_transposed(groups: int):
    """PyTorch's ConvTranspose2d: the input channels of the kernel are those of all groups, the output's of one."""

    def apply(x, kernel):
        pairs = zip(jnp.split(x, groups, 1), jnp.split(kernel, groups, 0), strict=True)
        numbers = ("NCHW", "OIHW", "NCHW")
        return jnp.concatenate(
            [
                lax.conv_transpose(part, own, (2, 2), "VALID", dimension_numbers=numbers, transpose_kernel=True)
                for part, own in pairs
            ],
            1,
        )

    return apply


@dataclasses.dataclass(frozen=True)
class Layer:
    """A linear map of x by a kernel; what it makes of one is normalised along `names`."""

    apply: Callable
    x: tuple[int, ...]
    kernel: tuple[int, ...]
    layout: str
    y: str  # the layout of what comes out
    sizes: tuple[int, ...]  # of the channel, along `names`
    channel: str | None = None
    names: str = "C"

    @property
    def pooled(self) -> str:
        return " ".join(name for name in self.y.split() if name not in self.names.split())

    @property
    def terms(self) -> int:
        """No more than this many products make one entry of y."""
        return math.prod(self.kernel)

    def spread(self, bias):
        """An array along the channel as one that broadcasts to y."""
        kept = iter(np.shape(bias))
        return jnp.reshape(bias, [next(kept) if name in self.names.split() else 1 for name in self.y.split()])

    def problem(self, rng, dtype=np.float32):
        """x, kernel and bias, and what a norm of the output has, all random."""
        draw = lambda *shape: np.asarray(rng.normal(size=shape), dtype)  # noqa: E731
        params = nj.Affine(draw(*self.sizes), draw(*self.sizes), self.names)
        stats = stats_of(draw(*self.sizes), draw(*self.sizes) ** 2 + np.asarray(0.1, dtype), self.names)
        return draw(*self.x), draw(*self.kernel), draw(*self.sizes), params, stats


def stats_of(mean, var, names="C") -> nj.BatchStats:
    return nj.BatchStats(mean, var, 1, np.ones(np.shape(mean), np.float32), names)


NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")

LAYERS = {
    "dense": Layer(lambda x, k: x @ k, (6, 5), (5, 4), "I C", "N C", (4,)),
    "dense as in PyTorch": Layer(lambda x, k: x @ k.T, (6, 5), (4, 5), "C I", "N C", (4,)),
    "dense, square": Layer(lambda x, k: x @ k, (6, 4), (4, 4), "I C", "N C", (4,)),
    "dense into two axes": Layer(
        lambda x, k: jnp.einsum("ni,ihd->nhd", x, k), (6, 5), (5, 2, 3), "I H D", "N H D", (2, 3), names="H D"
    ),
    "two axes that are one channel": Layer(
        lambda x, k: jnp.einsum("ni,ihd->nhd", x, k).reshape(6, 6), (6, 5), (5, 2, 3), "I H D", "N C", (6,), "H D"
    ),
    "dense in groups": Layer(
        lambda x, k: jnp.einsum("ngi,gij->ngj", x, k).reshape(6, 8), (6, 2, 5), (2, 5, 4), "g i j", "N C", (8,), "g j"
    ),
    "1-D": Layer(conv(("NHC", "HIO", "NHC")), (2, 6, 3), (3, 3, 4), "l I C", "N L C", (4,)),
    "2-D": Layer(conv(NHWC, stride=2), (2, 5, 6, 3), (3, 2, 3, 4), "h w I C", "N H W C", (4,)),
    "2-D, its channel called otherwise": Layer(
        conv(NHWC, padding="VALID"), (2, 5, 6, 3), (3, 2, 3, 4), "... I O", "N H W C", (4,), "O"
    ),
    "2-D, channels first": Layer(conv(NCHW), (2, 3, 5, 6), (4, 3, 3, 2), "C I h w", "N C H W", (4,)),
    "3-D": Layer(conv(("NDHWC", "DHWIO", "NDHWC")), (1, 3, 4, 3, 2), (2, 2, 2, 2, 3), "d h w I C", "N D H W C", (3,)),
    "grouped": Layer(conv(NHWC, groups=2), (2, 4, 4, 4), (3, 3, 2, 6), "h w I C", "N H W C", (6,)),
    "depthwise with a multiplier": Layer(
        conv(NHWC, groups=4), (2, 4, 4, 4), (3, 3, 1, 8), "h w I C", "N H W C", (8,)
    ),
    "depthwise, its multiplier an axis": Layer(
        lambda x, k: conv(NHWC, groups=4)(x, k.reshape(3, 3, 1, 8)), (2, 4, 4, 4), (3, 3, 4, 2), "h w g j",
        "N H W C", (8,), "g j",
    ),
    "transposed": Layer(transposed(False), (2, 3, 4, 3), (3, 3, 3, 5), "h w I C", "N H W C", (5,)),
    "transposed, square": Layer(transposed(False), (2, 3, 4, 3), (3, 3, 3, 3), "h w I C", "N H W C", (3,)),
    "transposed, the kernel too": Layer(transposed(True), (2, 3, 4, 3), (3, 3, 5, 3), "h w C I", "N H W C", (5,)),
    "transposed, the kernel too, square": Layer(
        transposed(True), (2, 3, 4, 3), (3, 3, 3, 3), "h w C I", "N H W C", (3,)
    ),
    "transposed in groups as in PyTorch": Layer(
        pytorchs_transposed(2), (2, 4, 3, 4), (4, 3, 3, 3), "(g=2 I) j h w", "N C H W", (6,), "g j"
    ),
}  # fmt: skip
