"""Few-shot accuracies of runs of different settings, for their mean over sets and settings (HET-XL Table 22)."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from lit_het.errors import UserError, pluralize
from lit_het.eval.evaluation import Record
from lit_het.eval.metrics.few_shot_means import (
    MEAN,
    WEIGHTED_MEAN,
    Accuracies,
    MeanOverSettings,
    by_shots,
    means_over_settings,
)
from lit_het.eval.run_comparison import check_same_settings
from lit_het.eval.saved_runs import SavedRun, by_setting


@dataclasses.dataclass(frozen=True)
class SettingsGroup:
    """Runs of one method.

    Attributes:
        runs: their names.
        num_settings: how many settings they have; runs that differ only in their seeds are one.
        sets: the names of the sets.
        means: by number of shots.
    """

    runs: tuple[str, ...]
    num_settings: int
    sets: tuple[str, ...]
    means: dict[int, MeanOverSettings]


def settings_groups(groups: Sequence[Sequence[SavedRun]]) -> list[SettingsGroup]:
    """Returns the means of groups of runs.

    Raises:
        UserError: a run has no few-shot evaluation, or two runs differ in their sets, shots or settings of these.
    """
    runs = [run for group in groups for run in group]
    for run in runs:
        _check_like(runs[0], run)
    return [_group(group) for group in groups]


def _group(runs: Sequence[SavedRun]) -> SettingsGroup:
    settings = [_mean_of_seeds([_accuracies(run) for run in members]) for members in by_setting(runs)]
    names = tuple(run.name for run in runs)
    return SettingsGroup(names, len(settings), tuple(settings[0]), means_over_settings(settings))


def _records(run: SavedRun) -> dict[str, Record]:
    """Returns the few-shot evaluations of a run by set."""
    return {
        name: record
        for (kind, name), record in run.records.items()
        if kind == "few_shot" and name not in (MEAN, WEIGHTED_MEAN)
    }


def _accuracies(run: SavedRun) -> Accuracies:
    return {name: by_shots(record.figures) for name, record in _records(run).items()}


def _mean_of_seeds(runs: Sequence[Accuracies]) -> Accuracies:
    return {
        name: {shots: statistics.fmean(run[name][shots] for run in runs) for shots in of_set}
        for name, of_set in runs[0].items()
    }


def _check_like(first: SavedRun, run: SavedRun) -> None:
    ours, theirs = _records(first), _records(run)
    if not run.config:
        raise UserError(f"{run.directory} has no config.json, which tells settings from seeds; leave the run out")
    if not theirs:
        raise UserError(f"{run.directory} has no few-shot evaluation; run lit-het few-shot --checkpoint first")
    if differing := sorted(ours.keys() ^ theirs.keys()):
        raise UserError(
            f"{first.name} has few-shot accuracies of {pluralize(len(ours), 'set')} and {run.name} of {len(theirs)}; "
            f"of {', '.join(differing)} only one has them: evaluate both on the same sets"
        )
    a_set, expected = next((name, by_shots(record.figures)) for name, record in ours.items())
    for name, record in theirs.items():
        if (found := by_shots(record.figures)).keys() != expected.keys():
            raise UserError(
                f"few-shot: {first.name} has accuracies of {a_set} at {_listed(expected)} shots, and {run.name} of "
                f"{name} at {_listed(found)}; evaluate all with the same --shots"
            )
        check_same_settings({first.name: ours[name], run.name: record})


def _listed(shots: Mapping[int, float]) -> str:
    return ", ".join(map(str, sorted(shots)))
