"""The arguments of ``lit-het demo``."""

import argparse
from typing import Any

from lit_het.cli.classify import add_checkpoint, add_prior, calibrated_of
from lit_het.paths import require_file, require_run

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    showing = commands.add_parser(
        "demo",
        allow_abbrev=False,
        description="Serves a page on this machine: drop an image, write labels, and see probabilities, their spread "
        "over noise samples, and the nearest captions. A decoder (docs/decoder.md) writes captions there, and answers "
        "questions. Needs the extra: pip install 'lit-het[demo]'.",
    )
    add_checkpoint(showing)
    showing.add_argument(
        "--captions", metavar="FILE", help="captions to search, one per line; their embeddings are cached"
    )
    add_prior(showing)
    showing.add_argument("--host", default="127.0.0.1", help="default: %(default)s, reachable from this machine only")
    showing.add_argument("--port", type=int, help="default: 7860, or any free port if it is taken")
    showing.add_argument(
        "--allow-host",
        nargs="+",
        default=(),
        metavar="NAME",
        help="further host names of this machine; requests to other host names are refused, since another web site "
        "may have sent them",
    )
    showing.set_defaults(command=_demo, name="demo")


def _demo(options: argparse.Namespace, _: list[str]) -> None:
    if options.captions is not None:
        require_file(options.captions)
    require_run(options.checkpoint)
    from lit_het.apps.demo.server import demo

    how = {"pretrained": options.pretrained, "allow_hosts": options.allow_host, "calibrated": calibrated_of(options)}
    demo(options.checkpoint, options.captions, options.host, options.port, **how)
