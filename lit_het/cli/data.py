"""The arguments of ``lit-het data`` and its actions."""

import argparse
import dataclasses
import os
from pathlib import Path
from typing import Any

from lit_het.paths import require_shards, require_source

# NumPy and the other heavy packages are imported only when an action runs, so that --help is fast.

_SHARDS_STAY = "finished shards are saved; the same command continues"


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    data = commands.add_parser("data", allow_abbrev=False, help="make shards, index them and check them")
    actions = data.add_subparsers(required=True, metavar="ACTION")
    index = actions.add_parser(
        "index",
        allow_abbrev=False,
        help="index shards, so that training starts at once",
        description="Reads the headers of new and changed shards and saves an index beside each shard, or in the "
        "user's cache if the folder is read-only. Can be interrupted and run again.",
    )
    check = actions.add_parser(
        "check",
        allow_abbrev=False,
        help="read every sample as training does and list the broken ones",
        description="Decodes every image and caption and counts unusable samples by shard and cause. The exit code is "
        "1 if there are any.",
    )
    for parser in (index, check):
        parser.add_argument(
            "shards", nargs="+", metavar="SHARDS", help="tar files, folders, globs, patterns {000..099}.tar, lists .txt"
        )
        parser.add_argument(
            "--workers", type=_positive, default=os.cpu_count() or 1, metavar="N", help="default: %(default)s"
        )
        parser.add_argument(
            "--checksum",
            action="store_true",
            help="also hash every shard: index writes SHARD.sha256, check compares with it",
        )
    check.add_argument(
        "--captions",
        metavar="MEMBER",
        help="member that every sample must have, such as txt or json/caption; default: none",
    )
    check.add_argument(
        "--labels",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="every sample must have a .cls that indexes the names in FILE; default: classnames.txt beside the shards",
    )
    check.add_argument("--output", type=Path, metavar="FILE", help="also write the table as JSON")
    index.set_defaults(command=_index, name="data index", if_stopped=_SHARDS_STAY)
    check.set_defaults(command=_check, name="data check")
    _add_corrupt(actions)
    prepare = actions.add_parser(
        "prepare",
        allow_abbrev=False,
        help="write shards of a published data set, with class names and prompts",
        description="Writes SOURCE as webdataset shards in clip_benchmark's layout: OUTPUT/SPLIT/0.tar and so on, "
        "OUTPUT/classnames.txt, OUTPUT/zeroshot_classification_templates.txt. Images are copied byte by byte. "
        "The same command continues an interrupted one.",
    )
    kinds = prepare.add_subparsers(required=True, metavar="KIND", dest="kind")

    def add(kind: str, help: str, source: str) -> argparse.ArgumentParser:
        parser = kinds.add_parser(kind, allow_abbrev=False, help=help, description=f"Writes shards of {help}.")
        parser.add_argument("source", type=Path, metavar="SOURCE", help=source)
        parser.add_argument("output", type=Path, metavar="OUTPUT", help="the folder to write")
        parser.add_argument(
            "--split", metavar="NAME", help="only this split; the name of the split where SOURCE names none (train)"
        )
        parser.add_argument(
            "--samples-per-shard", type=_positive, default=10_000, metavar="N", help="at most; default: %(default)s"
        )
        parser.add_argument(
            "--workers",
            type=_positive,
            default=min(os.cpu_count() or 1, 8),
            metavar="N",
            help="shards at a time; default: %(default)s",
        )
        parser.add_argument("--check-images", action="store_true", help="decode every image, not only its header")
        parser.add_argument("--skip-broken", action="store_true", help="leave out images that cannot be read")
        parser.set_defaults(command=_prepare, name=f"data prepare {kind}", if_stopped=_SHARDS_STAY)
        return parser

    def add_any_order(kind: str, help: str, source: str) -> argparse.ArgumentParser:
        parser = add(kind, help, source)
        parser.add_argument(
            "--shuffle", action="store_true", help="write in random order, for readers that cannot shuffle"
        )
        return parser

    add_any_order(
        "cifar10", "CIFAR-10, the Python version from its site", "cifar-10-python.tar.gz, or the unpacked folder"
    )
    cifar100 = add_any_order(
        "cifar100", "CIFAR-100, the Python version from its site", "cifar-100-python.tar.gz, or the unpacked folder"
    )
    cifar100.add_argument("--labels", choices=("fine", "coarse"), default="fine", help="100 classes (default) or 20")
    add_any_order(
        "pets",
        "Oxford-IIIT Pet, images and annotations",
        "folder with images.tar.gz and annotations.tar.gz, or with their content",
    )
    add_any_order(
        "flowers",
        "Oxford Flowers-102, images, labels and splits",
        "folder with 102flowers.tgz (or jpg/ from it), imagelabels.mat and setid.mat",
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
        "a folder of images for each class, or images with captions",
        "one subfolder per class, or images with captions in .txt",
    )
    captions = add_any_order(
        "captions",
        "images with several captions each: COCO and Flickr, Karpathy's splits or COCO's own",
        "dataset_coco.json, dataset_flickr30k.json, dataset_flickr8k.json, or captions_val2017.json and the like",
    )
    captions.add_argument(
        "--images", type=Path, metavar="PATH", help="folder of the images; default: beside SOURCE, or below it"
    )
    add_any_order("img2dataset", "the webdataset tars that img2dataset writes", "folder with tars of .jpg and .txt")
    parquet = add(
        "parquet",
        "parquet files with the bytes of images, as Hugging Face stores them",
        "file, or folder with files such as test-00000-of-00001.parquet",
    )
    for column, help in (
        ("image", "bytes of images (the only such column)"),
        ("label", "classes, as text or numbers with names in the schema (the only column of these)"),
        ("caption", "captions"),
    ):
        parquet.add_argument(f"--{column}", metavar="COLUMN", help=help)


def _add_corrupt(actions: Any) -> None:
    corrupt = actions.add_parser(
        "corrupt",
        allow_abbrev=False,
        help="write a data set with common corruptions, from noise to fog, in five severities",
        description="Writes OUTPUT/CORRUPTION/SEVERITY/0.tar and so on with the keys and labels of SHARDS, class names "
        "and prompts beside them: lit-het zero-shot --data OUTPUT/fog/3 reads them. The same command "
        "continues an interrupted one.",
    )
    corrupt.add_argument("shards", metavar="SHARDS", help="folder, glob, pattern {000..099}.tar or list .txt")
    corrupt.add_argument("output", type=Path, metavar="OUTPUT", help="the folder to write")
    corrupt.add_argument(
        "--corruptions", nargs="+", default=(), metavar="NAME", help="such as fog and gaussian_noise; all by default"
    )
    corrupt.add_argument(
        "--severities",
        nargs="+",
        type=int,
        choices=range(1, 6),
        default=range(1, 6),
        metavar="1-5",
        help="default: all",
    )
    corrupt.add_argument("--seed", type=int, default=0, help="seed of the random corruptions; default: %(default)s")
    corrupt.add_argument(
        "--samples-per-shard", type=_positive, default=1_000, metavar="N", help="at most; default: %(default)s"
    )
    corrupt.add_argument(
        "--workers", type=_positive, default=min(os.cpu_count() or 1, 8), metavar="N", help="default: %(default)s"
    )
    corrupt.set_defaults(command=_corrupt, name="data corrupt", if_stopped=_SHARDS_STAY)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _index(options: argparse.Namespace, _: list[str]) -> None:
    for pattern in options.shards:
        require_shards(pattern)
    from lit_het.apps.data import index

    index(options.shards, options.workers, checksum=options.checksum)


def _check(options: argparse.Namespace, _: list[str]) -> None:
    for pattern in options.shards:
        require_shards(pattern)
    from lit_het.apps.data import check
    from lit_het.data_pipelines.labels import ClassIndex

    check(
        options.shards,
        options.workers,
        options.captions,
        labels=None if options.labels is None else ClassIndex(str(options.labels) if options.labels.name else None),
        checksum=options.checksum,
        output=options.output,
    )


def _corrupt(options: argparse.Namespace, _: list[str]) -> None:
    require_shards(options.shards)
    from lit_het.apps.data import corrupt
    from lit_het.data_pipelines.prepare.writer import WriteOptions

    of_writer = WriteOptions(options.samples_per_shard, options.workers)
    corrupt(options.shards, options.output, options.corruptions, options.severities, options.seed, of_writer)


def _prepare(options: argparse.Namespace, _: list[str]) -> None:
    if options.kind == "img2dataset":
        require_shards(str(options.source))
    else:
        require_source(options.source)
    from lit_het.apps.data import SourceOptions, prepare
    from lit_het.data_pipelines.prepare.parquet import Columns
    from lit_het.data_pipelines.prepare.writer import WriteOptions

    given = vars(options)

    def of(config: type[Any]) -> dict[str, Any]:
        """The fields of a configuration that are flags of this kind of source."""
        return {field.name: given[field.name] for field in dataclasses.fields(config) if field.name in given}

    of_source = SourceOptions(**of(SourceOptions), columns=Columns(**of(Columns)))
    prepare(options.kind, options.source, options.output, of_source, WriteOptions(**of(WriteOptions)))
