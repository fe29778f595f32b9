"""The arguments of the commands that show what a model says of single images."""

import argparse
from pathlib import Path
from typing import Any

# Imports of JAX and its friends wait until a subcommand runs.


def add_to(commands: Any) -> None:
    """Adds the commands to those of ``lit-het``."""
    classifying = commands.add_parser(
        "classify",
        allow_abbrev=False,
        help="say what an image shows, and how sure the model is",
        description="Prints the probability of each label without noise, its mean and 5-95 % band over noise samples, "
        "and the noise norm of each image. A classifier chooses between its own classes: --labels names them all, in "
        "their order.",
    )
    classifying.add_argument("images", nargs="+", metavar="IMAGE", help="files, addresses, or - for standard input")
    _add_checkpoint(classifying)
    classifying.add_argument(
        "--labels", required=True, metavar="LABELS|FILE", help='such as "a cat,a dog", or a file with one a line'
    )
    classifying.add_argument(
        "--prompts", metavar="NAME|FILE", help="templates around each label: bare (default), photo, photos, pet, a file"
    )
    classifying.add_argument(
        "--samples", type=int, default=32, metavar="S", help="noise samples (%(default)s); 0 leaves the noise out"
    )
    classifying.add_argument("--seed", type=int, default=0, help="of the noise")
    classifying.add_argument("--top", type=int, default=10, metavar="N", help="labels in a table (%(default)s)")
    classifying.add_argument("--json", action="store_true", help="print JSON in place of tables")
    classifying.set_defaults(command=_classify, name="classify")

    showing = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="try a model on a local web page",
        description="Serves a page on this machine: drop an image, write labels, and see probabilities, how noise "
        "scatters them, and the nearest of your captions. Needs the extra: pip install 'lit-het[demo]'.",
    )
    _add_checkpoint(showing)
    showing.add_argument("--captions", metavar="FILE", help="captions to search, one a line; embedded once, then kept")
    showing.add_argument("--host", default="127.0.0.1", help="default: %(default)s, which only this machine can reach")
    showing.add_argument("--port", type=int, help="default: 7860, or a free one where it is taken")
    showing.add_argument(
        "--allow-host",
        nargs="+",
        default=(),
        metavar="NAME",
        help="further names that browsers may know this machine by; requests under names that it has not been told are "
        "refused, as another web site may have made them",
    )
    showing.set_defaults(command=_demo, name="demo")


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="directory of a run")
    parser.add_argument("--pretrained", type=Path, metavar="PATH", help="where the locked tower's run or file is now")


def _classify(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.cli.classify import ClassifyOptions, classify

    how = ClassifyOptions(options.labels, options.prompts, options.samples, options.seed, options.top)
    classify(options.images, options.checkpoint, how, pretrained=options.pretrained, as_json=options.json)


def _demo(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.cli.demo import demo

    where = {"pretrained": options.pretrained, "allow_hosts": options.allow_host}
    demo(options.checkpoint, options.captions, options.host, options.port, **where)
