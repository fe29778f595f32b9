"""Folders of pictures: a sub folder for each class, or captions beside the pictures."""

from collections.abc import Sequence
from pathlib import Path

from data_pipelines.prepare.archives import Files, open_files
from data_pipelines.prepare.dataset import DataSet, Split, chosen, pictures_in, split_of_files
from lit_het.errors import UserError

SPLIT_NAMES = frozenset({"train", "training", "val", "valid", "validation", "test"})
"""Sub folders that are all called so are splits, not classes."""


def read_folder(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens a folder, or a tar of one: ``cat/1.jpg``, or ``train/cat/1.jpg``, or ``1.jpg`` with ``1.txt``.

    Args:
        source: the folder or tar.
        scratch: a folder with room for what is gzipped.
        split: which of its splits to read; where the source names none, what to call it (``train``).

    Raises:
        UserError: there are no pictures, classes and captions are mixed, or a class is empty.
    """
    files = open_files(source, scratch)
    pictures = pictures_in(files)
    if not pictures:
        raise UserError(f"{source}: holds no pictures; name a folder with a sub folder of pictures for each class")
    if {name.partition("/")[0] for name in pictures} <= SPLIT_NAMES:
        names = sorted({name.partition("/")[0] for name in pictures})
        roots = {name: f"{name}/" for name in chosen(names, split, str(source))}
    else:
        roots = {split or "train": ""}
    parts = {name: [picture for picture in pictures if picture.startswith(root)] for name, root in roots.items()}
    flat = {name for name, root in roots.items() if any("/" not in p.removeprefix(root) for p in parts[name])}
    if flat:
        return DataSet({name: _captioned(files, parts[name], root) for name, root in roots.items()})
    return _classified(files, parts, roots)


def _captioned(files: Files, pictures: Sequence[str], root: str) -> Split:
    stray = next((name for name in pictures if "/" in name.removeprefix(root)), None)
    if stray is not None:
        raise UserError(f"{files.where(stray)}: lies in a sub folder, other pictures do not; put all into classes")
    captions = {name: f"{name.rpartition('.')[0]}.txt" for name in pictures}
    kept = [name for name in pictures if files.sizes.get(captions[name], 0)]
    if not kept:
        raise UserError(
            f"{files.path}: its pictures have neither sub folders, which would be classes, nor captions in .txt files"
        )
    left_out = {"without caption": len(pictures) - len(kept)}
    return split_of_files(files, kept, captions=[captions[name] for name in kept], left_out=left_out)


def _classified(files: Files, parts: dict[str, list[str]], roots: dict[str, str]) -> DataSet:
    folders = {
        folder.removeprefix(root).partition("/")[0]
        for root in roots.values()
        for folder in (*files.folders, *(name.rpartition("/")[0] for name in files.sizes))
        if folder.startswith(root) and folder != root.rstrip("/")
    } - {""}
    classes = {name: label for label, name in enumerate(sorted(folders))}
    labels = {
        split: [classes[name.removeprefix(roots[split]).partition("/")[0]] for name in names]
        for split, names in parts.items()
    }
    used = set().union(*labels.values())
    empty = [name for name, label in classes.items() if label not in used]
    if empty:
        raise UserError(f"{files.path}: class {empty[0]} has no pictures; add some or remove its folder")
    names = tuple(name.replace("_", " ") for name in classes)
    return DataSet({split: split_of_files(files, parts[split], labels[split]) for split in parts}, names)
