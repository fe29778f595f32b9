"""ImageNet-C, CIFAR-10-C and CIFAR-100-C as their authors released them (Hendrycks & Dietterich 2019).

Splits are called ``corrupted/<corruption>/<severity>``, so that ``lit-het shift`` finds them in the folder of the clean
set.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32, UInt8

from lit_het.console import Bar
from lit_het.data_pipelines.images.corruptions import BENCHMARK, EXTRA
from lit_het.data_pipelines.prepare.archives import Files, open_files, warn_unless_published
from lit_het.data_pipelines.prepare.dataset import (
    DataSet,
    Sample,
    Split,
    fingerprint,
    images_in,
    select_splits,
    split_of_files,
)
from lit_het.data_pipelines.prepare.imagenet import TEMPLATES, class_label
from lit_het.data_pipelines.prepare.images import encode_png
from lit_het.data_pipelines.texts.openai_clip import imagenet_names
from lit_het.errors import UserError
from lit_het.untrusted import Malformed, parse_npy

SEVERITIES = ("1", "2", "3", "4", "5")

_PUBLISHED_IMAGENET, _PUBLISHED_CIFAR = 50_000, 10_000
_CIFAR_MD5 = {10: "56bf5dcef84df0e2308c6dcbcbbd8499", 100: "11f0ed0f1191edbf9fa23466ae6021d3"}
_CIFAR_SHAPE = (32, 32, 3)

_logger = logging.getLogger(__name__)


def read_imagenet_c(source: Path, scratch: Path, split: str | None = None, *, extra: bool = False) -> DataSet:
    """Opens ``noise.tar``, ``blur.tar``, ``weather.tar``, ``digital.tar`` and ``extra.tar``, or what lies in them.

    Images are in the order of their numbers, as in the prepared validation set.

    Args:
        source: a folder with some of these archives, one of them, or a folder with
            ``<corruption>/<severity>/<WNID>/*.JPEG``, at any depth.
        scratch: a folder with space for decompressed archives.
        split: one corruption; None means all of `BENCHMARK` that exist.
        extra: also those of `EXTRA`.
    """
    archives = sorted(source.glob("*.tar")) if source.is_dir() else []
    found: dict[str, dict[str, tuple[Files, list[str]]]] = {}
    # An archive holds up to a million images.
    with Bar("reading", len(archives) or 1, "archives") as bar:
        for path in archives or [source]:
            _add_images(found, open_files(path, scratch))
            bar.advance(1)
    splits = {
        f"corrupted/{corruption}/{severity}": _imagenet_split(files, images)
        for corruption in _chosen(found, split, source, extra=extra)
        for severity, (files, images) in sorted(found[corruption].items())
    }
    return DataSet(splits, imagenet_names(), TEMPLATES)


def read_cifar_c(
    source: Path, scratch: Path, num_classes: int, split: str | None = None, *, extra: bool = False
) -> DataSet:
    """Opens ``CIFAR-10-C.tar`` or ``CIFAR-100-C.tar``, or the folder in it, whose arrays are mapped into memory.

    Args:
        source: the archive or folder, with ``labels.npy`` and an array for each corruption: all images of the first
            severity, in the order of CIFAR's test set, then those of the second.
        scratch: a folder with space for a decompressed archive.
        num_classes: 10 or 100.
        split: one corruption; None means all of `BENCHMARK` that exist.
        extra: also those of `EXTRA`.
    """
    files = open_files(source, scratch)
    if source.is_file():
        warn_unless_published(source, _CIFAR_MD5[num_classes])
    names = {Path(name).stem: name for name in files.sizes if name.endswith(".npy")}
    if "labels" not in names:
        raise UserError(f"{source}: holds no labels.npy; name the released archive, or the folder in it")
    labels = _labels(files, names["labels"], num_classes)
    count, splits = len(labels) // len(SEVERITIES), {}
    for corruption in _chosen(names, split, source, extra=extra):
        pixels, where = _pixels(files, names[corruption], len(labels)), files.where(names[corruption])
        for number, severity in enumerate(SEVERITIES):
            rows = slice(number * count, (number + 1) * count)
            splits[f"corrupted/{corruption}/{severity}"] = _cifar_split(pixels[rows], labels[rows], where)
    return DataSet(splits)


def _add_images(found: dict[str, dict[str, tuple[Files, list[str]]]], files: Files) -> None:
    """Adds the names of the images in an archive by corruption and severity."""
    for name in images_in(files):
        corruption, severity, *_ = ("", "", *name.split("/"))[-4:]
        if corruption not in (*BENCHMARK, *EXTRA) or severity not in SEVERITIES:
            raise UserError(
                f"{files.where(name)}: does not lie in <corruption>/<severity>/<WNID>; name the released archives"
            )
        holder, images = found.setdefault(corruption, {}).setdefault(severity, (files, []))
        if holder is not files:
            raise UserError(f"{files.path}: holds {corruption}, as {holder.path} does; remove one of them")
        images.append(name)


def _chosen(found: Collection[str], split: str | None, source: Path, *, extra: bool) -> list[str]:
    """Returns the corruptions to read, in the order of papers; warns if some of the benchmark's are missing."""
    wanted = (*BENCHMARK, *EXTRA) if extra or split else BENCHMARK
    available = [corruption for corruption in wanted if corruption in found]
    if not available:
        raise UserError(f"{source}: holds none of the released corruptions; name the released archives")
    missing = [corruption for corruption in BENCHMARK if corruption not in found]
    if missing and split is None:
        _logger.warning("%s: lacks %s; published means are over all 15 corruptions", source, ", ".join(missing))
    return select_splits(available, split, str(source))


def _imagenet_split(files: Files, images: Sequence[str]) -> Split:
    # By number, as in the prepared validation set: a sample has the key of its clean image.
    images = sorted(images, key=lambda name: name.rpartition("/")[2])
    labels = [class_label(name.split("/")[-2], files.where(name)) for name in images]
    return split_of_files(files, images, labels, published=_PUBLISHED_IMAGENET)


def _labels(files: Files, name: str, num_classes: int) -> Int32[np.ndarray, " n"]:
    """Returns the classes of the images of all severities."""
    labels, where = _array(files, name), files.where(name)
    if labels.dtype.kind not in "iu" or labels.ndim != 1 or not len(labels) or len(labels) % len(SEVERITIES):
        raise UserError(
            f"{where}: has the shape {labels.shape} and the type {labels.dtype}, "
            "not a whole number for each image of five severities; download it again"
        )
    if not ((labels >= 0) & (labels < num_classes)).all():
        raise UserError(f"{where}: has labels beyond {num_classes} classes; use the archive of CIFAR-{num_classes}-C")
    return labels.astype(np.int32)


def _pixels(files: Files, name: str, num_images: int) -> UInt8[np.ndarray, "n 32 32 3"]:
    """Returns the images of all severities of a corruption."""
    pixels, shape = _array(files, name), (num_images, *_CIFAR_SHAPE)
    if pixels.shape != shape or pixels.dtype != np.uint8:
        raise UserError(
            f"{files.where(name)}: has the shape {pixels.shape} and the type {pixels.dtype}, not {shape} and uint8; "
            "download it again"
        )
    return pixels


def _cifar_split(pixels: UInt8[np.ndarray, "n 32 32 3"], labels: Int32[np.ndarray, " n"], where: str) -> Split:
    def read(numbers: Sequence[int]) -> Iterator[Sample]:
        for number in numbers:
            yield Sample(encode_png(pixels[number]), f"{where}: row {number} of its severity")

    # Every 97th image and all labels: reading gigabytes to compare them would take as long as writing them.
    parts = (pixels[::97].tobytes(), labels.tobytes())
    return Split(len(pixels), read, fingerprint(parts), labels, _PUBLISHED_CIFAR)


def _array(files: Files, name: str) -> np.ndarray:
    try:
        return parse_npy(files.map(name))
    except Malformed as error:
        raise UserError(f"{files.where(name)}: cannot be read ({error}); download it again") from error
