"""Images to prepare, and the prepared samples."""

import dataclasses
import io
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lit_het.data_pipelines.index import ShardIndex
from lit_het.data_pipelines.prepare.dataset import DataSet
from lit_het.data_pipelines.prepare.writer import SplitWriter, WriteOptions
from lit_het.data_pipelines.shards import IMAGE, expand
from lit_het.data_pipelines.storage import content_or_raise


@dataclasses.dataclass(frozen=True)
class Written:
    """One sample of a shard; ``members`` by extension."""

    key: str
    image: bytes
    members: dict[str, bytes]

    @property
    def label(self) -> int:
        return int(self.members["cls"])

    @property
    def pixels(self) -> np.ndarray:
        return np.asarray(Image.open(io.BytesIO(self.image)))


@pytest.fixture(scope="session")
def written() -> Callable[[Path], list[Written]]:
    def read(folder: Path) -> list[Written]:
        optional = ("jpg", "png", "webp", "cls", "soft.npy", "txt", "json")
        index = ShardIndex(expand(folder), [IMAGE], optional)
        sizes = {kind: index.sizes(kind) for kind in optional}
        samples = []
        for number in range(len(index)):
            kinds = [kind for kind in optional if sizes[kind][number] >= 0]
            make_image, *others = map(content_or_raise, index.read([number], [IMAGE, *kinds])[0])
            samples.append(Written(index.key(number), make_image, dict(zip(kinds, others, strict=True))))
        # in the order of shards' numbers, not of their names
        return sorted(samples, key=lambda sample: sample.key)

    return read


@pytest.fixture(scope="session")
def write(written: Callable[[Path], list[Written]]) -> Callable[..., list[Written]]:
    def write(dataset: DataSet, output: Path, split: str, **options: Any) -> list[Written]:
        output.mkdir(exist_ok=True)
        SplitWriter(output / split, dataset.splits[split], WriteOptions(**options)).write(lambda count: None)
        return written(output / split)

    return write


@pytest.fixture(scope="session")
def make_image() -> Callable[..., bytes]:
    def make_image(colour: int = 0, format: str = "JPEG", mode: str = "RGB") -> bytes:
        stream = io.BytesIO()
        Image.new(mode, (6, 4), (colour,) * len(mode) if mode in ("RGB", "CMYK") else colour).save(stream, format)
        return stream.getvalue()

    return make_image


@pytest.fixture(scope="session")
def make_tar() -> Callable[..., bytes]:
    def make_tar(members: Mapping[str, bytes], mode: str = "w") -> bytes:
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode=mode) as tar:  # pyright: ignore[reportCallIssue, reportArgumentType]
            for name, content in members.items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        return stream.getvalue()

    return make_tar


@pytest.fixture(scope="session")
def make_zip() -> Callable[..., bytes]:
    def make_zip(members: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", compression) as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return stream.getvalue()

    return make_zip


@pytest.fixture(scope="session")
def unpack() -> Callable[[Mapping[str, bytes], Path], Path]:
    def unpack(members: Mapping[str, bytes], folder: Path) -> Path:
        for name, content in members.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        return folder

    return unpack
