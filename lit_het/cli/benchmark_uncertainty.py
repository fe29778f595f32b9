"""The arguments of ``lit-het benchmark-uncertainty``."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.cli.prepare import positive
from lit_het.errors import MissingText, TooManyBadSamples, UserError
from lit_het.paths import require_different, runs_in

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    parser = commands.add_parser(
        "benchmark-uncertainty",
        allow_abbrev=False,
        description="Measures models on the same images: accuracy, likelihood and calibration as trained and with a "
        "fitted temperature, selective prediction, prediction sets, and what each score of uncertainty finds. Writes "
        "a page with tables and a figure of cost and gain, and the figures beside it as .json and .md.",
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="[NAME=]RUN[+RUN...]",
        help="directories of runs; those joined by +, and those of lit-het train --members, are an ensemble",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="[NAME=]DIR",
        help="folders with classnames.txt and labelled shards (or shards in the subfolder test/)",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.html", help="the page")
    parser.add_argument(
        "--candidates", type=Path, metavar="FILE", help="class names to choose from; default: the set's"
    )
    parser.add_argument("--prompts", default="set", metavar="NAME", help="templates, as of lit-het zero-shot")
    parser.add_argument(
        "--samples", type=positive, default=16, metavar="S", help="noise samples per image; default: %(default)s"
    )
    parser.add_argument(
        "--outside", nargs="+", default=[], metavar="[NAME=]DIR", help="shards of out-of-distribution images"
    )
    parser.add_argument(
        "--corrupted", metavar="DIR", help="corrupted copies of the first --data, made by lit-het data corrupt"
    )
    parser.add_argument("--pairs", metavar="DIR", help="image-text pairs of which some captions are wrong")
    parser.add_argument(
        "--captions",
        default="txt",
        metavar="MEMBER",
        help="of the pairs, such as txt or json/caption, the first of several; default: %(default)s",
    )
    parser.add_argument(
        "--wrong",
        default="is_wrong",
        metavar="FIELD",
        help="field of the pairs' .json that is 1 where the caption is wrong; default: %(default)s",
    )
    parser.add_argument(
        "--training", metavar="DIR", help="training images, to measure the distance to the nearest of them"
    )
    parser.add_argument(
        "--baselines",
        action="store_true",
        help="add test-time augmentation, prompts as an ensemble and vector scaling of the first model",
    )
    parser.set_defaults(
        command=_benchmark,
        name="benchmark-uncertainty",
        hints={
            TooManyBadSamples: "fix them, or leave them out of the shards",
            MissingText: "--pairs need the captions that --captions names, and a .json with the field of --wrong",
        },
    )


def _benchmark(options: argparse.Namespace, _: list[str]) -> None:
    models: dict[str, list[Path]] = {}
    for argument in options.models:
        name, given, folders = argument.rpartition("=")
        directories = [Path(folder) for folder in folders.split("+")]
        name = name if given else " + ".join(directory.name for directory in directories)
        if not name:
            raise UserError(f"{argument}: give the model a name before =, or leave = out")
        if name in models:
            raise UserError(f"two models are called {name}; give each its own name, NAME=RUN")
        models[name] = [run for directory in directories for run in runs_in(directory)]
        require_different(models[name])
    if options.output.suffix != ".html":
        raise UserError(f"--output {options.output}: name a file that ends in .html")
    from lit_het.apps.uncertainty.benchmark import benchmark, options_of

    chosen = options_of(
        options.data,
        candidates=options.candidates,
        prompts=options.prompts,
        samples=options.samples,
        outside=tuple(options.outside),
        corrupted=options.corrupted,
        pairs=options.pairs,
        captions=options.captions,
        wrong=options.wrong,
        training=options.training,
    )
    benchmark(models, chosen, options.output, baselines=options.baselines)
