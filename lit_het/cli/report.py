"""The arguments of ``lit-het report`` and ``lit-het compare``."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_het.errors import UserError

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the commands to those of ``lit-het``."""
    _add_report(commands)
    _add_comparison(commands)


def _add_report(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        allow_abbrev=False,
        description="Writes one self-contained HTML page with the configurations, curves and evaluations of runs, and "
        "the same figures beside it as .json, .csv and .md.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="directory of a run")
    parser.add_argument(
        "--output", type=Path, metavar="FILE.html", help="default: RUN_DIR/report.html; for several runs ./report.html"
    )
    parser.set_defaults(command=_report, name="report")


def _add_comparison(commands: Any) -> None:
    parser = commands.add_parser(
        "compare",
        allow_abbrev=False,
        description="Prints means, standard errors and Welch's t-test of every metric that all runs have. The runs of "
        "a group differ in their seeds. With --pareto, --gains or --few-shot, runs may have any settings, and those "
        "that differ only in their seeds are one point.",
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN_DIR", help="the first group")
    parser.add_argument("--against", type=Path, nargs="+", metavar="RUN_DIR", help="the second group")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--pareto",
        nargs="+",
        metavar="FIGURE",
        help="compare figures, such as zero_shot/pets/nll and deep_ensemble/pets/joint_nll, with the operations of "
        "training instead; both groups are taken together",
    )
    what.add_argument(
        "--gains",
        nargs="+",
        metavar="FIGURE",
        help="relative improvements over the second group, setting by setting in the order of operations, instead; "
        "with at least 4 settings also normalised by their difficulty",
    )
    what.add_argument(
        "--few-shot",
        action="store_true",
        help="the mean few-shot accuracy over all sets and settings of a group, with standard errors, instead",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="also write the table to a file .md, .csv or .json, or with --pareto the figure to .html",
    )
    parser.set_defaults(command=_compare, name="compare")


def _check(runs: Sequence[Path]) -> None:
    for directory in runs:
        if not directory.exists():
            raise UserError(f"{directory} is not a run: it contains neither config.json nor evaluations")


def _report(options: argparse.Namespace, _: list[str]) -> None:
    _check(options.runs)
    from lit_het.apps.report import report

    report(options.runs, options.output)


def _compare(options: argparse.Namespace, _: list[str]) -> None:
    against = options.against or []
    if not against and options.pareto is None and not options.few_shot:
        raise UserError("compare needs two groups of runs: RUN_DIR ... --against RUN_DIR ...")
    _check([*options.runs, *against])
    if options.pareto or options.gains:
        import jax

        # Only shapes are traced; accelerators are not used.
        jax.config.update("jax_platforms", "cpu")
        from lit_het.apps.trade_off import gains, pareto

        if options.pareto:
            pareto([*options.runs, *against], options.pareto, options.output)
        else:
            gains(options.runs, against, options.gains, options.output)
        return
    from lit_het.apps.report import compare, compare_few_shot

    (compare_few_shot if options.few_shot else compare)(options.runs, against, options.output)
