"""The validation images of Places365 (Zhou et al. 2017) from the official archives."""

import re
from pathlib import Path

from lit_het.data_pipelines.prepare.archives import Files, open_published, root_of
from lit_het.data_pipelines.prepare.dataset import DataSet, images_in, select_splits, split_of_files
from lit_het.errors import UserError

TEMPLATES = (
    "a photo of a {c}.",
    "a picture of the {c}.",
    "inside or in front of a {c}.",
    "a view of a {c}.",
)

_IMAGES, _IMAGES_MD5 = "val_256.tar", "e27b17d8d44f4af9a78502beb927f808"
_LISTS, _LISTS_MD5 = "filelist_places365-standard.tar", "35a0585fee1fa656440f3ab298f8479c"
_PUBLISHED = 36_500
_NUMBER = re.compile(r"[0-9]{1,9}")


def read_places365(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens a folder with ``val_256.tar`` and ``filelist_places365-standard.tar``, or with their content.

    Args:
        source: the folder.
        scratch: unused, because the archives are not compressed.
        split: ``test``, which is the official validation set; None means the same.
    """
    (name,) = select_splits(["test"], split, "Places365")
    if not source.is_dir():
        raise UserError(f"{source}: is not a folder; give the folder with {_IMAGES} and {_LISTS}")
    lists = open_published(source, scratch, _LISTS, _LISTS_MD5, "filelist_places365-standard")
    classes = _pairs(lists, "categories_places365.txt")
    if sorted(classes.values()) != [*range(len(classes))]:
        raise UserError(f"{lists.path}: the classes of categories_places365.txt are not numbered from 0")
    files = open_published(source, scratch, _IMAGES, _IMAGES_MD5, "val_256")
    paths = {path.rpartition("/")[2]: path for path in images_in(files)}
    labels = _pairs(lists, "places365_val.txt")
    for image, label in labels.items():
        if image not in paths or label >= len(classes):
            raise UserError(
                f"{files.path}: {image:.100}, which places365_val.txt names, has no file or class; put the official "
                f"{_IMAGES} there"
            )
    images = [paths[image] for image in labels]
    names = tuple(_readable(path) for path in sorted(classes, key=classes.__getitem__))
    found = split_of_files(files, images, [*labels.values()], published=_PUBLISHED)
    return DataSet({name: found}, names, TEMPLATES)


def _pairs(lists: Files, base: str) -> dict[str, int]:
    """Returns the number of every name in a list."""
    name = root_of(lists, base, _LISTS) + base
    pairs: dict[str, int] = {}
    for place, line in enumerate(lists.read(name).decode("utf-8", "replace").splitlines(), 1):
        first, _, number = line.strip().rpartition(" ")
        if not first or not _NUMBER.fullmatch(number) or first in pairs:
            raise UserError(f"{lists.where(name)} line {place}: {line:.100} is not a new name with its number")
        pairs[first] = int(number)
    return pairs


def _readable(path: str) -> str:
    """Returns ``apartment building outdoor`` for ``/a/apartment_building/outdoor``."""
    return path[3:].replace("_", " ").replace("/", " ")
