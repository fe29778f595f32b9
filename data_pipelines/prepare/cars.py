"""Stanford Cars (Krause et al. 2013) from its images and MATLAB's lists, which were published in two forms.

The first is ``car_ims.tgz`` with ``cars_annos.mat``, the second ``cars_train.tgz`` and ``cars_test.tgz`` with
``car_devkit.tgz`` and ``cars_test_annos_withlabels.mat``. Images, classes and splits are the same.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_het.data_pipelines.prepare.archives import Files, open_published, root_of, warn_unless_published
from lit_het.data_pipelines.prepare.dataset import DataSet, Split, images_in, select_splits, split_of_files
from lit_het.data_pipelines.prepare.matlab import load_variables
from lit_het.errors import UserError
from lit_het.untrusted import Malformed

TEMPLATES = (
    "a photo of a {c}.",
    "a photo of a {c}, a car.",
    "a {c} on the road.",
    "a picture of the {c}.",
)

_PUBLISHED = {"train": 8_144, "test": 8_041}
_MD5 = {
    "car_ims.tgz": "d5c8f0aa497503f355e17dc7886c3f14",
    "cars_annos.mat": "b407c6086d669747186bd1d764ff9dbc",
    "cars_train.tgz": "065e5b463ae28d29e77c1b4b166cfe61",
    "cars_test.tgz": "4ce7ebf6a94d07f1952d94dd34c4d501",
    "car_devkit.tgz": "c3b158d763b6e2245038c8ad08e45376",
    "cars_test_annos_withlabels.mat": "b0a2b23655a3edd16d84508592a98d10",
}


def read_cars(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens a folder with the archives and lists of one of the two forms, or with the folders unpacked from them.

    Args:
        source: the folder.
        scratch: a folder with space for the decompressed archives.
        split: ``train`` or ``test``; None means both.
    """
    splits = select_splits(_PUBLISHED, split, "Stanford Cars")
    if (source / "cars_annos.mat").is_file():
        return _in_one(source, scratch, splits)
    if (source / "cars_test_annos_withlabels.mat").is_file() or splits == ["train"]:
        return _in_parts(source, scratch, splits)
    raise UserError(
        f"{source}: holds neither cars_annos.mat, which belongs to car_ims.tgz, nor cars_test_annos_withlabels.mat, "
        "which belongs to cars_test.tgz; put the official files there"
    )


def _in_one(source: Path, scratch: Path, splits: Sequence[str]) -> DataSet:
    path = source / "cars_annos.mat"
    names, annotations = _variables(path.read_bytes(), str(path), "class_names", "annotations")
    rows = _rows(annotations, str(path), "relative_im_path", "test")
    warn_unless_published(path, _MD5[path.name])
    images = _images(source, scratch, "car_ims")
    parts = {"train": [row for row in rows if not row[2]], "test": [row for row in rows if row[2]]}
    return _named({part: _split(images, parts[part], part) for part in splits}, names, str(path))


def _in_parts(source: Path, scratch: Path, splits: Sequence[str]) -> DataSet:
    images = {part: _images(source, scratch, f"cars_{part}") for part in splits}
    devkit = open_published(source, scratch, "car_devkit.tgz", _MD5["car_devkit.tgz"], "devkit")
    root = root_of(devkit, "cars_meta.mat", "car_devkit.tgz")
    found = {}
    for part in splits:
        if part == "train":
            name = root_of(devkit, "cars_train_annos.mat", "car_devkit.tgz") + "cars_train_annos.mat"
            content, origin = devkit.read(name), devkit.where(name)
        else:
            path = source / "cars_test_annos_withlabels.mat"
            warn_unless_published(path, _MD5[path.name])
            content, origin = path.read_bytes(), str(path)
        (annotations,) = _variables(content, origin, "annotations")
        found[part] = _split(images[part], _rows(annotations, origin, "fname"), part)
    meta = f"{root}cars_meta.mat"
    (names,) = _variables(devkit.read(meta), devkit.where(meta), "class_names")
    return _named(found, names, devkit.where(meta))


def _images(source: Path, scratch: Path, folder: str) -> Files:
    archive = f"{folder}.tgz"
    if not (source / folder).is_dir() and not (source / archive).is_file():
        raise UserError(f"{source}: holds neither {archive} nor a folder {folder}; put the official archive there")
    return open_published(source, scratch, archive, _MD5[archive], folder)


def _variables(content: bytes, origin: str, *names: str) -> list[Any]:
    try:
        return [*load_variables(content, *names).values()]
    except Malformed as error:
        raise UserError(f"{origin}: holds no readable {' and '.join(names)} ({error}); download it again") from error


def _rows(annotations: Any, origin: str, name: str, *flags: str) -> list[tuple[Any, ...]]:
    """Returns the image, the class from 1 and the flags of every annotation."""
    try:
        return [*zip(annotations[name], annotations["class"], *(annotations[flag] for flag in flags), strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{origin}: its annotations have no {name} and class; use the official file") from error


def _split(files: Files, rows: Sequence[tuple[Any, ...]], split: str) -> Split:
    # By the file's name alone: folders in an archive, in a list and after unpacking differ.
    paths = {path.rpartition("/")[2]: path for path in images_in(files)}
    labels: dict[str, int] = {}
    for image, number, *_ in rows:
        base = str(image).rpartition("/")[2]
        if base not in paths or type(number) is not int or number < 1 or paths[base] in labels:
            raise UserError(f"{files.path}: {base:.100} of the list has no image or class, or is listed twice")
        labels[paths[base]] = number - 1
    return split_of_files(files, [*labels], [*labels.values()], published=_PUBLISHED[split])


def _named(splits: dict[str, Split], names: Any, origin: str) -> DataSet:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{origin}: its class_names are not text; download it again")
    largest = max(int(split.labels.max(initial=-1)) for split in splits.values() if split.labels is not None)
    if largest >= len(names):
        raise UserError(f"{origin}: names {len(names)} classes, and the annotations have {largest + 1}; download again")
    return DataSet(splits, tuple(names), TEMPLATES)
