"""ImageNet-V2, -A, -R and -Sketch: test sets of ImageNet's classes, with a folder for each class."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_het.data_pipelines.prepare.archives import open_files, warn_unless_published
from lit_het.data_pipelines.prepare.dataset import DataSet, images_in, select_splits, split_of_files
from lit_het.data_pipelines.prepare.imagenet import NUM_CLASSES, TEMPLATES, class_label
from lit_het.data_pipelines.texts.openai_clip import imagenet_names
from lit_het.errors import UserError


class _Published(NamedTuple):
    """A set as it was published.

    Attributes:
        num_images: of the set.
        num_classes: of ImageNet's 1,000.
        md5: of its archive; None where the authors publish no sum.
        are_numbers: whether folders are called by the labels, 0 to 999, in place of WNIDs.
    """

    num_images: int
    num_classes: int = NUM_CLASSES
    md5: str | None = None
    are_numbers: bool = False


IMAGENET_SETS: Mapping[str, _Published] = {
    "imagenet-v2": _Published(10_000, are_numbers=True),
    "imagenet-a": _Published(7_500, 200, "c3e55429088dc681f30d81f4726b6595"),
    "imagenet-r": _Published(30_000, 200, "a61312130a589d0ca1a8fca1f2bd3337"),
    "imagenet-sketch": _Published(50_889),
}
"""By kind. Recht et al. 2019; Hendrycks et al. 2021 (CVPR and ICCV); Wang et al. 2019."""


def read_imagenet_set(kind: str, source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens the official archive of a set, or the folder unpacked from it.

    A subset of the classes has their names, and all of ImageNet's as candidates.

    Args:
        kind: one of `IMAGENET_SETS`.
        source: ``imagenetv2-matched-frequency.tar.gz``, another variant, ``imagenet-a.tar``, ``imagenet-r.tar``, or a
            folder with the folders of classes.
        scratch: a folder with space for the decompressed archive.
        split: ``test``, the only one, or None.
    """
    published = IMAGENET_SETS[kind]
    select_splits(["test"], split, kind)
    files = open_files(source, scratch)
    if published.md5 is not None and source.is_file():
        warn_unless_published(source, published.md5)
    images = images_in(files)
    if not images:
        raise UserError(f"{source}: holds no images; name the official archive, or the folder unpacked from it")
    label_of = _number if published.are_numbers else class_label
    labels = [label_of(name.split("/")[-2] if "/" in name else "", files.where(name)) for name in images]
    present, ranks = np.unique(labels, return_inverse=True)
    names = imagenet_names()
    if published.num_classes == NUM_CLASSES:
        return DataSet(
            {"test": split_of_files(files, images, labels, published=published.num_images)}, names, TEMPLATES
        )
    # Fewer candidates would be an easier task.
    if len(present) != published.num_classes:
        raise UserError(
            f"{source}: has images of {len(present)} classes, {kind} of {published.num_classes}; download it again"
        )
    test = split_of_files(files, images, ranks.tolist(), published=published.num_images)
    groups = tuple((label,) for label in present.tolist())
    return DataSet({"test": test}, tuple(names[label] for (label,) in groups), TEMPLATES, names, groups)


def _number(folder: str, origin: str) -> int:
    # A rank among the folders would be wrong: as text, 10 lies before 2.
    if not folder.isdecimal() or len(folder) > 3:
        raise UserError(f"{origin}: lies in no folder from 0 to 999; name an official archive of ImageNet-V2")
    return int(folder)
