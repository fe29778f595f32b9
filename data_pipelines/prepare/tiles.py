"""Two sets of .tif tiles in folders of classes: colorectal histology (Kather et al. 2016), UC Merced (Yang 2010).

Neither has official splits. The papers slice the only split of TensorFlow Datasets: `train[:2000]` and `train[2000:]`
of colorectal histology, `train[:1000]` and `train[1000:]` of UC Merced. Its order is that of MD5 hashes of the split's
name and the image's key, so that the slices here are the same.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lit_het.data_pipelines.prepare.archives import Files, open_published
from lit_het.data_pipelines.prepare.dataset import DataSet, Split, images_in, select_splits, split_of_files
from lit_het.errors import UserError


class _Tiles(NamedTuple):
    """A set of tiles.

    Attributes:
        title: its name, for messages.
        archive, md5, folder: as in `open_published`.
        classes: class names by folder.
        num_train: the images before this one, in the order of TensorFlow Datasets, are for training.
        num_images: of the published set.
        with_class: whether keys of images begin with the class, ``tumor/a.tif`` and not ``a.tif``.
        templates: prompts.
    """

    title: str
    archive: str
    md5: str
    folder: str
    classes: Mapping[str, str]
    num_train: int
    num_images: int
    with_class: bool
    templates: tuple[str, ...]


_COLORECTAL = _Tiles(
    title="Colorectal histology",
    archive="Kather_texture_2016_image_tiles_5000.zip",
    md5="0ddbebfc56344752028fda72602aaade",
    folder="Kather_texture_2016_image_tiles_5000",
    classes={
        "01_TUMOR": "tumour epithelium",
        "02_STROMA": "simple stroma",
        "03_COMPLEX": "complex stroma",
        "04_LYMPHO": "immune cell conglomerates",
        "05_DEBRIS": "debris and mucus",
        "06_MUCOSA": "mucosal glands",
        "07_ADIPOSE": "adipose tissue",
        "08_EMPTY": "background",
    },
    num_train=2_000,
    num_images=5_000,
    with_class=True,
    templates=("a histological image of {c}.", "{c} under the microscope.", "a stained slide of {c}."),
)

_UC_MERCED = _Tiles(
    title="UC Merced",
    archive="UCMerced_LandUse.zip",
    md5="5b7ec56793786b6dc8a908e8854ac0e4",
    folder="UCMerced_LandUse",
    classes={
        name.replace(" ", ""): name
        for name in (
            *("agricultural", "airplane", "baseball diamond", "beach", "buildings", "chaparral", "dense residential"),
            *("forest", "freeway", "golf course", "harbor", "intersection", "medium residential", "mobile home park"),
            *("overpass", "parking lot", "river", "runway", "sparse residential", "storage tanks", "tennis court"),
        )
    },
    num_train=1_000,
    num_images=2_100,
    with_class=False,
    templates=("a satellite photo of {c}.", "an aerial view of {c}.", "{c}, seen from above."),
)


def read_colorectal(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens ``Kather_texture_2016_image_tiles_5000.zip`` or the folder in it.

    Args:
        source: the archive, the folder, or a folder that holds one of them.
        scratch: unused, because a zip archive is read in place.
        split: ``train`` (2,000 images) or ``test`` (3,000); None means both.
    """
    return _read(_COLORECTAL, source, scratch, split)


def read_uc_merced(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens ``UCMerced_LandUse.zip`` or the folder in it.

    Args:
        source: the archive, the folder, or a folder that holds one of them.
        scratch: unused, because a zip archive is read in place.
        split: ``train`` (1,000 images) or ``test`` (1,100); None means both.
    """
    return _read(_UC_MERCED, source, scratch, split)


def _read(tiles: _Tiles, source: Path, scratch: Path, split: str | None) -> DataSet:
    names = select_splits(("train", "test"), split, tiles.title)
    files = open_published(source, scratch, tiles.archive, tiles.md5, tiles.folder)
    labels = {folder: label for label, folder in enumerate(tiles.classes)}
    images = [name for name in images_in(files) if name.endswith(".tif") and _folder(name) in labels]
    missing = labels.keys() - {_folder(name) for name in images}
    if missing:
        raise UserError(
            f"{files.path}: holds no images of {min(missing)}; give {tiles.archive}, or the folder unpacked from it"
        )
    images.sort(key=lambda name: _hash(name, tiles))
    parts = {"train": images[: tiles.num_train], "test": images[tiles.num_train :]}
    published = {"train": tiles.num_train, "test": tiles.num_images - tiles.num_train}
    found = {part: _split(files, parts[part], labels, published[part]) for part in names}
    return DataSet(found, tuple(tiles.classes.values()), tiles.templates)


def _split(files: Files, images: list[str], labels: dict[str, int], published: int) -> Split:
    return split_of_files(files, images, [labels[_folder(name)] for name in images], published=published)


def _folder(name: str) -> str:
    return name.split("/")[-2] if "/" in name else ""


def _hash(name: str, tiles: _Tiles) -> str:
    """Returns the hash by which TensorFlow Datasets orders the images of the split ``train``."""
    base = name.rpartition("/")[2]
    key = f"{_folder(name).partition('_')[2].lower()}/{base}" if tiles.with_class else base
    return hashlib.md5(f"train{key}".encode("utf-8", "surrogateescape"), usedforsecurity=False).hexdigest()
