"""Counts of an optimised HLO module, read off its text: bytes moved, kernels, collectives with their payloads.

Bytes are those that the launched operations read from and write to device memory: each operand and each result once,
by its layout, tiles padded; buffers on the chip (memory space S(1) and up) move nothing. Of an operand that a fusion
only slices, the slices count. What an operation re-reads is not in the text: matrix products and convolutions count
as if they read once, and a hand-written kernel is refused, because its bytes are those of its blocks.

A collective's payload is the size of its result wherever that lies, on the chip too.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence

_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"\b(pred|bf16|token|opaque|(?:[fsu]|f8e|c)\d\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_PARTS = {"slice", "dynamic-slice", "gather"}
_COLLECTIVES = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all"}
_WRAPPERS = ("fusion", "async-start")
_KERNELS = ("tpu_custom_call", "triton", "mosaic")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an HLO type."""

    bits: int
    shape: tuple[int, ...]
    layout: str

    @property
    def payload(self) -> int:
        """Bytes of the entries."""
        return math.prod(self.shape) * self.bits // 8

    @property
    def on_chip(self) -> bool:
        """Whether it lies in a memory space of its own."""
        return re.search(r"S\([1-9]", self.layout) is not None

    @property
    def device_bytes(self) -> int:
        """Bytes in device memory, with the padding of the layout's tiles."""
        if self.on_chip:
            return 0
        order, _, tiles = self.layout.partition(":")
        if not (tile := re.match(r"T\(([\d,]+)\)", tiles)) or not self.shape:
            return self.payload
        minor_first = [int(axis) for axis in order.split(",")]
        padded = list(self.shape)
        for axis, size in zip(minor_first, reversed([int(n) for n in tile[1].split(",")]), strict=False):
            padded[axis] = -(-padded[axis] // size) * size
        return math.prod(padded) * self.bits // 8


def _width(name: str) -> int:
    return _BITS[name] if name in _BITS else int(re.search(r"\d+", name)[0])


def arrays(text: str) -> list[Array]:
    """The arrays of an HLO type, those of a tuple in order."""
    return [
        Array(_width(name), tuple(int(n) for n in dims.split(",") if n), layout or "")
        for name, dims, layout in _ARRAY.findall(text)
    ]


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `operands` and what it calls by name."""

    name: str
    op: str
    out: list[Array]
    operands: list[str]
    attributes: str
    root: bool

    def called(self, key: str) -> str:
        """The computation that an attribute names."""
        return re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)[1]


def _closing(text: str) -> int:
    depth = 1
    for i, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return i
    raise ValueError(f"hlo: an instruction does not end: {text!r}")


def computations(text: str) -> tuple[str, dict[str, list[Instruction]]]:
    """The entry's name and the instructions of every computation of a module."""
    entry, found, body = "", {}, []
    for line in text.splitlines():
        if header := _HEADER.match(line):
            body = found[header[2]] = []
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            root, name, kind, op, rest = match.groups()
            end = _closing(rest)
            operands = [] if op in ("parameter", "constant") else re.findall(r"%([\w.\-]+)", rest[:end])
            attributes = rest if op == "parameter" else rest[end + 1 :]
            body.append(Instruction(name, op, arrays(kind), operands, attributes, root is not None))
    if not entry:
        raise ValueError("hlo: the text has no ENTRY computation.")
    return entry, found


@dataclasses.dataclass
class Counts:
    """What a module does each time it runs.

    Attributes:
      moved: bytes read from and written to device memory.
      kernels: operations launched.
      collectives: name and payload in bytes of each collective, in the program's order.
    """

    moved: int = 0
    kernels: int = 0
    collectives: list[tuple[str, int]] = dataclasses.field(default_factory=list)

    def add(self, other: "Counts", times: int = 1) -> None:
        """Adds what another part of the program does, `times` over."""
        self.moved += other.moved * times
        self.kernels += other.kernels * times
        self.collectives += other.collectives * times


def count(text: str) -> Counts:
    """Counts of an optimised module: `compiled.as_text()`."""
    entry, module = computations(text)
    return _count_body(module, entry)


def _count_body(module: dict[str, list[Instruction]], name: str) -> Counts:
    total, types = Counts(), {}
    for one in module[name]:
        types[one.name] = one.out
        if one.op in _FREE or one.op.endswith("-done"):
            continue
        if one.op == "call":
            total.add(_count_body(module, one.called("to_apply")))
        elif one.op == "while":
            total.add(_count_body(module, one.called("body")), _trips(one))
        elif one.op == "conditional":
            first, *others = (_count_body(module, branch) for branch in _branches(one))
            if any(other != first for other in others):
                raise ValueError(f"hlo: {one.name} has branches that move different amounts; which runs is not known.")
            total.add(first)
        else:
            total.add(_count_one(module, one, types))
    return total


def _branches(one: Instruction) -> list[str]:
    found = re.search(r"\bbranch_computations=\{([^}]*)\}", one.attributes)
    names = found[1].split(",") if found else [one.called("true_computation"), one.called("false_computation")]
    return [name.strip().lstrip("%") for name in names]


def _trips(loop: Instruction) -> int:
    found = re.search(r'"known_trip_count":(\{[^}]*\})', loop.attributes)
    if not found:
        raise ValueError(f"hlo: {loop.name} loops a number of times that cannot be read off the text.")
    return int(json.loads(found[1])["n"])


def _count_one(module, one: Instruction, types: dict[str, list[Array]]) -> Counts:
    if one.op == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', one.attributes)[1]
        if any(word in target for word in _KERNELS):
            raise ValueError(
                f"hlo: {one.name} calls the kernel {target!r}; count the bytes of its blocks, not of its operands."
            )
    inner = module[one.called("calls")] if one.op in _WRAPPERS else []
    op = inner[-1].op if one.op == "async-start" else one.op.removesuffix("-start")
    out = _results(one)
    read = [1.0] * len(one.operands)
    if one.op == "fusion":
        read = _fractions_read(inner)
    elif op in _PARTS:
        whole = sum(array.payload for array in types[one.operands[0]])
        read[0] = sum(array.payload for array in out) / max(whole, 1)
    moved = sum(array.device_bytes for array in out)
    for operand, fraction in zip(one.operands, read, strict=True):
        moved += round(fraction * sum(array.device_bytes for array in types[operand]))
    return Counts(moved, 1, list(_collectives(module, one)))


def _collectives(module, one: Instruction) -> Iterator[tuple[str, int]]:
    """Collectives that an instruction starts, those fused with other work too."""
    op = one.op.removesuffix("-start")
    if op in _COLLECTIVES:
        yield op, sum(array.payload for array in _results(one))
    elif one.op in _WRAPPERS:
        for inner in module[one.called("calls")]:
            yield from _collectives(module, inner)


def _results(one: Instruction) -> Sequence[Array]:
    """What an instruction writes: the type of an asynchronous start also names operands and flags."""
    if one.op == "copy-start":
        return one.out[:1]
    if one.op == "all-gather-start":
        return one.out[len(one.operands) : 2 * len(one.operands)]
    if one.op in ("async-start", "slice-start", "dynamic-slice-start", "collective-permute-start"):
        return one.out[len(one.operands) : len(one.operands) + 1]
    return one.out


def _fractions_read(body: list[Instruction]) -> list[float]:
    """For every parameter of a fused computation, how much of it the result needs: all, unless it is only sliced."""
    at = {one.name: one for one in body}
    needed = dict.fromkeys(at, 0.0)
    parameters: dict[int, str] = {}
    for one in reversed(body):
        if one.op == "parameter":
            parameters[int(one.attributes[: _closing(one.attributes)])] = one.name
        share = 1.0 if one.root else min(1.0, needed[one.name])
        for operand, fraction in _reads(one, at, share):
            needed[operand] += fraction
    return [min(1.0, needed[parameters[i]]) for i in range(len(parameters))]


def _reads(one: Instruction, at: dict[str, Instruction], share: float) -> Iterator[tuple[str, float]]:
    for i, operand in enumerate(one.operands):
        if i == 0 and one.op in _PARTS:
            yield operand, share * one.out[0].payload / max(at[operand].out[0].payload, 1)
        elif one.op == "broadcast":
            yield operand, float(share > 0)
        else:
            yield operand, share
