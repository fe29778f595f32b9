"""``lit-het tune``: searches fields of a configuration for the best value of a metric, within a number of runs.

``output`` is the folder of a grid (`lit_het.search.grid_runs`) with ``search.json``, which says what is searched, and
``settings/<number>.json`` for every trial. All else follows from these and from the results of the runs: there is no
further state, so a search may be killed at any time, and several processes may share it.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_het import untrusted
from lit_het.configs import experiment
from lit_het.console import Bar, message
from lit_het.errors import DoesNotFit, UserError, pluralize
from lit_het.files import locked, write_atomically
from lit_het.search import grid_runs, space, tuning_page
from lit_het.search.grid_runs import Planned, Pruned, direction_of
from lit_het.search.space import Search, Trial
from lit_het.search.tuned_sets import check_sets
from lit_het.training.log import read_metrics

_DONE = ("finished", "given up", "failed")


def tune(search: Search, budget: int) -> list[Trial]:
    """Trains runs until so many were tried; writes ``table.md``, ``trials.json`` and ``page.html``.

    Finished runs are not repeated and interrupted ones are resumed; runs of other processes are left to them. A setting
    whose configuration is invalid, whose step does not fit into memory, or whose loss or metric is not finite, counts
    as failed.

    Args:
        search: what to search.
        budget: number of trials, those of earlier starts and of other processes included.

    Returns:
        The trials, by number.
    """
    _check(search, budget)
    with _locked(search.output):
        _check_search(search)
    done = sum(trial.state in _DONE for trial in read_trials(search))
    planned = iter(lambda: _next(search, budget), None)
    bar = Bar("tune", budget, "trials", start=min(done, budget))
    grid_runs.train_all(planned, functools.partial(_attempt, search), bar)
    with _locked(search.output):  # the last process has all trials
        trials = read_trials(search)
        _write(search, trials)
    grid_runs.report_unfinished(sum(trial.state == "running" for trial in trials))
    return trials


def _attempt(search: Search, planned: Planned) -> str:
    """Trains the run of a trial; returns what was done."""
    setting = " ".join(f"{field}={value}" for field, value in planned.setting.items())
    message(f"{planned.name}: {setting}")
    watch = _watch(search, planned) if search.prune else None
    try:
        return grid_runs.run_unless_done(planned, search.output, (search.metric, *search.shown), watch)
    except DoesNotFit as error:  # or every start would try the trial again, and no other
        problem = str(error).removeprefix(f"{planned.name}: ")
        _write_setting(search, _number(planned), planned.setting, problem)
        return f"failed: {problem}"


def _check(search: Search, budget: int) -> None:
    if budget < 1:
        raise UserError(f"--budget {budget} must be at least 1")
    if search.seed < 0:
        raise UserError(f"--seed {search.seed} must be at least 0")
    if search.output.exists() and not search.output.is_dir():
        raise UserError(f"{search.output} is a file; --output takes a folder")
    space.check_fields(search)
    for field in search.fields:
        if field.field in ("seed", "data.seed", "run-dir") or field.field.startswith("evaluations"):
            raise UserError(f"--field {field.field}: every run has its own run directory, and --seed; search others")
    check_sets(search.config, search.metric)
    if search.lower is None:
        direction_of(search.metric)  # refuses a metric whose name does not tell
    if search.prune:
        space.require_optuna()
        if not search.config.cadence.evaluate_steps or search.metric.startswith("train/"):
            raise UserError(
                "--prune compares evaluations during training: name the metric of one, and set --cadence.evaluate-steps"
            )


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Waits for the other processes on a folder; the lock is released when the process ends."""
    (output / "settings").mkdir(parents=True, exist_ok=True)
    with locked(output / "search.lock"):
        yield


def _check_search(search: Search) -> None:
    """Writes ``search.json``, or compares it with that of an earlier start. The metric and the method may change."""
    path = search.output / "search.json"
    fields = [dataclasses.asdict(field) for field in search.fields]
    now = {"fields": json.loads(json.dumps(fields)), "seed": search.seed}
    if not path.exists():
        content = {**now, "config": experiment.fields(search.config)}
        write_atomically(path, json.dumps(content, indent=2) + "\n")
        return
    found = untrusted.read_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("config"), dict):
        raise UserError(f"{path} is not that of a search; give another --output")
    for name, value in now.items():
        if found.get(name) != value:
            raise UserError(f"{path} was written with other {name} ({_shown(found.get(name))}); give another --output")
    grid_runs.check_same(path, found["config"], search.config)


def _shown(value: Any) -> str:
    return ", ".join(str(one.get("field")) for one in value) if isinstance(value, list) else str(value)


def _next(search: Search, budget: int) -> Planned | None:
    """Returns a run that no process is training; None if there are enough."""
    with _locked(search.output):
        while True:
            trials = read_trials(search)
            for trial in trials[:budget]:
                if trial.state == "running" and not grid_runs.is_claimed(search.output, _name(search, trial.number)):
                    # Interrupted, or just chosen by another process, which then finds it claimed.
                    return _planned(search, trial)
            if len(trials) >= budget:
                return None
            setting = space.next_setting(search, trials)
            if setting is None:
                message(f"{pluralize(len(trials), 'setting')} tried; no other is left")
                return None
            _add(search, len(trials), setting)


def _add(search: Search, number: int, setting: Mapping[str, str]) -> None:
    """Writes the setting of a trial; one that is invalid, such as a combination of fields, has failed."""
    try:
        check_sets(space.with_setting(search.config, setting), search.metric)
        problem = ""
    except UserError as error:
        problem = str(error)
        message(f"trial {number} failed: {problem}")
    _write_setting(search, number, setting, problem)


def _write_setting(search: Search, number: int, setting: Mapping[str, str], problem: str) -> None:
    content = {"number": number, "setting": dict(setting), "problem": problem}
    write_atomically(_settings_path(search, number), json.dumps(content, ensure_ascii=False) + "\n")


def _settings_path(search: Search, number: int) -> Path:
    return search.output / "settings" / f"{number:04d}.json"


def _planned(search: Search, trial: Trial) -> Planned:
    config = space.with_setting(search.config, trial.setting)
    return grid_runs.plan_run(config, trial.setting, f"trial{trial.number:04d}", search.seed, search.output)


def _name(search: Search, number: int) -> str:
    """Returns the name of the run of a trial."""
    return f"trial{number:04d}_seed{search.seed}"


def _number(planned: Planned) -> int:
    """Returns the number of the trial of a run. Two trials of an earlier version may have the same setting."""
    return int(planned.name.removeprefix("trial").partition("_")[0])


@dataclasses.dataclass(frozen=True)
class _Setting:
    """The content of a file of ``settings``."""

    number: int
    setting: dict[str, str]
    problem: str


def read_trials(search: Search) -> list[Trial]:
    """Returns the trials in the folder of a search, by number."""
    trials = []
    for number, path in enumerate(sorted((search.output / "settings").glob("*.json"))):
        with grid_runs.explained(path, "is not a setting of this search", "give another --output"):
            found = grid_runs.CONVERTER.structure(untrusted.read_json(path), _Setting)
            if found.number != number or found.setting.keys() != {field.field for field in search.fields}:
                raise ValueError(f"trial {number} of these fields is expected")
        trials.append(_read_trial(search, found))
    return trials


def _read_trial(search: Search, found: _Setting) -> Trial:
    number, setting = found.number, found.setting
    if found.problem:
        return Trial(number, setting, "failed", note=found.problem)
    name = _name(search, number)
    path = grid_runs.result_path(search.output, name)
    history = _history(search.output / "runs" / name, search.metric) if search.prune else {}
    if not path.exists():
        return Trial(number, setting, "running", history=history)
    result = grid_runs.read_result(path)
    if result.stopped_at is not None:
        note = f"after step {result.stopped_at}"
        return Trial(number, setting, "given up", history=history, figures=result.figures, note=note)
    value = result.figures.get(search.metric, math.nan)
    if not math.isfinite(value):
        note = f"{search.metric} is {value}" if result.figures else "the loss is not finite"
        return Trial(number, setting, "failed", figures=result.figures, note=note)
    return Trial(number, setting, "finished", value, history, result.figures)


def _history(run_dir: Path, metric: str) -> dict[int, float]:
    """Returns the metric of a run by steps."""
    path = run_dir / "metrics.jsonl"
    records = read_metrics(path) if path.exists() else []
    return {record["step"]: float(record[metric]) for record in records if metric in record}


def _watch(search: Search, planned: Planned) -> grid_runs.Watch:
    """Returns a function that gives up a run which is worse than the median of the finished ones at the same step."""
    number = _number(planned)

    def watch(step: int, metrics: Mapping[str, float]) -> None:
        if search.metric not in metrics:
            return
        trials = read_trials(search)
        # The record may not be written yet, where the disk is full.
        history = {**trials[number].history, step: float(metrics[search.metric])}
        trials[number] = dataclasses.replace(trials[number], history=history)
        if space.should_prune(search, trials, number):
            raise Pruned(step)

    return watch


def _write(search: Search, trials: Sequence[Trial]) -> None:
    order = search.ranked(trials)
    content = {
        "metric": search.metric,
        "lower_is_better": search.minimizes,
        "method": search.method,
        "seed": search.seed,
        "best": order[0].setting if order and order[0].state == "finished" else None,
        "trials": [_record(search, trial) for trial in trials],
    }
    write_atomically(search.output / "trials.json", json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    tuning_page.write_table(search, order)
    tuning_page.write_page(search, trials)


def _record(search: Search, trial: Trial) -> dict[str, Any]:
    """Returns a trial as JSON, which has no NaN."""
    return {
        "number": trial.number,
        "setting": trial.setting,
        "state": trial.state,
        "value": trial.value if trial.state == "finished" else None,
        "note": trial.note,
        "run": str(search.output / "runs" / _name(search, trial.number)),
        "figures": {name: value if math.isfinite(value) else None for name, value in trial.figures.items()},
    }
