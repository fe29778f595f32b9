"""Trains every setting of a grid of fields with every seed, and sorts the settings by a validation metric.

``output`` contains ``runs/<setting>_seed<k>``, ``results/<setting>_seed<k>.json`` for every finished run, and the
tables. Finished runs are skipped, interrupted runs are resumed, and runs of other processes are left to them: several
processes can share a grid.
"""

import dataclasses
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_het import untrusted
from lit_het.apps.sweep import claim
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar, message
from lit_het.errors import UserError
from lit_het.eval.significance import Estimate, estimate
from lit_het.files import write_atomically
from lit_het.runs.checks import CHANGEABLE_FIELDS
from lit_het.runs.directory import config_path, load_config
from lit_het.runs.flags import with_flags
from lit_het.runs.training import train_unless_done
from lit_het.training.loop import NonFinite
from lit_het.training.metric_log import read_metrics

# Parts of the names of metrics that are better if lower.
_LOWER_IS_BETTER = ("loss", "nll", "ece", "brier", "error", "fpr")


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
        """Returns the axis of ``FIELD=VALUE,VALUE``.

        Raises:
            UserError: the text has another form, or contains a value twice.
        """
        field, _, values = text.partition("=")
        axis = Axis(field.strip().lstrip("-"), tuple(value.strip() for value in values.split(",")))
        if not axis.field or not all(axis.values) or len(set(axis.values)) < len(axis.values):
            raise UserError(f"--grid {text}: write FIELD=VALUE,VALUE, such as schedule.learning-rate=0.01,0.03")
        return axis


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run of a grid.

    Attributes:
        setting: the value of every axis by its field.
        config: configuration of the run.
    """

    setting: dict[str, str]
    config: ExperimentConfig

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.config.run_dir.name


@dataclasses.dataclass(frozen=True)
class Row:
    """All seeds of one setting.

    Attributes:
        setting: the value of every axis by its field.
        seeds: seeds of the finished runs.
        figures: metrics of the runs, over seeds.
    """

    setting: dict[str, str]
    seeds: tuple[int, ...]
    figures: dict[str, Estimate]


def plan(config: ExperimentConfig, axes: Sequence[Axis], seeds: Sequence[int], output: Path) -> list[Planned]:
    """Returns all runs of a grid, ordered by seed.

    Raises:
        UserError: an axis is not a field, a value is invalid, or two axes have the same field.
    """
    if len({axis.field for axis in axes}) < len(axes):
        raise UserError("--grid: two axes have the same field; list all of its values in one axis")
    planned = []
    for seed in dict.fromkeys(seeds):
        for values in itertools.product(*(axis.values for axis in axes)):
            setting = {axis.field: value for axis, value in zip(axes, values, strict=True)}
            flags = [part for field, value in setting.items() for part in (f"--{field}", value)]
            changed = with_flags(config, flags, "--grid")
            named = dataclasses.replace(
                changed,
                run_dir=output / "runs" / _name(setting, seed),
                data=dataclasses.replace(changed.data, seed=seed),
                seed=seed,
            )
            planned.append(Planned(setting, named))
    return planned


def run(planned: Sequence[Planned], output: Path, names: Sequence[str]) -> None:
    """Trains every unfinished run, and saves the last value of each of its metrics.

    A run whose loss is not finite has no metrics, and is not repeated.

    Args:
        planned: the runs.
        output: folder of the grid.
        names: metrics that the table needs.

    Raises:
        UserError: a run cannot be trained or lacks a metric, or ``output`` contains a run of the same name with another
            configuration.
    """
    with Bar("sweep", len(planned), "runs") as bar:
        for run in planned:
            with bar.paused():
                note = _run_unless_done(run, output, names)
                message(f"{run.name}: {note}")
            bar.advance(1)


def table(planned: Sequence[Planned], output: Path, metric: str, shown: Sequence[str]) -> list[Row]:
    """Writes ``table.md`` and ``table.json`` of the finished runs, the best setting first; returns the rows.

    Args:
        planned: all runs of the grid, finished or not.
        output: folder of the grid.
        metric: metric that sorts the settings.
        shown: further metrics.

    Raises:
        UserError: no run is finished, or a run lacks a metric.
    """
    settings: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for one in planned:
        path = output / "results" / f"{one.name}.json"
        if path.exists():
            found, figures = _read_result(path)
            _check_same(path, found, one.config)
            settings.setdefault(json.dumps(one.setting), []).append((one.config.seed, figures))
    if not settings:
        raise UserError(f"{output}: no run is finished; start without --table")
    rows = [_row(json.loads(setting), of_seeds, (metric, *shown)) for setting, of_seeds in settings.items()]
    sign = 1 if any(part in metric.rpartition("/")[2] for part in _LOWER_IS_BETTER) else -1
    rows.sort(key=lambda row: (math.isnan(row.figures[metric].mean), sign * row.figures[metric].mean))
    write_atomically(output / "table.md", markdown(rows))
    content = {"metric": metric, "best": rows[0].setting, "rows": [dataclasses.asdict(row) for row in rows]}
    write_atomically(output / "table.json", json.dumps(content, indent=2) + "\n")
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table with a note."""
    titles = (*rows[0].setting, *rows[0].figures, "seeds")
    cells = [
        (*row.setting.values(), *(found.shown(4) for found in row.figures.values()), ", ".join(map(str, row.seeds)))
        for row in rows
    ]
    lines = [titles, ("---",) * len(titles), *cells]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\nBest first; mean ± standard error over seeds.\n"


def _run_unless_done(one: Planned, output: Path, names: Sequence[str]) -> str:
    path, config = output / "results" / f"{one.name}.json", one.config
    with claim(output / "locks" / one.name) as claimed:
        if not claimed:
            return "in progress in another process"
        if path.exists():
            _check_same(path, _read_result(path)[0], config)
            return "already finished"
        saved = config_path(config.run_dir)
        if saved.exists():
            _check_same(saved, experiment.fields(load_config(config.run_dir)), config)
        figures = {}
        try:
            train_unless_done(config)
            # The last value of each metric is saved.
            for record in read_metrics(config.run_dir / "metrics.jsonl"):
                figures |= {name: float(value) for name, value in record.items() if name != "step"}
            _check_named(figures, names)
            note = f"loss {figures['train/loss']:.3f}"
        except NonFinite as error:  # a learning rate may be too high for one setting only
            note = f"failed: {error}"
        except UserError as error:
            raise UserError(f"{one.name}: {error}") from error
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"setting": one.setting, "figures": figures, "config": experiment.fields(config)}
        write_atomically(path, json.dumps(content) + "\n")
        return note


def _read_result(path: Path) -> tuple[dict[str, object], dict[str, float]]:
    """Returns the configuration and the metrics of a finished run."""
    try:
        content = untrusted.read_json(path)
        config, figures = content["config"], content["figures"]
        if not isinstance(config, dict):
            raise TypeError("its configuration is no object")
        return config, {name: float(value) for name, value in figures.items()}
    except (OSError, ValueError, OverflowError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is not a result of a run ({error}); delete it to repeat the run") from error


def _row(setting: dict[str, str], of_seeds: list[tuple[int, dict[str, float]]], names: Sequence[str]) -> Row:
    for _, figures in of_seeds:
        if figures:
            _check_named(figures, names)
    # A failed run has no metrics.
    figures = {name: estimate([figures.get(name, math.nan) for _, figures in of_seeds]) for name in names}
    return Row(setting, tuple(seed for seed, _ in of_seeds), figures)


def _check_named(figures: Mapping[str, float], names: Sequence[str]) -> None:
    for name in names:
        if name not in figures:
            known = ", ".join(sorted(figures))
            raise UserError(f"--metric {name}: these runs have no such metric; they have {known}")


def _check_same(path: Path, found: Mapping[str, object], config: ExperimentConfig) -> None:
    """Checks that a file was written with the same configuration."""
    wanted, found = (json.loads(json.dumps(fields)) for fields in (experiment.fields(config), found))
    for field in sorted(wanted.keys() | found.keys()):
        if wanted.get(field) != found.get(field) and not field.startswith(CHANGEABLE_FIELDS):
            before, now = found.get(field), wanted.get(field)
            raise UserError(f"{path} was written with {field} = {before}, which is now {now}; give another --output")


def _name(setting: Mapping[str, str], seed: int) -> str:
    """Returns the name of a run: its fields with their values; a full path where two fields end alike."""
    names = [field.rpartition(".")[2] for field in setting]
    parts = [
        f"{name if names.count(name) == 1 else field}={value}"
        for (field, value), name in zip(setting.items(), names, strict=True)
    ]
    return re.sub(r"[^\w.=-]+", "_", "_".join([*parts, f"seed{seed}"]))
