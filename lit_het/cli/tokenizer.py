"""The arguments of ``lit-het tokenizer`` and its action."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.cli.prepare import positive
from lit_het.errors import UserError
from lit_het.paths import require_shards

# SentencePiece and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    tokenizer = commands.add_parser("tokenizer", allow_abbrev=False)
    actions = tokenizer.add_subparsers(required=True, metavar="ACTION")
    train = actions.add_parser(
        "train",
        allow_abbrev=False,
        help="train a SentencePiece model on the captions of shards",
        description="Reads all captions of SHARDS (of more than a million samples, a million evenly spread) and trains "
        "a SentencePiece model (BPE) that covers all of their characters. Padding is token 0, the "
        "end 1, unknown 2. Equal captions give an equal file.",
    )
    train.add_argument(
        "shards", nargs="+", metavar="SHARDS", help="tar files, folders, globs, patterns {000..099}.tar, lists .txt"
    )
    train.add_argument(
        "--size",
        type=positive,
        default=32_000,
        metavar="N",
        help="most pieces of the vocabulary; few captions yield fewer; default: %(default)s",
    )
    train.add_argument("--output", type=Path, required=True, metavar="FILE", help="such as tokenizer.model")
    train.add_argument(
        "--captions",
        nargs="+",
        default=["txt"],
        metavar="MEMBER",
        help="members with captions, such as json/caption, or json/en json/de for translation; default: txt",
    )
    train.add_argument(
        "--keep-case",
        action="store_true",
        help="tell capitals from small letters, for translation (with --tokenizer.no-lowercase in training)",
    )
    train.set_defaults(command=_train, name="tokenizer train")


def _train(options: argparse.Namespace, _: list[str]) -> None:
    for pattern in options.shards:
        require_shards(pattern)
    output = options.output
    if output.is_dir() or not output.resolve().parent.is_dir():
        raise UserError(f"--output {output} must be a file in an existing folder")
    from lit_het.apps.tokenizer import train_tokenizer
    from lit_het.console import message

    lowercase = not options.keep_case
    trained = train_tokenizer(options.shards, options.captions, options.size, output, lowercase=lowercase)
    case = " --tokenizer.no-lowercase" if options.keep_case else ""
    message(
        f"{trained.pieces:,} pieces in {output}; {trained.length} tokens cut {trained.cut:.1%} of the captions: "
        f"--tokenizer.model {output} --tokenizer.length {trained.length}{case}, and the same length and "
        f"{trained.pieces} pieces for the text tower (--task.text-tower.length and .vocabulary-size) or the decoder "
        "(--task.decoder.length and .vocabulary-size)"
    )
