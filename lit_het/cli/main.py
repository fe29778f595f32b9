"""The command ``lit-het``."""

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_het.errors import UserError

# Imports of JAX and its friends wait until a subcommand runs: `lit-het --help` answers at once.


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; mistakes of the user end in one line and exit code 1."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it writes
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command not in (_train, _embed):
        parser.error(f"unknown argument {rest[0]}; see lit-het {options.name} --help")
    try:
        options.command(options, rest)
    except UserError as error:
        print(f"lit-het: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lit-het: interrupted; checkpoints that were saved stay", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lit-het",
        allow_abbrev=False,
        description="Image-text models that know how sure they are: LiT with HET-XL heads, in JAX.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    quickstart = commands.add_parser(
        "quickstart",
        allow_abbrev=False,
        help="train LiT with and without HET-XL on pictures of characters, and write a report (about 5 minutes)",
        description="Renders characters in many faces, trains an image tower on them, locks it, trains text towers "
        "with a deterministic and with a HET-XL head, evaluates both zero-shot and writes a report. "
        "A quickstart that was stopped goes on where it was.",
    )
    quickstart.add_argument("--run-dir", type=Path, default=Path("runs/quickstart"), help="default: %(default)s")
    quickstart.add_argument("--seed", type=int, default=0, help="of everything: data order, initialisation, noise")
    quickstart.set_defaults(command=_quickstart, name="quickstart")

    train = commands.add_parser(
        "train",
        allow_abbrev=False,
        help="train from a configuration file",
        usage="lit-het train --config FILE [--resume] [--any.field.of-the-configuration VALUE ...]",
        description="Trains the experiment that FILE's get_config() describes. Every field with a value can be "
        "changed by a flag with its dotted path, e.g. --num-steps 100 --task.head.covariance.num-factors 8; "
        "'lit-het train --config FILE --help' lists them with their values.",
        add_help=False,
    )
    train.add_argument("--config", type=Path, help="a Python file with get_config(), e.g. configs/*.py")
    train.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in the run directory")
    train.add_argument("-h", "--help", action="store_true", help="this text; with --config every field as well")
    train.set_defaults(command=_train, name="train", parser=train)

    embedding = commands.add_parser(
        "embed",
        allow_abbrev=False,
        help="compute the embeddings of a locked image tower once, to train on them",
        usage="lit-het embed --tower RUN|FILE --output DIR [--data SHARDS ...] [--dtype TYPE] [--crops K] [--part I/N] "
        "[--any.field.of-the-configuration VALUE ...]",
        description="Embeds every picture of the shards, as the tower sees it in evaluation, into one file a shard. "
        "Then --data.embeddings DIR lets 'lit-het train' read them in place of pictures, and --embeddings DIR "
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
        help="store K random views of each picture, by `crop` and `augmentations` of the configuration (none)",
    )
    embedding.add_argument(
        "--part", default="0/1", metavar="I/N", help="this host's part of the shards, where N hosts run the command"
    )
    embedding.add_argument(
        "-h", "--help", action="store_true", help="this text; with --tower and --output every field as well"
    )
    embedding.set_defaults(command=_embed, name="embed", parser=embedding)

    zero_shot = commands.add_parser(
        "zero-shot",
        allow_abbrev=False,
        help="evaluate a trained run zero-shot",
        description="Scores every picture of each data set against the names of its classes.",
    )
    zero_shot.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="directory of a run")
    zero_shot.add_argument(
        "--data",
        nargs="+",
        required=True,
        metavar="[NAME=]DIR",
        help="folders with classnames.txt and shards (or shards in a folder test/ below), as clip_benchmark lays out",
    )
    zero_shot.add_argument("--candidates", type=Path, help="a file of names to choose from, in place of the classes")
    zero_shot.add_argument(
        "--pretrained", type=Path, metavar="PATH", help="where the locked tower's run or file is now"
    )
    zero_shot.add_argument("--batch-size", type=int, default=256, help="default: %(default)s")
    zero_shot.add_argument(
        "--samples",
        type=int,
        default=0,
        metavar="S",
        help="average probabilities over S noise samples of each picture; 0 (the default) leaves the noise out",
    )
    zero_shot.add_argument(
        "--embeddings", metavar="DIR", help="what lit-het embed made of the pictures of all these sets"
    )
    zero_shot.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    zero_shot.set_defaults(command=_zero_shot, name="zero-shot")

    _add_data(commands.add_parser("data", allow_abbrev=False, help="make shards, index them and check them"))

    importing = commands.add_parser(
        "import",
        allow_abbrev=False,
        help="make a run of weights that another program wrote",
        description="Reads big_vision files (x.npz, or x.npz:img for a part), V-MoE and e3 checkpoints (the path of "
        "x.index) and Hugging Face folders (SigLIP, SigLIP 2, ViT, DINOv2, CLIP's image tower), here or at an address "
        "such as hf://owner/model. Sizes are inferred.",
    )
    importing.add_argument("--from", dest="source", required=True, metavar="SOURCE", help="path or address")
    importing.add_argument("--to", type=Path, required=True, metavar="DIR", help="the run directory to write")
    for flag, text in (
        ("--image-size", "resample positions for pictures of this size"),
        ("--patch-size", "resample the first layer for patches of this size"),
        ("--text-length", "keep the positions of so many tokens"),
        ("--num-selected", "K, experts of a token, which no file says (2)"),
        ("--num-members", "M, to make an efficient ensemble of a V-MoE"),
    ):
        importing.add_argument(flag, type=int, metavar="N", help=text)
    importing.add_argument(
        "--text-pooling",
        choices=("last", "first", "mean", "max"),
        help="of a text tower in a big_vision file, which does not tell (last)",
    )
    importing.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="the text tower's, if none lies beside the weights: SentencePiece model, tokenizer.json or vocab.txt",
    )
    importing.set_defaults(command=_import, name="import")

    exporting = commands.add_parser(
        "export",
        allow_abbrev=False,
        help="write a trained model for other programs",
        description="A model with a ViT and a text Transformer becomes a SiglipModel folder of Hugging Face "
        "transformers, or a file with big_vision's names; a HET-XL head is left without its noise. A classifier with a "
        "deterministic head becomes a file with big_vision's names.",
    )
    exporting.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="directory of a run")
    exporting.add_argument("--to", choices=("huggingface", "npz"), required=True)
    exporting.add_argument("--output", type=Path, required=True, help="folder, or file, to write")
    exporting.add_argument(
        "--pretrained", type=Path, metavar="PATH", help="where the locked tower's run or file is now"
    )
    exporting.set_defaults(command=_export, name="export")
    return parser


def _add_data(data: argparse.ArgumentParser) -> None:
    actions = data.add_subparsers(required=True, metavar="ACTION")
    index = actions.add_parser(
        "index",
        allow_abbrev=False,
        help="scan shards once, so that training begins at once",
        description="Reads the headers of shards that have no index yet, or have changed, and keeps what lies where "
        "beside them (or in the user's cache, where their folder cannot be written to). May be stopped and run again.",
    )
    check = actions.add_parser(
        "check",
        allow_abbrev=False,
        help="read every sample as training would, and list what is broken",
        description="Decodes every picture and caption, and counts what cannot be used by shard and cause. The exit "
        "code is 1 if there is anything.",
    )
    for parser in (index, check):
        parser.add_argument(
            "shards", nargs="+", metavar="SHARDS", help="tar files, folders, globs, patterns {000..099}.tar, lists .txt"
        )
        parser.add_argument(
            "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="default: %(default)s"
        )
        parser.add_argument(
            "--checksum",
            action="store_true",
            help="also hash every shard: index keeps SHARD.sha256, check compares",
        )
    check.add_argument(
        "--captions", metavar="MEMBER", help="that samples must have, such as txt or json/caption; none by default"
    )
    check.add_argument(
        "--labels",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="samples must have a .cls that indexes the names in FILE, classnames.txt beside the shards by default",
    )
    check.add_argument("--output", type=Path, metavar="FILE", help="also write the table as JSON")
    index.set_defaults(command=_index, name="data index")
    check.set_defaults(command=_check, name="data check")
    prepare = actions.add_parser(
        "prepare",
        allow_abbrev=False,
        help="write shards of a published data set, with class names and prompts",
        description="Writes SOURCE as webdataset shards in clip_benchmark's layout: OUTPUT/SPLIT/0.tar and so on, "
        "OUTPUT/classnames.txt, OUTPUT/zeroshot_classification_templates.txt. Pictures stay the bytes that they are. "
        "The same command goes on where it was stopped.",
    )
    kinds = prepare.add_subparsers(required=True, metavar="KIND", dest="kind")

    def add(kind: str, help: str, source: str) -> argparse.ArgumentParser:
        parser = kinds.add_parser(kind, allow_abbrev=False, help=help, description=f"Writes shards of {help}.")
        parser.add_argument("source", type=Path, metavar="SOURCE", help=source)
        parser.add_argument("output", type=Path, metavar="OUTPUT", help="the folder to write")
        parser.add_argument(
            "--split", metavar="NAME", help="this split alone; where SOURCE names none, what to call it (train)"
        )
        parser.add_argument(
            "--samples-per-shard", type=int, default=10_000, metavar="N", help="at most; default: %(default)s"
        )
        parser.add_argument(
            "--workers",
            type=int,
            default=min(os.cpu_count() or 1, 8),
            metavar="N",
            help="shards at a time; default: %(default)s",
        )
        parser.add_argument("--check-pictures", action="store_true", help="decode every picture, not its header alone")
        parser.add_argument("--skip-broken", action="store_true", help="leave out pictures that cannot be read")
        parser.set_defaults(command=_prepare, name=f"data prepare {kind}")
        return parser

    def add_any_order(kind: str, help: str, source: str) -> argparse.ArgumentParser:
        parser = add(kind, help, source)
        parser.add_argument("--shuffle", action="store_true", help="in random order, for readers that cannot shuffle")
        return parser

    add_any_order(
        "cifar10", "CIFAR-10, as its site offers it for Python", "cifar-10-python.tar.gz, or the folder in it"
    )
    cifar100 = add_any_order(
        "cifar100", "CIFAR-100, as its site offers it for Python", "cifar-100-python.tar.gz, or the folder in it"
    )
    cifar100.add_argument("--labels", choices=("fine", "coarse"), default="fine", help="100 classes (default) or 20")
    add_any_order(
        "pets",
        "Oxford-IIIT Pet, pictures and annotations",
        "folder with images.tar.gz and annotations.tar.gz, or what is in them",
    )
    imagenet = add_any_order(
        "imagenet",
        "ImageNet (ILSVRC 2012), tars or folders",
        "ILSVRC2012_img_val.tar, ILSVRC2012_img_train.tar, a folder with them, or folders such as n01440764/",
    )
    imagenet.add_argument(
        "--devkit", type=Path, metavar="PATH", help="ILSVRC2012_devkit_t12.tar.gz, if not beside SOURCE"
    )
    add_any_order(
        "folder",
        "a folder of pictures for each class, or pictures with captions",
        "a sub folder for each class, or pictures with captions in .txt",
    )
    add_any_order("img2dataset", "the webdataset tars that img2dataset writes", "folder with tars of .jpg and .txt")
    parquet = add(
        "parquet",
        "parquet files with the bytes of pictures, as Hugging Face stores them",
        "file, or folder with files such as test-00000-of-00001.parquet",
    )
    for column, help in (
        ("image", "bytes of pictures (the only such column)"),
        ("label", "classes, as text or numbers with names in the schema (the only column of these)"),
        ("caption", "captions"),
    ):
        parquet.add_argument(f"--{column}", metavar="COLUMN", help=help)


def _quickstart(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.cli.quickstart import quickstart

    quickstart(options.run_dir, options.seed)


def _train(options: argparse.Namespace, flags: list[str]) -> None:
    if options.config is None:
        if not options.help:
            raise UserError("train needs --config FILE, e.g. --config configs/quickstart_upstream.py")
        options.parser.print_help()
        return
    from lit_het.cli.train import parse_config, train

    if options.help:
        options.parser.print_help()
        flags = [*flags, "--help"]
    train(parse_config(options.config, flags), resume=options.resume)


def _embed(options: argparse.Namespace, flags: list[str]) -> None:
    if options.help:
        options.parser.print_help()
        flags = [*flags, "--help"]
    if options.tower is None or options.output is None:
        if options.help:
            return
        raise UserError("embed needs --tower RUN|FILE and --output DIR, see lit-het embed --help")
    from lit_het.cli.embed import EmbedOptions, embed

    try:
        number, count = map(int, options.part.split("/"))
    except ValueError as error:
        raise UserError(f"--part {options.part} is no part; two hosts take 0/2 and 1/2") from error
    how = EmbedOptions(tuple(options.data), options.dtype, options.crops, (number, count))
    embed(options.tower, options.output, how, flags)


def _zero_shot(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.cli.zero_shot import zero_shot

    zero_shot(
        options.checkpoint,
        options.data,
        candidates=options.candidates,
        pretrained=options.pretrained,
        batch_size=options.batch_size,
        num_samples=options.samples,
        embeddings=options.embeddings,
        output=options.output,
    )


def _index(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.cli.data import index

    index(options.shards, options.workers, checksum=options.checksum)


def _check(options: argparse.Namespace, _: list[str]) -> None:
    from data_pipelines.labels import ClassIndex
    from lit_het.cli.data import check

    check(
        options.shards,
        options.workers,
        options.captions,
        labels=None if options.labels is None else ClassIndex(options.labels if options.labels.name else None),
        checksum=options.checksum,
        output=options.output,
    )


def _prepare(options: argparse.Namespace, _: list[str]) -> None:
    from data_pipelines.prepare.parquet import Columns
    from data_pipelines.prepare.writer import WriteOptions
    from lit_het.cli.data import SourceOptions, prepare

    given = vars(options)

    def of(config: type[Any]) -> dict[str, Any]:
        """The fields of a configuration that are flags of this kind of source."""
        return {field.name: given[field.name] for field in dataclasses.fields(config) if field.name in given}

    of_source = SourceOptions(**of(SourceOptions), columns=Columns(**of(Columns)))
    prepare(options.kind, options.source, options.output, of_source, WriteOptions(**of(WriteOptions)))


def _import(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.cli.convert import ImportOptions, import_weights

    fields = (field.name for field in dataclasses.fields(ImportOptions))
    import_weights(options.source, options.to, ImportOptions(**{field: getattr(options, field) for field in fields}))


def _export(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.cli.convert import export

    export(options.checkpoint, options.to, options.output, options.pretrained)


if __name__ == "__main__":
    sys.exit(main())
