"""The arguments of ``lit-het merge``."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.errors import UserError
from lit_het.eval.evaluators import COMMANDS
from lit_het.paths import named_folder, require_different, require_run

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    merge = commands.add_parser(
        "merge",
        allow_abbrev=False,
        usage="lit-het merge RUN RUN ... (--output DIR [--weights W W ... | --greedy] | --curve FILE.html) "
        "[--data [NAME=]DIR ...]",
        description="Writes a run whose weights are a mean of those of runs that started from the same ones: a model "
        "and what was fine-tuned from it, or the runs of a sweep. --greedy leaves out runs that make the mean worse on "
        "held-out images (model soups); --curve evaluates the mixtures between two runs on several sets, such as new "
        "data and old tasks (WiSE-FT). Further flags are fields of the evaluation.",
    )
    merge.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    what = merge.add_mutually_exclusive_group(required=True)
    what.add_argument("--output", type=Path, metavar="DIR", help="the run to write")
    what.add_argument(
        "--curve", type=Path, metavar="FILE", help="evaluate the mixtures of two runs on --data, and write a page .html"
    )
    merge.add_argument(
        "--weights",
        type=float,
        nargs="+",
        metavar="W",
        help="share of each run, in sum 1, a negative one to move away from it; default: equal",
    )
    merge.add_argument(
        "--greedy", action="store_true", help="keep the runs, from the best on, that make the mean no worse on --data"
    )
    merge.add_argument(
        "--by", metavar="FIGURE", help="of --greedy, such as nll; default: top1, of retrieval image_to_text_recall1"
    )
    merge.add_argument("--points", type=int, default=11, metavar="N", help="mixtures of --curve; default: %(default)s")
    merge.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="[NAME=]DIR",
        help="the sets of --curve, or the held-out one of --greedy",
    )
    merge.add_argument(
        "--evaluation", default="zero-shot", metavar="COMMAND", help="such as retrieval; default: %(default)s"
    )
    merge.set_defaults(command=_merge, name="merge", takes_fields=True)


def _merge(options: argparse.Namespace, flags: list[str]) -> None:
    _check(options, flags)
    for run_dir in options.runs:
        require_run(run_dir)
    require_different(options.runs)
    if not options.data:
        from lit_het.apps.merging import merge

        merge(options.runs, options.weights, options.output)
        return
    for argument in options.data:
        named_folder(argument)
    from lit_het.apps.merging import curve, soup
    from lit_het.configs.parsing import parse_evaluations

    configs = parse_evaluations(options.evaluation, options.data, flags)
    if options.curve is not None:
        curve(options.runs, configs, options.points, options.curve)
    else:
        soup(options.runs, configs[0], options.by, options.output)


def _check(options: argparse.Namespace, flags: list[str]) -> None:
    if len(options.runs) < 2:
        raise UserError("merge takes two runs or more")
    if bool(options.data) != (options.greedy or options.curve is not None):
        raise UserError("--data DIR belongs to --curve FILE.html and to --greedy, which need it")
    if options.greedy and (options.curve is not None or options.weights or len(options.data) > 1):
        raise UserError("--greedy finds the weights by one held-out set: leave out --weights, --curve and other --data")
    if options.curve is not None and options.weights:
        raise UserError("--curve evaluates many weights; leave out --weights")
    if options.points < 2:
        raise UserError(f"--points {options.points} must be at least 2, of both runs")
    if options.evaluation not in COMMANDS:
        raise UserError(f"--evaluation {options.evaluation} is not one of {', '.join(COMMANDS)}")
    if flags and not options.data:
        raise UserError(f"unknown argument {flags[0]}; see lit-het merge --help")
