"""Tables of figures: evaluations of several runs side by side, for pages, the terminal and Markdown."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import rich.box
import rich.table
from rich.text import Text

from lit_het.eval.evaluation import CALIBRATED, Record
from lit_het.eval.metrics.significance import Estimate
from lit_het.eval.report.naming import (
    PLAIN,
    PLAIN_CALIBRATED,
    STYLES,
    WHOLES,
    FigureStyle,
    is_setting,
    split,
    style_of,
    title_of_part,
)
from lit_het.eval.report.page import Html, escaped, joined

# With more parts (such as corruptions), a table only shows their means.
_MOST_PARTS = 12
NO_FIGURE = "–"
CHANCE = "chance"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: as printed.
        strong: whether it is bold, such as the best of its row.
        faint: whether it is muted, such as chance.
    """

    text: str
    strong: bool = False
    faint: bool = False


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table; without cells, the heading of the rows below."""

    label: str
    cells: tuple[Cell, ...] = ()


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: above the table.
        columns: headings of all columns but the first, which has the row labels.
        rows: in order.
    """

    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    def html(self) -> Html:
        """Returns the table for a page."""
        head = "".join(f'<th scope="col">{_breakable(column)}</th>' for column in self.columns)
        caption = f"<caption>{escaped(self.caption)}</caption>" if self.caption else ""
        return Html(
            f'<div class="scroll"><table class="figures">{caption}'
            f"<thead><tr><td></td>{head}</tr></thead>\n"
            f"<tbody>\n{joined(map(self._html_row, self.rows))}\n</tbody></table></div>"
        )

    def markdown(self) -> str:
        """Returns the table as Markdown."""
        rows = []
        for row in self.rows:
            cells = [f"**{cell.text}**" if cell.strong else in_markdown(cell.text) for cell in row.cells]
            blank = "" if row.cells else "**"
            padding = [""] * (len(self.columns) - len(cells))
            rows.append((f"{blank}{in_markdown(row.label)}{blank}", *cells, *padding))
        titles = ("", *map(in_markdown, self.columns))
        return f"{in_markdown(self.caption)}\n\n{markdown_table(titles, rows, rule='---:')}"

    def terminal(self) -> rich.table.Table:
        """Returns the table for a terminal."""
        # As wide as the title, which would be broken at the width of the table; no column has a least width, for which
        # the last ones would be cut off.
        shown = rich.table.Table(
            title=Text(self.caption),
            title_justify="left",
            box=rich.box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
            min_width=min(len(self.caption), 60),
        )
        shown.add_column("")
        for column in self.columns:
            shown.add_column(Text(column), justify="right", overflow="fold")
        for number, row in enumerate(self.rows):
            if not row.cells:
                if number:
                    shown.add_row()
                shown.add_row(Text(row.label, style="bold"))
            else:
                # Text, not str: rich would parse brackets in a name as markup.
                cells = (Text(cell.text, style="bold" if cell.strong else "") for cell in row.cells)
                shown.add_row(Text(row.label), *cells)
        return shown

    def _html_row(self, row: Row) -> Html:
        if not row.cells:
            span = len(self.columns) + 1
            return Html(
                f'<tr class="group"><th colspan="{span}" scope="rowgroup"><span>{escaped(row.label)}</span></th></tr>'
            )
        cells = "".join(map(_html_cell, row.cells))
        return Html(f'<tr><th scope="row">{escaped(row.label)}</th>{cells}</tr>')


def _breakable(text: str) -> Html:
    """Returns escaped text with optional line breaks after slashes and underscores, for long names of runs."""
    return Html(re.sub("([/_])", r"\1<wbr>", escaped(text)))


def _html_cell(cell: Cell) -> Html:
    text = f"<strong>{escaped(cell.text)}</strong>" if cell.strong else escaped(cell.text)
    return Html(f'<td class="chance">{text}</td>' if cell.faint else f"<td>{text}</td>")


def plain_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Returns a table of texts; the first of each row is its label."""
    return Table(caption, tuple(columns), tuple(Row(label, tuple(map(Cell, texts))) for label, *texts in rows))


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]], rule: str = "---") -> str:
    """Returns a Markdown table of cells in Markdown; ``rule`` aligns all columns but the first."""
    rules = ("---", *(rule for _ in titles[1:]))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (titles, rules, *rows))


def in_markdown(text: str) -> str:
    """Returns plain text escaped for a Markdown table."""
    for special in "\\|*_<>`[]":
        text = text.replace(special, f"\\{special}")
    return " ".join(text.split())


def evaluation_table(measured: Mapping[str, Record]) -> Table:
    """Returns a table of one evaluation, with a column per run; for a single run, with a column per part.

    Parts with other chance levels have rows of their own.

    Args:
        measured: the records of the evaluation, by run name.
    """
    first = next(iter(measured.values()))
    paths = [path for path in first.figures if not is_setting(path)]
    for record in measured.values():
        paths += [path for path in record.figures if path not in paths and not is_setting(path)]
    places = {path: split(path) for path in paths}
    parts = list(dict.fromkeys(part for part, _ in places.values()))
    if len(parts) > _MOST_PARTS:
        parts = [part for part in parts if "/" not in part] or parts
    found = dict.fromkeys(figure for part, figure in places.values() if part in parts)
    plain = _plain_title(measured)
    figures = sorted(found, key=lambda figure: list(STYLES).index(figure) if figure in STYLES else len(STYLES))
    by_place = {place: path for path, place in places.items()}
    show = _CellBuilder(measured, by_place, plain)
    is_turned = len(parts) > len(figures)
    if len(measured) > 1 or show.has_several_chances(parts, figures):
        columns = (*show.chance_column, *measured)
        rows = show.grouped_by_figure(parts, figures) if is_turned else show.grouped_by_part(parts, figures)
    elif is_turned:
        columns = tuple(style_of(figure).label for figure in figures)
        rows = [Row(title_of_part(part, plain), show.part_of_run(part, figures)) for part in parts]
        rows += show.chance_of_figures(parts[0], figures)
    else:
        columns = (
            *show.chance_column,
            *(title_of_part(part, "value" if len(parts) == 1 else plain) for part in parts),
        )
        rows = [Row(style_of(figure).label, show.figure_of_run(parts, figure)) for figure in figures]
    return Table(_caption(first, measured), columns, tuple(rows))


def _caption(first: Record, measured: Mapping[str, Record]) -> str:
    steps = {record.step for record in measured.values()}
    shown_steps = (
        f"step {first.step:,}" if len(steps) == 1 else "steps " + ", ".join(f"{step:,}" for step in sorted(steps))
    )
    errors = ", ± standard error" if any(record.errors for record in measured.values()) else ""
    texts = dict.fromkeys(filter(None, (record.settings.get(CALIBRATED) for record in measured.values())))
    return "; ".join((f"{first.name}, at {shown_steps}{errors}", *map(str, texts)))


def _plain_title(measured: Mapping[str, Record]) -> str:
    """Returns the title of figures that are neither noisy nor calibrated by the evaluation itself, nor of a part."""
    kinds = sorted((bool(record.settings.get(CALIBRATED)), record.kind) for record in measured.values())
    titles = (PLAIN_CALIBRATED if is_calibrated else WHOLES.get(kind, PLAIN) for is_calibrated, kind in kinds)
    return ", or ".join(dict.fromkeys(titles))


@dataclasses.dataclass(frozen=True)
class _CellBuilder:
    """Builds cells from records; ``paths`` maps part and figure to the path of the figure.

    ``plain`` is the title of figures without a part.
    """

    measured: Mapping[str, Record]
    paths: Mapping[tuple[str, str], str]
    plain: str

    @property
    def chance_column(self) -> tuple[str, ...]:
        """The heading of the chance column; empty if no figure has a chance level."""
        return (CHANCE,) if any(record.chance for record in self.measured.values()) else ()

    def has_several_chances(self, parts: Sequence[str], figures: Sequence[str]) -> bool:
        """Whether a figure has other chance levels in other parts: sets of a linear probe have classes of their own."""
        return any(len({self._chance(part, figure).text for part in parts} - {""}) > 1 for figure in figures)

    def grouped_by_part(self, parts: Sequence[str], figures: Sequence[str]) -> list[Row]:
        rows = []
        for part in parts:
            rows += [Row(title_of_part(part, self.plain))] if len(parts) > 1 else []
            rows += [
                Row(style_of(figure).label, self.cells_of_runs(part, figure))
                for figure in figures
                if (part, figure) in self.paths
            ]
        return rows

    def grouped_by_figure(self, parts: Sequence[str], figures: Sequence[str]) -> list[Row]:
        rows = []
        for figure in figures:
            rows.append(Row(style_of(figure).label))
            rows += [
                Row(title_of_part(part, self.plain), self.cells_of_runs(part, figure))
                for part in parts
                if (part, figure) in self.paths
            ]
        return rows

    def cells_of_runs(self, part: str, figure: str) -> tuple[Cell, ...]:
        path, style = self.paths[part, figure], style_of(figure)
        values = [record.estimate(path) for record in self.measured.values()]
        best = best_of(values, style)
        cells = (
            Cell(style.shown(value.mean, value.error), number == best) if path in record.figures else Cell(NO_FIGURE)
            for number, (record, value) in enumerate(zip(self.measured.values(), values, strict=True))
        )
        return (*self._chance_cell([(part, figure)]), *cells)

    def figure_of_run(self, parts: Sequence[str], figure: str) -> tuple[Cell, ...]:
        places = [(part, figure) for part in parts]
        return (*self._chance_cell(places), *(self._of_one(*place) for place in places))

    def part_of_run(self, part: str, figures: Sequence[str]) -> tuple[Cell, ...]:
        return tuple(self._of_one(part, figure) for figure in figures)

    def chance_of_figures(self, part: str, figures: Sequence[str]) -> list[Row]:
        cells = tuple(self._chance(part, figure) for figure in figures)
        return [Row(CHANCE, cells)] if any(cell.text for cell in cells) else []

    def _chance_cell(self, places: Sequence[tuple[str, str]]) -> tuple[Cell, ...]:
        found = [self._chance(*place) for place in places if place in self.paths]
        return tuple(next((cell for cell in found if cell.text), found[0]) for _ in self.chance_column)

    def _of_one(self, part: str, figure: str) -> Cell:
        (record,) = self.measured.values()
        path = self.paths.get((part, figure), "")
        if path not in record.figures:
            return Cell(NO_FIGURE)
        return Cell(style_of(figure).shown(record.figures[path], record.errors.get(path, math.nan)))

    def _chance(self, part: str, figure: str) -> Cell:
        # Calibrated and noisy predictions have the chance level of plain predictions.
        for path in (self.paths.get((part, figure), ""), figure):
            for record in self.measured.values():
                if path in record.chance:
                    return Cell(style_of(figure).shown(record.chance[path]), faint=True)
        return Cell("", faint=True)


def best_of(values: Sequence[Estimate], style: FigureStyle) -> int | None:
    """Returns the index of the value that is better than all others (`FigureStyle.compared`), or None.

    NaN values do not count.
    """
    known = {number: value for number, value in enumerate(values) if not math.isnan(value.mean)}
    for number, one in known.items():
        others = [other for place, other in known.items() if place != number]
        if others and all(style.compared(one, other) > 0 for other in others):
            return number
    return None
