"""Reads the text of a compiled program: its computations, their instructions, and how often each runs."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

Shape: TypeAlias = tuple[str, tuple[int, ...]]
"""Element type and sizes, such as ``("f32", (16, 1152))``."""

_BITS = re.compile(r"[a-z]+(\d+)")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_INSTRUCTION = re.compile(r"\s+(?P<root>ROOT )?%?(?P<name>[^\s=]+) = (?P<type>.*?) (?P<kind>[a-z][\w-]*)\((?P<rest>.*)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.-]+)"
)
_BRANCHES = ("branch_computations", "true_computation", "false_computation")

PRODUCTS = ("dot", "convolution")
"""Kinds of matrix products."""


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a program.

    Attributes:
        dtype: XLA's name, such as ``bf16``.
        sizes: of its dimensions.
        stored: sizes in memory, where a TPU fills the two minor dimensions up to whole tiles.
        space: its memory; 0 is the main one, HBM.
    """

    dtype: str
    sizes: tuple[int, ...]
    stored: tuple[int, ...] = ()
    space: int = 0

    @property
    def shape(self) -> Shape:
        """Element type and sizes."""
        return self.dtype, self.sizes

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes in memory."""
        return shape_bytes((self.dtype, self.stored or self.sizes))


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of a computation.

    Attributes:
        name: unique in the program.
        kind: the operation, such as ``fusion``.
        results: arrays that it returns; several for a tuple.
        operands: names of instructions.
        text: all after the opening parenthesis of its operands.
        is_root: whether the computation returns its result.
    """

    name: str
    kind: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    text: str
    is_root: bool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of the results."""
        return tuple(array.shape for array in self.results)

    @property
    def origin(self) -> str:
        """JAX's name of the operation that caused it."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""

    def called(self) -> Iterator[tuple[str, str]]:
        """Yields (role, name) of the computations that it calls."""
        for role, names in _CALLED.findall(self.text):
            for name in re.findall(r"[\w.-]+", names):
                yield role, name


def shape_bytes(shape: Shape) -> int:
    """Returns the bytes of an array."""
    dtype, sizes = shape
    bits = _BITS.match(dtype)
    return math.prod(sizes) * (max(1, int(bits[1]) // 8) if bits else 1)  # booleans, pred, take one byte


def computations(text: str) -> dict[str, list[Instruction]]:
    """Returns the computations by name: callees before callers, the entry last."""
    found, name = {}, ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
            found[name] = []
        # XLA writes positions in long tuples as comments, /*index=5*/, which are not part of a type.
        elif match := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line)):
            operands = re.findall(r"%([\w.-]+)", match["rest"].split(")")[0])
            results = tuple(_array(*groups) for groups in _ARRAY.findall(match["type"]))
            found[name].append(
                Instruction(match["name"], match["kind"], results, tuple(operands), match["rest"], bool(match["root"]))
            )
    return found


def _array(dtype: str, sizes: str, order: str, layout: str) -> Array:
    dims = tuple(map(int, filter(None, sizes.split(","))))
    tile, space = _TILE.search(layout), _SPACE.search(layout)
    stored = list(dims)
    if tile and order:
        minor = list(map(int, order.split(",")))
        for axis, size in zip(minor, reversed(tile[1].split(",")), strict=False):
            stored[axis] = math.ceil(dims[axis] / int(size)) * int(size)
    return Array(dtype, dims, tuple(stored), int(space[1]) if space else 0)


def iterations(loop: Instruction, program: Mapping[str, Sequence[Instruction]]) -> int | None:
    """Returns how often the body of a loop runs, if that is a constant of the program, as it is for every scan."""
    if found := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
        return int(found[1])
    # XLA for TPUs does not write it down. A scan counts from 0 while its counter is below its length.
    condition = program.get(next((name for role, name in loop.called() if role == "condition"), ""), ())
    by_name = {one.name: one for one in condition}
    for one in condition:
        if one.is_root and one.kind == "compare" and "direction=LT" in one.text:
            counter, length = (by_name[name] for name in one.operands)
            if counter.kind == "get-tuple-element" and length.kind == "constant":
                return int(length.text.split(")")[0])
    return None


def run_counts(program: Mapping[str, Sequence[Instruction]]) -> dict[str, int]:
    """Returns the number of runs of each computation.

    Loops of unknown length count as one iteration. Of the branches of a conditional that with the most operations runs,
    as in `costs.traced_flops`.
    """
    times: dict[str, int] = collections.Counter()
    names = list(program)
    times[names[-1]] = 1
    for name in reversed(names):
        for one in program[name]:
            for callee, count in _runs(one, program):
                # Computations are printed callees first, so in reverse order a caller's count is final before its
                # callees are counted.
                times[callee] += times[name] * count
    return times


def _runs(one: Instruction, program: Mapping[str, Sequence[Instruction]]) -> Iterator[tuple[str, int]]:
    """Yields the computations that an instruction runs, and how often."""
    branches = [callee for role, callee in one.called() if role in _BRANCHES]
    if branches:
        yield max(branches, key=lambda name: operations(name, program)), 1
    for role, callee in one.called():
        if role not in _BRANCHES:
            yield callee, (iterations(one, program) or 1) if role == "body" else 1


def operations(name: str, program: Mapping[str, Sequence[Instruction]]) -> int:
    """Returns the operations of all products of a computation and of those that it runs."""
    ones, total = program.get(name, ()), 0
    results = {one.name: one.results for one in ones}
    for one in ones:
        if one.kind in PRODUCTS:
            total += product_flops(one, [results[operand][0] for operand in one.operands])
        total += sum(count * operations(callee, program) for callee, count in _runs(one, program))
    return total


def product_flops(one: Instruction, operands: Sequence[Array]) -> int:
    """Returns the floating-point operations of a ``dot`` or ``convolution``.

    They are 2 x (elements of the result) x (products summed for each). A TPU computes every product as a convolution,
    whose window has holes where the batch of a product became a spatial dimension: only what meets an element counts.
    """
    left, right = (array.sizes for array in operands[:2])
    result = one.results[0].sizes
    if one.kind == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.text)
        return (
            2 * math.prod(result) * (math.prod(left[int(axis)] for axis in found[1].split(",") if axis) if found else 1)
        )
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.text)
    assert labels
    of_left, of_right, of_result = labels.groups()
    features = right[of_right.index("i")] * result[of_result.index("f")] * result[of_result.index("b")]
    window = _Window.read(one.text, sum(label.isdigit() for label in of_left))
    pairs = [
        window.pairs(number, left[of_left.index(str(number))], result[of_result.index(str(number))])
        for number in range(len(window.sizes))
    ]
    return 2 * features * math.prod(pairs)


@dataclasses.dataclass(frozen=True)
class _Window:
    """The window of a convolution, an entry for each spatial dimension."""

    sizes: list[int]
    strides: list[int]
    low: list[int]
    input_dilation: list[int]
    dilation: list[int]

    @staticmethod
    def read(text: str, rank: int) -> "_Window":
        found = re.search(r"window=\{([^}]*)\}", text)
        fields = dict(part.split("=") for part in found[1].split()) if found else {}

        def entries(name: str, default: int) -> list[int]:
            return [int(size.split("_")[0]) for size in fields[name].split("x")] if name in fields else [default] * rank

        return _Window(
            entries("size", 1),
            entries("stride", 1),
            entries("pad", 0),
            entries("lhs_dilate", 1),
            entries("rhs_dilate", 1),
        )

    def pairs(self, number: int, length: int, results: int) -> int:
        """Returns how many pairs (element of the result, place in the window) meet an element of the input."""
        count = 0
        for place in range(self.sizes[number]):
            first = place * self.dilation[number] - self.low[number]
            spread, stride = self.input_dilation[number], self.strides[number]
            # Elements of the result whose place lies on an element of the input, and not between two or outside.
            positions = range(first, first + results * stride, stride)
            count += sum(p % spread == 0 and 0 <= p < length * spread for p in positions)
        return count
