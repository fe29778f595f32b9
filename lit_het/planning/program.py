"""Reads a compiled program: its memory, and from its text collectives between devices and iterations of loops."""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh

Shape: TypeAlias = tuple[str, tuple[int, ...]]
"""Element type and sizes, such as ``("f32", (16, 1152))``."""

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_ITEM_BITS = re.compile(r"[a-z]+(\d+)")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?(?P<name>[^\s=]+) = (?P<type>.*?) (?P<kind>[a-z][\w-]*)\((?P<rest>.*)")
_CALLED = re.compile(r"\b(calls|to_apply|body|condition|branch_computations)=(\{[^}]*\}|%?[\w.-]+)")


def memory_bytes(compiled: jax.stages.Compiled) -> tuple[int, int]:
    """Returns the bytes on each device of arguments and results, which may share memory, and of intermediate values."""
    memory = compiled.memory_analysis()
    assert memory is not None
    lasting = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return lasting, memory.temp_size_in_bytes


@dataclasses.dataclass(frozen=True)
class Collective:
    """One instruction that moves data between devices.

    Attributes:
        kind: one of `COLLECTIVES`.
        shapes: shapes of its results on a device.
        axes: mesh axes along which devices communicate; None if the devices do not form whole axes.
        group: number of devices that communicate.
        times: number of runs per step.
        origin: JAX's name of the operation that caused it.
    """

    kind: str
    shapes: tuple[Shape, ...]
    axes: tuple[str, ...] | None
    group: int
    times: int
    origin: str

    @property
    def bytes_sent(self) -> int | float:
        """Bytes that a device sends per step, if the group forms a ring."""
        size, share = sum(map(shape_bytes, self.shapes)), 1 / self.group
        factors = {"all-reduce": 2 * (1 - share), "reduce-scatter": self.group - 1, "collective-permute": 1.0}
        return self.times * size * factors.get(self.kind, 1 - share)


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that a device runs per step.

    Attributes:
        collectives: every instruction that moves data, in no order.
        product_flops: floating-point operations of matrix products and convolutions.
        unknown_loops: loops with an unknown number of iterations, which are counted as one.
    """

    collectives: tuple[Collective, ...]
    product_flops: int
    unknown_loops: int


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    kind: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    text: str


def read_program(text: str, mesh: Mesh) -> Program:
    """Returns collectives and products of a compiled program.

    Args:
        text: the program of one device, from `jax.stages.Compiled.as_text`.
        mesh: the mesh, by whose axes collectives are named.
    """
    computations = dict(_computations(text))
    times = _times(computations)
    collectives, flops, unknown = [], 0, 0
    for name, instructions in computations.items():
        shapes = {one.name: one.shapes for one in instructions}
        for one in instructions:
            kind = one.kind.removesuffix("-start")
            if kind in COLLECTIVES:
                collectives.append(_collective(one, kind, times[name], mesh))
            elif kind in ("dot", "convolution"):
                flops += times[name] * _product_flops(one, shapes)
            # Trip counts are constants of the program for every scan; only data-dependent loops lack one.
            elif kind == "while" and times[name] and _iterations(one) is None:
                unknown += 1
    return Program(tuple(c for c in collectives if c.times), flops, unknown)


def shape_bytes(shape: Shape) -> int:
    """Returns the bytes of an array."""
    dtype, sizes = shape
    bits = _ITEM_BITS.match(dtype)
    return math.prod(sizes) * (max(1, int(bits[1]) // 8) if bits else 1)  # booleans, pred, take one byte


def _computations(text: str) -> Iterator[tuple[str, list[_Instruction]]]:
    """Yields computations; callers come after the computations that they call."""
    name, instructions = "", []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            name, instructions = line.removeprefix("ENTRY ").split()[0].lstrip("%"), []
        elif line.startswith("}"):
            yield name, instructions
        # XLA writes positions in long tuples as comments, /*index=5*/, which are not part of a type.
        elif found := _INSTRUCTION.match(re.sub(r"/\*.*?\*/", "", line)):
            operands = re.findall(r"%([\w.-]+)", found["rest"].split(")")[0])
            instructions.append(
                _Instruction(found["name"], found["kind"], _shapes(found["type"]), tuple(operands), found["rest"])
            )


def _shapes(text: str) -> tuple[Shape, ...]:
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text)
    return tuple((dtype, tuple(map(int, filter(None, sizes.split(","))))) for dtype, sizes in found)


def _times(computations: dict[str, list[_Instruction]]) -> dict[str, int]:
    """Returns the number of runs of each computation; the last one, the entry, runs once."""
    times: dict[str, int] = collections.Counter()
    times[list(computations)[-1]] = 1
    for name in reversed(computations):
        for one in computations[name]:
            for role, called in _CALLED.findall(one.text):
                # Computations are printed callees first, so in reverse order a caller's count is final before its
                # callees are counted.
                iterations = _iterations(one) or 1 if role == "body" else 1
                for callee in re.findall(r"[\w.-]+", called):
                    times[callee] += times[name] * iterations
    return times


def _iterations(loop: _Instruction) -> int | None:
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text)
    return int(found[1]) if found else None


def _product_flops(one: _Instruction, shapes: dict[str, tuple[Shape, ...]]) -> int:
    """Returns 2 x (elements of the result) x (products summed for each)."""
    left, right = (shapes[name][0][1] for name in one.operands[:2])
    if one.kind == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.text)
        summed = math.prod(left[int(axis)] for axis in found[1].split(",") if axis) if found else 1
    else:
        labels = re.search(r"dim_labels=\w+_(\w+)->", one.text)
        summed = math.prod(right) // right[labels[1].index("o")] if labels else 0
    return 2 * math.prod(one.shapes[0][1]) * summed


def _collective(one: _Instruction, kind: str, times: int, mesh: Mesh) -> Collective:
    shapes = one.shapes
    if one.kind.endswith("-start") and kind in ("all-gather", "collective-permute"):
        shapes = shapes[len(shapes) // 2 :]  # operands precede results
    groups = _groups(one.text, mesh.size)
    origin = re.search(r'op_name="([^"]*)"', one.text)
    return Collective(kind, shapes, _axes(groups, mesh), len(groups[0]), times, origin[1] if origin else "")


def _groups(text: str, num_devices: int) -> list[list[int]]:
    """Returns groups of device positions in the mesh, from any of XLA's notations."""
    if found := re.search(r"source_target_pairs=\{(\{.*?\})\}", text):
        pairs = [list(map(int, pair.split(","))) for pair in re.findall(r"\{([\d,]+)\}", found[1])]
        return _connected(pairs)
    if found := re.search(r"replica_groups=\{(\{.*?\})\}", text):
        return [list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found[1])]
    if found := re.search(r"replica_groups=\[([\d,]+)\](<=\[[\d,]+\](?:T\([\d,]+\))?)", text):
        return _listed(found[2]).reshape(*map(int, found[1].split(","))).tolist()
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        ids = _listed(f"<={found[2]}") if found[2] else np.arange(num_devices)
        used = re.findall(r"'(\w+)'", found[3])
        unused = [name for name in sizes if name not in used]
        order = [list(sizes).index(name) for name in (*unused, *used)]
        group = math.prod(sizes[name] for name in used)
        return ids.reshape(*sizes.values()).transpose(order).reshape(-1, group).tolist()
    return [list(range(num_devices))]


def _listed(text: str) -> np.ndarray:
    """Returns the numbers of a notation such as ``<=[8,4]T(1,0)``."""
    sizes, _, order = text.removeprefix("<=[").partition("]")
    dims = list(map(int, sizes.split(",")))
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return numbers.transpose(list(map(int, order[2:-1].split(",")))) if order else numbers


def _connected(pairs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Returns the cycles or chains of devices that (source, target) pairs form."""
    target = {source: target for source, target in pairs}
    groups, left = [], set(itertools.chain.from_iterable(pairs))
    while left:
        group, device = [], min(left)
        while device in left:
            left.remove(device)
            group.append(device)
            device = target.get(device, -1)
        groups.append(group)
    return groups


def _axes(groups: Sequence[Sequence[int]], mesh: Mesh) -> tuple[str, ...] | None:
    """Returns the mesh axes along which groups of devices lie, or None."""
    wanted = {frozenset(group) for group in groups}
    positions = np.arange(mesh.size).reshape(mesh.devices.shape)
    names = [name for name in mesh.axis_names if mesh.shape[name] > 1]
    for count in range(len(names) + 1):
        for axes in itertools.combinations(names, count):
            along: Any = [mesh.axis_names.index(name) for name in axes]
            # The devices that differ only along these axes, one row per group.
            lines = np.moveaxis(positions, along, range(-len(along), 0)) if axes else positions[..., None]
            group = math.prod(mesh.shape[name] for name in axes)
            if {frozenset(line) for line in lines.reshape(-1, group).tolist()} == wanted:
                return axes
    return None
