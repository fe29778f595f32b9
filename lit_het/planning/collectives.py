"""Finds what a compiled program sends between devices: over which axes of the mesh, how much, and beside what."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from lit_het.planning.hlo import Array, Instruction, Shape, shape_bytes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
BETWEEN_SLICES = "send"
# XLA for TPUs sends between slices by a runtime of this name, through the hosts.
_MEGASCALE = "xla_megascale"


@dataclasses.dataclass(frozen=True)
class Collective:
    """An operation that moves data between devices.

    Attributes:
        kind: one of `KINDS`, or `BETWEEN_SLICES`: what a device sends to other slices of TPUs.
        shapes: shapes of its results on a device.
        axes: mesh axes along which devices communicate; None if the devices do not form whole axes.
        group: number of devices that communicate.
        times: number of runs per step.
        origin: JAX's name of the operation that caused it.
        overlaps: whether the device computes meanwhile.
    """

    kind: str
    shapes: tuple[Shape, ...]
    axes: tuple[str, ...] | None
    group: int
    times: int
    origin: str
    overlaps: bool = False

    @property
    def bytes_sent(self) -> int | float:
        """Bytes that a device sends per step, if the group forms a ring."""
        size, share = sum(map(shape_bytes, self.shapes)), 1 / self.group
        whole = {"collective-permute": 1.0, BETWEEN_SLICES: 1.0}
        factors = {"all-reduce": 2 * (1 - share), "reduce-scatter": self.group - 1, **whole}
        return self.times * size * factors.get(self.kind, 1 - share)


def find_collectives(
    program: Mapping[str, Sequence[Instruction]], times: Mapping[str, int], mesh: Mesh
) -> Iterator[Collective]:
    """Yields the collectives of a program that run.

    Args:
        program: its computations.
        times: number of runs of each.
        mesh: of the devices that the program numbers: those of one slice.
    """
    callers = {callee: one for ones in program.values() for one in ones for _, callee in one.called()}
    seen = set()
    # Of a chain whose links run within an inner loop, its start, which runs least often, comes first.
    for name, ones in sorted(program.items(), key=lambda item: times[item[0]]):
        for one in ones if times[name] else ():
            kind = one.kind.removesuffix("-start")
            if kind == BETWEEN_SLICES and _MEGASCALE in one.text:
                yield Collective(kind, one.shapes[:1], None, 1, times[name], one.origin, overlaps=True)
            if kind not in KINDS:
                continue
            caller = callers.get(name)
            # XLA for TPUs runs a collective beside other work as a chain of fusions, each of which names it.
            chain = re.search(r'chain_id="(\d+)"', one.text)
            if chain and caller:
                link = (chain[1], one.shapes)
                if link in seen:
                    continue
                seen.add(link)
            overlaps = (
                bool(chain) or one.kind.endswith("-start") or (caller is not None and caller.kind == "async-start")
            )
            arrays = received(one)
            if kind == "all-reduce" and caller and _bytes(caller.results) < _bytes(arrays):
                kind, arrays = "reduce-scatter", caller.results  # XLA for TPUs writes it so, within one fusion
            groups = _groups(one.text, mesh.size)
            shapes = tuple(array.shape for array in arrays)
            yield Collective(kind, shapes, _axes(groups, mesh), len(groups[0]), times[name], one.origin, overlaps)


def received(one: Instruction) -> tuple[Array, ...]:
    """Returns the arrays that a collective receives, which in some starts follow those that it sends."""
    if one.kind == "all-gather-start":
        return one.results[len(one.results) // 2 :]
    if one.kind == "collective-permute-start":
        return one.results[1:2]  # a TPU's has two semaphores after them
    return one.results


def _bytes(arrays: Iterable[Array]) -> int:
    return sum(array.bytes for array in arrays)


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
