"""Writes docs/papers.md from docs/results/papers.json, for the site that docs/conf.py builds."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "papers.md"
STATES = {
    "tested": "a test of the suite holds it",
    "read": "it is there, by reading the code or by flags, and no test holds all of it",
    "partly": "with what is missing",
    "missing": "with the reason",
}
INTRODUCTION = """\
# The papers, row by row

Systems, methods, tables and protocols of the papers, and of the order that lit-het was built to, each with its place in
the code. Places are below `lit_het/` unless they start with `scripts/` or `docs/`. [Departures](paper_map.md) of what
is there have a list of their own. This page is written from [`results/papers.json`](results/papers.json).
"""


class Row(NamedTuple):
    """A row of docs/results/papers.json.

    Attributes:
        number: from 1.
        paper: its short name.
        place: in the paper.
        what: a system, method, table or protocol.
        state: one of `STATES`.
        code: modules, separated by commas.
        check: the tests that hold it, or what is missing and why.
    """

    number: int
    paper: str
    place: str
    what: str
    state: str
    code: str
    check: str


def rows() -> tuple[Row, ...]:
    """Reads the rows."""
    (table,) = json.loads((DOCS / "results" / "papers.json").read_text("utf-8")).values()
    return tuple(Row(*row) for row in table["rows"])


def page() -> str:
    """Returns the text of docs/papers.md."""
    found = rows()
    papers = list(dict.fromkeys(row.paper for row in found))
    blocks = [INTRODUCTION.rstrip(), "\n".join(f"- {_state(state)}: {text}" for state, text in STATES.items())]
    blocks.append(_table(("paper", "rows", *STATES), (_counts(paper, found) for paper in [*papers, "all"])))
    for paper in papers:
        blocks.append(f"## {paper}")
        blocks.append(
            _table(("no.", "place", "what", "state", "code, and what checks it or is missing"), _cells(paper, found))
        )
    return "\n\n".join(blocks) + "\n"


def _counts(paper: str, found: Iterable[Row]) -> list[str]:
    states = Counter(row.state for row in found if paper in ("all", row.paper))
    return [paper, *map(str, (states.total(), *(states[state] for state in STATES)))]


def _cells(paper: str, found: Iterable[Row]) -> Iterator[list[str]]:
    for row in found:
        if row.paper == paper:
            code, check = (", ".join(map(_code, text.split(", "))) for text in (row.code, row.check))
            yield [str(row.number), row.place, row.what, _state(row.state), f"{code}<br>{check}"]


def _state(name: str) -> str:
    return f'<span class="state-{name}">{name}</span>'


def _code(text: str) -> str:
    """Marks the path of a module or test as code."""
    path, separator, rest = text.partition("; ")
    return f"`{path}`{separator}{rest}" if "/" in path and " " not in path else text


def _table(columns: tuple[str, ...], cells: Iterable[list[str]]) -> str:
    lines = [list(columns), ["---"] * len(columns), *cells]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def write_page() -> None:
    """Writes the page."""
    PAGE.write_text(page(), "utf-8")
