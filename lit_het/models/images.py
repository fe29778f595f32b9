"""Images of any kind as input of an image tower: paths, addresses, bytes, open files, PIL images and arrays."""

import collections
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.decoding import BrokenImage, upright_rgb
from lit_het.data_pipelines.images.headers import check_size
from lit_het.data_pipelines.images.transforms import Transparency
from lit_het.data_pipelines.shards import storage
from lit_het.data_pipelines.shards.storage import reason
from lit_het.errors import UserError


@runtime_checkable
class BinaryFile(Protocol):
    """An open file."""

    def read(self) -> bytes:
        """Returns its bytes."""
        ...


ImageLike: TypeAlias = str | Path | bytes | bytearray | BinaryFile | Image.Image | np.ndarray
"""One image: a path, an address such as ``https://...`` or ``gs://...``, the bytes of an image file, an open file, a
PIL image, or uint8 pixels, grey ``[h w]`` and ``[h w 1]``, RGB ``[h w 3]`` or RGBA ``[h w 4]``."""

_NUM_THREADS = min(16, os.cpu_count() or 1)
_PER_ROUND = 2 * _NUM_THREADS


class Images:
    """Images in order, read and preprocessed by several threads when they are iterated over.

    Attributes:
        is_single: whether one image was given, rather than a list of images.
        names: the path or address of each image, or ``image N``, where N counts from 0.
    """

    def __init__(self, images: Any, data: LoaderConfig):
        self.is_single = _is_image(images)
        is_list = isinstance(images, Iterable) and not isinstance(images, set | frozenset)  # sets have no order
        self._images = [images] if self.is_single else list(images) if is_list else []
        if not self._images:
            raise UserError(f"images = {images!r:.100}; give an image, or a list of one or more")
        self.names = tuple(_name(image) or f"image {number}" for number, image in enumerate(self._images))
        for name, image in zip(self.names, self._images, strict=True):
            if not _is_image(image):
                kind = f"an array {list(image.shape)}" if isinstance(image, np.ndarray) else type(image).__name__
                raise UserError(f"{name}: {kind} is not an image; give a path, address, bytes, PIL image or array")
        self._data = data
        # PIL images and open files are read where they stand: one that is given twice must not be read by two threads.
        self._lock = threading.Lock()
        files = collections.Counter(id(image) for image in self._images if isinstance(image, BinaryFile))
        self._repeated: dict[int, Any] = {file: None for file, count in files.items() if count > 1}

    def __len__(self) -> int:
        return len(self._images)

    def __iter__(self) -> Iterator[UInt8[np.ndarray, "*input"]]:
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            for start in range(0, len(self), _PER_ROUND):
                yield from pool.map(self._input, range(start, min(start + _PER_ROUND, len(self))))

    def _input(self, number: int) -> UInt8[np.ndarray, "*input"]:
        image, name = self._images[number], self.names[number]
        if isinstance(image, Image.Image | np.ndarray):
            with self._lock:
                return self._data.preprocessing.apply_to_pixels(
                    _pixels(image, name, self._data.preprocessing.transparency), self._data.image_size
                )
        return decode(self._read(image, name), self._data, name)

    def _read(self, image: Any, name: str) -> bytes:
        if isinstance(image, bytes | bytearray | memoryview):
            return bytes(image)
        try:
            if isinstance(image, str | os.PathLike):
                return storage.read_whole(os.fspath(image))
            content = self._read_file(image)
        except (OSError, ValueError) as error:
            raise UserError(f"{name}: cannot be read ({reason(error)}); check the path") from error
        if not isinstance(content, bytes):
            raise UserError(f"{name}: was opened as text; open it with mode 'rb'")
        return content

    def _read_file(self, file: BinaryFile) -> Any:
        with self._lock:
            if id(file) not in self._repeated:
                return file.read()
            # One that is given twice stands at its end after the first time.
            if self._repeated[id(file)] is None:
                self._repeated[id(file)] = file.read()
            return self._repeated[id(file)]


def decode(data: bytes, trained_on: LoaderConfig, name: str) -> UInt8[np.ndarray, "*input"]:
    """Returns an image, preprocessed for the tower of a run.

    Args:
        data: the encoded image.
        trained_on: the run's data.
        name: of the image, for messages.
    """
    try:
        return trained_on.preprocessing.apply(data, trained_on.image_size)
    except BrokenImage as error:
        raise UserError(f"{name}: {reason(error)}") from error


def _is_image(image: Any) -> bool:
    if isinstance(image, np.ndarray):
        return image.ndim < 4
    return isinstance(image, str | os.PathLike | bytes | bytearray | memoryview | Image.Image | BinaryFile)


def _name(image: Any) -> str:
    """Returns the path or address of an image; empty if it has none."""
    if isinstance(image, str | os.PathLike):
        return os.fspath(image)
    name = getattr(image, "filename", "") if isinstance(image, Image.Image) else getattr(image, "name", "")
    return name if isinstance(name, str) else ""


def _pixels(image: Image.Image | np.ndarray, name: str, transparency: Transparency) -> UInt8[np.ndarray, "h w 3"]:
    if isinstance(image, np.ndarray) and (
        image.dtype != np.uint8 or image.shape[2:] not in ((), (1,), (3,), (4,)) or image.ndim < 2
    ):
        raise UserError(
            f"{name}: an array of {image.dtype} {list(image.shape)}; give uint8 [h w], [h w 1], [h w 3] or [h w 4], or "
            "several images as [n h w c], with values from 0 to 255"
        )
    height, width = image.shape[:2] if isinstance(image, np.ndarray) else (image.height, image.width)
    if not width * height:
        raise UserError(f"{name}: has no pixels")
    try:
        check_size(width, height)  # before Pillow copies an array
        if isinstance(image, np.ndarray):
            image = Image.fromarray(image[:, :, 0] if image.shape[2:] == (1,) else image)
        return upright_rgb(image, transparency)
    except Exception as error:  # Pillow's readers raise arbitrary exceptions on damage
        raise UserError(f"{name}: cannot be decoded ({reason(error)})") from error
