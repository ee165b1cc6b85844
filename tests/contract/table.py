"""The columns of the contract table, which of their combinations cannot exist, and a cover of all pairs.

A cell is a tuple with one value of each column. The full product is for `-m matrix`; every run takes a cover in which
each two values of different columns meet in at least one cell.
"""

import itertools
from typing import NamedTuple

COLUMNS: dict[str, tuple[str, ...]] = {
    "family": ("batch", "batch_eval", "layer", "instance", "group", "rms"),
    "layout": (
        "channels last",
        "channels first",
        "signal, scale alone",
        "sequence, zero-centred",
        "split axes",
        "ghost batches",
        "conditional parameters",
        "scalar parameters",
        "no parameters",
    ),
    "mask": ("none", "small", "full", "empties a group", "NaN left out"),
    "dtype": ("float64", "float32", "float32 in x64", "bfloat16", "float16", "int32"),
    "derivative": ("vjp", "jvp", "autodiff"),
    "transform": ("eager", "jit", "vmap", "grad", "grad of grad", "scan carry", "remat", "eval_shape"),
}
GRADIENTS = ("grad", "grad of grad", "remat")


class Cell(NamedTuple):
    """One value of each column, in their order."""

    family: str
    layout: str
    mask: str
    dtype: str
    derivative: str
    transform: str

    def __str__(self) -> str:
        return "-".join(value.replace(" ", "_").replace(",", "") for value in self)


def why_impossible(**chosen: str) -> str | None:
    """Why no cell may hold these values together, or None; columns that are not given may still be anything.

    This is the one rule that takes cells out of the product.
    """
    family, layout, mask, dtype, transform = map(chosen.get, ("family", "layout", "mask", "dtype", "transform"))
    if layout == "ghost batches" and family not in (None, "batch", "batch_eval"):
        return "ghost batches split the axis of examples, which only batch norm pools"
    if dtype == "int32" and mask == "NaN left out":
        return "integers have no NaN"
    if dtype == "int32" and layout == "no parameters" and transform in GRADIENTS:
        return "integers have no gradient, and there is nothing else to differentiate by"
    return None


def product(**only: str) -> list[Cell]:
    """Every cell that can exist, with the values given in some columns alone."""
    columns = ((only[column],) if column in only else values for column, values in COLUMNS.items())
    cells = map(Cell._make, itertools.product(*columns))
    return [cell for cell in cells if why_impossible(**cell._asdict()) is None]


def pairs_of(cell: Cell) -> set[tuple[str, str, str, str]]:
    """Each two values of a cell, with their columns."""
    return {(a, x, b, y) for (a, x), (b, y) in itertools.combinations(cell._asdict().items(), 2)}


def cover() -> list[Cell]:
    """Cells in which every possible pair meets, by a greedy choice that is the same in every run.

    Each cell starts from the first pair that has not met; every other column then takes the value that meets most
    values for the first time.
    """
    columns = list(COLUMNS)
    missing = {
        (a, x, b, y): None
        for a, b in itertools.combinations(columns, 2)
        for x, y in itertools.product(COLUMNS[a], COLUMNS[b])
        if why_impossible(**{a: x, b: y}) is None
    }

    def meets_first(chosen: dict[str, str], column: str, value: str) -> int:
        pairs = (
            sorted([(other, chosen[other]), (column, value)], key=lambda p: columns.index(p[0])) for other in chosen
        )
        return sum((*first, *second) in missing for first, second in pairs)

    cells = []
    while missing:
        a, x, b, y = next(iter(missing))
        chosen = {a: x, b: y}
        for column in columns:
            if column in chosen:
                continue
            possible = [value for value in COLUMNS[column] if why_impossible(**chosen, **{column: value}) is None]
            # Turned by one value a cell, so that ties do not always fall to the first value.
            turn = len(cells) % len(possible)
            possible = possible[turn:] + possible[:turn]
            chosen[column] = max(possible, key=lambda value: meets_first(chosen, column, value))
        cell = Cell(**chosen)
        cells.append(cell)
        for pair in pairs_of(cell):
            missing.pop(pair, None)
    return cells
