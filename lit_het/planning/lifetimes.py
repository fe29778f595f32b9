"""The main memory that a compiled program holds over its life, by the order of its instructions."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from lit_het.planning import hlo
from lit_het.planning.hlo import Instruction
from lit_het.planning.traffic import HBM

_RENAMES = frozenset({"bitcast", "opt-barrier", "while"})


@dataclasses.dataclass
class Buffer:
    """An intermediate value in the main memory.

    Attributes:
        name: of the instruction that makes it.
        origin: JAX's name of the operation that caused it.
        shape: as XLA prints it, such as ``bf16[27,2048,1152]``.
        bytes: in memory; 0 where it takes the place of a donated argument.
        first, last: positions of the instructions that make it and that use it last.
    """

    name: str
    origin: str
    shape: str
    bytes: int
    first: int
    last: int


@dataclasses.dataclass(frozen=True)
class Life:
    """The memory of a computation.

    Attributes:
        buffers: its own; those within a loop are in `within`.
        within: bytes that a loop holds within itself, by its position.
        length: number of instructions.
    """

    buffers: list[Buffer]
    within: dict[int, int]
    length: int

    def held(self) -> list[int]:
        """Returns the bytes that are held during each instruction."""
        change = [0] * (self.length + 1)
        for buffer in self.buffers:
            change[buffer.first] += buffer.bytes
            change[buffer.last + 1] -= buffer.bytes
        total, held = 0, []
        for position in range(self.length):
            total += change[position]
            held.append(total + self.within.get(position, 0))
        return held


def life(text: str) -> Life:
    """Returns the memory of a scheduled program, from `jax.stages.Compiled.as_text`.

    The compiler's own sum is exact; this one leaves out how it packs buffers, and copies of loops.
    """
    program = hlo.computations(text)
    header = text.partition("\n")[0]
    aliases = re.findall(r"\{(\d*)\}: \(\d+, \{\}, \w+-alias\)", header)
    donated = {int(number or 0) for number in aliases}
    return _life(next(reversed(program.values())), program, donated)


def _life(ones: Sequence[Instruction], program: Mapping[str, Sequence[Instruction]], donated: set[int] | None) -> Life:
    """Returns the memory of a computation; ``donated`` are results in the place of arguments, None for all."""
    buffers: list[Buffer] = []
    within: dict[int, int] = {}
    # Of each value, the buffers of its parts.
    parts: dict[str, list[Buffer | None]] = {}
    for position, one in enumerate(ones):
        of_operands = [parts.get(name, []) for name in one.operands]
        for buffer in (buffer for several in of_operands for buffer in several if buffer):
            buffer.last = position
        parts[one.name] = found = _parts(one, of_operands, position)
        buffers += [buffer for buffer in found if buffer and buffer.first == position and buffer.name == one.name]
        if one.kind == "while":
            bodies = [program[name] for role, name in one.called() if role == "body"]
            within[position] = max((max(_life(body, program, None).held(), default=0) for body in bodies), default=0)
        if one.is_root:
            for number, buffer in enumerate(found):
                if buffer:
                    buffer.last = len(ones) - 1
                    if donated is None or number in donated:
                        buffer.bytes = 0
    return Life(buffers, within, len(ones))


def _parts(one: Instruction, operands: Sequence[list[Buffer | None]], position: int) -> list[Buffer | None]:
    """Returns the buffers of an instruction's results: new ones, or those of its operands."""
    if one.kind in ("parameter", "constant"):
        return [None] * len(one.results)
    if one.kind == "tuple":
        return [buffer for several in operands for buffer in several]
    if one.kind == "get-tuple-element":
        index = re.search(r"index=(\d+)", one.text)
        several = operands[0] if operands else []
        return [several[int(index[1])]] if index and int(index[1]) < len(several) else several[:1]
    if one.kind in _RENAMES and operands:
        return operands[0]
    if one.kind.endswith("-done") and operands:
        return operands[0][:1] if one.kind == "copy-done" else operands[0][1 : 1 + len(one.results)]
    found: list[Buffer | None] = [
        None
        if array.space != HBM or not array.bytes
        else Buffer(
            one.name, one.origin, f"{array.dtype}{list(array.sizes)}".replace(" ", ""), array.bytes, position, position
        )
        for array in one.results
    ]
    for operand, result in _in_place(one, len(operands)):
        if operand < len(operands) and result < len(found) and operands[operand]:
            found[result] = operands[operand][0]
    if one.kind.endswith("-start") and len(found) > 1 and operands:
        found[0 if one.kind != "copy-start" else 1] = operands[0][0] if operands[0] else None  # the original
    return found


def _in_place(one: Instruction, num_operands: int) -> list[tuple[int, int]]:
    """Returns pairs (operand, result) that share memory."""
    if one.kind == "dynamic-update-slice":
        return [(0, 0)]
    pairs = []
    if lists := re.search(r'"aliasing_operands":\{"lists":\[(.*?)\]\}', one.text):
        for indices in re.findall(r'"indices":\[([\d",]*)\]', lists[0]):
            numbers = [int(number) for number in re.findall(r"\d+", indices)]
            operands = [number for number in numbers if number < num_operands]
            pairs += [(operands[0], number - num_operands) for number in numbers if operands and number >= num_operands]
    return pairs
