"""The arguments of ``lit-het report`` and ``lit-het compare``."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.errors import UserError

# Imports of JAX and its friends wait until the command runs.


def add_to(commands: Any) -> None:
    """Adds the commands to those of ``lit-het``."""
    _add_report(commands)
    _add_comparison(commands)


def _add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        allow_abbrev=False,
        help="draw what was measured of runs on one page",
        description="Writes a page from what lies in the folders of runs: configurations, curves and evaluations. It "
        "asks for nothing from outside. The same figures go beside it as .json, .csv and .md.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="directory of a run")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.html", help="default: RUN_DIR/report.html; of several runs, ./report.html"
    )
    parser.set_defaults(command=_report, name="report")


def _add_comparison(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        allow_abbrev=False,
        help="test whether two groups of runs differ",
        description="Means, standard errors and Welch's t-test of every figure that all runs have, where the runs of a "
        "group differ in their seeds.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="the first group")
    parser.add_argument("--against", type=Path, nargs="+", metavar="RUN_DIR", help="the second group")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the table to a file .md, .csv or .json")
    parser.set_defaults(command=_compare, name="compare")


def _report(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.apps.report import report

    report(options.runs, options.output)


def _compare(options: argparse.Namespace, _: list[str]) -> None:
    if options.against is None:
        raise UserError("compare needs two groups of runs: RUN_DIR ... --against RUN_DIR ...")
    from lit_het.apps.report import compare

    compare(options.runs, options.against, options.output)
