"""The arguments of ``lit-het benchmark-vtab``."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.cli.benchmark import require_sets
from lit_het.cli.train import ALLOW_BAD_SAMPLES
from lit_het.errors import UserError
from lit_het.paths import locate_config, require_run

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    parser = commands.add_parser(
        "benchmark-vtab",
        allow_abbrev=False,
        usage="lit-het benchmark-vtab RUN --data DIR --output DIR [--config FILE] [--grid FIELD=VALUES|grid ...] "
        "[--seeds S ...] [--any.field.of-the-configuration VALUE ...]",
        description="Fine-tunes the image tower of a run on 1,000 images of each task of VTAB below a folder, in "
        "clip_benchmark's layout with the splits train and test. Every setting of the grid is trained on 800 images; "
        "the best on the other 200 is trained on all, and tested on the whole test split. Writes a page with all "
        "tasks, the means of their groups, and published figures. The same command continues; several processes share "
        "one --output. Fields are changed as for train.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument(
        "--data", required=True, metavar="DIR", help="a folder with the folders of the sets, as of lit-het benchmark"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="folder for images, runs and vtab_1k.html"
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("fine_tune_vtab"),
        metavar="FILE",
        help="a Python file whose get_config() has an argument `task`; default: the shipped %(default)s",
    )
    parser.add_argument(
        "--grid",
        action="append",
        metavar="FIELD=VALUE,VALUE|grid",
        help="an axis of the settings, or those of get_grid() in FILE; may be repeated. A single setting is trained on "
        "all 1,000 images at once: --grid length=2500 is ViT's. Default: grid",
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0], metavar="S", help="of the runs on 1,000 images; default: 0"
    )
    parser.set_defaults(
        command=_benchmark_vtab,
        name="benchmark-vtab",
        takes_fields=True,
        hints=ALLOW_BAD_SAMPLES,
        if_stopped="the same command continues",
    )


def _benchmark_vtab(options: argparse.Namespace, flags: list[str]) -> None:
    require_run(options.run)
    require_sets(options.data)
    if options.output.exists() and not options.output.is_dir():
        raise UserError(f"{options.output} is a file; --output takes a folder")
    config = locate_config(options.config)
    from lit_het.apps.benchmark.fine_tuning import Protocol, benchmark_vtab

    protocol = Protocol(config, options.grid or ["grid"], options.seeds, flags)
    benchmark_vtab(options.run, options.data, options.output, protocol)
