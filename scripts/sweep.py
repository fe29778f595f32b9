r"""Trains every setting of a grid of fields with several seeds, and writes a table with the best setting first.

    python -m scripts.sweep --config configs/fine_tune_experts.py:data_set=cifar10,model=e3 --grid grid \
        --seeds 0 1 2 --metric supervised/minival/top1 --show supervised/cifar10/top1 --output runs/cifar10_e3

The same command continues an interrupted sweep. In an array job every process takes ``--part I/N``; afterwards the same
command with ``--table`` writes the table. Flags of ``lit-het train`` for all runs follow ``--``.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_het.configs.parsing import parse_config
from lit_het.search import grid
from lit_het.search.grid import Axis
from lit_het.search.grid_runs import direction_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the sweep; user errors are printed as one line, with exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="configuration to train")
    parser.add_argument(
        "--grid",
        action="append",
        required=True,
        metavar="FIELD=VALUE,VALUE|grid",
        help="an axis, or those of get_grid() in the configuration file; may be repeated",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="seeds of initialisation, noise and data order"
    )
    parser.add_argument(
        "--metric",
        required=True,
        metavar="NAME",
        help="metric that sorts the settings, such as supervised/minival/top1",
    )
    parser.add_argument(
        "--direction", choices=("lower", "higher"), help="values that are better; default: by the metric's name"
    )
    parser.add_argument("--show", nargs="+", default=[], metavar="NAME", help="further metrics in the table")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder for runs and the table")
    parser.add_argument(
        "--part", type=_part, default=(0, 1), metavar="I/N", help="train every N-th run, from the I-th on"
    )
    parser.add_argument("--table", action="store_true", help="train nothing; write the table of the finished runs")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help="flags of all runs")
    return grid.run_main("sweep", lambda: _sweep(parser.parse_args(arguments)))


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not int(match[1]) < int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part; write I/N with I from 0 to N - 1")
    return int(match[1]), int(match[2])


def _sweep(options: argparse.Namespace) -> None:
    config = parse_config(options.config, options.flags, "lit-het train")
    axes = [Axis.parse(text) for text in grid.with_published(options.grid, options.config)]
    planned = grid.plan(config, axes, options.seeds, options.output)
    first, step = options.part
    direction = options.direction or direction_of(options.metric)  # before the training
    if not options.table:
        grid.run(planned[first::step], options.output, (options.metric, *options.show))
    if options.table or step == 1:
        grid.table(planned, options.output, options.metric, options.show, direction)
        print(f"table: {options.output / 'table.md'} and table.json")


if __name__ == "__main__":
    sys.exit(main())
