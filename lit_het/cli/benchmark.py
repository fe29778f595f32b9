"""The arguments of ``lit-het benchmark``."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.cli.evaluate import add_model
from lit_het.cli.prepare import positive
from lit_het.errors import UserError
from lit_het.paths import require_run

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.

SUITES = ("clip_benchmark", "vtab", "robustness", "fewshot")


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    parser = commands.add_parser(
        "benchmark",
        allow_abbrev=False,
        description="Evaluates a run on all sets of a suite that lie below a folder, in clip_benchmark's layout: "
        "clip_benchmark (zero-shot and retrieval), vtab (its 19 sets, zero-shot), robustness (ImageNet, its variants "
        "and corrupted copies), fewshot (9 sets, 1 to 25 images per class). Writes a page with a table of all sets, "
        "their means, published figures and the time of each set, and the figures beside it as .json and .md; "
        "evaluations are saved in the run's folder. The same command continues an interrupted benchmark.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--suite", choices=SUITES, required=True, help="the sets")
    parser.add_argument(
        "--data",
        required=True,
        metavar="DIR",
        help="a folder with the folders of the sets, such as wds_cifar10, wds_vtab-pets or imagenet-a, at most three "
        "levels below",
    )
    parser.add_argument("--output", type=Path, metavar="FILE.html", help="the page; default: RUN/benchmarks/SUITE.html")
    parser.add_argument("--prompts", default="set", metavar="NAME", help="templates, as of lit-het zero-shot")
    parser.add_argument(
        "--samples",
        type=positive,
        default=0,
        metavar="S",
        help="noise samples per image, for figures over samples in the saved evaluations; default: none",
    )
    add_model(parser)
    parser.set_defaults(
        command=_benchmark,
        name="benchmark",
        if_stopped="the same command continues",
    )


def _benchmark(options: argparse.Namespace, _: list[str]) -> None:
    require_run(options.run)
    require_sets(options.data)
    if options.experts and options.output is None:
        raise UserError("--experts makes another model of the run; name its page with --output FILE.html")
    output = options.output or options.run / "benchmarks" / f"{options.suite}.html"
    if output.suffix != ".html":
        raise UserError(f"--output {output}: name a file that ends in .html")
    from lit_het.apps.benchmark.running import benchmark

    how = {name: getattr(options, name) for name in ("prompts", "samples", "pretrained", "experts")}
    benchmark(options.run, options.suite, options.data, output, **how)


def require_sets(data: str) -> None:
    """Checks that the folder above those of the sets exists, unless it is a URL."""
    if "://" not in data and not Path(data).is_dir():
        raise UserError(f"no folder {data}; name the folder above those of the sets with --data")
