"""Two groups of runs compared figure by figure, as runs with several seeds must be (HET-XL Table 6)."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lit_het.errors import UserError
from lit_het.eval.evaluation import Record
from lit_het.eval.kept_runs import KeptRun, flattened
from lit_het.eval.report.naming import is_of_member, is_rank_of_calibrated, is_setting, place_of_kind
from lit_het.eval.significance import WelchTest, holm, welch_tests
from lit_het.eval.sweeps import differences

LEVEL = 0.05
# Fields of evaluations that change no figure (but of mixtures of experts, whose slots a batch shares).
_WITHOUT_EFFECT = ("data.batch_size", "data.embeddings")
# Fields that name files and folders: a seed may have data of its own, so that only the last parts must be alike.
_PLACES = ("data.directory", "names.candidates", "names.classes", "relabels", "corrupted", "near", "far")


@dataclasses.dataclass(frozen=True)
class RunComparison:
    """Two groups of runs.

    Attributes:
        one: names of the first group's runs.
        other: those of the second's.
        figures: the comparison of each figure, ``<kind>/<set>/<figure>``.
        survivors: figures whose difference stays significant when Holm's correction counts all tests.
        remarks: what a reader should know before the figures, as sentences.
    """

    one: tuple[str, ...]
    other: tuple[str, ...]
    figures: Mapping[str, WelchTest]
    survivors: frozenset[str]
    remarks: tuple[str, ...]

    @property
    def titles(self) -> tuple[str, str]:
        """A short name for each group: the beginning or end that the names of its runs share, or A and B."""
        for shared in (_shared_start, _shared_end):
            one, other = shared(self.one), shared(self.other)
            if one and other and one != other:
                return one, other
        return "A", "B"

    @property
    def tested(self) -> dict[str, WelchTest]:
        """The figures with a test."""
        return {name: found for name, found in self.figures.items() if not found.untested}

    @property
    def verdict(self) -> str:
        """How many figures differ, in a sentence or three."""
        groups = f"{len(self.one)} {_runs(self.one)} against {len(self.other)}"
        if not self.tested:
            reasons = ", ".join(dict.fromkeys(found.untested for found in self.figures.values()))
            return f"{groups}: {len(self.figures)} figures, and no test ({reasons})."
        differing = sum(found.p_value < LEVEL for found in self.tested.values())
        untested = len(self.figures) - len(self.tested)
        return (
            f"{groups}: {differing} of {len(self.tested)} tested figures differ at p < {LEVEL}. That many tests at "
            f"once would give about {LEVEL * len(self.tested):.1f} by chance alone; "
            f"{len(self.survivors)} {'stays' if len(self.survivors) == 1 else 'stay'} significant after Holm's "
            f"correction." + (f" {untested} {'has' if untested == 1 else 'have'} no test." if untested else "")
        )


def compare_runs(runs: Sequence[KeptRun], against: Sequence[KeptRun]) -> RunComparison:
    """Compares every figure that all runs have by Welch's test.

    Raises:
        UserError: a run without evaluations, evaluations with other settings, or no figure in all runs.
    """
    everyone = [*runs, *against]
    for run in everyone:
        if not run.records:
            raise UserError(f"{run.directory} holds no evaluations; lit-het zero-shot and its siblings make some")
    shared = (key for key in everyone[0].records if all(key in run.records for run in everyone))
    kept = sorted(shared, key=lambda key: (place_of_kind(key[0]), key))
    for key in kept:
        check_same_settings({run.name: run.records[key] for run in everyone})
    figures = [figures_of(run.records[key] for key in kept) for run in everyone]
    found = welch_tests(figures[: len(runs)], figures[len(runs) :])
    repeats = _repeats(figures, [name for name, one in found.items() if not one.untested])
    found = {name: one for name, one in found.items() if name not in repeats}
    p_values = {name: one.p_value for name, one in found.items() if not one.untested}
    left_out = sorted({key for run in everyone for key in run.records} - set(kept))
    return RunComparison(
        tuple(run.name for run in runs),
        tuple(run.name for run in against),
        found,
        holm(p_values, LEVEL),
        (
            *_remarks_on_steps(everyone, kept),
            *_remarks_on_places(everyone, kept),
            *_remarks_on_rest(left_out),
            *_remarks_on_repeats(repeats),
        ),
    )


def figures_of(records: Iterable[Record]) -> dict[str, float]:
    """Returns the figures of evaluations, ``<kind>/<set>/<figure>``, that tell of runs what no other figure does.

    That is without settings, single members, and ranks of calibrated predictions.
    """
    return {
        f"{record.kind}/{record.name}/{figure}": value
        for record in records
        for figure, value in record.figures.items()
        if not (is_setting(figure) or is_of_member(figure) or is_rank_of_calibrated(figure))
    }


def _repeats(figures: Sequence[Mapping[str, float]], tested: Sequence[str]) -> dict[str, str]:
    """Returns the figures that are an earlier one again in every run, with that: both would count as tests."""
    first: dict[tuple[float, ...], str] = {}
    repeats = {}
    for name in tested:
        # Sums of the same numbers in another order differ in their last digits.
        values = tuple(float(f"{of_run[name]:.12g}") for of_run in figures)
        if first.setdefault(values, name) != name:
            repeats[name] = first[values]
    return repeats


def check_same_settings(measured: Mapping[str, Record]) -> None:
    """Demands that runs were evaluated alike.

    Args:
        measured: the records of one kind and name, by the runs' names.

    Raises:
        UserError: a setting of the evaluation differs.
    """
    (first, one), *rest = measured.items()
    for name, other in rest:
        before, now = (_comparable(flattened(record.settings)) for record in (one, other))
        for field, (ours, theirs) in differences(before, now, lambda field: field in _WITHOUT_EFFECT).items():
            raise UserError(
                f"{one.kind.replace('_', '-')} {one.name}: {field} is {_told(ours)} in {first} and {_told(theirs)} in "
                f"{name}: evaluate both alike first"
            )


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings in which places are named by their last parts, and members of a deep ensemble are counted."""

    def last_part(value: Any) -> Any:
        if isinstance(value, list):
            return [last_part(one) for one in value]
        return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else value

    told = {field: last_part(value) if field in _PLACES else value for field, value in settings.items()}
    # Which models are the members is what two groups differ in; how many they are is a setting.
    return told | {field: len(told[field]) for field in ("checkpoints",) if field in told}


def _remarks_on_places(runs: Sequence[KeptRun], kept: Sequence[tuple[str, str]]) -> list[str]:
    settings = (flattened(run.records[key].settings) for run in runs for key in kept)
    folders = {str(of_one.get("data.directory")).rstrip("/") for of_one in settings}
    by_name: dict[str, set[str]] = {}
    for folder in folders:
        by_name.setdefault(folder.rpartition("/")[2], set()).add(folder)
    other = sorted(name for name, places in by_name.items() if len(places) > 1)
    if not other:
        return []
    return [f"Not all runs were evaluated in the same folder: {', '.join(other)}. Are the images the same?"]


def _remarks_on_steps(runs: Sequence[KeptRun], kept: Sequence[tuple[str, str]]) -> list[str]:
    steps = {run.name: sorted({run.records[key].step for key in kept}) for run in runs}
    if len({step for of_run in steps.values() for step in of_run}) < 2:
        return []
    told = ", ".join(f"{name} {' and '.join(f'{step:,}' for step in of_run)}" for name, of_run in steps.items())
    return [f"Evaluations are of different steps: {told}."]


def _remarks_on_rest(left_out: Sequence[tuple[str, str]]) -> list[str]:
    if not left_out:
        return []
    names = ", ".join(f"{kind.replace('_', '-')} {name}" for kind, name in left_out)
    return [f"Left out, as not all runs have it: {names}."]


def _remarks_on_repeats(repeats: Mapping[str, str]) -> list[str]:
    if not repeats:
        return []
    told = ", ".join(f"{name} ({first})" for name, first in repeats.items())
    return [f"Left out, as another figure is the same in every run: {told}."]


def _shared_start(names: Sequence[str]) -> str:
    same = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in same).strip("/_-. ")


def _shared_end(names: Sequence[str]) -> str:
    return _shared_start([name[::-1] for name in names])[::-1]


def _told(value: Any) -> str:
    return "not set" if value is None else str(value)


def _runs(names: Sequence[str]) -> str:
    return "run" if len(names) == 1 else "runs"


def json_of(comparison: RunComparison) -> dict[str, Any]:
    """Returns a comparison as JSON values; what is not finite is null."""
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
    """Returns each compared figure with all its numbers by name."""
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
