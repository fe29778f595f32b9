"""The arguments of ``lit-het tune``."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.cli.train import ALLOW_BAD_SAMPLES
from lit_het.errors import UserError
from lit_het.paths import locate_training

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    tune = commands.add_parser(
        "tune",
        allow_abbrev=False,
        usage="lit-het tune --config FILE --field FIELD=RANGE|VALUES ... --metric NAME --budget N --output DIR "
        "[--method bayes|random|grid] [--seed S] [--prune] [--any.field.of-the-configuration VALUE ...]",
        description="Trains up to N runs that differ in the fields, each with the setting that Optuna suggests after "
        "the runs so far, and writes a table, a page and trials.json. The same command continues an interrupted "
        "search; several processes share one --output. Fields that are the same in all runs are changed as for train. "
        "Needs the extra: pip install 'lit-het[tune]'.",
        add_help=False,
    )
    _add_what(tune)
    _add_how(tune)
    tune.add_argument("-h", "--help", action="store_true", help="show this text; with --config also every field")
    tune.set_defaults(
        command=_tune,
        name="tune",
        parser=tune,
        takes_fields=True,
        hints=ALLOW_BAD_SAMPLES,
        if_stopped="the same command continues",
    )


def _add_what(tune: Any) -> None:
    tune.add_argument(
        "--config", type=Path, help="a Python file with get_config(), or the name of a shipped configuration"
    )
    tune.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="FIELD=RANGE|VALUES|grid",
        help="a field to search, with a range LOW..HIGH or LOW..HIGH:log (of integers if its ends are whole and the "
        "field has no decimals), or values: schedule.learning-rate=1e-4..1e-2:log, task.head=deterministic,het_xl; or "
        "grid, those of get_grid() in FILE; may be repeated",
    )
    tune.add_argument(
        "--metric",
        metavar="NAME",
        help="metric to improve, such as supervised/minival/nll; its images must be others than those of the training",
    )
    tune.add_argument(
        "--direction",
        choices=("lower", "higher"),
        help="values of the metric that are better; default: by its name",
    )
    tune.add_argument("--show", nargs="+", default=[], metavar="NAME", help="further metrics in the table")


def _add_how(tune: Any) -> None:
    tune.add_argument("--budget", type=int, metavar="N", help="number of runs, those of other processes included")
    tune.add_argument("--output", type=Path, metavar="DIR", help="folder for runs, table.md, page.html and trials.json")
    tune.add_argument(
        "--method",
        choices=("bayes", "random", "grid"),
        default="bayes",
        help="bayes learns from earlier runs (TPE), random does not, grid tries all values; default: %(default)s",
    )
    tune.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="of the suggestions, and of initialisation, noise and data order in every run; default: %(default)s",
    )
    tune.add_argument(
        "--prune",
        action="store_true",
        help="give up runs that are worse than the median of the others at the same evaluation; needs "
        "--cadence.evaluate-steps",
    )


def _tune(options: argparse.Namespace, flags: list[str]) -> None:
    if options.help:
        options.parser.print_help()
        if options.config is None:
            return
        flags = [*flags, "--help"]
    elif not options.field or None in (options.config, options.metric, options.budget, options.output):
        raise UserError(
            "tune needs --config FILE, --field FIELD=..., --metric NAME, --budget N and --output DIR, see lit-het tune "
            "--help"
        )
    path = locate_training(options.config)
    from lit_het.configs.parsing import parse_config

    config = parse_config(path, flags, "lit-het tune")
    from lit_het.search.grid import with_published
    from lit_het.search.space import Search, parse_field
    from lit_het.search.tuning import tune

    search = Search(
        config=config,
        fields=tuple(parse_field(text, config) for text in with_published(options.field, path)),
        metric=options.metric,
        output=options.output,
        shown=tuple(options.show),
        lower=None if options.direction is None else options.direction == "lower",
        method=options.method,
        seed=options.seed,
        prune=options.prune,
    )
    tune(search, options.budget)
    print(f"table: {options.output / 'table.md'}, page.html and trials.json")
