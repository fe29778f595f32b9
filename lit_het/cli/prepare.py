"""The arguments of ``lit-het data prepare``; a new data set is a reader and a `_Source` in `SOURCES`."""

import argparse
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_het.cli import prepare_imagenet21k, prepare_listed
from lit_het.errors import MissingImage, UserError
from lit_het.paths import require_shards, require_source

if TYPE_CHECKING:
    from lit_het.data_pipelines.prepare.dataset import DataSet

# NumPy and the other heavy packages are imported only when an action runs, so that --help is fast.

SHARDS_STAY = "finished shards are saved; the same command continues"


class _Source(NamedTuple):
    """A published data set.

    Attributes:
        help: what it is.
        source: what the user gives.
        read: opens it.
        flags: further arguments of its parser.
        shuffles: whether samples can be read in any order.
    """

    help: str
    source: str
    read: "Callable[[argparse.Namespace], DataSet]"
    flags: tuple[tuple[str, dict[str, Any]], ...] = ()
    shuffles: bool = True


def _cifar10(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.cifar import read_cifar10

    return read_cifar10(options.source, options.output, options.split)


def _cifar100(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.cifar import read_cifar100

    return read_cifar100(options.source, options.output, options.split, options.labels)


def _pets(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.pets import read_pets

    return read_pets(options.source, options.output, options.split)


def _flowers(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.flowers import read_flowers

    return read_flowers(options.source, options.output, options.split)


def _birds(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.birds import read_birds

    return read_birds(options.source, options.output, options.split)


def _caltech101(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.caltech101 import read_caltech101

    return read_caltech101(options.source, options.output, options.split)


def _cars(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.cars import read_cars

    return read_cars(options.source, options.output, options.split)


def _colorectal(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.tiles import read_colorectal

    return read_colorectal(options.source, options.output, options.split)


def _dtd(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.dtd import read_dtd

    return read_dtd(options.source, options.output, options.split)


def _places365(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.places365 import read_places365

    return read_places365(options.source, options.output, options.split)


def _svhn(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.svhn import read_svhn

    return read_svhn(options.source, options.split)


def _uc_merced(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.tiles import read_uc_merced

    return read_uc_merced(options.source, options.output, options.split)


def _imagenet(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.imagenet import read_imagenet

    return read_imagenet(options.source, options.output, options.split, options.devkit)


def _imagenet_set(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.imagenet_sets import read_imagenet_set

    return read_imagenet_set(options.kind, options.source, options.output, options.split)


def _objectnet(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.objectnet import read_objectnet

    return read_objectnet(options.source, options.split)


def _imagenet_c(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.released_corruptions import read_imagenet_c

    return read_imagenet_c(options.source, options.output, options.split, extra=options.extra)


def _cifar_c(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.released_corruptions import read_cifar_c

    num_classes = {"cifar10-c": 10, "cifar100-c": 100}[options.kind]
    return read_cifar_c(options.source, options.output, num_classes, options.split, extra=options.extra)


def _cifar10h(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.cifar import read_cifar10h

    return read_cifar10h(options.source, options.output, options.split)


def _folder(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.folder import read_folder

    return read_folder(options.source, options.output, options.split)


def _img2dataset(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.img2dataset import read_img2dataset

    return read_img2dataset(options.source, options.split)


def _parquet(options: argparse.Namespace) -> "DataSet":
    from lit_het.data_pipelines.prepare.parquet import Columns, read_parquet

    return read_parquet(options.source, options.split, Columns(options.image, options.label, options.caption))


_EXTRA = (
    "--extra",
    {
        "action": "store_true",
        "help": "also speckle_noise, gaussian_blur, spatter and saturate, which published means leave out",
    },
)

SOURCES = {
    "cifar10": _Source(
        "CIFAR-10, the Python version from its site", "cifar-10-python.tar.gz, or the unpacked folder", _cifar10
    ),
    "cifar100": _Source(
        "CIFAR-100, the Python version from its site",
        "cifar-100-python.tar.gz, or the unpacked folder",
        _cifar100,
        (("--labels", {"choices": ("fine", "coarse"), "default": "fine", "help": "100 classes (default) or 20"}),),
    ),
    "pets": _Source(
        "Oxford-IIIT Pet, images and annotations",
        "folder with images.tar.gz and annotations.tar.gz, or with their content",
        _pets,
    ),
    "flowers": _Source(
        "Oxford Flowers-102, images, labels and splits",
        "folder with 102flowers.tgz (or jpg/ from it), imagelabels.mat and setid.mat",
        _flowers,
    ),
    "birds": _Source(
        "Caltech-UCSD Birds-200-2011 (CUB)", "CUB_200_2011.tgz, or the unpacked folder CUB_200_2011", _birds
    ),
    "caltech101": _Source(
        "Caltech-101, 30 training images per class",
        "101_ObjectCategories.tar.gz (in caltech-101.zip), or the unpacked folder 101_ObjectCategories",
        _caltech101,
    ),
    "cars": _Source(
        "Stanford Cars",
        "folder with car_ims.tgz and cars_annos.mat; or with cars_train.tgz, cars_test.tgz, car_devkit.tgz and "
        "cars_test_annos_withlabels.mat; archives may be unpacked",
        _cars,
    ),
    "colorectal": _Source(
        "colorectal histology, tiles of 8 tissues",
        "Kather_texture_2016_image_tiles_5000.zip, or the unpacked folder",
        _colorectal,
    ),
    "dtd": _Source(
        "the Describable Textures Dataset, first partition", "dtd-r1.0.1.tar.gz, or the unpacked folder dtd", _dtd
    ),
    "places365": _Source(
        "Places365, the validation images of 256 pixels",
        "folder with val_256.tar and filelist_places365-standard.tar, or with their content",
        _places365,
    ),
    "svhn": _Source(
        "Street View House Numbers, cropped digits", "folder with train_32x32.mat and test_32x32.mat", _svhn
    ),
    "uc_merced": _Source(
        "UC Merced Land Use, aerial photos", "UCMerced_LandUse.zip, or the unpacked folder UCMerced_LandUse", _uc_merced
    ),
    "imagenet": _Source(
        "ImageNet (ILSVRC 2012), tars or folders",
        "ILSVRC2012_img_val.tar, ILSVRC2012_img_train.tar, a folder with them, or folders such as n01440764/",
        _imagenet,
        (
            (
                "--devkit",
                {"type": Path, "metavar": "PATH", "help": "ILSVRC2012_devkit_t12.tar.gz, if not beside SOURCE"},
            ),
        ),
    ),
    "imagenet21k": _Source(*prepare_imagenet21k.TEXTS, prepare_imagenet21k.read, prepare_imagenet21k.FLAGS),
    "imagenet-v2": _Source(
        "ImageNet-V2, one of its three variants",
        "imagenetv2-matched-frequency.tar.gz, imagenetv2-threshold0.7.tar.gz, imagenetv2-top-images.tar.gz, or the "
        "folder in one of them",
        _imagenet_set,
    ),
    "imagenet-a": _Source("ImageNet-A, 200 classes", "imagenet-a.tar, or the folder in it", _imagenet_set),
    "imagenet-r": _Source("ImageNet-R, 200 classes", "imagenet-r.tar, or the folder in it", _imagenet_set),
    "imagenet-sketch": _Source(
        "ImageNet-Sketch", "ImageNet-Sketch.zip, or the folder in it, with folders such as n01440764/", _imagenet_set
    ),
    "objectnet": _Source(
        "ObjectNet's 113 classes among ImageNet's, without the red border of images",
        "the folder in objectnet-1.0.zip, with images/ and mappings/",
        _objectnet,
    ),
    "imagenet-c": _Source(
        "ImageNet-C as released, for lit-het shift; OUTPUT is the prepared ImageNet, --split one corruption",
        "folder with noise.tar, blur.tar, weather.tar and digital.tar, or with their content",
        _imagenet_c,
        (_EXTRA,),
    ),
    "cifar10-c": _Source(
        "CIFAR-10-C as released, for lit-het shift; OUTPUT is the prepared CIFAR-10, --split one corruption",
        "CIFAR-10-C.tar, or the folder in it",
        _cifar_c,
        (_EXTRA,),
    ),
    "cifar100-c": _Source(
        "CIFAR-100-C as released, for lit-het shift; OUTPUT is the prepared CIFAR-100, --split one corruption",
        "CIFAR-100-C.tar, or the folder in it",
        _cifar_c,
        (_EXTRA,),
    ),
    "cifar10h": _Source(
        "CIFAR-10H, the test set of CIFAR-10 with distributions of human answers",
        "folder with cifar10h-probs.npy and cifar-10-python.tar.gz",
        _cifar10h,
    ),
    "folder": _Source(
        "a folder of images for each class, or images with captions",
        "one subfolder per class, or images with captions in .txt",
        _folder,
    ),
    **{
        kind: _Source(*texts, prepare_listed.read, prepare_listed.flags_of(kind))
        for kind, texts in prepare_listed.KINDS.items()
    },
    "img2dataset": _Source(
        "the webdataset tars that img2dataset writes", "folder with tars of .jpg and .txt", _img2dataset
    ),
    "parquet": _Source(
        "parquet files with the bytes of images, as Hugging Face stores them",
        "file, or folder with files such as test-00000-of-00001.parquet",
        _parquet,
        (
            ("--image", {"metavar": "COLUMN", "help": "bytes of images (the only such column)"}),
            (
                "--label",
                {
                    "metavar": "COLUMN",
                    "help": "classes, as text or numbers with names in the schema (the only column of these)",
                },
            ),
            ("--caption", {"metavar": "COLUMN", "help": "captions"}),
        ),
        shuffles=False,
    ),
}


def positive(text: str) -> int:
    """Reads a whole number of at least 1.

    Raises:
        ArgumentTypeError: the text is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _split_name(text: str) -> str:
    """Reads the name of a split, which becomes that of a folder in OUTPUT.

    Raises:
        ArgumentTypeError: it would be a path, or a hidden folder.
    """
    if not re.fullmatch(r"\w[^/]{0,99}", text) or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a folder, such as test")
    return text


def add_to(actions: Any) -> None:
    """Adds the action to those of ``lit-het data``."""
    prepare = actions.add_parser(
        "prepare",
        allow_abbrev=False,
        help="write shards of a published data set, with class names and prompts",
        description="Writes SOURCE as webdataset shards in clip_benchmark's layout: OUTPUT/SPLIT/0.tar and so on, "
        "OUTPUT/classnames.txt, OUTPUT/zeroshot_classification_templates.txt. Images are copied byte by byte. "
        "The same command continues an interrupted one.",
    )
    kinds = prepare.add_subparsers(required=True, metavar="KIND", dest="kind")
    for kind, source in SOURCES.items():
        _add_source(kinds, kind, source)


def _add_source(kinds: Any, kind: str, source: _Source) -> None:
    parser = kinds.add_parser(
        kind, allow_abbrev=False, help=source.help, description=f"Writes shards of {source.help}."
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help=source.source)
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the folder to write")
    parser.add_argument(
        "--split",
        type=_split_name,
        metavar="NAME",
        help="only this split; the name of the split where SOURCE names none (train)",
    )
    parser.add_argument(
        "--samples-per-shard", type=positive, default=10_000, metavar="N", help="at most; default: %(default)s"
    )
    parser.add_argument(
        "--workers",
        type=positive,
        default=min(os.cpu_count() or 1, 8),
        metavar="N",
        help="shards at a time; default: %(default)s",
    )
    parser.add_argument("--check-images", action="store_true", help="decode every image, not only its header")
    parser.add_argument("--skip-broken", action="store_true", help="leave out images that cannot be read")
    if source.shuffles:
        parser.add_argument(
            "--shuffle",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="write in random order (default), or in that of the source, which is faster from slow disks",
        )
    for flag, settings in source.flags:
        parser.add_argument(flag, **settings)
    parser.set_defaults(command=_prepare, name=f"data prepare {kind}", if_stopped=SHARDS_STAY)
    if prepare_listed.SKIP_MISSING in source.flags:
        way_out = "set its folder with --images, or leave out images that are gone with --skip-missing"
        parser.set_defaults(hints={MissingImage: way_out})


def _prepare(options: argparse.Namespace, _: list[str]) -> None:
    source, output = options.source, options.output
    if options.kind == "img2dataset":
        require_shards(str(source))
    else:
        require_source(source)
    if options.kind == "folder" and output.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{output} lies in {source} and would become a class; choose another output")
    from lit_het.apps.data import prepare
    from lit_het.data_pipelines.prepare.writer import WriteOptions

    fields = ("samples_per_shard", "workers", "shuffle", "check_images", "skip_broken")
    of_writer = WriteOptions(**{name: value for name, value in vars(options).items() if name in fields})
    prepare(lambda: SOURCES[options.kind].read(options), source, output, of_writer)
