"""Two models side by side, each figure with its chance level: a table for pages and the terminal."""

import dataclasses
import itertools
from collections.abc import Mapping

from lit_het.eval.evaluation import Record
from lit_het.eval.report.naming import SIGNIFICANTLY, STYLES, FigureStyle
from lit_het.eval.report.tables import Cell, Row, Table

# The figures of `lit_het.eval.metrics.scores` that are compared.
FIGURE_STYLES: Mapping[str, FigureStyle] = {
    name: STYLES[name] for name in ("top1", "top5", "mean_reciprocal_rank", "mean_class_recall", "nll", "brier", "ece")
}


@dataclasses.dataclass(frozen=True)
class ComparedFigure:
    """One figure of both models on one set.

    Attributes:
        group: the set.
        label: the figure.
        chance, baseline, candidate: values as printed.
        winner: +1 if the candidate is significantly better, -1 if the baseline is, otherwise 0.
    """

    group: str
    label: str
    chance: str
    baseline: str
    candidate: str
    winner: int


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Figures of two models on the same sets.

    Attributes:
        baseline, candidate: names of the models.
        rows: figures, those of one set together.
    """

    baseline: str
    candidate: str
    rows: tuple[ComparedFigure, ...]

    def count(self, winner: int) -> int:
        """Counts the figures where the candidate (+1) or the baseline (-1) is significantly better, or neither (0)."""
        return sum(row.winner == winner for row in self.rows)


def compare(
    baseline: str,
    candidate: str,
    records: Mapping[str, tuple[Record, Record]],
) -> Comparison:
    """Compares two models by their `lit_het.eval.metrics.scores.figures`, see `FigureStyle.compared`.

    Args:
        baseline: name of the first model.
        candidate: name of the second model.
        records: for each set, the evaluations of the baseline and of the candidate.
    """
    rows = []
    for group, (first, second) in records.items():
        for name, style in FIGURE_STYLES.items():
            one, other = first.estimate(name), second.estimate(name)
            chance = style.shown(first.chance[name])
            shown = (style.shown(value.mean, value.error) for value in (one, other))
            rows.append(ComparedFigure(group, style.label, chance, *shown, winner=style.compared(other, one)))
    return Comparison(baseline, candidate, tuple(rows))


def comparison_table(comparison: Comparison, title: str) -> Table:
    """Returns the table, with significantly better values in bold."""
    rows: list[Row] = []
    for group, members in itertools.groupby(comparison.rows, key=lambda row: row.group):
        rows.append(Row(group))
        for row in members:
            values = (Cell(row.baseline, strong=row.winner < 0), Cell(row.candidate, strong=row.winner > 0))
            rows.append(Row(row.label, (Cell(row.chance, faint=True), *values)))
    columns = ("chance", comparison.baseline, comparison.candidate)
    return Table(f"{title}; bold: better {SIGNIFICANTLY}", columns, tuple(rows))
