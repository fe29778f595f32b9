"""Cells of CSV tables: texts that a spreadsheet shows, and never takes for formulas."""

import re
from typing import Any

_FORMULA = re.compile(r"'*[=+\-@\t\r]")


def cell_of(value: Any) -> Any:
    """Returns a value for a cell; a text that a spreadsheet could take for a formula has an apostrophe before it."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def text_of(cell: str) -> str:
    """Returns the text that `cell_of` made a cell of."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell
