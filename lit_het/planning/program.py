"""Reads a compiled program: its memory, what its instructions compute and move, and collectives between devices."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

import jax
from jax.sharding import Mesh

from lit_het.planning import hlo
from lit_het.planning.collectives import Collective, find_collectives
from lit_het.planning.hlo import Instruction
from lit_het.planning.traffic import outer, traffic


def memory_bytes(compiled: jax.stages.Compiled) -> tuple[int, int]:
    """Returns the bytes on each device of arguments and results, which may share memory, and of intermediate values."""
    memory = compiled.memory_analysis()
    assert memory is not None
    lasting = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return lasting, memory.temp_size_in_bytes


@dataclasses.dataclass(frozen=True)
class Work:
    """An instruction, such as a fusion of several.

    Attributes:
        name: in the program.
        origin: JAX's name of the operation that caused it.
        times: number of runs per step.
        flops: floating-point operations of its matrix products and convolutions in one run.
        hbm_bytes: read from and written to the main memory in one run.
        beside: whether it moves its bytes while other instructions run.
        cycles: the compiler's own estimate of one run, where it has one.
    """

    name: str
    origin: str
    times: int
    flops: int
    hbm_bytes: int
    beside: bool
    cycles: int


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or convolution.

    Attributes:
        origin: JAX's name of the operation that caused it.
        flops: floating-point operations of all its runs in a step.
        dtypes: element types of its operands.
        precision: passes that are asked of a TPU, such as "highest"; empty for one of bfloat16.
    """

    origin: str
    flops: int
    dtypes: tuple[str, ...]
    precision: str


@dataclasses.dataclass(frozen=True)
class Program:
    """The program that a device runs per step.

    Attributes:
        collectives: everything that moves data between devices; what runs least often comes first.
        products: matrix products and convolutions.
        works: instructions that compute products or move data, in the order in which they run.
        unknown_loops: loops with an unknown number of iterations, which are counted as one.
    """

    collectives: tuple[Collective, ...]
    products: tuple[Product, ...]
    works: tuple[Work, ...]
    unknown_loops: int

    @property
    def product_flops(self) -> int:
        """Floating-point operations of all products of a step."""
        return sum(one.flops for one in self.products)


def read_program(text: str, mesh: Mesh) -> Program:
    """Returns what a compiled program computes and moves.

    Args:
        text: the program of one device, from `jax.stages.Compiled.as_text`.
        mesh: the mesh, by whose axes collectives are named.
    """
    program = hlo.computations(text)
    times = hlo.run_counts(program)
    loops = (one for name, ones in program.items() if times[name] for one in ones if one.kind == "while")
    return Program(
        tuple(find_collectives(program, times, mesh)),
        tuple(_products(program, times)),
        tuple(_works(program, times)),
        # Only loops that depend on data have an unknown number of iterations.
        sum(hlo.iterations(one, program) is None for one in loops),
    )


def _products(program: Mapping[str, Sequence[Instruction]], times: Mapping[str, int]) -> Iterator[Product]:
    for name, ones in program.items():
        results = {one.name: one.results for one in ones}
        for one in ones if times[name] else ():
            if one.kind in hlo.PRODUCTS:
                operands = [results[operand][0] for operand in one.operands]
                precision = re.search(r"operand_precision=\{(\w+)", one.text)
                yield Product(
                    one.origin,
                    times[name] * hlo.product_flops(one, operands),
                    tuple(array.dtype for array in operands),
                    precision[1] if precision else "",
                )


def _works(program: Mapping[str, Sequence[Instruction]], times: Mapping[str, int]) -> Iterator[Work]:
    for name in outer(program):
        results = {one.name: one.results for one in program[name]}
        for one in program[name] if times[name] else ():
            operands = [results[operand][0] for operand in one.operands if results.get(operand)]
            moved, flops = traffic(one, operands, program), _flops(one, results, program)
            if moved.hbm or flops:
                cycles = re.search(r'"estimated_cycles":"(\d+)"', one.text)
                yield Work(
                    one.name, one.origin, times[name], flops, moved.hbm, moved.beside, int(cycles[1]) if cycles else 0
                )


def _flops(
    one: Instruction, results: Mapping[str, Sequence[hlo.Array]], program: Mapping[str, Sequence[Instruction]]
) -> int:
    """Returns the operations of the products of an instruction, with those of what it fuses."""
    if one.kind in hlo.PRODUCTS:
        return hlo.product_flops(one, [results[operand][0] for operand in one.operands])
    return sum(hlo.operations(name, program) for role, name in one.called() if one.kind == "fusion" and role == "calls")
