"""Compares two groups of runs over several seeds, figure by figure (HET-XL Table 6)."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lit_het.errors import UserError, pluralize
from lit_het.eval.evaluation import CALIBRATED, Record
from lit_het.eval.metrics.significance import WelchTest, holm, welch_tests
from lit_het.eval.report.naming import is_of_member, is_rank_of_calibrated, is_setting, place_of_kind
from lit_het.eval.saved_runs import SavedRun, differences, flattened

LEVEL = 0.05
# The titles of groups whose runs share no part of their names.
WITHOUT_TITLES = "A", "B"
# Settings that change no figure, except for mixtures of experts, where images of a batch compete for slots.
_WITHOUT_EFFECT = ("data.batch_size", "data.embeddings")
# Settings that are paths. Every seed may have its own data folder, so only the last component of a path must agree.
_PATHS = (
    *("data.directory", "names.candidates", "names.classes", "relabels", "corrupted", "near", "far", "others"),
    "reference",
)


@dataclasses.dataclass(frozen=True)
class RunComparison:
    """Two groups of runs.

    Attributes:
        one: names of the runs in the first group.
        other: names of the runs in the second group.
        figures: the comparison of each figure, ``<kind>/<set>/<figure>``.
        survivors: figures whose difference is still significant after Holm's correction.
        remarks: warnings about the comparison, as sentences.
    """

    one: tuple[str, ...]
    other: tuple[str, ...]
    figures: Mapping[str, WelchTest]
    survivors: frozenset[str]
    remarks: tuple[str, ...]

    @property
    def titles(self) -> tuple[str, str]:
        """A short name for each group, see `titles_of`."""
        return titles_of(self.one, self.other)

    @property
    def tested(self) -> dict[str, WelchTest]:
        """The figures that were tested."""
        return {name: found for name, found in self.figures.items() if not found.untested}

    @property
    def verdict(self) -> str:
        """How many figures differ, in one to three sentences."""
        groups = f"{len(self.one)} {_runs(self.one)} against {len(self.other)}"
        if not self.tested:
            reasons = ", ".join(dict.fromkeys(found.untested for found in self.figures.values()))
            return f"{groups}: {pluralize(len(self.figures), 'figure')}, and no test ({reasons})."
        differing = sum(found.p_value < LEVEL for found in self.tested.values())
        untested = len(self.figures) - len(self.tested)
        return (
            f"{groups}: {differing} of {len(self.tested)} tested figures differ at p < {LEVEL}. By chance, about "
            f"{LEVEL * len(self.tested):.1f} of this many tests would; "
            f"{len(self.survivors)} {'is' if len(self.survivors) == 1 else 'are'} significant after Holm's "
            f"correction." + (f" {untested} {'has' if untested == 1 else 'have'} no test." if untested else "")
        )


def titles_of(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """Returns a short name for each of two groups: the common prefix or suffix of its runs' names, or A and B."""
    for shared in (_shared_start, _shared_end):
        titles = shared(one), shared(other)
        if all(titles) and titles[0] != titles[1]:
            return titles
    return WITHOUT_TITLES


def compare_runs(runs: Sequence[SavedRun], against: Sequence[SavedRun]) -> RunComparison:
    """Compares every figure that all runs have, with Welch's test."""
    all_runs = [*runs, *against]
    for run in all_runs:
        if not run.records:
            raise UserError(f"{run.directory} has no evaluations; run lit-het zero-shot or lit-het evaluate first")
    shared = (key for key in all_runs[0].records if all(key in run.records for run in all_runs))
    compared = sorted(shared, key=lambda key: (place_of_kind(key[0]), key))
    for key in compared:
        check_same_settings({run.name: run.records[key] for run in all_runs})
    # Only evaluations that all runs have: a test on a subset of seeds would not be comparable with the others.
    figures = [figures_of(run.records[key] for key in compared) for run in all_runs]
    found = welch_tests(figures[: len(runs)], figures[len(runs) :])
    repeats = _repeats(figures, [name for name, one in found.items() if not one.untested])
    found = {name: one for name, one in found.items() if name not in repeats}
    p_values = {name: one.p_value for name, one in found.items() if not one.untested}
    left_out = sorted({key for run in all_runs for key in run.records} - set(compared))
    return RunComparison(
        tuple(run.name for run in runs),
        tuple(run.name for run in against),
        found,
        holm(p_values, LEVEL),
        (
            *_remarks_on_steps(all_runs, compared),
            *_remarks_on_folders(all_runs, compared),
            *_remarks_on_rest(left_out),
            *_remarks_on_repeats(repeats),
        ),
    )


def figures_of(records: Iterable[Record]) -> dict[str, float]:
    """Returns the figures of evaluations that can be compared between runs, ``<kind>/<set>/<figure>``.

    Settings, single members and ranks of calibrated predictions are left out.
    """
    return {
        f"{record.kind}/{record.name}/{figure}": value
        for record in records
        for figure, value in record.figures.items()
        if not (is_setting(figure) or is_of_member(figure) or is_rank_of_calibrated(figure))
    }


def _repeats(figures: Sequence[Mapping[str, float]], tested: Sequence[str]) -> dict[str, str]:
    """Returns figures that equal an earlier figure in every run, with that figure; both would count as tests."""
    first: dict[tuple[float, ...], str] = {}
    repeats = {}
    for name in tested:
        # Sums in another order differ in their last digits.
        values = tuple(float(f"{run_figures[name]:.12g}") for run_figures in figures)
        if first.setdefault(values, name) != name:
            repeats[name] = first[values]
    return repeats


def check_same_settings(measured: Mapping[str, Record]) -> None:
    """Checks that runs were evaluated with the same settings.

    Args:
        measured: the records of one kind and name, by run name.
    """
    (first, one), *rest = measured.items()
    for name, other in rest:
        before, now = (_comparable(flattened(record.settings)) for record in (one, other))
        for field, (ours, theirs) in differences(before, now, lambda field: field in _WITHOUT_EFFECT).items():
            raise UserError(
                f"{one.kind.replace('_', '-')} {one.name}: {field} is {_shown(ours)} in {first} and {_shown(theirs)} "
                f"in {name}: evaluate both with the same settings first"
            )


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with paths reduced to their last components, and checkpoints to their number."""

    def last_part(value: Any) -> Any:
        if isinstance(value, list):
            return [last_part(one) for one in value]
        return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value

    reduced = {field: last_part(value) if field in _PATHS else value for field, value in settings.items()}
    # The groups differ in the members of a deep ensemble and their weights; the number of members is a setting.
    reduced.pop("weights", None)
    reduced |= {field: len(reduced[field]) for field in ("checkpoints",) if field in reduced}
    # Every run has fitted temperatures of its own.
    return reduced | {field: True for field in (CALIBRATED,) if field in reduced}


def _remarks_on_folders(runs: Sequence[SavedRun], compared: Sequence[tuple[str, str]]) -> list[str]:
    settings = (flattened(run.records[key].settings) for run in runs for key in compared)
    folders = {str(fields.get("data.directory")).rstrip("/") for fields in settings}
    by_name: dict[str, set[str]] = {}
    for folder in folders:
        by_name.setdefault(folder.rpartition("/")[2], set()).add(folder)
    several = sorted(name for name, paths in by_name.items() if len(paths) > 1)
    if not several:
        return []
    names = ", ".join(several)
    return [f"Runs were evaluated on different folders of the same name: {names}. Check that the images are the same."]


def _remarks_on_steps(runs: Sequence[SavedRun], compared: Sequence[tuple[str, str]]) -> list[str]:
    steps = {run.name: sorted({run.records[key].step for key in compared}) for run in runs}
    if len({step for run_steps in steps.values() for step in run_steps}) < 2:
        return []
    listed = ", ".join(f"{name} {' and '.join(f'{step:,}' for step in run_steps)}" for name, run_steps in steps.items())
    return [f"Checkpoints were evaluated at different steps: {listed}."]


def _remarks_on_rest(left_out: Sequence[tuple[str, str]]) -> list[str]:
    if not left_out:
        return []
    names = ", ".join(f"{kind.replace('_', '-')} {name}" for kind, name in left_out)
    return [f"Left out because not all runs have them: {names}."]


def _remarks_on_repeats(repeats: Mapping[str, str]) -> list[str]:
    if not repeats:
        return []
    listed = ", ".join(f"{name} ({first})" for name, first in repeats.items())
    return [f"Left out because another figure has the same value in every run: {listed}."]


def _shared_start(names: Sequence[str]) -> str:
    # Letter by letter; the ends of words do not matter, as separators are stripped.
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in same).strip("/_-. ")


def _shared_end(names: Sequence[str]) -> str:
    return _shared_start([name[::-1] for name in names])[::-1]


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def _runs(names: Sequence[str]) -> str:
    return "run" if len(names) == 1 else "runs"


def json_of(comparison: RunComparison) -> dict[str, Any]:
    """Returns a comparison as JSON values; values that are not finite are null."""
    return {
        "runs": list(comparison.one),
        "against": list(comparison.other),
        "verdict": comparison.verdict,
        "remarks": list(comparison.remarks),
        "figures": {
            name: {field: _plain(value) for field, value in row.items()}
            for name, row in zip(comparison.figures, rows_of(comparison), strict=True)
        },
    }


def rows_of(comparison: RunComparison) -> list[dict[str, Any]]:
    """Returns a row of named values for each compared figure."""
    return [
        {
            "figure": name,
            "mean": found.one.mean,
            "error": found.one.error,
            "mean_against": found.other.mean,
            "error_against": found.other.error,
            "difference": found.difference,
            "low": found.interval[0],
            "high": found.interval[1],
            "t": found.statistic,
            "degrees": found.degrees,
            "p": found.p_value,
            "survives_holm": name in comparison.survivors,
            "untested": found.untested,
        }
        for name, found in comparison.figures.items()
    ]


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
