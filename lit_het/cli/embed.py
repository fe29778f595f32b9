"""The arguments of ``lit-het embed``."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.errors import UserError

# Imports of JAX and its friends wait until the command runs.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    embedding = commands.add_parser(
        "embed",
        allow_abbrev=False,
        help="compute the embeddings of a locked image tower once, to train on them",
        usage="lit-het embed --tower RUN|FILE --output DIR [--data SHARDS ...] [--dtype TYPE] [--crops K] [--part I/N] "
        "[--any.field.of-the-configuration VALUE ...]",
        description="Embeds every image of the shards, as the tower sees it in evaluation, into one file a shard. "
        "Then --data.embeddings DIR lets 'lit-het train' read them in place of images, and --embeddings DIR "
        "'lit-het zero-shot'. The same command goes on where it was stopped.",
        add_help=False,
    )
    embedding.add_argument(
        "--tower",
        type=Path,
        metavar="RUN|FILE",
        help="directory of a run, or the configuration file of the run to be trained, with its flags",
    )
    embedding.add_argument("--output", metavar="DIR", help="folder or address to write")
    embedding.add_argument("--data", nargs="+", default=(), metavar="SHARDS", help="default: those of the tower's run")
    embedding.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="default: %(default)s"
    )
    embedding.add_argument(
        "--crops",
        type=int,
        default=0,
        metavar="K",
        help="store K random views of each image, by `crop` and `augmentations` of the configuration (none)",
    )
    embedding.add_argument(
        "--part", default="0/1", metavar="I/N", help="this host's part of the shards, where N hosts run the command"
    )
    embedding.add_argument(
        "-h", "--help", action="store_true", help="this text; with --tower and --output every field as well"
    )
    embedding.set_defaults(
        command=_embed,
        name="embed",
        parser=embedding,
        takes_fields=True,
        if_stopped="shards that are done stay, the same command goes on",
    )


def _embed(options: argparse.Namespace, flags: list[str]) -> None:
    if options.help:
        options.parser.print_help()
        flags = [*flags, "--help"]
    if options.tower is None or options.output is None:
        if options.help:
            return
        raise UserError("embed needs --tower RUN|FILE and --output DIR, see lit-het embed --help")
    from lit_het.runs.embedding import EmbedOptions, embed

    try:
        number, count = map(int, options.part.split("/"))
    except ValueError as error:
        raise UserError(f"--part {options.part} is no part; two hosts take 0/2 and 1/2") from error
    how = EmbedOptions(tuple(options.data), options.dtype, options.crops, (number, count))
    embed(options.tower, options.output, how, flags)
