"""Runs read from their folders, for reports and comparisons: no model or data set is loaded."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_het import untrusted
from lit_het.errors import UserError
from lit_het.eval.evaluation import Record, evaluations_folder, read_records
from lit_het.paths import require_different
from lit_het.training.log import read_metrics
from lit_het.untrusted import Malformed
from lit_het.weights import manifest

_CONFIG, _METRICS = "config.json", "metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run as saved in its folder.

    Attributes:
        name: unique among the runs that are read together.
        directory: its folder.
        config: its configuration as JSON, of any version of lit-het; empty if the file is missing.
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
        """The seed of the run; None if unknown."""
        return self.config.get("seed")

    @property
    def last_step(self) -> int:
        """The last recorded step."""
        steps = [record["step"] for record in self.history] + [record.step for record in self.records.values()]
        return max(steps, default=0)

    def settings(self) -> dict[str, Any]:
        """Returns the dotted fields of the configuration, without seeds and ``run_dir``.

        Paths below the parent of ``run_dir`` are made relative to it: runs that differ in seeds have equal settings.
        """
        run_dir = self.config.get("run_dir")
        # The quickstart writes data and towers of each seed below one folder; without this, all seeds would differ in
        # paths.
        home = str(Path(run_dir).parent) if isinstance(run_dir, str) else "."
        return {
            field: _relative(value, home)
            for field, value in flattened(self.config).items()
            if field != "run_dir" and field.rpartition(".")[2] != "seed"
        }


def read_runs(directories: Sequence[Path]) -> list[SavedRun]:
    """Reads several runs."""
    require_different(directories)
    places = [directory.resolve() for directory in directories]
    return [_read(directory, name) for directory, name in zip(directories, _short_names(places), strict=True)]


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values of nested mappings by their dotted names."""
    flat = {}
    for name, value in config.items():
        is_nested = isinstance(value, Mapping) and value
        flat |= flattened(value, f"{prefix}{name}.") if is_nested else {f"{prefix}{name}": value}
    return flat


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], ignored: Callable[[str], bool]
) -> dict[str, tuple[Any, Any]]:
    """Returns fields with different values, with both values; without fields that ``ignored`` accepts."""
    return {
        field: (one.get(field), other.get(field))
        for field in sorted(one.keys() | other.keys())
        if one.get(field) != other.get(field) and not ignored(field)
    }


def by_setting(runs: Sequence[SavedRun]) -> list[list[SavedRun]]:
    """Groups runs that differ only in their seeds and folders."""
    groups: dict[str, list[SavedRun]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.settings(), sort_keys=True), []).append(run)
    return list(groups.values())


def differing_fields(runs: Sequence[SavedRun]) -> dict[str, tuple[Any, ...]]:
    """Returns the configuration fields in which runs differ, with the value of each run; None where it is missing."""
    settings = [{"seed": run.seed, **run.settings()} for run in runs]
    fields = {field: None for other in settings for field in differences(settings[0], other, lambda _: False)}
    return {field: tuple(fields_of_run.get(field) for fields_of_run in settings) for field in fields}


def _read(directory: Path, name: str) -> SavedRun:
    config, metrics = directory / _CONFIG, directory / _METRICS
    if not any(path.exists() for path in (config, metrics, evaluations_folder(directory))):
        below = sorted(path.parent.name for path in directory.glob(f"*/{_CONFIG}")) if directory.is_dir() else []
        hint = f"; it contains the runs {', '.join(below)}" if below else ""
        raise UserError(f"{directory} is not a run: it contains neither {_CONFIG} nor evaluations{hint}")
    records = {(record.kind, record.name): record for record in read_records(directory)}
    return SavedRun(name, directory, _read_config(config), read_metrics(metrics), records)


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    # Reports must not show a configuration that was edited after the training.
    manifest.check(path.parent)
    try:
        return untrusted.read_json_object(path)
    except (OSError, Malformed) as error:
        raise UserError(f"{path}: cannot be read ({' '.join(str(error).split())})") from error


def _short_names(places: Sequence[Path]) -> list[str]:
    """Returns the fewest last components of each path that make all names unique."""
    for count in range(1, max(len(place.parts) for place in places)):
        names = ["/".join(place.parts[-count:]) for place in places]
        if len(set(names)) == len(names):
            return names
    return [str(place) for place in places]


def _relative(value: Any, home: str) -> Any:
    if isinstance(value, list):
        return [_relative(one, home) for one in value]
    is_inside = isinstance(value, str) and home not in (".", "/")
    # Anywhere in the string, as shards may be patterns and commands.
    return value.replace(f"{home}/", "") if is_inside else value
