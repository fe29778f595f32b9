"""What benchmarks share: flags, training steps, interleaved timing, memory of compiled programs, tables and plots."""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from rich.console import Console
from rich.table import Table

from lit_het import parameters
from lit_het.configs.experiment import ExperimentConfig
from lit_het.eval.report.tables import markdown_table
from lit_het.training.durations import RunLength
from lit_het.training.step import initial_state, jit_step, make_step, of_trainable
from lit_het.types import Batch

# Short calls are repeated for this many seconds, so that clock resolution and dispatch do not matter.
SHORTEST_MEASUREMENT = 0.05
GIB = 2**30
MIB = 2**20

MEMORY_NOTE = (
    "Memory is that of the compiled program (`memory_analysis`): temporary + argument + output - aliased bytes; "
    "arguments and outputs are parameters, inputs and their gradients."
)


def parser_of(description: str | None, output: str = "") -> argparse.ArgumentParser:
    """Returns a parser of flags; ``output`` says what the folder of ``--output`` receives, if there is one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if output:
        parser.add_argument("--output", type=Path, default=None, help=f"directory of {output}")
    return parser


@dataclasses.dataclass
class Program:
    """A compiled JAX function with its arguments.

    Attributes:
        call: runs it once and waits.
        temporary: bytes of intermediate values.
        peak: total bytes, see `MEMORY_NOTE`.
        compile_seconds: how long the compilation took.
    """

    call: Callable[[], Any]
    temporary: int
    peak: int
    compile_seconds: float

    @classmethod
    def of(cls, function: Callable, *arguments: Any) -> "Program":
        """Compiles a function for arguments, which may be shapes if the program is not to run."""
        began = time.perf_counter()
        compiled = jax.jit(function).lower(*arguments).compile()
        seconds = time.perf_counter() - began
        return cls(lambda: jax.block_until_ready(compiled(*arguments)), *program_bytes(compiled), seconds)


def program_bytes(compiled: Any) -> tuple[int, int]:
    """Returns the temporary bytes of a compiled program and all of them, see `MEMORY_NOTE`."""
    memory = compiled.memory_analysis()
    lasting = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.temp_size_in_bytes, memory.temp_size_in_bytes + lasting


class TrainingStep:
    """The training step of a configuration, without evaluations, logs and checkpoints.

    Attributes:
        task: of the configuration.
        state, locked: as the step takes them.
        step: of state, locked parameters and a batch.
    """

    def __init__(self, config: ExperimentConfig):
        self.task: Any = config.task.build()
        run = RunLength.resolve(config.length, config.data.batch_size, None)
        optimizer = config.optimizer.build(config.schedule, run, self.task.layers_above, self.task.learning_rates)
        params = jax.jit(self.task.initialize)(jax.random.key(0))
        locked, trainable = parameters.partition(params, self.task.locked)
        self.locked = parameters.cast(locked, config.task.compute_type)
        self.state = jax.jit(lambda params: initial_state(params, optimizer))(trainable)
        self.step: Any = jit_step(make_step(of_trainable(self.task.loss), optimizer, config.seed), self.state)

    def compile(self, batch: Batch) -> tuple[Any, float]:
        """Compiles the step for a batch; returns the lowered step, and the seconds of the compilation."""
        lowered = self.step.lower(self.state, self.locked, batch)
        began = time.perf_counter()
        self.step = lowered.compile()
        return lowered, time.perf_counter() - began

    def __call__(self, batch: Batch) -> Any:
        """Begins a step and returns its metrics."""
        self.state, metrics = self.step(self.state, self.locked, batch)
        return metrics


def product_rate(
    rows: int,
    width: int,
    hidden: int,
    compute_type: str = "float32",
    repeats: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Returns the FLOP/s of bare products ``[rows width] x [width hidden]``, by a clock in seconds."""
    # Of random numbers: GPUs draw less power for equal ones, and are faster.
    left, right = (
        jax.random.normal(jax.random.key(0), shape, compute_type) for shape in ((rows, width), (width, hidden))
    )
    product = jax.jit(jnp.matmul)
    product(left, right).block_until_ready()
    began = clock()
    jax.block_until_ready([product(left, right) for _ in range(repeats)])
    return 2 * rows * width * hidden * repeats / (clock() - began)


def seconds_in_turn(
    calls: Mapping[str, Callable[[], Any]], rounds: int, budget: float, progress: Callable[[str], None]
) -> dict[str, list[float]]:
    """Times functions in turn, so that changes of the machine's speed affect all of them.

    Every function is called once to warm up; if that call exceeds the budget, it is the measurement.

    Args:
        calls: functions that wait for their results, by name.
        rounds: measurements of each.
        budget: seconds for each, all rounds together; at least one round is measured.
        progress: receives the name of the current measurement.

    Returns:
        Seconds of a call, by round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    spent, repeats = {}, {}
    for name, call in calls.items():
        progress(f"{name}, warm-up")
        spent[name] = _seconds(call, 1)
        repeats[name] = min(20, max(1, round(SHORTEST_MEASUREMENT / max(spent[name], 1e-9))))
        if spent[name] > budget:
            seconds[name].append(spent[name])
    for number in range(rounds):
        for name, call in calls.items():
            if spent[name] > budget and seconds[name]:
                continue
            progress(f"{name}, round {number + 1} of {rounds}")
            seconds[name].append(_seconds(call, repeats[name]))
            spent[name] += seconds[name][-1] * repeats[name]
    return seconds


def _seconds(call: Callable[[], Any], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats


def between(seconds: Sequence[float], scale: float = 1.0, digits: int = 3) -> tuple[str, str]:
    """Returns the median, and "least-greatest"."""
    median, least, greatest = (
        f"{scale * value:.{digits}f}" for value in (np.median(seconds), min(seconds), max(seconds))
    )
    return median, f"{least}-{greatest}"


def ratio(seconds: Mapping[str, list[float]], numerator: str, denominator: str) -> list[float] | None:
    """Returns ratios pair by pair of the rounds that both were measured in, or None if there are none."""
    pairs = zip(seconds.get(numerator, ()), seconds.get(denominator, ()), strict=False)
    return [first / second for first, second in pairs] or None


def spread(values: Sequence[float] | None) -> str:
    """Returns "median (least-greatest)"."""
    if not values:
        return "-"
    return f"{np.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def assert_close(found: Any, wanted: Any, name: str = "") -> None:
    """Asserts that two arrays agree to 1 % of the largest entry: products may be of 16-bit numbers on accelerators."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.01 * np.abs(wanted).max() + 1e-6, err_msg=name)


def machine() -> str:
    """Returns devices and JAX version of the measurement."""
    devices = jax.devices()
    return f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}"


def print_table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    console.print(table)


class Report:
    """Collects tables and remarks, prints them as they come and writes them with their data."""

    def __init__(self, console: Console, title: str):
        self.console = console
        self.data: dict[str, Any] = {"machine": machine()}
        self._lines = [f"# {title}", "", f"{machine()}", ""]
        self.note(MEMORY_NOTE)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Adds a table."""
        self._lines += [f"## {title}", "", markdown_table(columns, rows)]
        print_table(self.console, title, columns, rows)

    def note(self, text: str) -> None:
        """Adds a remark."""
        self.console.print(text)
        self._lines += [text, ""]

    def write(self, directory: Path, name: str, figure: Figure | None) -> None:
        """Writes ``name.json``, ``name.md`` and, where there is a figure, ``name.png``."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.json").write_text(json.dumps(self.data, indent=1) + "\n")
        lines = [*self._lines, f"![Plot of the figures above]({name}.png)"] if figure else self._lines
        (directory / f"{name}.md").write_text("\n".join(lines).rstrip() + "\n")
        if figure:
            figure.savefig(directory / f"{name}.png", dpi=150)
        self.console.print(f"written to {directory}/{name}.*")


# Of each line: its points (x, seconds, bytes), where figures may be missing.
Lines = Mapping[str, Sequence[tuple[float, float | None, float | None]]]


def plot(lines: Lines, x_label: str, title: str) -> Figure:
    """Draws time and peak memory over a size, on logarithmic axes, one line per name."""
    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for index, (axes, label) in enumerate(zip(panels, ("time [ms]", "peak memory [MiB]"), strict=True)):
        for number, (name, points) in enumerate(lines.items()):
            shown = [(point[0], point[1 + index]) for point in points if point[1 + index] is not None]
            if shown:
                x, y = np.array(shown, float).T
                # Lines may coincide: markers and widths distinguish them.
                marker, width = "osD^vPX*<>"[number % 10], 3 - 2 * number / len(lines)
                scale = 1e3 if index == 0 else 1 / MIB
                style = "-" if number < 10 else "--"
                axes.plot(x, y * scale, style, marker=marker, markersize=7, linewidth=width, label=name)
        sizes = sorted({point[0] for points in lines.values() for point in points})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
        axes.minorticks_off()
        axes.tick_params(labelsize=13)
        axes.set_xlabel(x_label, fontsize=14)
        axes.set_ylabel(label, fontsize=14)
        axes.grid(alpha=0.3, which="both")
    # Below the panels: inside, it would hide lines.
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=12, ncols=4, loc="outside lower center")
    figure.suptitle(title, fontsize=15)
    return figure
