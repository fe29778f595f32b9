"""Street View House Numbers, SVHN (Netzer et al. 2011), cropped digits from MATLAB's files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lit_het.data_pipelines.prepare.archives import warn_unless_published
from lit_het.data_pipelines.prepare.dataset import DataSet, Sample, Split, fingerprint, select_splits
from lit_het.data_pipelines.prepare.images import encode_png
from lit_het.data_pipelines.prepare.matlab import load_array
from lit_het.errors import UserError
from lit_het.untrusted import Malformed

CLASS_NAMES = tuple("0123456789")

TEMPLATES = (
    "a photo of the number {c}.",
    "a house number with the digit {c}.",
    "the digit {c} on a house.",
    "a blurry photo of the number {c}.",
)

_FILES = {"train": "train_32x32.mat", "test": "test_32x32.mat"}
_MD5 = {"train": "e26dedcc434d2e4c54c9b2d4a06d8373", "test": "eb5a983be6a315427106f1b164d9cef3"}
_PUBLISHED = {"train": 73_257, "test": 26_032}
_SHAPE = (32, 32, 3)


def read_svhn(source: Path, split: str | None = None) -> DataSet:
    """Opens a folder with ``train_32x32.mat`` and ``test_32x32.mat``; the label 10 of a file is the digit 0.

    Args:
        source: the folder.
        split: ``train`` or ``test``; None means both.
    """
    names = select_splits(_FILES, split, "SVHN")
    if not source.is_dir():
        raise UserError(f"{source}: is not a folder; give the folder with {' and '.join(_FILES.values())}")
    for name in names:  # before the first is read, which takes seconds
        if not (source / _FILES[name]).is_file():
            raise UserError(
                f"{source}: holds no {_FILES[name]}; put the official file there, or choose another with --split"
            )
    return DataSet({name: _split(source / _FILES[name], name) for name in names}, CLASS_NAMES, TEMPLATES)


def _split(path: Path, split: str) -> Split:
    try:
        images, labels = load_array(path, "X"), load_array(path, "y").reshape(-1)
    except (OSError, Malformed) as error:
        raise UserError(f"{path}: holds no readable images and labels ({error}); download it again") from error
    if images.ndim == len(_SHAPE):  # MATLAB drops the last axis of a single image
        images = images[..., None]
    if images.dtype != np.uint8 or images.shape != (*_SHAPE, len(labels)):
        raise UserError(f"{path}: X of shape {images.shape} are not {len(labels)} images of 32 x 32; download it again")
    if not np.isin(labels, np.arange(1, 11)).all():
        raise UserError(f"{path}: has labels that are not from 1 to 10; download it again")
    warn_unless_published(path, _MD5[split])

    def read(numbers: Sequence[int]) -> Iterator[Sample]:
        for number in numbers:
            yield Sample(encode_png(images[:, :, :, number]), f"{path} image {number}")

    return Split(
        num_samples=len(labels),
        read=read,
        fingerprint=fingerprint([images.tobytes(), labels.tobytes()]),
        labels=(labels % 10).astype(np.int32),
        published=_PUBLISHED[split],
    )
