"""What ``lit-het plan --topology`` shows: tables for the terminal, a page, and the same figures as JSON."""

import dataclasses
import importlib.metadata
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import in_minutes
from lit_het.eval.report import figures
from lit_het.eval.report.page import Html, Section, configuration, facts, paragraph, render_page
from lit_het.eval.report.tables import Table, plain_table
from lit_het.eval.report.writing import write_files
from lit_het.planning import tables
from lit_het.planning.chips import GIB, Topology
from lit_het.planning.lifetimes import Life, life
from lit_het.planning.program import Work
from lit_het.planning.roofline import serial_seconds
from lit_het.planning.slices import OnChips, needed

BOUND = (
    "Bounds, and not measurements: what the compiled program computes and moves, at the published rates of the chip. "
    "No run can be faster; a run is slower by what a rate cannot reach, by exponentials and other work of the vector "
    "unit, and by waits."
)
_MILLION = 1e6
_POINTS = 400


def bounds(shown: Sequence[OnChips], topology: Topology) -> Table:
    """Returns the bounds of a step, and what follows from them, of one or more programs."""
    columns = [_bounds(one, topology) for one in shown]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    return plain_table("bounds of a step", [one.name for one in shown], rows)


def _bounds(one: OnChips, topology: Topology) -> dict[str, str]:
    """Returns the cells of a column."""
    found = one.roofline
    if found is None:
        return {"the step": "does not fit"}
    cells = {
        limit.name: f"{1e3 * limit.seconds:.2f} ms ({_amount(limit.name, limit.amount)})" for limit in found.limits
    }
    if not topology.chip.dcn_gb_s and topology.slices > 1:
        cells["DCN"] = "no published rate"
    cells["one after the other"] = f"{1e3 * found.serial:.2f} ms"
    cells["the step"] = f"{1e3 * found.seconds:.2f} ms at least"
    cells["MFU"] = f"{found.mfu:.1%} at most"
    cells["examples a second"] = f"{one.plan.batch_size / found.seconds:,.0f} at most"
    cells["chip-hours of a million examples"] = f"{one.chip_hours(topology, _MILLION):,.2f} at least"
    if (hours := one.chip_hours(topology)) is not None:
        cells["chip-hours of the run"] = f"{hours:,.0f} at least"
    return cells


def _amount(name: str, amount: float) -> str:
    return f"{amount / 1e12:.3f} TFLOP" if name == "matrix products" else f"{amount / 1e9:.3f} GB"


def memory(one: OnChips, topology: Topology) -> Table:
    """Returns the memory of the compiled step of a device against that of a chip."""
    compiled, available = one.plan.compiled, topology.chip.memory
    sizes = {
        "arguments": compiled.arguments,
        "temporaries": compiled.temporary,
        "code": compiled.code,
        "all": needed(one.plan),
        "HBM": available,
    }
    rows = [(name, f"{size / GIB:.3f}", f"{size / available:.0%}") for name, size in sizes.items()]
    return plain_table("compiled, GiB of a device", ("", "of HBM"), rows)


def instructions(works: Iterable[Work], topology: Topology, count: int = 12) -> Table:
    """Returns the instructions whose own bounds are the largest."""
    chip, rows = topology.chip, []
    for work in sorted(works, key=lambda work: serial_seconds(work, chip), reverse=True)[:count]:
        limit = "products" if work.flops / chip.peak > work.hbm_bytes / chip.hbm_rate else "HBM"
        size = f"{work.times * work.flops / 1e9:,.1f}", f"{work.times * work.hbm_bytes / 1e9:,.2f}"
        rows.append(
            (_short(work.origin) or work.name, f"{1e3 * serial_seconds(work, chip):.2f}", limit, str(work.times), *size)
        )
    return plain_table("largest bounds", ("ms", "by", "times", "GFLOP", "GB of HBM"), rows)


def largest_buffers(of: Life, count: int = 10) -> Table:
    """Returns the largest intermediate values."""
    largest = sorted(of.buffers, key=lambda buffer: buffer.bytes, reverse=True)[:count]
    rows = [
        (_short(one.origin) or one.name, one.shape, f"{one.bytes / tables.MIB:,.1f}", f"{one.first:,} to {one.last:,}")
        for one in largest
    ]
    return plain_table("largest intermediate values", ("shape", "MiB", "instructions"), rows)


def _html(part: Table | str) -> Html:
    return part.html() if isinstance(part, Table) else paragraph(part)


def _short(origin: str) -> str:
    """Returns the last parts of JAX's name of an operation."""
    return "/".join(part for part in origin.split("/") if part not in ("closed_call", "while", "body"))[-60:]


def write(output: Path, config: ExperimentConfig, shown: Sequence[OnChips], topology: Topology) -> None:
    """Writes the page, and its figures as JSON beside it."""
    first = shown[0]
    compiled = first.plan.compiled
    content = {
        "topology": str(topology),
        "chips": topology.num_chips,
        "chip": dataclasses.asdict(topology.chip),
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
        "is_measured": False,
        "plans": [as_json(one, topology) for one in shown],
        "config": experiment.to_dict(config),
    }
    sections = [
        Section("Bounds", (bounds(shown, topology).html(),), BOUND),
        Section("Memory", (memory(first, topology).html(), tables.memory(first.plan).html())),
    ]
    if compiled.text:
        of = life(compiled.text)
        sections[1] = dataclasses.replace(sections[1], body=(*_life(of), *sections[1].body))
        sections += [
            Section("Collectives", tuple(_html(part) for part in tables.collectives(first.plan))),
            Section("Instructions", (instructions(compiled.program.works, topology).html(),)),
        ]
    sections.append(Section("Model", (tables.parameters(first.plan).html(), tables.operations(first.plan).html())))
    sections.append(Section("Configuration", (configuration(experiment.to_dict(config)),)))
    header = facts(
        {
            "chips": f"{topology.num_chips:,}",
            "batch": f"{first.plan.batch_size:,}",
            "mesh": " x ".join(f"{name} {size}" for name, size in first.plan.mesh.shape.items()),
            "compiled in": in_minutes(compiled.seconds),
            "compiler": f"libtpu {importlib.metadata.version('libtpu')}",
        }
    )
    page = render_page(f"Plan for {topology}", sections, verdict(first, topology), header)
    write_files({output: page, output.with_suffix(".json"): json.dumps(content, indent=1, default=str) + "\n"})


def verdict(one: OnChips, topology: Topology) -> str:
    """Returns the result in one sentence."""
    sizes = f"{needed(one.plan) / GIB:.2f} of {topology.chip.memory / GIB:g} GiB"
    if one.roofline is None:
        return f"The step does not fit: it needs {sizes} of a device"
    seconds = one.roofline.seconds
    return f"The step fits with {sizes} of a device and takes {1e3 * seconds:.2f} ms or longer"


def _life(of: Life) -> tuple[Any, ...]:
    held = of.held()
    stride = max(1, len(held) // _POINTS)
    # The largest of each group: a peak of one instruction is what must fit.
    points = range(0, len(held), stride)
    unit, size = ("GiB", GIB) if max(held, default=0) >= GIB else ("MiB", tables.MIB)
    line = figures.Line(list(points), [max(held[start : start + stride]) / size for start in points])
    drawn = figures.plot(
        "Intermediate values over a step",
        {unit: line},
        "instruction of the program",
        unit,
        caption="By the order of the instructions; the compiler's own sum is in the table below.",
    )
    return drawn, largest_buffers(of).html()


def as_json(one: OnChips, topology: Topology) -> Mapping[str, Any]:
    """Returns the figures of a plan."""
    compiled, found = one.plan.compiled, one.roofline
    return {
        "name": one.name,
        "mesh": dict(one.plan.mesh.shape),
        "batch_size": one.plan.batch_size,
        "fits": one.fits,
        "compile_seconds": compiled.seconds,
        "bytes": {"arguments": compiled.arguments, "temporaries": compiled.temporary, "code": compiled.code},
        "bytes_by_formula": one.plan.memory,
        "traced_flops": one.plan.flops,
        "bounds": found
        and {
            "limits": [dataclasses.asdict(limit) for limit in found.limits],
            "serial_seconds": found.serial,
            "seconds": found.seconds,
            "mfu": found.mfu,
            "chip_hours_of_a_million_examples": one.chip_hours(topology, _MILLION),
            "chip_hours_of_the_run": one.chip_hours(topology),
        },
        "compilers_cycles": sum(work.times * work.cycles for work in compiled.program.works),
        "collectives": [
            dataclasses.asdict(collective) | {"bytes_sent": collective.bytes_sent}
            for collective in compiled.program.collectives
        ],
    }
