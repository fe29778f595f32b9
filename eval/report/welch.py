"""The table that compares two groups of runs, for pages, the terminal and Markdown."""

import math

from lit_het.eval.metrics.significance import EQUAL, WelchTest
from lit_het.eval.report.naming import FigureStyle, split, style_of, title_of_kind, title_of_part
from lit_het.eval.report.tables import NO_FIGURE, Cell, Row, Table
from lit_het.eval.run_comparison import RunComparison

_CAPTION = "Mean ± standard error over runs; Welch's t-test"


def welch_table(comparison: RunComparison) -> Table:
    """Returns means, differences, confidence intervals and Welch's test of every figure, grouped by part.

    Differences that are significant after Holm's correction are bold.
    """
    rows = []
    for title, parts in _parts_of_sets(comparison).items():
        for part, members in parts.items():
            rows += [Row(f"{title}: {part}" if part else title), *members]
    return Table(_CAPTION, _columns(comparison), tuple(rows))


def welch_tables(comparison: RunComparison) -> dict[str, Table]:
    """Returns `welch_table` split by evaluation, by the title of the evaluation."""
    tables = {}
    for title, parts in _parts_of_sets(comparison).items():
        rows = []
        for part, members in parts.items():
            rows += [Row(part), *members] if part else members
        tables[title] = Table(_CAPTION, _columns(comparison), tuple(rows))
    return tables


def shown_p(p_value: float) -> str:
    """Formats a p-value with two or three digits."""
    return f"{p_value:.3f}" if p_value >= 0.001 else f"{p_value:.1e}"


def _columns(comparison: RunComparison) -> tuple[str, ...]:
    return (*comparison.titles, "difference", "95 % interval", "t", "df", "p")


def _parts_of_sets(comparison: RunComparison) -> dict[str, dict[str, list[Row]]]:
    """Returns the rows by title of the evaluation and of the part; the latter is empty for figures without part."""
    found: dict[str, dict[str, list[Row]]] = {}
    for path, test in comparison.figures.items():
        kind, name, rest = path.split("/", 2)
        part, figure = split(rest)
        style = style_of(figure)
        row = Row(style.label, _cells(test, style, path in comparison.survivors))
        parts = found.setdefault(f"{title_of_kind(kind)}, {name}", {})
        parts.setdefault(title_of_part(part, ""), []).append(row)
    return found


def _cells(found: WelchTest, style: FigureStyle, is_strong: bool) -> tuple[Cell, ...]:
    means = (Cell(style.shown(found.one.mean, found.one.error)), Cell(style.shown(found.other.mean, found.other.error)))
    difference = Cell(_signed(found.difference, style), strong=is_strong)
    if found.untested:
        in_place_of_p = EQUAL if found.untested == EQUAL else NO_FIGURE
        return (*means, difference, *(Cell(text, faint=True) for text in (*[NO_FIGURE] * 3, in_place_of_p)))
    low, high = (_signed(bound, style) for bound in found.interval)
    return (
        *means,
        difference,
        Cell(f"{low} to {high}"),
        Cell(f"{found.statistic:.2f}"),
        Cell(f"{found.degrees:.1f}"),
        Cell(shown_p(found.p_value)),
    )


def _signed(value: float, style: FigureStyle) -> str:
    return style.format.replace("{:", "{:+").format(value) if math.isfinite(value) else NO_FIGURE
