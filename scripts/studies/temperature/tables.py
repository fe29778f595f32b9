"""Tables of the study: our figures over seeds beside the printed ones."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_het.eval.metrics.significance import estimate
from lit_het.files import write_atomically
from scripts.studies.noise.paired import cells_of


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        title: what was varied.
        nll, top1: as printed in the paper; empty where it has no such row.
        by_seed: figures of a run of each seed.
    """

    title: str
    nll: str
    top1: str
    by_seed: Mapping[int, Mapping[str, float]]


def write(output: Path, name: str, rows: Sequence[Row], prefix: str = "") -> str:
    """Writes a table of the test set; differences in NLL and accuracy are from the first row, seed by seed.

    Args:
        output: folder of the tables.
        name: of the file.
        rows: of the table.
        prefix: of the figures, such as ``quiet/``.
    """
    columns = [
        cells_of(
            {row.title: {seed: one[f"{prefix}test/{figure}"] for seed, one in row.by_seed.items()} for row in rows}
        )
        for figure in ("nll", "top1")
    ]
    lines = ["| | NLL | Prec@1 | τ | NLL, paper | Prec@1, paper |", "| --- | --- | --- | --- | --- | --- |"]
    for number, row in enumerate(rows):
        tau = estimate([one["temperature"] for one in row.by_seed.values()]).shown(2)
        cells = (row.title, columns[0][number], columns[1][number], tau, row.nll, row.top1)
        lines.append(f"| {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    write_atomically(output / f"{name}.md", text)
    return text
