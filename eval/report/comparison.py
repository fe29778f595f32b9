"""Two models side by side, each figure with its chance level: a table for pages and the terminal."""

import dataclasses
from collections.abc import Mapping

from rich.table import Table
from rich.text import Text

from lit_het.eval.report.naming import STYLES, FigureStyle
from lit_het.eval.report.page import Html, escaped, joined

# The figures of `lit_het.eval.scores` that are compared.
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
        winner: +1 if the candidate is better, -1 if the baseline is, 0 if both print the same.
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
        """Counts the figures where the candidate (+1) or the baseline (-1) is better, or that are equal (0)."""
        return sum(row.winner == winner for row in self.rows)


def compare(
    baseline: str,
    candidate: str,
    results: Mapping[str, tuple[Mapping[str, float], Mapping[str, float]]],
    chances: Mapping[str, Mapping[str, float]],
) -> Comparison:
    """Compares two models by their `lit_het.eval.scores.figures`.

    Values that print the same are equal, so a table never prefers one of two equal numbers.

    Args:
        baseline: name of the first model.
        candidate: name of the second model.
        results: for each set, the figures of the baseline and of the candidate.
        chances: for each set, the figures of a uniform guess.
    """
    rows = []
    for group, (first, second) in results.items():
        for name, style in FIGURE_STYLES.items():
            rows.append(_compare_figure(group, style, chances[group][name], first[name], second[name]))
    return Comparison(baseline, candidate, tuple(rows))


def _compare_figure(group: str, style: FigureStyle, chance: float, first: float, second: float) -> ComparedFigure:
    shown_first, shown_second = style.format.format(first), style.format.format(second)
    candidate_wins = (second > first) == style.higher_is_better
    winner = 0 if shown_first == shown_second else (1 if candidate_wins else -1)
    return ComparedFigure(group, style.label, style.format.format(chance), shown_first, shown_second, winner)


def comparison_table(comparison: Comparison, caption: str = "") -> Html:
    """Returns the table for a page, with the better value of each pair in bold."""
    head = "".join(
        f'<th scope="col">{escaped(name)}</th>' for name in ("", "chance", comparison.baseline, comparison.candidate)
    ).replace('<th scope="col"></th>', "<td></td>")
    lines, group = [], None
    for row in comparison.rows:
        if row.group != group:
            lines.append(Html(f'<tr class="group"><th colspan="4" scope="rowgroup">{escaped(row.group)}</th></tr>'))
            group = row.group
        lines.append(
            Html(
                f'<tr><th scope="row">{escaped(row.label)}</th><td class="chance">{escaped(row.chance)}</td>'
                f"<td>{_bold(row.baseline, row.winner < 0)}</td><td>{_bold(row.candidate, row.winner > 0)}</td></tr>"
            )
        )
    shown_caption = f"<caption>{escaped(caption)}</caption>" if caption else ""
    return Html(
        f'<div class="scroll"><table>{shown_caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>\n{joined(lines)}\n</tbody></table></div>"
    )


def print_table(comparison: Comparison, title: str | None = None) -> Table:
    """Returns the same rows as a `rich.table.Table` for the terminal."""
    table = Table(title=title, title_justify="left", header_style="bold", pad_edge=False)
    table.add_column("set")
    table.add_column("figure")
    for name in ("chance", comparison.baseline, comparison.candidate):
        table.add_column(name, justify="right")
    group = None
    for row in comparison.rows:
        if group is not None and row.group != group:
            table.add_section()
        table.add_row(
            # Text, not str: rich would parse brackets in a set's name as markup.
            Text("" if row.group == group else row.group),
            row.label,
            row.chance,
            Text(row.baseline, style="bold" if row.winner < 0 else ""),
            Text(row.candidate, style="bold" if row.winner > 0 else ""),
        )
        group = row.group
    return table


def _bold(text: str, better: bool) -> Html:
    return Html(f"<strong>{escaped(text)}</strong>") if better else escaped(text)
