"""The arguments of ``lit-het embed``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_het.apps.embed import TRANSFORMERS
from lit_het.cli.train import ALLOW_BAD_SAMPLES
from lit_het.errors import OtherEmbeddings, UserError
from lit_het.paths import locate_config, require_run, require_shards

if TYPE_CHECKING:
    from lit_het.apps.embed.images import EmbedOptions

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    embedding = commands.add_parser(
        "embed",
        allow_abbrev=False,
        usage="lit-het embed --tower RUN|FILE|transformers:FOLDER --output DIR "
        "[--texts | --tokens | --logits] [--data SHARDS ...] "
        "[--dtype TYPE] [--crops K] [--part I/N] "
        "[--any.field.of-the-configuration VALUE ...]",
        description="Embeds every image of the shards, preprocessed as in evaluation, into one file per shard. "
        "'lit-het train --data.embeddings DIR' and 'lit-het zero-shot --embeddings DIR' then read them in place "
        "of images. With --texts it embeds every caption with the text tower, for 'lit-het train "
        "--data.text-embeddings DIR'. With --tokens it stores all tokens of a ViT, for a decoder, with --logits the "
        "logits of a classifier, for 'lit-het train --data.teacher-logits DIR'. The same command continues an "
        "interrupted one.",
        add_help=False,
    )
    embedding.add_argument(
        "--tower",
        metavar="RUN|FILE|transformers:FOLDER",
        help="directory of a run, or the configuration file (and its flags) of the run to be trained; or any AutoModel "
        "of images of transformers by PyTorch, also transformers:hf://owner/model (extra torch-towers)",
    )
    embedding.add_argument("--output", metavar="DIR", help="folder or address to write to")
    embedding.add_argument("--texts", action="store_true", help="embed the captions, with a text tower that is locked")
    embedding.add_argument(
        "--tokens", action="store_true", help="store all tokens of the image tower, before pooling, for a decoder"
    )
    embedding.add_argument(
        "--logits", action="store_true", help="store the logits of a classifier, without noise, not calibrated"
    )
    embedding.add_argument(
        "--data", nargs="+", default=(), metavar="SHARDS", help="default: the shards of the tower's run"
    )
    embedding.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="default: %(default)s"
    )
    embedding.add_argument(
        "--crops",
        type=int,
        default=0,
        metavar="K",
        help="store K random views of each image, made by `crop` and `augmentations` of the configuration (none)",
    )
    embedding.add_argument(
        "--part", default="0/1", metavar="I/N", help="embed shards I, I + N, ... where N hosts run the command"
    )
    embedding.add_argument(
        "-h", "--help", action="store_true", help="show this text; with --tower and --output also every field"
    )
    embedding.set_defaults(
        command=_embed,
        name="embed",
        parser=embedding,
        takes_fields=True,
        hints={**ALLOW_BAD_SAMPLES, OtherEmbeddings: "choose another --output"},
        if_stopped="finished shards are saved; the same command continues",
    )


def parse_part(text: str) -> tuple[int, int]:
    """Returns (I, N) of a part I/N."""
    try:
        number, count = map(int, text.split("/"))
    except ValueError as error:
        raise UserError(f"--part {text} is not of the form I/N; two hosts take 0/2 and 1/2") from error
    if not 0 <= number < count:
        raise UserError(f"--part {text} is invalid; N hosts take the parts 0/N to N-1/N")
    return number, count


def _embed(options: argparse.Namespace, flags: list[str]) -> None:
    if options.help:
        options.parser.print_help()
        flags = [*flags, "--help"]
    if options.tower is None or options.output is None:
        if options.help:
            return
        raise UserError("embed needs --tower RUN|FILE and --output DIR, see lit-het embed --help")
    of_transformers = options.tower.startswith(TRANSFORMERS)
    tower = Path(options.tower)
    if ".py" in tower.name and not of_transformers:
        tower = locate_config(tower)
    elif not of_transformers:
        require_run(tower)
    for pattern in options.data:
        require_shards(pattern)
    if of_transformers:
        from lit_het.apps.embed.torch_tower import embed_by_torch

        embed_by_torch(options.tower, flags, options.output, _how(options), texts=options.texts)
        return
    from lit_het.configs.parsing import parse_tower

    config = parse_tower(tower, flags)
    from lit_het.apps.embed import captions, images

    embed = captions.embed_captions if options.texts else images.embed
    embed(tower, config, options.output, _how(options))


def _how(options: argparse.Namespace) -> "EmbedOptions":
    from lit_het.apps.embed.images import EmbedOptions

    return EmbedOptions(
        tuple(options.data), options.dtype, options.crops, parse_part(options.part), options.tokens, options.logits
    )
