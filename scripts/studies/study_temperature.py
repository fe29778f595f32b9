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

from lit_het.search import grid
from scripts.studies.temperature import parts, tables
from scripts.studies.temperature.data import counts_of, prepare
from scripts.studies.temperature.methods import methods
from scripts.studies.temperature.runs import Runner

# With the tables of the paper.
PARTS = {
    "methods": "13 and 2: how τ is chosen or trained",
    "ranges": "19 and 20: its start and bounds",
    "samples": "14: the number of noise samples",
    "sizes": "15 and 16: W shared or not, and M",
    "learning": "8: heads with a learned τ",
    "epochs": "9: a learned τ in a short and a long training",
    "pairs": "7 and App. M: normalization in image-text models, evaluated without and with noise",
}


def study(options: argparse.Namespace) -> None:
    """Trains what is not finished and writes the tables of the chosen parts."""
    # Heads of equal shapes share a program, and most seeds and temperatures do.
    jax.config.update("jax_compilation_cache_dir", str(options.output.absolute() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    counts = counts_of(options.output) if options.table else prepare(options.output)
    runner = Runner(options.output, counts, trains=not options.table)
    for part in options.part:
        if part == "methods":
            rows = methods(runner, options.seeds, options.budget)
        else:
            rows = getattr(parts, part)(runner, options.seeds)
        print(tables.write(options.output, part, rows))
        if part == "pairs":
            print(tables.write(options.output, "pairs_without_noise", rows, "quiet/"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; user errors are printed as one line, with exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path("runs/temperature_study"), metavar="DIR")
    # Not 0, that of the tower: its features were trained with the kernel from which a head with this seed starts.
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    shown = "; ".join(f"{name}: Table {text}" for name, text in PARTS.items()).replace("%", "%%")
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help=shown)
    parser.add_argument(
        "--budget", type=int, default=30, help="trials of a Bayesian optimization; 0 for none; default: %(default)s"
    )
    parser.add_argument("--table", action="store_true", help="train nothing; write the tables of finished runs")
    options = parser.parse_args(arguments)
    if options.budget < 0:
        parser.error(f"--budget {options.budget}: must be at least 0")
    return grid.run_main("study_temperature", lambda: study(options))


if __name__ == "__main__":
    sys.exit(main())
