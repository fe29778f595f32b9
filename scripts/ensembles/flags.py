"""Flags of the studies of ensembles, which share a folder."""

import argparse
from pathlib import Path


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
