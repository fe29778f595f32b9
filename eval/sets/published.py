"""Figures that others printed, to be shown beside ours: ``published.csv``, each with its source."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_PATH = Path(__file__).with_suffix(".csv")


class Published(NamedTuple):
    """A printed figure.

    Attributes:
        model: its name in tables.
        protocol: how it was measured.
        set: a set as `lit_het.eval.sets.benchmarks` names it, or the title of a mean over sets.
        figure: such as ``top1``.
        value: a fraction, with the digits that were printed.
        source: a table of a paper, or a file of a public repository at a commit.
    """

    model: str
    protocol: str
    set: str
    figure: str
    value: float
    source: str


def read_published(models: Sequence[str]) -> list[Published]:
    """Returns the figures of the given models, in the order of the file."""
    with _PATH.open(newline="", encoding="utf-8") as file:
        rows = [Published(**{**row, "value": float(row["value"])}) for row in csv.DictReader(file)]
    return [row for row in rows if row.model in models]
