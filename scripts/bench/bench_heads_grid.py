"""Maps of what heads cost over numbers of samples S and batches, as HET-XL's Figs. 2 to 6; part of `bench_heads`.

HET, HET-H and HET-XL as in the paper, with all samples of a batch at the same time, and HET and HET-XL in this
library's blocks, the latter in both orders of products. Three maps: peak memory, operations, and time for an example.

Whether a cell fits into ``--memory-gib`` is decided as in ``lit-het plan``, before anything runs: it does not fit if
both the formula and the compiled program need more, and may not fit if one of them does. A cell is timed if it fits and
should take less than ``--seconds``, extrapolated from smaller ones. Its time is the least of all rounds, since other
work on the machine only adds to it.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from lit_het.heads.classification_config import HetConfig, HetHConfig, HetXLConfig
from lit_het.heads.noise_config import CovarianceConfig, Order, SamplingConfig
from scripts.bench.bench_heads_programs import Head, NoisyConfig, Size
from scripts.bench.tools import GIB, Program, Report, seconds_in_turn

Fit: TypeAlias = Literal["fits", "may not fit", "does not fit"]

# Whether all samples exist at once, by name.
FORMS = {
    "HET": True,
    "HET-H": True,
    "HET-XL": True,
    "HET, blocks": False,
    "HET-XL, blocks": False,
    "HET-XL, blocks, factored": False,
}
BATCH, SAMPLES = "batch", "noise samples S"


@dataclasses.dataclass
class Cell:
    """What a form costs at a size.

    Attributes:
        form: a name of `FORMS`.
        batch, samples: b and S.
        gflop: of matrix products of a call.
        planned, compiled: bytes by the formulas of ``lit-het plan`` and of the compiled program; the latter is None
            where the former is so large that nothing was compiled.
        fit: what they say.
        seconds: of a call, by round; empty where it was not timed.
    """

    form: str
    batch: int
    samples: int
    gflop: float
    planned: int
    compiled: int | None = None
    fit: Fit = "does not fit"
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def time(self) -> float | None:
        """The least seconds of a call; None where it was not timed."""
        return min(self.seconds, default=None)


Cells: TypeAlias = dict[tuple[str, int, int], Cell]


def map_costs(options: argparse.Namespace, report: Report) -> None:
    """Measures all cells, prints tables, and writes the maps and the numbers to ``options.output``."""
    cells: Cells = {}
    with report.console.status("grid") as status:
        for batch in sorted(options.grid_batches):
            for samples in sorted(options.samples):
                status.update(f"b = {batch}, S = {samples}")
                _measure(cells, batch, samples, options)
                report.console.print(f"b = {batch}, S = {samples}: {_progress(cells, batch, samples)}")
    report.data["grid"] = [dataclasses.asdict(cell) for cell in cells.values()]
    report.table("HET-XL over HET, as in the paper: time, peak memory, operations", *_ratios(cells, options))
    if options.output:
        report.write(options.output, "bench_heads_grid", None)
        draw(options.output)


def _measure(cells: Cells, batch: int, samples: int, options: argparse.Namespace) -> None:
    """Adds the cells of all forms at a size, with interleaved times."""
    programs: dict[str, Program] = {}
    size = Size(batch, options.features, options.classes, samples)
    for form, at_once in FORMS.items():
        head = Head(_config(form, samples, options), size, at_once=at_once)
        cell = Cell(form, batch, samples, head.gflop, head.planned_bytes())
        cells_of_form = [one for one in cells.values() if one.form == form]
        cells[form, batch, samples] = cell
        # Far beyond the memory, the compiled program cannot say otherwise.
        if cell.planned > 4 * options.memory_gib * GIB:
            continue
        runs = cell.planned <= options.memory_gib * GIB and _predicted(cell, cells_of_form) <= options.seconds
        program = head.program(runs=runs)
        cell.compiled = program.peak
        over = [size > options.memory_gib * GIB for size in (cell.planned, cell.compiled)]
        cell.fit = "does not fit" if all(over) else "may not fit" if any(over) else "fits"
        if runs and cell.fit == "fits":
            programs[form] = program
    calls = {form: program.call for form, program in programs.items()}
    for form, seconds in seconds_in_turn(calls, options.rounds, options.seconds, lambda _: None).items():
        cells[form, batch, samples].seconds = seconds


def _config(form: str, samples: int, options: argparse.Namespace) -> NoisyConfig:
    order: Order = "factored" if form.endswith("factored") else "direct"
    sampling = SamplingConfig(num_samples=samples, block_size=options.block_size, order=order)
    covariance = CovarianceConfig(num_factors=options.factors, form="efficient")
    match form.split(",")[0]:
        case "HET":
            return HetConfig(covariance, sampling=sampling)
        case "HET-H":
            return HetHConfig(min(options.features, options.classes), covariance=covariance, sampling=sampling)
        case _:
            return HetXLConfig(covariance, sampling=sampling)


def _predicted(cell: Cell, others: Sequence[Cell]) -> float:
    """Returns how many seconds a call should take; 0 for the first cell, ∞ if no smaller one was timed."""
    if not others:
        return 0.0
    row = [(one.samples, one.time) for one in others if one.batch == cell.batch and one.time is not None]
    column = [(one.batch, one.time) for one in others if one.samples == cell.samples and one.time is not None]
    found = [time * cell.batch / batch for batch, time in column]
    # Over S, a line: products of examples, and of samples. Through the origin where only one point is known.
    (fewer, before), (samples, time) = [(0, 0.0), *row][-2:] if row else ((0, 0.0), (1, math.inf))
    found.append(time + max(0.0, time - before) * (cell.samples - samples) / (samples - fewer))
    return min(found)


def _progress(cells: Cells, batch: int, samples: int) -> str:
    found = [cells[form, batch, samples] for form in FORMS]
    return ", ".join(f"{cell.form} {cell.fit if cell.time is None else f'{cell.time:.2f} s'}" for cell in found)


def _ratios(cells: Cells, options: argparse.Namespace) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Returns columns and rows, one for each batch."""
    columns = (BATCH, *(f"S = {samples}" for samples in options.samples))
    return columns, [(str(b), *(_ratio(cells, b, s) for s in options.samples)) for b in options.grid_batches]


def _ratio(cells: Cells, batch: int, samples: int) -> str:
    het, xl = (cells[form, batch, samples] for form in ("HET", "HET-XL"))
    time = f"{xl.time / het.time:.2f}" if xl.time and het.time else "-"
    memory = f"{xl.compiled / het.compiled:.2f}" if xl.compiled and het.compiled else "-"
    return f"{time}, {memory}, {xl.gflop / het.gflop:.2f}"


def draw(directory: Path) -> None:
    """Draws the maps of the numbers in a directory, one file each."""
    numbers = json.loads((directory / "bench_heads_grid.json").read_text())
    cells = [Cell(**one) for one in numbers["grid"]]
    maps = {
        "memory": ("Peak memory, GiB", lambda cell: cell.compiled and cell.compiled / GIB),
        "operations": ("Operations, GFLOP an example", lambda cell: cell.gflop / cell.batch),
        "time": ("Time, ms an example; white: not timed", lambda cell: cell.time and 1e3 * cell.time / cell.batch),
    }
    for name, (title, value) in maps.items():
        values = {(cell.form, cell.batch, cell.samples): (value(cell), cell.fit) for cell in cells}
        _map(values, title).savefig(directory / f"bench_heads_grid_{name}.png", dpi=110)


def _map(values: Mapping[tuple[str, int, int], tuple[float | None, str]], title: str) -> Figure:
    """Returns a heat map for each form, with one scale of colours."""
    batches, samples = (sorted(sizes) for sizes in ({b for _, b, _ in values}, {s for *_, s in values}))
    shown = [value for value, fit in values.values() if value is not None and fit != "does not fit"]
    norm = LogNorm(min(shown, default=0.1), max(shown, default=1.0))
    figure = Figure(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, form in zip(panels.flat, FORMS, strict=True):
        _panel(axes, [[values[form, b, s] for s in samples] for b in batches], norm)
        axes.set_title(form, fontsize=13)
        axes.set_xticks(range(len(samples)), [str(s) for s in samples])
        axes.set_yticks(range(len(batches)), [f"{b:,}" for b in batches])
    for axes in panels[1]:
        axes.set_xlabel(SAMPLES, fontsize=12)
    for axes in panels[:, 0]:
        axes.set_ylabel(BATCH, fontsize=12)
    figure.colorbar(ScalarMappable(norm), ax=panels, shrink=0.8)
    figure.suptitle(f"{title}; black: does not fit; hatched: may not fit", fontsize=14)
    return figure


def _panel(axes: Axes, cells: Sequence[Sequence[tuple[float | None, str]]], norm: LogNorm) -> None:
    """Draws one map, batches from below."""
    fits = [[math.nan if fit == "does not fit" or value is None else value for value, fit in row] for row in cells]
    axes.imshow(np.array(fits), norm=norm, cmap="viridis", origin="lower", aspect="auto")
    for y, row in enumerate(cells):
        for x, (value, fit) in enumerate(row):
            if fit == "does not fit":
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, color="black"))
                continue
            if fit == "may not fit":
                axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, hatch="///", edgecolor="grey", lw=0))
            if value is not None:
                dark = norm(value) < 0.5
                axes.text(
                    x,
                    y,
                    f"{value:.3g}" if value < 1000 else f"{value:,.0f}",
                    ha="center",
                    va="center",
                    color="white" if dark else "black",
                )
