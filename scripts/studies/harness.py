"""What studies over seeds share: flags, runs that are resumed, and the figures of finished ones."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from lit_het.apps.quickstart.running import write_data
from lit_het.configs import quickstart_upstream
from lit_het.training.log import read_metrics


def study_parser(description: str | None, steps: int) -> argparse.ArgumentParser:
    """Returns a parser with the flags of all studies.

    Args:
        description: of the study.
        steps: of its runs, by default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, default=Path("runs/ensembles"), metavar="DIR")
    parser.add_argument("--data", type=Path, default=Path("runs/quickstart/data"), metavar="DIR")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--table", action="store_true", help="train nothing; write the table of the finished runs")
    return parser


def run_seeds(
    options: argparse.Namespace,
    train: Callable[[Path, Path, int, int], None],
    conclude: Callable[[Path, Path, Sequence[int], int], None],
) -> None:
    """Trains what is not finished, and writes the table.

    Args:
        options: of `study_parser`.
        train: the runs of a seed; folder, data, seed and steps.
        conclude: writes the table; output, data, seeds and steps.
    """
    if not options.table:
        write_data(options.data, quickstart_upstream.glyphs())
        # The programs of all seeds are the same.
        jax.config.update("jax_compilation_cache_dir", str(options.output.absolute() / "programs"))
        for seed in options.seeds:
            train(options.output / f"seed{seed}", options.data, seed, options.steps)
    conclude(options.output, options.data, options.seeds, options.steps)


def last_figures(run_dir: Path) -> Mapping[str, float]:
    """Returns the last value of every metric of a run."""
    found: dict[str, float] = {}
    for record in read_metrics(run_dir / "metrics.jsonl"):
        found |= record
    return found
