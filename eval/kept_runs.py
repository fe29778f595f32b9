"""Runs as they lie in their folders: what reports and comparisons read, without model or data."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_het import untrusted
from lit_het.checkpoints import manifest
from lit_het.errors import UserError
from lit_het.eval.evaluation import Record, evaluations_folder, read_records
from lit_het.eval.sweeps import differences
from lit_het.training.metric_log import read_metrics
from lit_het.untrusted import Malformed

_CONFIG, _METRICS = "config.json", "metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class KeptRun:
    """What a run has left.

    Attributes:
        name: tells it apart from the runs it is read with.
        directory: where it lies.
        config: its configuration as JSON, of whatever version of lit-het; empty if there is none.
        history: the records of its ``metrics.jsonl``.
        records: its evaluations, by kind and name.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    records: Mapping[tuple[str, str], Record]

    @property
    def seed(self) -> Any:
        """The seed of the run, if it is known."""
        return self.config.get("seed")

    @property
    def last_step(self) -> int:
        """The last step that is known of."""
        steps = [record["step"] for record in self.history] + [record.step for record in self.records.values()]
        return max(steps, default=0)

    def settings(self) -> dict[str, Any]:
        """Returns the dotted fields of the configuration, but for seeds and for the folder that it was trained in.

        Other paths below that folder are told from there, as runs with other seeds have their own.
        """
        run_dir = self.config.get("run_dir")
        home = str(Path(run_dir).parent) if isinstance(run_dir, str) else "."
        return {
            field: _relative(value, home)
            for field, value in flattened(self.config).items()
            if field != "run_dir" and field.rpartition(".")[2] != "seed"
        }


def read_runs(directories: Sequence[Path]) -> list[KeptRun]:
    """Reads several runs.

    Raises:
        UserError: a folder that is no run or is named twice, or a file in it that cannot be read.
    """
    places = [directory.resolve() for directory in directories]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise UserError(f"{directories[number]} is named twice; name each run once")
    return [_read(directory, name) for directory, name in zip(directories, _short_names(places), strict=True)]


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested mappings by their dotted names."""
    flat = {}
    for name, value in config.items():
        is_nested = isinstance(value, Mapping) and value
        flat |= flattened(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
    return flat


def by_setting(runs: Sequence[KeptRun]) -> list[list[KeptRun]]:
    """Returns groups of runs that differ in nothing but their seeds and where they lie."""
    groups: dict[str, list[KeptRun]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.settings(), sort_keys=True), []).append(run)
    return list(groups.values())


def differing_fields(runs: Sequence[KeptRun]) -> dict[str, tuple[Any, ...]]:
    """Returns the fields of the configuration in which runs differ, with the value of each run (None without one)."""
    settings = [{"seed": run.seed, **run.settings()} for run in runs]
    fields = {field: None for other in settings for field in differences(settings[0], other, lambda _: False)}
    return {field: tuple(of_run.get(field) for of_run in settings) for field in fields}


def _read(directory: Path, name: str) -> KeptRun:
    kept = (directory / _CONFIG, directory / _METRICS, evaluations_folder(directory))
    if not any(path.exists() for path in kept):
        below = sorted(path.parent.name for path in directory.glob(f"*/{_CONFIG}")) if directory.is_dir() else []
        hint = f"; the runs below it are {', '.join(below)}" if below else ""
        raise UserError(f"{directory} is no run: it holds neither {_CONFIG} nor evaluations{hint}")
    records = {(record.kind, record.name): record for record in read_records(directory)}
    return KeptRun(name, directory, _read_config(kept[0]), read_metrics(kept[1]), records)


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    manifest.check(path.parent)
    try:
        content = untrusted.read_json(path)
    except (OSError, Malformed) as error:
        raise UserError(f"{path}: cannot be read as JSON ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: not the configuration of a run")
    return content


def _short_names(places: Sequence[Path]) -> list[str]:
    """Returns for each path as few of its last parts as tell all apart."""
    for count in range(1, max(len(place.parts) for place in places)):
        names = ["/".join(place.parts[-count:]) for place in places]
        if len(set(names)) == len(names):
            return names
    return [str(place) for place in places]


def _relative(value: Any, home: str) -> Any:
    if isinstance(value, list):
        return [_relative(one, home) for one in value]
    is_inside = isinstance(value, str) and home not in (".", "/")
    return value.replace(f"{home}/", "") if is_inside else value
