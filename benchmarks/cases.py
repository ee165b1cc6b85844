"""What is timed: every row of the suite, as data.

A row is a norm on one shape and dtype, forward alone or forward and backward. Shapes are those of real activations: the
stages of ResNet-50 at batch 32, transformer rows (512×768, 2048×1024, 4096×1024), and the small feature counts of
attention heads. Batches are chosen so that the slowest call stays below about 50 ms on two cores.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator

FORWARD, BOTH = "forward", "forward+backward"
FAMILIES = ("batch", "layer", "rms", "group", "instance")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the suite.

    Attributes:
      family: which norm.
      name: where the shape comes from.
      shape: of x, its axes named by `layout`; scale and bias run along C.
      layout: as in normjax.
      axis_names: the names that pool into one mean.
      dtype: of x and the cotangent; parameters and running statistics are float32.
      mode: `FORWARD` or `BOTH`: the value and its VJP with a random cotangent, in one program.
      train: batch norm by the batch's statistics, and the new running ones; False: by the running statistics.
      groups: of group norm.
      ghost: examples in a ghost batch, or None.
      masked: whether a mask excludes a third of the entries.
      gather: whether x is permuted along its first axis before it is normalised, in the same program.
      eager: called operation by operation, without jit.
      quick: whether `--quick` has it.
      plot: whether the plot has it.
      numbers: of the listed cases that this row answers.
    """

    family: str
    name: str
    shape: tuple[int, ...]
    layout: str
    axis_names: str
    dtype: str = "float32"
    mode: str = BOTH
    train: bool = True
    groups: int | None = None
    ghost: int | None = None
    masked: bool = False
    gather: bool = False
    eager: bool = False
    quick: bool = False
    plot: bool = False
    numbers: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Norm, name, shape and dtype: what a row of the table begins with."""
        norm = self.family if self.train else f"{self.family} evaluation"
        short = {"float32": "f32", "bfloat16": "bf16"}[self.dtype]
        return f"{norm} {self.name} {'x'.join(map(str, self.shape))} {short}"

    @property
    def key(self) -> str:
        """The label and the mode: what `--only` is matched against."""
        return f"{self.label} {self.mode}"

    @property
    def backward(self) -> bool:
        """Whether the gradients are computed."""
        return self.mode == BOTH

    @property
    def channel_axis(self) -> int:
        """Where the layout has C."""
        return [re.split("[=(]", name)[0] for name in re.findall(r"\w+=\([^)]*\)|\w+", self.layout)].index("C")

    @property
    def channels(self) -> int:
        """The size of C."""
        return self.shape[self.channel_axis]

    @property
    def group_size(self) -> int:
        """How many entries share one mean."""
        per_example = math.prod(self.shape[1:])
        sizes = {
            "batch": (self.ghost or self.shape[0]) * per_example // self.channels,
            "layer": self.channels,
            "rms": self.channels,
            "group": per_example // (self.groups or 1),
            "instance": per_example // self.channels,
        }
        return sizes[self.family]

    @property
    def problem(self) -> "Case":
        """The case with what does not change the arrays left out, so that modes share them."""
        return dataclasses.replace(self, mode=BOTH, eager=False, quick=False, plot=False, numbers=())


def _rows(family, name, shape, layout="N C", axis_names="C", modes=(FORWARD, BOTH), dtypes=("float32",), **options):
    """A row for each dtype and mode; `quick` lists the modes that `--quick` has. Plot and `--quick` are in float32."""
    quick, plot = options.pop("quick", ()), options.pop("plot", False)
    for dtype in dtypes:
        single = dtype == "float32"
        for mode in modes:
            flags = {"quick": single and mode in quick, "plot": single and plot}
            yield Case(family, name, shape, layout, axis_names, dtype, mode, **flags, **options)


def _batch() -> Iterator[Case]:
    nhwc = {"layout": "N H W C", "axis_names": "N H W"}
    two = ("float32", "bfloat16")
    stages = [
        ("ResNet-50 stage 1", (32, 56, 56, 64), two, ()),
        ("ResNet-50 stage 2", (32, 28, 28, 128), ("float32",), ()),
        ("ResNet-50 stage 3", (32, 14, 14, 256), two, (FORWARD, BOTH)),
        ("ResNet-50 stage 4", (32, 7, 7, 2048), ("float32",), ()),
    ]
    for name, shape, dtypes, quick in stages:
        yield from _rows("batch", name, shape, **nhwc, dtypes=dtypes, quick=quick, plot=True)
        yield from _rows("batch", name, shape, **nhwc, dtypes=dtypes, modes=[FORWARD], train=False, plot=bool(quick))
    yield from _rows("batch", "ResNet-50 stage 3", (32, 14, 14, 256), **nhwc, modes=[BOTH], train=False)
    first = {"layout": "N C H W", "axis_names": "N H W", "numbers": (106,)}
    yield from _rows("batch", "channels first", (32, 256, 14, 14), **first)
    ghost = {"layout": "N=(B n=16) C", "axis_names": "n", "ghost": 16, "numbers": (106,)}
    yield from _rows("batch", "ghost 16", (1024, 32), **ghost)
    yield from _rows("batch", "masked tokens", (64, 128, 256), "N T C", "N T", masked=True)
    yield from _rows("batch", "after a gather", (16384, 64), "N C", "N", gather=True, numbers=(105,))


def _layer_and_rms() -> Iterator[Case]:
    two = ("float32", "bfloat16")
    yield from _rows("layer", "transformer", (512, 768), dtypes=two, quick=(FORWARD, BOTH), plot=True)
    yield from _rows("layer", "transformer", (2048, 1024), dtypes=two, plot=True, numbers=(103,))
    yield from _rows("layer", "transformer", (4096, 1024))
    yield from _rows("layer", "small batch", (64, 1024), numbers=(103,))
    for features in (8, 16, 32, 64):
        yield from _rows("layer", "few features", (16384, features), plot=features == 64, numbers=(105,))
    yield from _rows("layer", "masked features", (64, 128, 256), "N T C", masked=True)
    yield from _rows("rms", "transformer", (512, 768), plot=True, quick=[BOTH])
    yield from _rows("rms", "transformer", (2048, 1024), dtypes=two, plot=True)
    yield from _rows("rms", "transformer", (4096, 1024))
    yield from _rows("rms", "attention head", (16384, 64), numbers=(105,))


def _group_and_instance() -> Iterator[Case]:
    grouped = {"layout": "N H W C=(G=32 K)", "axis_names": "H W K", "groups": 32}
    yield from _rows("group", "ResNet-50 stage 2", (32, 28, 28, 128), **grouped)
    two = ("float32", "bfloat16")
    yield from _rows("group", "ResNet-50 stage 3", (32, 14, 14, 256), **grouped, dtypes=two, quick=[BOTH], plot=True)
    own = {"layout": "N H W C", "axis_names": "H W"}
    yield from _rows("instance", "ResNet-50 stage 1", (8, 56, 56, 64), **own)
    yield from _rows("instance", "ResNet-50 stage 3", (32, 14, 14, 256), **own, dtypes=two, quick=[BOTH], plot=True)


def _eager() -> Iterator[Case]:
    yield from _rows("layer", "eager call", (8, 16), modes=[FORWARD], eager=True, quick=[FORWARD])
    yield from _rows("layer", "eager call", (8, 16), modes=[BOTH], eager=True)
    yield from _rows("batch", "eager call", (8, 16), "N C", "N", modes=[FORWARD], eager=True)


CASES = (*_batch(), *_layer_and_rms(), *_group_and_instance(), *_eager())


def select(cases: Iterable[Case], *, quick=False, only: str | None = None, families: Iterable[str] = ()) -> list[Case]:
    """The cases that every given filter lets through: `only` is a regular expression sought in the key."""
    families = set(families)
    return [
        case
        for case in cases
        if (case.quick or not quick)
        and (only is None or re.search(only, case.key))
        and (not families or case.family in families)
    ]
