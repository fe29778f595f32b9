"""Folders of images: one subfolder per class, or captions beside the images."""

import collections
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from lit_het.console import message
from lit_het.data_pipelines.prepare.archives import Files, open_files
from lit_het.data_pipelines.prepare.dataset import (
    SPLIT_NAMES,
    DataSet,
    Split,
    files_beside,
    images_in,
    look_like_splits,
    only_split,
    refuse_alike,
    select_splits,
    split_of_files,
    tell_classes,
    tell_unused,
)
from lit_het.errors import UserError, pluralize


def read_folder(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens a folder, or a tar of one: ``cat/1.jpg``, or ``train/cat/1.jpg``, or ``1.jpg`` with ``1.txt``.

    All of it may lie in a further folder. Messages tell what was recognised.

    Args:
        source: the folder or tar.
        scratch: a folder with space for a decompressed archive.
        split: which split to read; if the source has no splits, the name of the only one.
    """
    files = open_files(source, scratch)
    images = images_in(files)
    if not images:
        raise UserError(f"{source}: holds no images; name a folder with one subfolder of images per class")
    captions = files_beside(files, images, ".txt")
    tell_unused(files, {*images, *captions.values()})
    folders = files.folders | {name[:end] for name in files.sizes for end, letter in enumerate(name) if letter == "/"}
    top = _only_folder(folders, images)
    roots = _splits(files, images, captions, top)
    # Of all splits together: the only class of one split is a folder as well.
    inner = _only_folder(_below(roots.values(), folders), _below(roots.values(), images)) if roots else ""
    roots = {name: f"{root}{inner}" for name, root in roots.items()} or {split or only_split(source): top}
    wanted = select_splits(roots, split, str(source))
    parts = {name: [image for image in images if image.startswith(root)] for name, root in roots.items()}
    nested = [image for name, part in parts.items() for image in part if "/" in image.removeprefix(roots[name])]
    if not captions and len(nested) == len(images):
        return _classified(files, folders, parts, roots, wanted)
    if nested and len(captions) < len(images):
        # With captions a folder is not a class, and without them it is one.
        stray = next(image for image in (images if captions else nested) if image not in captions)
        what = "has no .txt beside it" if captions else "lies in a subfolder"
        raise UserError(
            f"{files.where(stray)}: {what}, unlike other images; give each image a caption, or put each into the "
            "folder of its class"
        )
    return DataSet({name: _captioned(files, parts[name], captions, name) for name in wanted})


def _only_folder(folders: Collection[str], images: Collection[str]) -> str:
    """Returns ``pets/`` if all classes or splits lie in ``pets``, as in an archive of this folder."""
    holding, root = {image[: image.rfind("/") + 1] for image in images}, ""
    while root not in holding:
        inside = {folder.removeprefix(root).partition("/")[0] for folder in folders if folder.startswith(root)}
        below = f"{root}{min(inside)}/"
        # An only folder that holds images itself is a class.
        if len(inside) > 1 or below in holding or min(inside).lower() in SPLIT_NAMES:
            break
        root = below
    return root


def _below(roots: Iterable[str], names: Collection[str]) -> set[str]:
    """Returns the names that lie in one of the roots, relative to it."""
    return {name.removeprefix(root) for root in roots for name in names if name.startswith(root)}


def _splits(files: Files, images: Sequence[str], captions: Collection[str], top: str) -> dict[str, str]:
    """Returns the folder of each split, by its name in lower case; none if folders are not splits."""
    first = {image: image.removeprefix(top).partition("/")[0] for image in images}
    named = sorted(name for name in {*first.values()} if name.lower() in SPLIT_NAMES)
    others = [image for image, name in first.items() if name not in named]
    unclear = {name for image, name in first.items() if name != image.removeprefix(top)}
    if not named and look_like_splits(unclear):
        raise UserError(
            f"{files.where(top + min(unclear))}: may be a split; name it train, val or test, or give one folder as the "
            "source"
        )
    # A class may be called "test" too: its images lie in no further folder, like those of the others.
    if others and not captions and all(image.removeprefix(top).count("/") == 1 for image in images):
        return {}
    splits = {name.lower(): f"{top}{name}/" for name in named}
    if named and others:
        raise UserError(
            f"{files.where(others[0])}: lies in no split, others in {', '.join(named)}; name its folder train, val or "
            "test, or move it out of the source"
        )
    if len(splits) < len(named):
        raise UserError(f"{files.path}: {', '.join(named)} differ only in case; put each split into one folder")
    return splits


def _captioned(files: Files, images: Sequence[str], captions: Mapping[str, str], split: str) -> Split:
    captioned = [name for name in images if files.sizes.get(captions.get(name, ""), 0)]
    if not captioned:
        raise UserError(
            f"{files.path}: its images have neither class folders nor captions in .txt files; add one of them"
        )
    message(f"{split}: {pluralize(len(captioned), 'image')} with captions from .txt files; folders are not classes")
    left_out = {"without caption": len(images) - len(captioned)}
    return split_of_files(files, captioned, captions=[captions[name] for name in captioned], left_out=left_out)


def _classified(
    files: Files,
    folders: Collection[str],
    parts: Mapping[str, Sequence[str]],
    roots: Mapping[str, str],
    wanted: Sequence[str],
) -> DataSet:
    holding = collections.defaultdict[str, set[str]](set)
    for name, root in roots.items():
        for image in parts[name]:
            folder = image.removeprefix(root).rpartition("/")[0]
            holding[f"{root}{folder.partition('/')[0]}"].add(f"{root}{folder}")
    for folder, inner in holding.items():
        if len(inner) > 1:
            raise UserError(
                f"{files.where(folder)}: its images lie in several folders, such as {min(inner - {folder})}, which may "
                "be classes too; give one folder of classes as the source, or put the images of each class into one "
                "folder"
            )
    # Classes of all splits together, so that a label means the same in each of them.
    names = sorted({folder.partition("/")[0] for folder in _below(roots.values(), folders)})
    refuse_alike(names, str(files.path))
    classes = {name: label for label, name in enumerate(names)}
    labels = {
        name: [classes[image.removeprefix(root).partition("/")[0]] for image in parts[name]]
        for name, root in roots.items()
    }
    counts = {name: np.bincount(of_split, minlength=len(names)) for name, of_split in labels.items()}
    if empty := np.flatnonzero(sum(counts.values()) == 0).tolist():
        raise UserError(f"{files.path}: class {names[empty[0]]} has no images; add some or remove its folder")
    for name, found in counts.items():
        others = sum(counts.values()) - found
        if len(names) > 1 and np.count_nonzero(found) == 1 and not others[found.argmax()]:
            raise UserError(
                f"{files.where(roots[name] + names[found.argmax()])}: holds all images of {name}, and is a class of no "
                "other split; put them into the folders of their classes, or remove the split"
            )
    for name in wanted:
        tell_classes(name, names, counts[name])
    splits = {name: split_of_files(files, parts[name], labels[name]) for name in wanted}
    return DataSet(splits, tuple(name.replace("_", " ") for name in names))
