"""The page of ``lit-het benchmark``: figures beside published ones, means, and a further table, such as of times."""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Protocol

from lit_het.apps.benchmark.results import DECODING, REST, TOWER, Result
from lit_het.eval.report.naming import FigureStyle
from lit_het.eval.report.page import Section, paragraph
from lit_het.eval.report.tables import NO_FIGURE, Cell, Row, Table, plain_table
from lit_het.eval.sets.benchmarks import Group, Suite, group_means
from lit_het.eval.sets.published import Published, read_published

# All figures of suites are shares.
_SHARE = FigureStyle("", "{:.1%}", higher_is_better=True)
_FIGURES_NOTE = (
    "Top-1 accuracy unless the heading says otherwise, ± standard error over images (few-shot: over seeds). Published "
    "figures are as printed, by the protocols below: preprocessing, prompts and class names differ. A published mean "
    "is over the same sets as ours; where ours has all, it is the printed one if there is one. That of corrupted "
    "images is over ImageNet-C as released; copies that lit-het data corrupt makes have another frost."
)
_TIME_NOTE = (
    "Seconds of the evaluation, without opening the set and without drawings. Images are decoded while the image tower "
    "computes; shares are of the time that was spent waiting for either, and of the rest: texts, head and metrics. The "
    "first set of a shape includes compilation."
)


class Measured(Protocol):
    """What was measured on a set."""

    @property
    def figures(self) -> Mapping[str, float]:
        """By name."""
        ...

    @property
    def errors(self) -> Mapping[str, float]:
        """Standard errors of the figures that have one, by name."""
        ...


@dataclasses.dataclass(frozen=True)
class Page:
    """Contents of the page of a benchmark.

    Attributes:
        suite: its sets.
        name: of the model.
        results: by set.
        failures: why a set could not be evaluated, by set.
        note: what the figures are, below their table.
        beside: a table of its own section, with what is said below it; None for none.
        errors_of_means: standard errors of the means of groups, by their titles.
    """

    suite: Suite
    name: str
    results: Mapping[str, Measured]
    failures: Mapping[str, str]
    note: str = _FIGURES_NOTE
    beside: tuple[Table, str] | None = None
    errors_of_means: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def published(self) -> list[Published]:
        """The figures to compare with."""
        return read_published(self.suite.published)

    @property
    def means(self) -> dict[str, dict[str, float]]:
        """The means of each group over the sets that were evaluated, by the titles of both."""
        groups = self.suite.groups_with_all
        return {group.title: means for group in groups if (means := group_means(group, self._ours(group)))}

    def sections(self) -> list[Section]:
        """Returns the page's sections."""
        failed = (paragraph(f"{name}: {reason}") for name, reason in self.failures.items())
        beside = () if self.beside is None else (self.beside,)
        return [
            Section("Figures", (self.tables()[0].html(), *failed), self.note),
            *(Section(table.caption, (dataclasses.replace(table, caption="").html(),), note) for table, note in beside),
            Section("Sources of published figures", tuple(map(paragraph, self.sources()))),
        ]

    def sources(self) -> list[str]:
        """Returns how and where each published model was measured, a line each."""
        found = dict.fromkeys((row.model, row.protocol, row.source) for row in self.published)
        return [f"{model}: {protocol}; {source}." for model, protocol, source in found]

    def tables(self) -> tuple[Table, ...]:
        """Returns the table of figures and the one beside it, if there is one."""
        rows = [row for group in self.suite.groups_with_all for row in self._rows(group)]
        figures = Table("", (self.name, *self.suite.published), tuple(rows))
        return (figures,) if self.beside is None else (figures, self.beside[0])

    def _rows(self, group: Group) -> list[Row]:
        ours, theirs = self._ours(group), [self._theirs(group, model) for model in self.suite.published]
        rows = [Row(group.title)]
        if not group.is_mean:
            rows += [
                Row(name, (self._cell(group, name), *(_cell(one.get(name)) for one in theirs))) for name in group.sets
            ]
        is_complete = len(ours) == len(group.sets)
        for title, mean in group_means(group, ours).items():
            label = title if is_complete else f"{title}, {len(ours)} of {len(group.sets)} sets"
            # Of the same sets as ours; a printed mean is that of all.
            means = [_mean_of_same(group, ours, one).get(title) for one in theirs]
            means = [one.get(title, mean) if is_complete else mean for one, mean in zip(theirs, means, strict=True)]
            error = self.errors_of_means.get(group.title, math.nan)
            rows.append(Row(label, (Cell(_SHARE.shown(mean, error)), *map(_cell, means))))
        return rows

    def _ours(self, group: Group) -> dict[str, float]:
        return {name: self.results[name].figures[group.figure] for name in group.sets if name in self.results}

    def _theirs(self, group: Group, model: str) -> dict[str, float]:
        """Returns a published model's figures, of sets and of means by their titles."""
        return {row.set: row.value for row in self.published if (row.model, row.figure) == (model, group.figure)}

    def _cell(self, group: Group, name: str) -> Cell:
        if name not in self.results:
            return Cell("failed" if name in self.failures else NO_FIGURE)
        found = self.results[name]
        return Cell(_SHARE.shown(found.figures[group.figure], found.errors.get(group.figure, math.nan)))


def _cell(value: float | None) -> Cell:
    return Cell(NO_FIGURE if value is None else _SHARE.shown(value))


def _mean_of_same(group: Group, ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """Returns a published model's means over the sets that we evaluated; none where it lacks one of them."""
    return group_means(group, {name: theirs[name] for name in ours}) if ours.keys() <= theirs.keys() else {}


def times(results: Mapping[str, Result]) -> tuple[Table, str] | None:
    """Returns the table of the time of each set, with what is said below it; None without results."""
    columns = ("images", "seconds", "images/s", DECODING, TOWER, REST, "most for")
    rows = ((name, *_times_of(result)) for name, result in results.items())
    return (plain_table("Time of each set", columns, rows), _TIME_NOTE) if results else None


def _times_of(result: Result) -> tuple[str, ...]:
    speed = result.num_images / max(result.seconds, 1e-9)
    texts = (f"{result.num_images:,}", f"{result.seconds:.1f}", f"{speed:.1f}")
    shares = (f"{share:.0%}" for share in result.shares.values())
    return (*texts, *shares, result.bound)
