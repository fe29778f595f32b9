"""Trains every setting of a grid with every seed, and compares the settings by metrics of their runs.

A grid is made of fields of the configuration, or of heads and temperatures (`lit_het.search.temperatures`). ``output``
contains ``runs/<setting>_seed<k>``, ``results/<setting>_seed<k>.json`` for every finished run, and the tables. Finished
runs are skipped, interrupted runs are resumed, and runs of other processes are left to them: several processes can
share a grid.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lit_het import library_logs
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar
from lit_het.errors import UserError
from lit_het.eval.metrics.significance import Estimate, estimate
from lit_het.eval.report.tables import markdown_table
from lit_het.files import write_atomically
from lit_het.search import grid_runs
from lit_het.search.grid_runs import Direction, Planned, Result


@dataclasses.dataclass(frozen=True)
class Axis:
    """A field of the configuration with its values.

    Attributes:
        field: dotted path, as in a flag.
        values: as in a flag.
    """

    field: str
    values: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> "Axis":
        """Returns the axis of ``FIELD=VALUE,VALUE``."""
        field, _, values = text.partition("=")
        usage = f"--grid {text}: write FIELD=VALUE,VALUE, such as schedule.learning-rate=0.01,0.03"
        return Axis.read(field.strip().lstrip("-"), values, usage)

    @staticmethod
    def read(field: str, values: str, usage: str) -> "Axis":
        """Returns the axis of a field with the values ``VALUE,VALUE``."""
        axis = Axis(field, tuple(value.strip() for value in values.split(",")))
        if not axis.field or not all(axis.values) or len(set(axis.values)) < len(axis.values):
            raise UserError(usage)
        return axis


def with_published(texts: Sequence[str], path: Path) -> list[str]:
    """Returns axes as texts, with those of ``get_grid()`` of the configuration file in place of ``grid``."""
    found = []
    for text in texts:
        axes = experiment.load_grid(path) if text == "grid" else {}
        found += [f"{field}={','.join(map(str, values))}" for field, values in axes.items()] or [text]
    return found


@dataclasses.dataclass(frozen=True)
class Row:
    """All seeds of one setting.

    Attributes:
        setting: the value of every axis by its field.
        seeds: seeds of the finished runs, in the order of the results.
        num_parameters: of the model.
        figures: metrics of the runs, over seeds.
    """

    setting: dict[str, str]
    seeds: tuple[int, ...]
    num_parameters: int
    figures: dict[str, Estimate]


def run_main(name: str, body: Callable[[], object]) -> int:
    """Runs a script; user errors are printed as one line, with exit code 1."""
    library_logs.silence()
    try:
        body()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run the same command to continue", file=sys.stderr)
        return 130
    return 0


def plan(config: ExperimentConfig, axes: Sequence[Axis], seeds: Sequence[int], output: Path) -> list[Planned]:
    """Returns all runs of a grid, ordered by seed."""
    if len({axis.field for axis in axes}) < len(axes):
        raise UserError("--grid: two axes have the same field; list all of its values in one axis")
    planned = []
    for seed in dict.fromkeys(seeds):
        for values in itertools.product(*(axis.values for axis in axes)):
            setting = {axis.field: value for axis, value in zip(axes, values, strict=True)}
            changed = grid_runs.with_setting(config, setting, "--grid")
            planned.append(grid_runs.plan_run(changed, setting, _name(setting), seed, output))
    return planned


def run(planned: Sequence[Planned], output: Path, names: Sequence[str]) -> None:
    """Trains every unfinished run, and saves the last value of each of its metrics.

    A run whose loss is not finite has no metrics, and is not repeated.

    Args:
        planned: the runs.
        output: folder of the grid.
        names: metrics that the table needs.
    """
    grid_runs.check_folder(planned, output)
    attempt = functools.partial(grid_runs.run_unless_done, output=output, names=names)
    grid_runs.train_all(planned, attempt, Bar("sweep", len(planned), "runs"))
    grid_runs.report_unfinished(sum(not grid_runs.result_path(output, one.name).exists() for one in planned))


def table(
    planned: Sequence[Planned], output: Path, metric: str, shown: Sequence[str], direction: Direction | None = None
) -> list[Row]:
    """Writes ``table.md`` and ``table.json`` of the finished runs, the best setting first; returns the rows.

    Args:
        planned: all runs of the grid, finished or not.
        output: folder of the grid.
        metric: metric that sorts the settings.
        shown: further metrics.
        direction: "lower" or "higher" values of the metric are better; None for what its name tells.
    """
    sign = 1 if (direction or grid_runs.direction_of(metric)) == "lower" else -1
    configs = {one.name: one.config for one in planned}
    results = grid_runs.finished(configs, output)
    for name, result in results.items():
        grid_runs.check_same(grid_runs.result_path(output, name), result.config, configs[name])
    if not results:
        raise UserError(f"{output}: no run is finished; start without --table")
    rows = summarize(list(results.values()), (metric, *shown))
    rows.sort(key=lambda row: (math.isnan(row.figures[metric].mean), sign * row.figures[metric].mean))
    cells = [
        (*row.setting.values(), *(found.shown(4) for found in row.figures.values()), shown_seeds(row)) for row in rows
    ]
    titles = (*rows[0].setting, *rows[0].figures, "seeds")
    write_table(output, titles, cells, "Best first; mean ± standard error over seeds.")
    content = {"metric": metric, "best": rows[0].setting, "rows": [dataclasses.asdict(row) for row in rows]}
    write_atomically(output / "table.json", json.dumps(content, indent=2) + "\n")
    return rows


def summarize(results: Sequence[Result], names: Sequence[str]) -> list[Row]:
    """Returns a row for each setting with some of its metrics, in the order of the results."""
    members: dict[str, list[Result]] = {}
    for result in results:
        if result.figures:
            grid_runs.check_named(result.figures, names)
        members.setdefault(json.dumps(result.setting), []).append(result)
    return [
        Row(
            setting=of_setting[0].setting,
            seeds=tuple(result.seed for result in of_setting),
            num_parameters=of_setting[0].num_parameters,
            # A failed run has no metrics.
            figures={name: estimate([result.figures.get(name, math.nan) for result in of_setting]) for name in names},
        )
        for of_setting in members.values()
    ]


def write_table(
    output: Path, titles: Sequence[str], cells: Sequence[Sequence[str]], note: str, printed: int | None = None
) -> None:
    """Writes ``table.md`` with a note below the rows, and prints it, or only so many of its rows."""
    write_atomically(output / "table.md", f"{markdown_table(titles, cells)}\n{note}\n")
    print(f"{markdown_table(titles, cells[:printed])}\n{note}\n")


def shown_seeds(row: Row) -> str:
    """Returns the seeds of a row as a cell."""
    return ", ".join(map(str, row.seeds))


def _name(setting: Mapping[str, str]) -> str:
    """Returns the name of a setting: its fields with their values; a full path where two fields end alike."""
    names = [field.rpartition(".")[2] for field in setting]
    parts = [
        f"{name if names.count(name) == 1 else field}={value}"
        for (field, value), name in zip(setting.items(), names, strict=True)
    ]
    return re.sub(r"[^\w.=-]+", "_", "_".join(parts))
