"""The output of ``lit-het plan``."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import console_of_results, message
from lit_het.eval.report.writing import print_results
from lit_het.planning import page, slices, tables
from lit_het.planning.alternatives import smaller
from lit_het.planning.chips import GIB, Topology
from lit_het.planning.plan import Plan, plan

REMARKS = (
    "The step is compiled by XLA for CPUs. It converts bfloat16 to float32, in memory and in collectives, and turns a "
    "reduce-scatter into an all-reduce and a slice, with twice the bytes. Compilers for accelerators do neither, but "
    "choose other fusions, layouts and padding. The bytes of the state are exact in both columns. On GPUs attention "
    "computes and saves the logits of all examples at once, which here are in groups and not saved.",
    "Bytes of collectives are sent by each device in a step, with ring algorithms. Operations are those of matrix "
    "products and convolutions; compiled ones include what the backward pass computes again to save memory.",
)
OF_EXPERTS = (
    "Dispatch: products with one-hot vectors, which move tokens to experts and back. Published operations of V-MoE and "
    "e3 are without them."
)


def report(config: ExperimentConfig, devices: Sequence[Any], memory_gib: int | float) -> bool:
    """Prints the plan of a configuration and returns whether it fits into the devices' memory.

    Args:
        config: configuration of the run.
        devices: may be virtual.
        memory_gib: memory per device.
    """
    made = plan(config, devices, f"the step for {len(devices)} virtual devices")
    console = console_of_results()
    console.print(tables.title(made))
    remarks = (*REMARKS, OF_EXPERTS) if made.dispatch_flops else REMARKS
    print_results(
        tables.parameters(made), tables.operations(made), tables.memory(made), *tables.collectives(made), *remarks
    )
    return _verdict(console, config, made, memory_gib)


def report_on_chips(config: ExperimentConfig, topology: Topology, output: Path | None, *, fit: bool) -> bool:
    """Prints the plan of a configuration on slices of TPUs and returns whether it fits, or a change of it does.

    Args:
        config: configuration of the run.
        topology: the slices.
        output: page to write; None for none.
        fit: whether to compile changes if it does not fit.
    """
    shown = slices.side_by_side(config, topology)
    first = shown[0]
    console = console_of_results()
    console.print(f"{topology}: {tables.title(first.plan)}")
    compiled = []
    if first.fits:
        compiled = [*tables.collectives(first.plan), page.bounds(shown, topology), page.BOUND]
    print_results(
        tables.parameters(first.plan),
        tables.operations(first.plan),
        tables.memory(first.plan),
        page.memory(first, topology),
        *compiled,
        *((OF_EXPERTS,) if first.plan.dispatch_flops else ()),
    )
    if output is not None:
        page.write(output, config, shown, topology)
        message(f"{output}, and its figures in {output.with_suffix('.json').name} beside it")
    console.print(f"{page.verdict(first, topology)}.")
    if first.fits:
        return True
    if not fit:
        _print_changes(console, config, first.plan, topology.chip.memory)
        console.print("With --fit they are compiled.")
        return False
    return _fit(console, config, first.plan, topology)


def _fit(console: Console, config: ExperimentConfig, made: Plan, topology: Topology) -> bool:
    """Prints changes that need less memory, and returns whether one of them fits."""
    tried = list(slices.fitting(config, made, topology))
    if tried:
        print_results(page.bounds(tried, topology))
    for one in tried:
        console.print(f"  {one.name}: {page.verdict(one, topology)}.")
    fitting = [one for one in tried if one.fits]
    if not fitting:
        console.print("None of these changes fits: take more chips, or a smaller batch or model.")
        return False
    cheapest = min(fitting, key=lambda one: one.chip_hours(topology, 1) or math.inf)
    console.print(f"The cheapest that fits: {cheapest.name}")
    return True


def _verdict(console: Console, config: ExperimentConfig, made: Plan, memory_gib: int | float) -> bool:
    formula, compiled = tables.totals(made)
    sizes = f"{tables.size_text(formula)} by formula, {tables.size_text(compiled)} compiled"
    if max(formula, compiled) <= memory_gib * GIB:
        console.print(f"It fits into {memory_gib:g} GiB per device: {sizes}.")
        return True
    certainty = "will not fit" if min(formula, compiled) > memory_gib * GIB else "may not fit"
    largest = max(made.memory, key=lambda name: made.memory[name])
    console.print(f"It {certainty} into {memory_gib:g} GiB per device: {sizes}. The largest part: {largest}.")
    _print_changes(console, config, made, memory_gib * GIB)
    return False


def _print_changes(console: Console, config: ExperimentConfig, made: Plan, available: float) -> None:
    console.print("Flags that help, each in addition to those above it, by formula:")
    for change in smaller(config, made, together=True):
        flag, value = list(change.flags.items())[-1]
        fits = change.bytes <= available
        console.print(f"  {flag} {value}: {tables.size_text(change.bytes)}{', which fits' if fits else ''}")
        if fits:
            break
