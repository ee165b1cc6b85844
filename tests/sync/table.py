"""The columns of the table of mappings, and cells in which each two values of different columns meet."""

from typing import NamedTuple

from tests.sync.mappings import MAPPINGS
from tests.sync.problems import FAMILIES, MASKS

DERIVATIVES = ("vjp", "jvp", "autodiff")
COLUMNS = {
    "mapping": tuple(MAPPINGS),
    "derivative": DERIVATIVES,
    "family": tuple(FAMILIES),
    "mask": ("none", *MASKS),
}


class Cell(NamedTuple):
    """One program: a value of each column but the mask, which is an input of the program unless there is none."""

    mapping: str
    derivative: str
    family: str
    masked: bool

    def __str__(self) -> str:
        words = (self.mapping, self.derivative, self.family, "masked" if self.masked else "no mask")
        return "-".join(word.replace(" ", "_").replace(",", "") for word in words)

    @property
    def masks(self) -> tuple[str, ...]:
        return MASKS if self.masked else ("none",)


def product() -> list[Cell]:
    return [
        Cell(mapping, derivative, family, masked)
        for mapping in MAPPINGS
        for derivative in DERIVATIVES
        for family in FAMILIES
        for masked in (True, False)
    ]


def cover() -> list[Cell]:
    """Three programs a mapping, the fewest that meet its three derivatives and families; one of them has no mask.

    Turned by one derivative a mapping, and by one family every third, so that the others meet each other too.
    """
    return [
        Cell(mapping, DERIVATIVES[(turn + i) % 3], family, i != turn // 3 % 3)
        for turn, mapping in enumerate(MAPPINGS)
        for i, family in enumerate(FAMILIES)
    ]
