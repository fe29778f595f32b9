"""The engine of grids, searches and sweeps: every run is trained once, by one process, and its result is a file.

``output`` contains ``runs/<name>``, ``results/<name>.json`` for every finished run, and ``locks/<name>``, which the
process that trains the run holds.
"""

import contextlib
import dataclasses
import fcntl
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import cattrs
import jax
from flax import traverse_util

from lit_het import parameters, untrusted
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.configs.flags import with_flags
from lit_het.console import Bar, message
from lit_het.data_pipelines import data_config
from lit_het.errors import DoesNotFit, UserError, pluralize
from lit_het.eval.report.naming import split, style_of
from lit_het.eval.saved_runs import differences
from lit_het.files import write_atomically
from lit_het.heads import options as heads
from lit_het.models.pretrained import abstract_params
from lit_het.towers import base as towers
from lit_het.training.checks import CHANGEABLE_FIELDS
from lit_het.training.directory import config_path, load_config
from lit_het.training.log import read_metrics
from lit_het.training.loop import NonFinite
from lit_het.training.train import Watch, train_unless_done

Direction: TypeAlias = Literal["lower", "higher"]
"""Which values of a metric are better."""

_LATER = {**towers.LATER_FIELDS, **heads.LATER_FIELDS, **data_config.LATER_FIELDS}


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
class Result:
    """A finished run.

    Attributes:
        setting: the value of every axis by its field.
        seed: of initialisation, noise and data order.
        figures: the last value of each metric; empty if the run failed.
        num_parameters: of the model.
        seconds: training time in the process that finished the run; compilation and evaluations included.
        device: of the training.
        config: fields of the configuration, by dotted names.
        stopped_at: the step after which the run was given up; None if it was not.
    """

    setting: dict[str, str]
    seed: int
    figures: dict[str, float]
    num_parameters: int
    seconds: float
    device: str
    config: dict[str, Any]
    stopped_at: int | None = None


class Pruned(Exception):
    """A run that is not worth its remaining steps, raised by the callback.

    Attributes:
        step: number of steps that it was trained for.
    """

    def __init__(self, step: int):
        super().__init__(f"given up after step {step}")
        self.step = step


def with_setting(config: ExperimentConfig, setting: Mapping[str, str], command: str) -> ExperimentConfig:
    """Returns the configuration with the values of a setting, by fields as in flags."""
    return with_flags(config, [f"--{field}={value}" for field, value in setting.items()], command)


def plan_run(config: ExperimentConfig, setting: dict[str, str], name: str, seed: int, output: Path) -> Planned:
    """Returns the run of one setting, called ``name``, with one seed."""
    named = dataclasses.replace(
        config,
        run_dir=output / "runs" / f"{name}_seed{seed}",
        data=dataclasses.replace(config.data, seed=seed),
        seed=seed,
    )
    return Planned(setting, named)


def result_path(output: Path, name: str) -> Path:
    """Returns where the result of a run is saved when it is finished."""
    return output / "results" / f"{name}.json"


def is_claimed(output: Path, name: str) -> bool:
    """Returns whether a process is training a run."""
    with _claim(output, name) as claimed:
        return not claimed


def run_unless_done(one: Planned, output: Path, names: Sequence[str], watch: Watch | None = None) -> str:
    """Trains a run unless it is finished or another process trains it, as `run`; returns what was done.

    Args:
        one: the run.
        output: folder of the grid.
        names: metrics that the run must have.
        watch: sees every evaluation during the training; it may raise `Pruned`.

    Raises:
        DoesNotFit: a step does not fit into memory.
        UserError: as `run`.
    """
    path, config = result_path(output, one.name), one.config
    with _claim(output, one.name) as claimed:
        if not claimed:
            return "in progress in another process"
        _check_earlier(one, output)
        if path.exists():
            return "already finished"
        figures, stopped_at, began = {}, None, time.monotonic()
        try:
            train_unless_done(config, watch=watch)
            figures = _last_figures(config.run_dir)
            check_named(figures, names)
            note = ", ".join(f"{name} {figures[name]:.3f}" for name in dict.fromkeys(["train/loss", *names]))
        except NonFinite as error:  # a learning rate may be too high for one setting only
            note = f"failed: {error}"
        except Pruned as error:
            figures, stopped_at, note = _last_figures(config.run_dir), error.step, str(error)
        except DoesNotFit as error:
            raise DoesNotFit(f"{one.name}: {error}") from error
        except UserError as error:
            raise UserError(f"{one.name}: {error}") from error
        result = Result(
            setting=one.setting,
            seed=config.seed,
            figures=figures,
            num_parameters=parameters.count(abstract_params(config.task.build())),
            seconds=time.monotonic() - began,
            device=jax.devices()[0].device_kind,
            config=experiment.fields(config),
            stopped_at=stopped_at,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(dataclasses.asdict(result), ensure_ascii=False) + "\n")
        return note


def train_all(planned: Iterable[Planned], attempt: Callable[[Planned], str], bar: Bar) -> None:
    """Trains runs one after another, and tells what was done with each.

    Args:
        planned: the runs; each is asked for when the one before it has ended.
        attempt: trains a run unless that is done, see `run_unless_done`; returns what was done.
        bar: shows the progress.
    """
    with bar:
        for one in planned:
            with bar.paused():
                message(f"{one.name}: {attempt(one)}")
            bar.advance(1)


def report_unfinished(count: int) -> None:
    """Says how many runs of a table other processes are still training."""
    if count:
        message(f"{pluralize(count, 'run')} in progress in other processes; repeat the command for the whole table")


def finished(names: Iterable[str], output: Path) -> dict[str, Result]:
    """Reads the results of those runs that are finished, by name."""
    paths = {name: result_path(output, name) for name in names}
    return {name: read_result(path) for name, path in paths.items() if path.exists()}


def check_folder(planned: Sequence[Planned], output: Path) -> None:
    """Checks a folder before anything is written or trained; runs that another process trains are left to it."""
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file; --output takes a folder")
    for one in planned:
        if result_path(output, one.name).exists() or config_path(one.config.run_dir).exists():
            with _claim(output, one.name) as claimed:
                if claimed:
                    _check_earlier(one, output)


def _check_earlier(one: Planned, output: Path) -> None:
    path, saved = result_path(output, one.name), config_path(one.config.run_dir)
    if path.exists():
        check_same(path, read_result(path).config, one.config)
    elif saved.exists():
        check_same(saved, experiment.fields(load_config(one.config.run_dir)), one.config)


def _last_figures(run_dir: Path) -> dict[str, float]:
    """Returns the last value of each metric of a run."""
    figures: dict[str, float] = {}
    for record in read_metrics(run_dir / "metrics.jsonl"):
        figures |= {name: float(value) for name, value in record.items() if name != "step"}
    return figures


@contextlib.contextmanager
def _claim(output: Path, name: str) -> Iterator[bool]:
    """Yields whether this process holds the claim of a run; it is released when the process ends."""
    path = output / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def read_result(path: Path) -> Result:
    """Reads the result of a finished run."""
    with explained(path, "is not a result of a run", "delete it to repeat the run"):
        return CONVERTER.structure(untrusted.read_json(path), Result)


@contextlib.contextmanager
def explained(path: Path, problem: str, way_out: str) -> Iterator[None]:
    """Turns any error of reading a file with `CONVERTER` into one line."""
    try:
        yield
    # cattrs passes on any exception of a conversion, such as that of a number from a string.
    except Exception as error:
        reasons = cattrs.transform_error(error) if isinstance(error, cattrs.BaseValidationError) else [str(error)]
        reason = " ".join(reasons[0].split())[:300]
        raise UserError(f"{path} {problem} ({reason}); {way_out}") from error


def check_named(figures: Mapping[str, float], names: Sequence[str]) -> None:
    """Checks that a run has metrics."""
    for name in names:
        if name not in figures:
            known = ", ".join(sorted(figures))
            raise UserError(f"--metric {name}: these runs have no such metric; they have {known}")


def direction_of(metric: str) -> Direction:
    """Returns whether "lower" or "higher" values of a metric are better, such as of ``supervised/minival/nll``."""
    figure = split(metric.split("/", 2)[-1])[1]
    higher = style_of(figure).higher_is_better
    # Reports show no losses of training, so these have no style.
    if higher is None and (figure == "loss" or figure.endswith("_loss")):
        higher = False
    if higher is None:
        raise UserError(f"--metric {metric}: add --direction lower or higher, for the values that are better")
    return "higher" if higher else "lower"


def check_same(path: Path, found: Mapping[str, Any], config: ExperimentConfig, varied: tuple[str, ...] = ()) -> None:
    """Checks that a file was written with the same configuration, apart from fields that start as in ``varied``."""
    check_same_fields(path, found, experiment.fields(config), varied)


def check_same_fields(
    path: Path, found: Mapping[str, Any], expected: Mapping[str, Any], varied: tuple[str, ...] = ()
) -> None:
    """Checks as `check_same`, with the fields of a configuration by dotted names."""
    pair = _compared(found), _compared(expected)
    for field, (before, now) in differences(*pair, lambda field: field.startswith(varied)).items():
        raise UserError(f"{path} was written with {field} = {before}, which is now {now}; give another --output")


def _compared(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that determine the metrics of a run, as values that JSON preserves."""
    fields = json.loads(json.dumps(fields))
    evaluations = {str(number): evaluation for number, evaluation in enumerate(fields.get("evaluations", ()))}
    found = {field: value for field, value in fields.items() if not field.startswith(CHANGEABLE_FIELDS)}
    found |= traverse_util.flatten_dict({"evaluations": evaluations}, sep=".")
    # The batch size of an evaluation changes no result.
    return {
        field: value
        for field, value in found.items()
        if not field.endswith(".data.batch_size") and not _changes_nothing(field, value)
    }


def _changes_nothing(field: str, value: Any) -> bool:
    """Returns whether a field has the value by which earlier versions, which had no such field, trained."""
    return value == [] or any(field.endswith(f".{name}") and value == neutral for name, neutral in _LATER.items())


CONVERTER = cattrs.Converter(forbid_extra_keys=True)
"""Of JSON files of grids, sweeps and searches."""
