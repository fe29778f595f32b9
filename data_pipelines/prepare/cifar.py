"""CIFAR-10 and CIFAR-100 from their "python version" archives (cs.toronto.edu/~kriz/cifar.html), and CIFAR-10H."""

import dataclasses
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from lit_het.data_pipelines.labels import SOFT_LABELS
from lit_het.data_pipelines.prepare.archives import Files, open_files, warn_unless_published
from lit_het.data_pipelines.prepare.dataset import DataSet, Sample, Split, fingerprint, select_splits
from lit_het.data_pipelines.prepare.images import encode_png
from lit_het.data_pipelines.prepare.unpickler import load_arrays
from lit_het.errors import UserError
from lit_het.untrusted import Malformed, parse_npy, read_bytes

TEMPLATES = (
    "a photo of a {c}.",
    "a small photo of a {c}.",
    "a blurry photo of a {c}.",
    "a low-resolution picture of the {c}.",
)

MAX_HUMAN_BYTES = 2**24
"""The largest file of human answers that is read; the published one has 0.8 MB."""

# As published on the site; another archive is used with a warning.
_CIFAR10_MD5 = "c58f30108f718f92721af3b95e74349a"
_CIFAR100_MD5 = "eb9058c3a382ffc7106e4002c42a8d85"
_BATCHES = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
_PUBLISHED = {"train": 50_000, "test": 10_000}
_OF_CIFAR10 = ("cifar-10-python.tar.gz", "cifar-10-batches-py")
_HUMAN = "cifar10h-probs.npy"
_SIZE = 32  # pixels; a data row holds the red, green and blue planes, each in row-major order


def read_cifar10(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens ``cifar-10-python.tar.gz`` or the folder extracted from it.

    Args:
        source: the archive or folder.
        scratch: a folder with space for the decompressed archive.
        split: ``train`` or ``test``; None means both.
    """
    files = _open(source, scratch, _CIFAR10_MD5)
    names = _names(files, "batches.meta", "label_names")
    splits = {
        name: _split(files, name, _BATCHES[name], "labels", len(names))
        for name in select_splits(_BATCHES, split, "CIFAR-10")
    }
    return DataSet(splits, names, TEMPLATES)


def read_cifar100(
    source: Path, scratch: Path, split: str | None = None, labels: Literal["fine", "coarse"] = "fine"
) -> DataSet:
    """Opens ``cifar-100-python.tar.gz`` or the folder extracted from it.

    Args:
        source: the archive or folder.
        scratch: a folder with space for the decompressed archive.
        split: ``train`` or ``test``; None means both.
        labels: the 100 classes, or the 20 superclasses.
    """
    files = _open(source, scratch, _CIFAR100_MD5)
    names = _names(files, "meta", f"{labels}_label_names")
    splits = {
        name: _split(files, name, [name], f"{labels}_labels", len(names))
        for name in select_splits(_PUBLISHED, split, "CIFAR-100")
    }
    return DataSet(splits, names, TEMPLATES)


def read_cifar10h(source: Path, scratch: Path, split: str | None = None) -> DataSet:
    """Opens a folder with ``cifar10h-probs.npy`` beside the archive of CIFAR-10, or the folder extracted from it.

    The samples are CIFAR-10's test set with the distributions of human answers as members `SOFT_LABELS` (Peterson et
    al., "Human uncertainty makes classification more robust", ICCV 2019).

    Args:
        source: the folder.
        scratch: a folder with space for the decompressed archive.
        split: ``test``, the only one, or None.
    """
    select_splits(["test"], split, "CIFAR-10H")
    archive = next((source / name for name in _OF_CIFAR10 if (source / name).exists()), None)
    if archive is None or not (source / _HUMAN).is_file():
        raise UserError(f"{source}: must hold {_HUMAN} and {_OF_CIFAR10[0]}; put both there")
    clean = read_cifar10(archive, scratch, "test")
    test = clean.splits["test"]
    human = _human(source / _HUMAN, test.num_samples, len(clean.class_names or ()))

    def read(numbers: Sequence[int]) -> Iterator[Sample]:
        for number, sample in zip(numbers, test.read(numbers), strict=True):
            content = io.BytesIO()
            np.save(content, human[number])
            yield dataclasses.replace(sample, members={SOFT_LABELS: content.getvalue()})

    both = dataclasses.replace(test, read=read, fingerprint=fingerprint([test.fingerprint, human.tobytes()]))
    return dataclasses.replace(clean, splits={"test": both})


def _human(path: Path, num_images: int, num_classes: int) -> Float[np.ndarray, "n k"]:
    """Returns the distribution of human answers for each test image."""
    try:
        human = parse_npy(read_bytes(path, MAX_HUMAN_BYTES))
    except (OSError, Malformed) as error:
        raise UserError(f"{path}: cannot be read ({error}); download it again") from error
    if human.shape != (num_images, num_classes) or human.dtype.kind != "f":
        raise UserError(
            f"{path}: has the shape {human.shape} and the type {human.dtype}, not a probability for each of "
            f"{num_images:,} images and {num_classes} classes; download it again"
        )
    if not ((human >= 0).all() and np.allclose(human.sum(axis=1), 1, atol=1e-3)):
        raise UserError(f"{path}: has rows that are not probabilities; download it again")
    return human.astype(np.float32)


def _open(source: Path, scratch: Path, md5: str) -> Files:
    files = open_files(source, scratch)
    if source.is_file():
        warn_unless_published(source, md5)
    return files


def _load(files: Files, base: str) -> dict[str, Any]:
    # By the file's name alone: the folder inside the archive has another name than an extracted one may have.
    name = next((name for name in files.sizes if name.rpartition("/")[2] == base), None)
    if name is None:
        raise UserError(f"{files.path}: holds no {base}; use the archive called 'python version'")
    content = load_arrays(files.read(name), files.where(name))
    if not isinstance(content, dict):
        raise UserError(f"{files.where(name)}: is not a dictionary; download the archive again")
    return content


def _names(files: Files, base: str, key: str) -> tuple[str, ...]:
    names = _load(files, base).get(key)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{files.path}: {base} holds no {key}; download the archive again")
    return tuple(name.replace("_", " ") for name in names)


def _split(files: Files, split: str, batches: Sequence[str], key: str, num_classes: int) -> Split:
    parts = [_rows(files, batch, key, num_classes) for batch in batches]
    rows, labels = (np.concatenate(column) for column in zip(*parts, strict=True))

    def read(numbers: Sequence[int]) -> Iterator[Sample]:
        for number in numbers:
            # Planes to interleaved channels.
            image = rows[number].reshape(3, _SIZE, _SIZE).transpose(1, 2, 0)
            yield Sample(encode_png(image), f"{files.path}: {split} row {number}")

    return Split(
        num_samples=len(rows),
        read=read,
        fingerprint=fingerprint([rows.tobytes(), labels.tobytes()]),
        labels=labels,
        published=_PUBLISHED[split],
    )


def _rows(files: Files, base: str, key: str, num_classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns pixels ``[rows 3072]`` uint8 and classes ``[rows]`` int32."""
    batch = _load(files, base)
    data, labels = batch.get("data"), batch.get(key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3 * _SIZE**2,):
        raise UserError(f"{files.path}: data of {base} are not rows of {3 * _SIZE**2} bytes; download it again")
    if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
        raise UserError(f"{files.path}: {base} holds no {key}; download it again")
    if len(labels) != len(data) or not all(0 <= label < num_classes for label in labels):
        raise UserError(
            f"{files.path}: {base} has {len(labels)} {key} for {len(data)} images of {num_classes} classes; "
            "download it again"
        )
    return data, np.array(labels, np.int32)
