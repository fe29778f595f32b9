"""Trains every setting of a grid of fields with every seed, and says which is best on a validation figure.

``output`` holds ``runs/<setting>_seed<k>``, ``results/<setting>_seed<k>.json`` for every finished run, and the tables.
A run that is done is never done again, one that was interrupted goes on, and one that another process has begun is left
to it: several processes can share a grid.
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
from lit_het.console import Bar, say
from lit_het.errors import UserError
from lit_het.eval.significance import Estimate, estimate
from lit_het.files import write_atomically
from lit_het.runs.checks import CHANGEABLE_FIELDS
from lit_het.runs.directory import config_path, load_config
from lit_het.runs.flags import with_flags
from lit_het.runs.training import train_unless_done
from lit_het.training.loop import NonFinite
from lit_het.training.metric_log import read_metrics

# Part of a figure that is better the lower it is.
_FALLING = ("loss", "nll", "ece", "brier", "error", "fpr")


@dataclasses.dataclass(frozen=True)
class Axis:
    """A field of the configuration with the values that it takes.

    Attributes:
        field: its dotted path, as in a flag.
        values: as a flag takes them.
    """

    field: str
    values: tuple[str, ...]

    @staticmethod
    def parse(text: str) -> "Axis":
        """Returns the axis of ``FIELD=VALUE,VALUE``.

        Raises:
            UserError: the text is none, or a value stands in it twice.
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
        config: of the run.
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
        seeds: of the runs that are done.
        figures: of the runs, over seeds.
    """

    setting: dict[str, str]
    seeds: tuple[int, ...]
    figures: dict[str, Estimate]


def plan(config: ExperimentConfig, axes: Sequence[Axis], seeds: Sequence[int], output: Path) -> list[Planned]:
    """Returns all runs of a grid, one seed after the other.

    Raises:
        UserError: an axis is no field, a value does not fit it, or two axes are one field.
    """
    if len({axis.field for axis in axes}) < len(axes):
        raise UserError("--grid: a field stands in two axes; list all of its values in one")
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
    """Does every run that nobody has done, and keeps the last value of each of its figures.

    A run whose loss is not finite has none, and is not tried again.

    Args:
        planned: which runs.
        output: where they go.
        names: of figures that the table will need.

    Raises:
        UserError: a run cannot be trained, or has no such figure; ``output`` holds one of another configuration under
            its name.
    """
    with Bar("sweep", len(planned), "runs") as bar:
        for one in planned:
            with bar.paused():
                note = _run_unless_done(one, output, names)
                say(f"{one.name}: {note}")
            bar.advance(1)


def table(planned: Sequence[Planned], output: Path, metric: str, shown: Sequence[str]) -> list[Row]:
    """Writes ``table.md`` and ``table.json`` of the runs that are done, the best setting first; returns the rows.

    Args:
        planned: all runs of the grid, of which some may not be done.
        output: where they are.
        metric: the figure that decides.
        shown: further figures.

    Raises:
        UserError: no run is done, or one has no such figure.
    """
    settings: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for one in planned:
        path = output / "results" / f"{one.name}.json"
        if path.exists():
            found, figures = _kept(path)
            _check_same(path, found, one.config)
            settings.setdefault(json.dumps(one.setting), []).append((one.config.seed, figures))
    if not settings:
        raise UserError(f"{output}: no run is done; start without --table")
    rows = [_row(json.loads(setting), of_seeds, (metric, *shown)) for setting, of_seeds in settings.items()]
    sign = 1 if any(part in metric.rpartition("/")[2] for part in _FALLING) else -1
    rows.sort(key=lambda row: (math.isnan(row.figures[metric].mean), sign * row.figures[metric].mean))
    write_atomically(output / "table.md", markdown(rows))
    content = {"metric": metric, "best": rows[0].setting, "rows": [dataclasses.asdict(row) for row in rows]}
    write_atomically(output / "table.json", json.dumps(content, indent=2) + "\n")
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """Returns the rows as a table, with what its reader must know below."""
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
            return "under way in another process"
        if path.exists():
            _check_same(path, _kept(path)[0], config)
            return "done before"
        kept = config_path(config.run_dir)
        if kept.exists():
            _check_same(kept, experiment.fields(load_config(config.run_dir)), config)
        figures = {}
        try:
            train_unless_done(config)
            # Of each figure the last one stays.
            for record in read_metrics(config.run_dir / "metrics.jsonl"):
                figures |= {name: float(value) for name, value in record.items() if name != "step"}
            _check_named(figures, names)
            note = f"loss {figures['train/loss']:.3f}"
        except NonFinite as error:  # a rate may be too high for one setting, and right for others
            note = f"failed: {error}"
        except UserError as error:
            raise UserError(f"{one.name}: {error}") from error
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"setting": one.setting, "figures": figures, "config": experiment.fields(config)}
        write_atomically(path, json.dumps(content) + "\n")
        return note


def _kept(path: Path) -> tuple[dict[str, object], dict[str, float]]:
    """Returns configuration and figures of a run that is done."""
    try:
        content = untrusted.read_json(path)
        config, figures = content["config"], content["figures"]
        if not isinstance(config, dict):
            raise TypeError("its configuration is no object")
        return config, {name: float(value) for name, value in figures.items()}
    except (OSError, ValueError, OverflowError, AttributeError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no result of a run ({error}); delete it, and the run is done again") from error


def _row(setting: dict[str, str], of_seeds: list[tuple[int, dict[str, float]]], names: Sequence[str]) -> Row:
    for _, figures in of_seeds:
        if figures:
            _check_named(figures, names)
    # A run that failed has none.
    figures = {name: estimate([figures.get(name, math.nan) for _, figures in of_seeds]) for name in names}
    return Row(setting, tuple(seed for seed, _ in of_seeds), figures)


def _check_named(figures: Mapping[str, float], names: Sequence[str]) -> None:
    for name in names:
        if name not in figures:
            known = ", ".join(sorted(figures))
            raise UserError(f"--metric {name}: no figure of these runs is called so; they have {known}")


def _check_same(path: Path, found: Mapping[str, object], config: ExperimentConfig) -> None:
    """Refuses what another configuration has left under the same name."""
    wanted, found = (json.loads(json.dumps(fields)) for fields in (experiment.fields(config), found))
    for field in sorted(wanted.keys() | found.keys()):
        if wanted.get(field) != found.get(field) and not field.startswith(CHANGEABLE_FIELDS):
            before, now = found.get(field), wanted.get(field)
            raise UserError(f"{path} was made with {field} = {before}, and now it is {now}; give another --output")


def _name(setting: Mapping[str, str], seed: int) -> str:
    """Returns the name of a run: the last parts of its fields with their values, whole paths where these are equal."""
    lasts = [field.rpartition(".")[2] for field in setting]
    parts = [
        f"{last if lasts.count(last) == 1 else field}={value}"
        for (field, value), last in zip(setting.items(), lasts, strict=True)
    ]
    return re.sub(r"[^\w.=-]+", "_", "_".join([*parts, f"seed{seed}"]))
