"""Images to prepare, archives of them, and the prepared samples."""

import dataclasses
import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scipy.io
from PIL import Image

from lit_het.data_pipelines.prepare import matlab
from lit_het.data_pipelines.prepare.dataset import DataSet
from lit_het.data_pipelines.prepare.writer import SplitWriter, WriteOptions
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.storage import content_or_raise
from lit_het.data_pipelines.shards.writing import IMAGE, expand
from tests.data_pipelines.conftest import encoded

GOLDEN = Path(__file__).parents[2] / "golden" / "data"
TRUTH = json.loads((GOLDEN / "truth.json").read_text())


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


def written(folder: Path) -> list[Written]:
    optional = ("jpg", "png", "webp", "cls", "soft.npy", "txt", "json", "panoptic.png", "panoptic.json")
    index = ShardIndex(expand(folder), [IMAGE], optional)
    sizes = {kind: index.sizes(kind) for kind in optional}
    samples = []
    for number in range(len(index)):
        kinds = [kind for kind in optional if sizes[kind][number] >= 0]
        image, *others = map(content_or_raise, index.read([number], [IMAGE, *kinds])[0])
        samples.append(Written(index.key(number), image, dict(zip(kinds, others, strict=True))))
    # in the order of shards' numbers, not of their names
    return sorted(samples, key=lambda sample: sample.key)


def write(dataset: DataSet, output: Path, split: str, **options: Any) -> list[Written]:
    output.mkdir(exist_ok=True)
    SplitWriter(output / split, dataset.splits[split], WriteOptions(**options)).write(lambda count: None)
    return written(output / split)


def labelled(samples: Sequence[Written]) -> list[tuple[int, bytes]]:
    return [(sample.label, sample.image) for sample in samples]


def labels_of(dataset: DataSet, split: str) -> list[int]:
    return np.asarray(dataset.splits[split].labels).tolist()


def bytes_of(folder: Path) -> dict[str, bytes]:
    """The shards of a split."""
    return {path.name: path.read_bytes() for path in folder.glob("*.tar")}


def make_json(folder: Path, name: str, content: object, images: Sequence[str] = ()) -> Path:
    """Writes a file of JSON, or a text as it is, with images beside it that differ in colour."""
    unpack({image: make_image(40 * number) for number, image in enumerate(images)}, folder)
    text = content if isinstance(content, str) else json.dumps(content)
    return unpack({name: text.encode()}, folder) / name


def changed(content: Any, path: str, value: object) -> Any:
    """Returns a copy with a value at a path such as ``images.0.split``; None removes it."""
    content = json.loads(json.dumps(content))
    *parents, last = [int(name) if len(name) == 1 and name.isdecimal() else name for name in path.split(".")]
    inner = content
    for name in parents:
        inner = inner[name]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return content


def make_image(colour: int = 0, format: str = "JPEG", mode: str = "RGB") -> bytes:
    return encoded(Image.new(mode, (6, 4), (colour,) * len(mode) if mode in ("RGB", "CMYK") else colour), format)


def make_tar(members: Mapping[str, bytes], mode: str = "w") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def make_zip(members: Mapping[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def make_mat(compress: bool = False, /, **variables: object) -> bytes:
    stream = io.BytesIO()
    scipy.io.savemat(stream, variables, do_compression=compress)
    return stream.getvalue()


def unpack(members: Mapping[str, bytes], folder: Path) -> Path:
    for name, content in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def matlab_in_process() -> Iterator[None]:
    """MATLAB's files are read in this process: each of its subprocesses takes a second to import SciPy."""

    def read(function: str, *names: str, **streams: Any) -> bytes:
        content = streams["input"] if "input" in streams else streams["stdin"].read()
        output = io.TextIOWrapper(io.BytesIO())
        try:
            with (
                mock.patch.multiple(sys, argv=["", *names], stdin=io.TextIOWrapper(io.BytesIO(content)), stdout=output),
                mock.patch.object(matlab.resource, "setrlimit"),
            ):
                getattr(matlab, function)()
        except Exception as error:
            raise matlab.Malformed(f"{type(error).__name__}: {error}") from error
        output.flush()
        found = output.buffer.getvalue()
        if hasattr(streams.get("stdout"), "write"):
            streams["stdout"].write(found)
        return found

    with mock.patch.object(matlab, "_read", read):
        yield
