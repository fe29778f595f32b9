"""The arguments of ``lit-het demo``."""

import argparse
from typing import Any

from lit_het.cli.classify import add_checkpoint

# Imports of JAX and its friends wait until the command runs.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    showing = commands.add_parser(
        "demo",
        allow_abbrev=False,
        help="try a model on a local web page",
        description="Serves a page on this machine: drop an image, write labels, and see probabilities, how noise "
        "scatters them, and the nearest of your captions. Needs the extra: pip install 'lit-het[demo]'.",
    )
    add_checkpoint(showing)
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


def _demo(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.apps.demo.server import demo

    where = {"pretrained": options.pretrained, "allow_hosts": options.allow_host}
    demo(options.checkpoint, options.captions, options.host, options.port, **where)
