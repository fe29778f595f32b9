"""A tiny shard set whose labels number its samples, so that a test can identify the samples of a batch."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_het.data_pipelines.images import encode_jpeg
from lit_het.data_pipelines.shards import write_shards

NUM_SAMPLES = 23
IMAGE_SIZE = 8


@pytest.fixture(scope="session")
def image_bytes() -> Callable[..., bytes]:
    def encode(image: Image.Image, format: str, **options: object) -> bytes:
        stream = io.BytesIO()
        image.save(stream, format, **options)
        return stream.getvalue()

    return encode


@pytest.fixture(scope="session")
def make_shards() -> Callable[..., Path]:
    def make(directory: Path, **changed: dict) -> Path:
        """Writes the shards; ``changed`` maps ``s<number>`` to members that replace those of that sample."""
        random = np.random.default_rng(0)
        samples = []
        for number in range(NUM_SAMPLES):
            pixels = random.integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
            sample = {"__key__": f"s{number}", "jpg": encode_jpeg(pixels), "txt": f"word{number}", "cls": number}
            samples.append({**sample, **changed.get(f"s{number}", {})})
        write_shards(directory, samples, samples_per_shard=10)
        (directory / "classnames.txt").write_text("".join(f"class {i}\n" for i in range(NUM_SAMPLES)))
        (directory / "words.txt").write_text("".join(f"word{i}\n" for i in range(NUM_SAMPLES)))
        return directory

    return make


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory, make_shards: Callable[..., Path]) -> Path:
    return make_shards(tmp_path_factory.mktemp("data") / "train")
