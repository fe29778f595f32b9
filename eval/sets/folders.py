"""Sets that are named by their folders, and which of them have shards in common."""

import dataclasses
from collections.abc import Sequence

from lit_het.data_pipelines.shards import storage, urls
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.data_pipelines.shards.writing import common_shards, expand
from lit_het.errors import UserError
from lit_het.eval.sets import ImageSet
from lit_het.paths import named_folder


def overlaps(data: ImageSet, shards: Sequence[str], portion: Portion) -> bool:
    """Returns whether a set may have images in common with a portion of shards, by their paths, not contents."""
    return bool(common_shards(_expanded([data.shards]), data.portion, _expanded(shards), portion))


def _expanded(shards: Sequence[str]) -> list[str]:
    try:
        return expand(shards)
    except UserError:  # it is reported where the shards are opened
        return list(shards)


def parse_set(argument: str, like: ImageSet) -> ImageSet:
    """Parses ``NAME=FOLDER`` or ``FOLDER`` into a set; all other fields are those of ``like``.

    The folder contains the class names (if the set is labelled), and either shards or a folder ``like.split`` of
    shards. Or it contains shards, and its parent the class names. Without NAME, the set has the name of the
    folder, or of its parent if the folder is ``like.split``.
    """
    name, folder = named_folder(argument)
    parent, _, last = folder.rpartition("/")
    directory, split = folder, "." if _has_shards(folder) else like.split
    if like.labelled and not storage.exists(f"{folder}/{like.names_file}"):
        directory, split = parent or ".", last
        if not storage.exists(f"{directory}/{like.names_file}"):
            raise UserError(
                f"no {like.names_file} in {folder} or its parent; write one with one class name per line, "
                "or take the captions of images as classes, with lit-het zero-shot --captions txt"
            )
    if not name:
        name = parent.rpartition("/")[2] if last == like.split and parent.rpartition("/")[2] else last
    return dataclasses.replace(like, name=name, directory=directory, split=split)


def unlabelled(folder: str, name: str | None = None) -> ImageSet:
    """Returns a folder or pattern of shards as a set whose class names and labels are not read, called by its folder.

    Args:
        folder: of shards, or a pattern.
        name: another name.
    """
    return ImageSet(name or folder, folder, split=urls.absolute(folder), labelled=False)


def _has_shards(folder: str) -> bool:
    try:
        return bool(expand(folder))
    except UserError:
        return False
