"""Caltech-101 (Fei-Fei et al. 2004) from its archive, split as in TensorFlow Datasets.

The data set has no official splits. Those of TensorFlow Datasets 3.0, which the papers use, draw 30 training images of
each class by NumPy's generator with the seed 1234, one class after another, in the order in which the file system lists
folders and files. That order is not fixed; here both are sorted. `BACKGROUND_Google`, images of no class, is the 102nd
class there and here. Its file ``tmp``, which is not an image, takes part in the draw.
"""

from pathlib import Path

import numpy as np

from lit_het.data_pipelines.prepare.archives import Files, open_published
from lit_het.data_pipelines.prepare.dataset import DataSet, select_splits, split_of_files
from lit_het.errors import UserError

NUM_CLASSES = 102

_ARCHIVE = "101_ObjectCategories.tar.gz"
_MD5 = "b224c7392d521a49829488ab0f1120d9"
_PUBLISHED = {"train": 3_060, "test": 6_084}
_SHOTS, _SEED = 30, 1234
_BACKGROUND, _NO_IMAGE = "BACKGROUND_Google", "tmp"


def read_caltech101(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens ``101_ObjectCategories.tar.gz`` or the folder in it; samples are in the order of classes and files.

    Args:
        source: the archive, the folder, or a folder that holds one of them.
        scratch: a folder with space for the decompressed archive.
        split: ``train`` or ``test``; None means both.
    """
    splits = select_splits(_PUBLISHED, split, "Caltech-101")
    files = open_published(source, scratch, _ARCHIVE, _MD5, "101_ObjectCategories")
    folders = _folders(files)
    if len(folders) != NUM_CLASSES or _BACKGROUND not in folders:
        raise UserError(
            f"{files.path}: holds {len(folders)} folders of images, not {NUM_CLASSES} with {_BACKGROUND}; give "
            f"{_ARCHIVE} (in caltech-101.zip), or the folder unpacked from it"
        )
    # The order of labels ignores case, that of the draw does not.
    classes = sorted(folders, key=str.lower)
    training = _training(folders)
    parts: dict[str, dict[str, int]] = {"train": {}, "test": {}}
    for label, folder in enumerate(classes):
        for base, name in folders[folder].items():
            parts["train" if base in training[folder] else "test"][name] = label
    return DataSet(
        {
            part: split_of_files(files, [*parts[part]], [*parts[part].values()], published=_PUBLISHED[part])
            for part in splits
        },
        tuple(folder.lower().replace("_", " ") for folder in classes),
    )


def _folders(files: Files) -> dict[str, dict[str, str]]:
    """Returns the images of every class: their names in the archive by the names of the files."""
    folders: dict[str, dict[str, str]] = {}
    for name in files.sizes:
        if name.endswith(".jpg") and "/" in name:
            folders.setdefault(name.split("/")[-2], {})[name.rpartition("/")[2]] = name
    return folders


def _training(folders: dict[str, dict[str, str]]) -> dict[str, set[str]]:
    """Draws the training images of every class."""
    generator = np.random.RandomState(_SEED)
    drawn = {}
    for folder in sorted(folders):
        names = sorted({*folders[folder], _NO_IMAGE} if folder == _BACKGROUND else folders[folder])
        if len(names) < _SHOTS:
            raise UserError(f"class {folder} has {len(names)} images, fewer than {_SHOTS}; download Caltech-101 again")
        drawn[folder] = {str(name) for name in generator.choice(names, _SHOTS, replace=False)}
    return drawn
