"""Caltech-UCSD Birds-200-2011 (Wah et al. 2011) from its archive."""

import re
from pathlib import Path

from lit_het.data_pipelines.prepare.archives import Files, open_published, root_of
from lit_het.data_pipelines.prepare.dataset import DataSet, Split, select_splits, split_of_files
from lit_het.errors import UserError

TEMPLATES = (
    "a photo of a {c}, a kind of bird.",
    "a {c} in the wild.",
    "a close-up of a {c}, a bird.",
    "a picture of the {c}.",
)

_ARCHIVE = "CUB_200_2011.tgz"
_MD5 = "97eceeb196236b17998738112f37df78"
_PUBLISHED = {"train": 5_994, "test": 5_794}
_NUMBER = re.compile(r"[0-9]{1,9}")
_LISTS = ("images.txt", "image_class_labels.txt", "train_test_split.txt")


def read_birds(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens ``CUB_200_2011.tgz`` or the folder in it; samples are in the order of the image numbers.

    Args:
        source: the archive, the folder, or a folder that holds one of them.
        scratch: a folder with space for the decompressed archive.
        split: ``train`` or ``test``; None means both.
    """
    splits = select_splits(_PUBLISHED, split, "CUB-200-2011")
    files = open_published(source, scratch, _ARCHIVE, _MD5, "CUB_200_2011")
    root = root_of(files, "images.txt", _ARCHIVE)
    classes = _column(files, root, "classes.txt")
    if sorted(classes) != [*range(1, len(classes) + 1)]:
        raise UserError(f"{files.where(root + 'classes.txt')}: its classes are not numbered from 1; download it again")
    paths, labels, training = (_column(files, root, name) for name in _LISTS)
    if not paths.keys() == labels.keys() == training.keys():
        raise UserError(f"{files.path}: {', '.join(_LISTS)} do not list the same images; download it again")
    images: dict[str, dict[str, int]] = {"train": {}, "test": {}}
    for number in sorted(paths):
        name = f"{root}images/{paths[number]}"
        label = int(labels[number]) if _NUMBER.fullmatch(labels[number]) else 0
        if name not in files.sizes or label not in classes or training[number] not in ("0", "1"):
            raise UserError(f"{files.path}: image {number}, {paths[number]:.200}, has no file, class or split")
        images["train" if training[number] == "1" else "test"][name] = label - 1
    names = tuple(_readable(classes[number]) for number in sorted(classes))
    return DataSet({part: _split(files, images[part], part) for part in splits}, names, TEMPLATES)


def _split(files: Files, labels: dict[str, int], split: str) -> Split:
    return split_of_files(files, [*labels], [*labels.values()], published=_PUBLISHED[split])


def _column(files: Files, root: str, base: str) -> dict[int, str]:
    """Returns the second column of a list by the numbers in the first."""
    name = root + base
    if name not in files.sizes:
        raise UserError(f"{files.path}: holds no {base}; download it again")
    column = {}
    for place, line in enumerate(files.read(name).decode("utf-8", "replace").splitlines(), 1):
        number, _, value = line.strip().partition(" ")
        if not value or " " in value or not _NUMBER.fullmatch(number) or int(number) in column:
            raise UserError(f"{files.where(name)} line {place}: {line:.100} is not a new number with its value")
        column[int(number)] = value
    return column


def _readable(folder: str) -> str:
    """Returns ``Black footed Albatross`` for ``001.Black_footed_Albatross``."""
    return folder.partition(".")[2].replace("_", " ")
