r"""Trains every setting of a grid of fields with several seeds, and writes a table with the best setting first.

    python scripts/sweep.py --config configs/fine_tune_experts.py:data_set=cifar10,model=e3 \
        --grid length=2500,5000,7500,10000 --grid schedule.learning-rate=0.001,0.003,0.01,0.03 \
        --seeds 0 1 2 --metric supervised/minival/top1 --show supervised/cifar10/top1 --output runs/cifar10_e3

The same command goes on where it was stopped. As an array job every process takes ``--part I/N`` and the table is made
afterwards, by the command with ``--table``. What follows ``--`` are flags of all runs, as of ``lit-het train``.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_het.apps import grid
from lit_het.apps.grid import Axis
from lit_het.apps.sweep import run_main
from lit_het.runs.training import parse_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sweep; mistakes of the user end in one line and exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="what to train")
    parser.add_argument(
        "--grid",
        action="append",
        required=True,
        metavar="FIELD=VALUE,VALUE",
        help="an axis; may be given several times",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of initialisation, noise, data order")
    parser.add_argument("--metric", required=True, metavar="NAME", help="what decides, such as supervised/minival/top1")
    parser.add_argument("--show", nargs="+", default=[], metavar="NAME", help="further figures for the table")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where runs and the table go")
    parser.add_argument("--part", type=_part, default=(0, 1), metavar="I/N", help="do every N-th run, from the I-th on")
    parser.add_argument("--table", action="store_true", help="train nothing, make the table of what is done")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="fields that all runs change")
    return run_main("sweep", lambda: _sweep(parser.parse_args(arguments)))


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not int(match[1]) < int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no part; write I/N with I from 0 to N - 1")
    return int(match[1]), int(match[2])


def _sweep(options: argparse.Namespace) -> None:
    config = parse_config(options.config, options.flags, "lit-het train")
    axes = [Axis.parse(text) for text in options.grid]
    planned = grid.plan(config, axes, options.seeds, options.output)
    first, step = options.part
    if not options.table:
        grid.run(planned[first::step], options.output, (options.metric, *options.show))
    if options.table or step == 1:
        rows = grid.table(planned, options.output, options.metric, options.show)
        print(grid.markdown(rows))
        print(f"table: {options.output / 'table.md'} and table.json")


if __name__ == "__main__":
    sys.exit(main())
