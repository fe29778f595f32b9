"""The Describable Textures Dataset, DTD (Cimpoi et al. 2014), from its archive."""

from pathlib import Path

from lit_het.data_pipelines.prepare.archives import Files, open_published, root_of
from lit_het.data_pipelines.prepare.dataset import DataSet, Split, images_in, select_splits, split_of_files
from lit_het.errors import UserError

TEMPLATES = (
    "a photo of a {c} texture.",
    "a photo of a {c} pattern.",
    "a close-up of something {c}.",
    "a {c} surface.",
)

_ARCHIVE = "dtd-r1.0.1.tar.gz"
_MD5 = "fff73e5086ae6bdbea199a49dfb8a4c1"
# The first of the ten official partitions, as in TensorFlow Datasets.
_LISTS = {"train": "labels/train1.txt", "val": "labels/val1.txt", "test": "labels/test1.txt"}
_PUBLISHED = 1_880  # images of each split


def read_dtd(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens ``dtd-r1.0.1.tar.gz`` or the folder in it; samples are in the order of the official lists.

    Args:
        source: the archive, the folder, or a folder that holds one of them.
        scratch: a folder with space for the decompressed archive.
        split: ``train``, ``val`` or ``test`` of the first official partition; None means all.
    """
    splits = select_splits(_LISTS, split, "DTD")
    files = open_published(source, scratch, _ARCHIVE, _MD5, "dtd")
    root = root_of(files, _LISTS["train"], _ARCHIVE)
    images = f"{root}images/"
    folders = {name.removeprefix(images).partition("/")[0] for name in images_in(files) if name.startswith(images)}
    classes = {folder: label for label, folder in enumerate(sorted(folders))}
    return DataSet({name: _split(files, root, name, classes) for name in splits}, tuple(classes), TEMPLATES)


def _split(files: Files, root: str, split: str, classes: dict[str, int]) -> Split:
    path = root + _LISTS[split]
    if path not in files.sizes:
        raise UserError(f"{files.path}: holds no {_LISTS[split]}; download it again")
    labels: dict[str, int] = {}
    for line in files.read(path).decode("utf-8", "replace").split():
        name = f"{root}images/{line}"
        if name not in files.sizes or name in labels:
            raise UserError(f"{files.where(path)}: {line:.100} is not an image, or named twice; download it again")
        labels[name] = classes[line.partition("/")[0]]
    return split_of_files(files, [*labels], [*labels.values()], published=_PUBLISHED)
