"""Rebuilds the tables of HET-XL on the temperature, on heads for stored embeddings of characters, over seeds.

    python -m scripts.studies.study_temperature --output runs/temperature_study --part methods ranges samples

The image tower of a small classifier is trained once, on 14 typefaces, and embeds all images; runs train a head. A
fifteenth typeface validates, a sixteenth is the test (docs/temperature.md). Finished runs are skipped.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from lit_het.eval.metrics.significance import estimate
from lit_het.eval.report.tables import markdown_table
from scripts.studies import harness
from scripts.studies.temperature import parts
from scripts.studies.temperature.data import counts_of, prepare
from scripts.studies.temperature.methods import methods
from scripts.studies.temperature.runs import Row, Runner

# With the tables of the paper.
PARTS = {
    "methods": "13 and 2: how τ is chosen or trained",
    "ranges": "19 and 20: its start and bounds",
    "samples": "14: the number of noise samples",
    "sizes": "15 and 16: W shared or not, and M",
    "learning": "8: heads with a learned τ",
    "epochs": "9: a learned τ in a short and a long training",
    "dynamics": "18: τ fixed at the value that another run learned",
    "terms": "21: the second term of the covariance",
    "pairs": "7 and App. M: normalization in image-text models, evaluated without and with noise",
}


def write(output: Path, name: str, rows: Sequence[Row], prefix: str = "") -> str:
    """Writes a table of the test set; differences in NLL and accuracy are from the first row, seed by seed.

    Args:
        output: folder of the tables.
        name: of the file.
        rows: of the table.
        prefix: of the figures, such as ``quiet/``.
    """
    found = {row.title: row.by_seed for row in rows}
    measured = harness.rows_of(found, [f"{prefix}test/{figure}" for figure in ("nll", "top1")])
    taus = [estimate([of["temperature"] for of in row.by_seed.values()]).shown(2) for row in rows]
    lines = [(*cells, tau, row.nll, row.top1) for row, cells, tau in zip(rows, measured, taus, strict=True)]
    titles = ("", "NLL", "Prec@1", "τ", "NLL, paper", "Prec@1, paper")
    return harness.write_tables(output / f"{name}.md", markdown_table(titles, lines))


def study(options: argparse.Namespace) -> None:
    """Trains what is not finished and writes the tables of the chosen parts."""
    # Heads of equal shapes share a program, which compiles fast.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    counts = counts_of(options.output) if options.table else prepare(options.output)
    runner = Runner(options, counts)
    for part in options.part:
        rows = methods(runner) if part == "methods" else getattr(parts, part)(runner)
        write(options.output, part, rows)
        if part == "pairs":
            write(options.output, "pairs_without_noise", rows, "quiet/")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study."""
    # Not 0, that of the tower: its features were trained with the kernel from which a head with this seed starts.
    parser = harness.study_parser(__doc__, "runs/temperature_study", seeds=(1, 2, 3, 4, 5))
    shown = "; ".join(f"{name}: Table {text}" for name, text in PARTS.items()).replace("%", "%%")
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help=shown)
    parser.add_argument(
        "--budget", type=int, default=30, help="trials of a Bayesian optimization; 0 for none; default: %(default)s"
    )
    options = parser.parse_args(arguments)
    if options.budget < 0:
        parser.error(f"--budget {options.budget}: must be at least 0")
    return harness.run_study("study_temperature", study, options)


if __name__ == "__main__":
    sys.exit(main())
