"""Folders of images: one subfolder per class, or captions beside the images."""

from collections.abc import Sequence
from pathlib import Path

from lit_het.data_pipelines.prepare.archives import Files, open_files
from lit_het.data_pipelines.prepare.dataset import (
    DataSet,
    Split,
    files_beside,
    images_in,
    select_splits,
    split_of_files,
)
from lit_het.errors import UserError

SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test"})
"""If all subfolders have such names, they are splits, not classes."""


def read_folder(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens a folder, or a tar of one: ``cat/1.jpg``, or ``train/cat/1.jpg``, or ``1.jpg`` with ``1.txt``.

    Args:
        source: the folder or tar.
        scratch: a folder with space for a decompressed archive.
        split: which split to read; if the source has no splits, the name of the only one (``train``).

    Raises:
        UserError: there are no images, classes and captions are mixed, or a class is empty.
    """
    files = open_files(source, scratch)
    images = images_in(files)
    if not images:
        raise UserError(f"{source}: holds no images; name a folder with one subfolder of images per class")
    # Only if all folders have such names: a class may be called "test" too.
    if {name.partition("/")[0] for name in images} <= SPLIT_NAMES:
        names = sorted({name.partition("/")[0] for name in images})
        roots = {name: f"{name}/" for name in select_splits(names, split, str(source))}
    else:
        roots = {split or "train": ""}
    parts = {name: [image for image in images if image.startswith(root)] for name, root in roots.items()}
    flat = {name for name, root in roots.items() if any("/" not in p.removeprefix(root) for p in parts[name])}
    if flat:
        return DataSet({name: _captioned(files, parts[name], root) for name, root in roots.items()})
    return _classified(files, parts, roots)


def _captioned(files: Files, images: Sequence[str], root: str) -> Split:
    stray = next((name for name in images if "/" in name.removeprefix(root)), None)
    if stray is not None:
        raise UserError(
            f"{files.where(stray)}: lies in a subfolder, other images do not; put each into the folder of its class"
        )
    captions = files_beside(files, images, ".txt")
    captioned = [name for name in images if files.sizes.get(captions.get(name, ""), 0)]
    if not captioned:
        raise UserError(
            f"{files.path}: its images have neither class folders nor captions in .txt files; add one of them"
        )
    left_out = {"without caption": len(images) - len(captioned)}
    return split_of_files(files, captioned, captions=[captions[name] for name in captioned], left_out=left_out)


def _classified(files: Files, parts: dict[str, list[str]], roots: dict[str, str]) -> DataSet:
    folders = {
        folder.removeprefix(root).partition("/")[0]
        for root in roots.values()
        for folder in (*files.folders, *(name.rpartition("/")[0] for name in files.sizes))
        if folder.startswith(root) and folder != root.rstrip("/")
    } - {""}
    # Classes of all splits together, so that a label means the same in each of them.
    classes = {name: label for label, name in enumerate(sorted(folders))}
    labels = {
        split: [classes[name.removeprefix(roots[split]).partition("/")[0]] for name in names]
        for split, names in parts.items()
    }
    used = set().union(*labels.values())
    empty = [name for name, label in classes.items() if label not in used]
    if empty:
        raise UserError(f"{files.path}: class {empty[0]} has no images; add some or remove its folder")
    names = tuple(name.replace("_", " ") for name in classes)
    return DataSet({split: split_of_files(files, parts[split], labels[split]) for split in parts}, names)
