"""Bytes that the instructions of a compiled program move between HBM and a chip."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from lit_het.planning.collectives import KINDS, received
from lit_het.planning.hlo import Array, Instruction

HBM = 0
"""The memory of arrays whose layout names none; the other memories are on the chip."""

# They rename values, or their work is that of the computations that they call.
_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call"),
        *("after-all", "opt-barrier", "partition-id", "replica-id", "copy-done", "slice-done", "send", "recv"),
        *("send-done", "recv-done", "async-start", "async-update", "async-done"),
    )
)
# Position of the copy among their results; the original is another one.
_PREFETCHES = {"copy-start": 0, "slice-start": 1, "dynamic-slice-start": 1}
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
# A chain of fusions hands a running collective on; its bytes are those of the collective.
_HANDED_ON = frozenset({*KINDS, "custom-call", "tuple"})


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one run of an instruction moves.

    Attributes:
        hbm: bytes read from and written to HBM.
        beside: whether it moves them while other instructions run.
    """

    hbm: int
    beside: bool = False


def traffic(one: Instruction, operands: Sequence[Array], program: Mapping[str, Sequence[Instruction]]) -> Traffic:
    """Returns what an instruction outside of fusions moves.

    An operand is read once, or the part of it that is sliced; what a fusion computes within itself is not moved. What
    collectives read and write is left out, but for those with an instruction of their own for the start.

    Args:
        one: the instruction.
        operands: its operands.
        program: computations that it may call.
    """
    if one.kind in _FREE or one.kind.removesuffix("-done") in KINDS or "AllocateBuffer" in one.text:
        return Traffic(0)
    if one.kind in _PREFETCHES:
        copy = one.results[_PREFETCHES[one.kind]]
        return Traffic(_in_hbm(copy, copy.bytes) + _in_hbm(operands[0], copy.bytes), beside=True)
    results = received(one)
    if one.kind == "fusion":
        reads, writes = _fused(called_by(one, program), program)
    else:
        reads = [_read(one, number, array) for number, array in enumerate(operands)]
        writes = [_written(one, result, operands) for result in results]
    moved = sum(_in_hbm(array, min(size, array.bytes)) for array, size in zip(operands, reads, strict=False))
    moved += sum(_in_hbm(array, min(size, array.bytes)) for array, size in zip(results, writes, strict=False))
    return Traffic(moved, beside=one.kind.removesuffix("-start") in KINDS and one.kind.endswith("-start"))


def _in_hbm(array: Array, size: int) -> int:
    return size if array.space == HBM else 0


def _read(one: Instruction, number: int, operand: Array) -> int:
    """Returns the bytes that an instruction reads of an operand."""
    if number == 0 and one.kind in _SLICES:
        return sum(array.bytes for array in one.results)
    if number == 0 and one.kind in ("dynamic-update-slice", "scatter"):
        return 0  # in place
    return operand.bytes


def _written(one: Instruction, result: Array, operands: Sequence[Array]) -> int:
    match one.kind:
        case "dynamic-update-slice":
            return operands[1].bytes
        case "scatter":
            return 2 * operands[-1].bytes  # read and written in place
        case _:
            return result.bytes


def _fused(called: Sequence[Instruction], program: Mapping[str, Sequence[Instruction]]) -> tuple[list[int], list[int]]:
    """Returns the bytes that a fusion reads of each operand, and those that it writes of each result."""
    by_name = {one.name: one for one in called}
    readers: dict[str, list[Instruction]] = {}
    for one in called:
        for name in one.operands:
            readers.setdefault(name, []).append(one)

    def read(value: Instruction) -> int:
        total = 0
        for reader in readers.get(value.name, ()):
            number = reader.operands.index(value.name)
            if reader.kind == "bitcast":
                total += read(reader)
            elif reader.kind == "fusion":
                total += _fused(called_by(reader, program), program)[0][number]
            elif reader.kind not in _HANDED_ON:
                total += _read(reader, number, value.results[0])
        return total

    def written(value: Instruction) -> int:
        if value.kind == "bitcast":
            return written(by_name[value.operands[0]])
        if value.kind == "parameter" or value.kind in _HANDED_ON:
            return 0
        return _written(value, value.results[0], [by_name[name].results[0] for name in value.operands])

    parameters = sorted((one for one in called if one.kind == "parameter"), key=lambda one: int(one.text.split(")")[0]))
    root = next(one for one in called if one.is_root)
    results = [by_name[name] for name in root.operands] if root.kind == "tuple" else [root]
    return [read(one) for one in parameters], [written(one) for one in results]


def called_by(fusion: Instruction, program: Mapping[str, Sequence[Instruction]]) -> Sequence[Instruction]:
    """Returns the computation of a fusion."""
    return next(program[name] for role, name in fusion.called() if role == "calls")


def outer(program: Mapping[str, Sequence[Instruction]]) -> Iterator[str]:
    """Yields the computations whose instructions run one after the other: the entry, bodies of loops and branches."""
    within = {
        name
        for ones in program.values()
        for one in ones
        for role, name in one.called()
        if role in ("calls", "to_apply") and one.kind not in ("call", "conditional")
    }
    yield from (name for name in program if name not in within)
