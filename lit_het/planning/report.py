"""The output of ``lit-het plan``."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console

from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import console_of_results, message
from lit_het.errors import UserError, pluralize
from lit_het.eval.report.tables import Table, plain_table
from lit_het.eval.report.writing import print_results
from lit_het.planning.plan import Plan, Step, plan
from lit_het.planning.program import Collective
from lit_het.sharding import MeshConfig

GIB, MIB = 2**30, 2**20

REMARKS = (
    "The step is compiled by XLA for CPUs. It converts bfloat16 to float32, in memory and in collectives, and turns a "
    "reduce-scatter into an all-reduce and a slice, with twice the bytes. Compilers for accelerators do neither, but "
    "choose other fusions, layouts and padding. The bytes of the state are exact in both columns.",
    "Bytes of collectives are sent by each device in a step, with ring algorithms. Operations are those of matrix "
    "products and convolutions, including recomputation by remat.",
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
    message(f"compiling the step for {len(devices)} virtual devices")
    made = plan(config, devices)
    console = console_of_results()
    mesh = " x ".join(f"{name} {size}" for name, size in made.mesh.shape.items())
    console.print(
        f"{pluralize(made.mesh.size, 'device')}: {mesh}; batch {made.batch_size:,}, {_rows(made):,} on a device"
    )
    remarks = (*REMARKS, OF_EXPERTS) if made.dispatch_flops else REMARKS
    print_results(_parameters(made), _operations(made), _memory(made), *_collectives(made), *remarks)
    return _verdict(console, config, made, memory_gib)


def _rows(made: Plan) -> int:
    return made.batch_size // made.mesh.size


def _parameters(made: Plan) -> Table:
    rows = {**made.counts, "all": tuple(map(sum, zip(*made.counts.values(), strict=True)))}
    cells = (
        (part.replace("_", " "), *(f"{count:,}" for count in (*counts, sum(counts)))) for part, counts in rows.items()
    )
    return plain_table("parameters", ("locked", "trainable", "all"), cells)


def _operations(made: Plan) -> Table:
    unit, name = (1e12, "TFLOP") if made.flops >= 1e12 else (1e9, "GFLOP")
    rows = {"traced": made.flops, "compiled": made.compiled.program.product_flops * made.mesh.size}
    if made.dispatch_flops:
        rows = {"traced": made.flops, "without dispatch": made.flops - made.dispatch_flops} | rows
    divisors = {"all devices": unit, "a device": made.mesh.size * unit, "GFLOP of an example": 1e9 * made.batch_size}
    cells = ((row, *(f"{flops / divisor:,.3f}" for divisor in divisors.values())) for row, flops in rows.items())
    return plain_table(f"{name} of a step", tuple(divisors), cells)


def _memory(made: Plan) -> Table:
    unit, name = (GIB, "GiB") if max(totals(made)) >= GIB else (MIB, "MiB")
    compiled, sizes = made.compiled, [f"{size / unit:.3f}" for size in made.memory.values()]
    # The compiler reports two sums; each stands in the last row that it covers.
    sums = [""] * len(sizes)
    sums[3], sums[-1] = f"{compiled.arguments / unit:.3f} all above", f"{compiled.temporary / unit:.3f} the rest"
    rows = [*zip(made.memory, sizes, sums, strict=True), ("all", *(f"{size / unit:.3f}" for size in totals(made)))]
    return plain_table(f"{name} of a device", ("by formula", "compiled"), rows)


def totals(made: Plan) -> tuple[int, int]:
    """Returns the bytes of a device by formula and by the compiler."""
    return sum(made.memory.values()), made.compiled.arguments + made.compiled.temporary


def _collectives(made: Plan) -> list[Table | str]:
    by_kind: dict[tuple[str, str], list[Collective]] = collections.defaultdict(list)
    for collective in made.compiled.program.collectives:
        axes = "other devices" if collective.axes is None else ", ".join(collective.axes)
        by_kind[collective.kind, f"{axes} ({collective.group})"].append(collective)
    rows = []
    for (kind, axes), ones in sorted(by_kind.items(), key=lambda item: -sum(one.bytes_sent for one in item[1])):
        times, sent = sum(one.times for one in ones), sum(one.bytes_sent for one in ones)
        rows.append((kind, axes, str(len(ones)), str(times), f"{sent / 1e6:,.1f}"))
    table = plain_table("collectives of a step", ("over", "instructions", "times", "MB sent"), rows)
    loops = made.compiled.program.unknown_loops
    return [table, *([f"{loops} loops of unknown length are counted as one iteration"] if loops else [])]


def _verdict(console: Console, config: ExperimentConfig, made: Plan, memory_gib: int | float) -> bool:
    formula, compiled = totals(made)
    sizes = f"{_size_text(formula)} by formula, {_size_text(compiled)} compiled"
    if max(formula, compiled) <= memory_gib * GIB:
        console.print(f"It fits into {memory_gib:g} GiB per device: {sizes}.")
        return True
    certainty = "will not fit" if min(formula, compiled) > memory_gib * GIB else "may not fit"
    largest = max(made.memory, key=lambda name: made.memory[name])
    console.print(f"It {certainty} into {memory_gib:g} GiB per device: {sizes}. The largest part: {largest}.")
    console.print("Flags that help, each in addition to those above it, by formula:")
    smallest = formula
    for flag, change in _remedies(config, made):
        try:
            changed = change(config)
            size = sum(Step(changed, changed.mesh.build(list(made.mesh.devices.flat))).memory().values())
        except UserError:
            continue  # experts or examples cannot be split over this mesh
        if size < smallest:
            config, smallest = changed, size
            console.print(f"  {flag}: {_size_text(size)}{'' if size > memory_gib * GIB else ', which fits'}")
        if smallest <= memory_gib * GIB:
            break
    return False


def _remedies(config: ExperimentConfig, made: Plan) -> Iterator[tuple[str, Callable[[ExperimentConfig], Any]]]:
    """Yields flags that may help, with the change that each makes, cheapest first."""
    mesh, task = MeshConfig(*made.mesh.devices.shape), config.task
    for factor in (2, 4, 8):
        wider = dataclasses.replace(mesh, data=-1, fsdp=factor * mesh.fsdp)
        yield f"--mesh.fsdp {wider.fsdp}", lambda config, wider=wider: dataclasses.replace(config, mesh=wider)
    if vars(task.loss).get("form", "ring") != "ring":
        loss: Any = dataclasses.replace(task.loss, **{"form": "ring"})
        yield "--task.loss.form ring", lambda config: _with_task(config, loss=loss)
    for part in ("text_tower", "decoder", "image_tower"):
        tower: Any = vars(task).get(part)
        if made.counts.get(part, (0, 0))[1] and (encoder := getattr(tower, "encoder", None)) is not None:
            for policy in ("dots", "full"):
                changed: Any = dataclasses.replace(tower, encoder=dataclasses.replace(encoder, remat=policy))
                flag = f"--task.{part.replace('_', '-')}.encoder.remat {policy}"
                yield flag, lambda config, part=part, changed=changed: _with_task(config, **{part: changed})
    if "microbatches" in vars(task):
        parts = 4 * task.microbatches
        yield f"--task.microbatches {parts}", lambda config: _with_task(config, microbatches=parts)
    data = dataclasses.replace(config.data, batch_size=config.data.batch_size // 2)
    yield f"--data.batch-size {data.batch_size}", lambda config: dataclasses.replace(config, data=data)


def _with_task(config: ExperimentConfig, **fields: Any) -> ExperimentConfig:
    return dataclasses.replace(config, task=dataclasses.replace(config.task, **fields))


def _size_text(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
