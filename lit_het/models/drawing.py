"""Tables with bars, for terminals and notebooks."""

import dataclasses
import html
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

_NUM_COLUMNS = 100  # characters of a line where the console is not known
_BAR_WIDTH = 16
TEXTS = ("image", "label")
"""Titles of columns of texts, which may be wrapped; the others hold numbers."""


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A table and the lines below it.

    Attributes:
        title: above it.
        header: titles of its columns, see `TEXTS`.
        rows: its cells.
        notes: lines below it.
        bars: probability and the ends of its band in each row, for a column of bars; empty for none.
        scale: the upper end of the bars' axis.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    bars: Sequence[tuple[float, float, float]] = ()
    scale: float = 1.0

    def print(self, console: Console) -> None:
        """Prints the table to a console."""
        # Text, not str: rich would parse brackets in a path as markup.
        table = Table(title=Text(self.title), title_justify="left", box=box.SIMPLE_HEAD)
        for title in self.header:
            kind: Any = {"overflow": "fold"} if title in TEXTS else {"justify": "right", "no_wrap": True}
            table.add_column(title, **kind)
        if self.bars:
            table.add_column("0" + f"{self.scale:.0%}".rjust(_BAR_WIDTH - 1), no_wrap=True)
        for number, row in enumerate(self.rows):
            bar = [_bar(*self.bars[number], self.scale)] if self.bars else []
            table.add_row(*map(Text, (*row, *bar)))
        console.print(table)
        for note in self.notes:
            console.print(note, markup=False, highlight=False)

    def text(self) -> str:
        """Returns the table as plain text."""
        console = Console(file=io.StringIO(), width=_NUM_COLUMNS, color_system=None)
        with console.capture() as captured:
            self.print(console)
        return "\n".join(line.rstrip() for line in captured.get().strip("\n").splitlines())

    def html(self) -> str:
        """Returns the table in HTML; colours are the page's, and labels, which may hold any text, are escaped."""

        def row(cells: Sequence[str], kind: str, end: str = "") -> str:
            return "<tr>" + "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells) + end + "</tr>"

        header = row(self.header, "th", f"<th>0 to {self.scale:.0%}</th>" if self.bars else "")
        bars = [_html_bar(*bar, self.scale) for bar in self.bars] or [""] * len(self.rows)
        body = "".join(row(cells, "td", bar) for cells, bar in zip(self.rows, bars, strict=True))
        notes = "<br>".join(map(html.escape, self.notes))
        title = f"<caption>{html.escape(self.title)}</caption>"
        return f"<table>{title}<thead>{header}</thead><tbody>{body}</tbody></table><small>{notes}</small>"


def _bar(probability: float, low: float, high: float, scale: float) -> str:
    """Draws a probability as a solid bar and its band shaded; the overlap is darker."""
    starts = np.arange(_BAR_WIDTH) / _BAR_WIDTH
    shaded = (starts < high / scale) & (starts + 1 / _BAR_WIDTH > low / scale)
    filled = starts + 0.5 / _BAR_WIDTH < probability / scale
    signs = np.array([[" ", "▒"], ["█", "▓"]])
    return "".join(signs[filled.astype(int), shaded.astype(int)])


def _html_bar(probability: float, low: float, high: float, scale: float) -> str:
    """Returns a cell with the probability as a solid bar, and its band as a translucent one behind it."""
    left, width, solid = (f"{100 * value / scale:.1f}%" for value in (low, high - low, probability))
    part = "position:absolute;background:currentColor"
    return (
        '<td><div style="position:relative;width:12em;height:1em">'
        f'<div style="{part};opacity:.25;height:100%;left:{left};width:{width}"></div>'
        f'<div style="{part};opacity:.6;top:30%;height:40%;left:0;width:{solid}"></div></div></td>'
    )
