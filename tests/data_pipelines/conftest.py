"""A tiny shard set whose labels number its samples, and what several files of tests ask for."""

import contextlib
import io
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
from PIL import Image
from tokenizers import models, normalizers, pre_tokenizers, processors

from lit_het.data_pipelines.images.decoding import encode_jpeg
from lit_het.data_pipelines.images.transforms import Filter
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.pipeline import AnyStream
from lit_het.data_pipelines.shards.storage import Unreadable
from lit_het.data_pipelines.shards.writing import write_shards

NUM_SAMPLES = 23
IMAGE_SIZE = 8
FILTERS: tuple[Filter, ...] = ("fast", "area", "bilinear", "bicubic")


def encoded(image: Image.Image | np.ndarray, format: str, **options: object) -> bytes:
    stream = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(stream, format, **options)
    return stream.getvalue()


def cause_of(content: object) -> str:
    """Why a member could not be read."""
    assert isinstance(content, Unreadable)
    return content.cause


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def sample(key: str, **members: object) -> dict[str, Any]:
    """A sample of three members, or of those given."""
    return {"__key__": key, **(members or {"jpg": b"pixels of " + key.encode(), "txt": f"text of {key}", "cls": 7})}


def word_pieces(words: Sequence[str], normalizer: normalizers.Normalizer | None = None) -> tokenizers.Tokenizer:
    """A tokenizer like BERT's, whose first words are ``[PAD]``, ``[UNK]``, ``[CLS]`` and ``[SEP]``."""
    pieces = models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(pieces)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    control = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=control)
    return tokenizer


def number_tokens(captions: list[str]) -> np.ndarray:
    """Stands for a tokenizer: the number in "word17", then 99."""
    return np.array([[int(caption[4:] or 0), 99] for caption in captions], np.int32)


def take(reader: Loader | AnyStream, count: int, *place: int) -> list[Any]:
    """The first batches from a position on, of one process of several."""
    with contextlib.closing(reader.batches(*place)) as batches:
        return list(itertools.islice(batches, count))


def joined(batches: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *parts: np.concatenate(parts), *batches)


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
