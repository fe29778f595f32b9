"""A model with constructed embeddings: images and captions index tables of vectors."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.open_sets import Sets
from lit_het.types import Batch, ImageFeatures, TextEncoder
from tests.eval.fake_model import FakeModel


@pytest.fixture
def make_encoder() -> Callable[..., FakeModel]:
    """Features of an image are the number in its first pixel; captions without vectors lie on the axes."""

    def make(
        image_vectors: np.ndarray,
        caption_vectors: Mapping[str, np.ndarray] | Sequence[str],
        temperature: float = 0.1,
        noise: np.ndarray | None = None,
        num_shards: int = 1,
        has_noise_norm: bool = True,
    ) -> FakeModel:
        if not isinstance(caption_vectors, Mapping):
            caption_vectors = dict(zip(caption_vectors, np.eye(len(caption_vectors)), strict=True))
        captions, text_table = list(caption_vectors), np.stack(list(caption_vectors.values()))

        def extract(view: np.ndarray) -> np.ndarray:
            assert len(view) % num_shards == 0
            return view[:, 0, 0, :1].astype(np.float32)

        def vectors(features: np.ndarray) -> np.ndarray:
            return image_vectors[features[:, 0].astype(int)].astype(np.float32)

        def logits(features: np.ndarray, count: int, names: np.ndarray | None) -> np.ndarray:
            queries = vectors(features)[:, None].astype(np.float64)
            if count:
                assert noise is not None
                queries = queries + noise[features[:, 0].astype(int), :count]
            assert names is not None
            return queries @ names.T / temperature

        return FakeModel(
            features=ImageFeatures(extract, num_members=1, num_shards=num_shards, tower="a tower"),
            logits=logits,
            embeddings=vectors,
            noise_norm=lambda features: features[:, 0] * has_noise_norm,
            text=TextEncoder(
                embed=lambda tokens: text_table[tokens[:, 0]].astype(np.float32),
                tokenize=lambda texts: np.array([[captions.index(text)] for text in texts], np.int32),
                join=lambda prompts: prompts.mean(axis=1) / np.linalg.norm(prompts.mean(axis=1), axis=1, keepdims=True),
            ),
            has_noise=noise is not None,
        )

    return make


@pytest.fixture
def make_batches() -> Callable[..., Callable[[], Iterator[Batch]]]:
    """Images 0, 1, 2, ... with the given labels, in batches whose last is padded."""

    def make(labels: Sequence[int], batch_size: int = 4, padding_label: int = -1) -> Callable[[], Iterator[Batch]]:
        def batches() -> Iterator[Batch]:
            for start in range(0, len(labels), batch_size):
                rows = np.arange(start, start + batch_size)
                valid = rows < len(labels)
                label = np.full(batch_size, padding_label)
                label[valid] = labels[start : start + batch_size]
                image = np.zeros((batch_size, 2, 2, 3), np.uint8)
                image[:, 0, 0, 0] = np.where(valid, rows, 0)
                yield Batch(valid=valid, image=image, label=label)

        return batches

    return make


@pytest.fixture
def write_set(tmp_path: Path) -> Callable[..., ImageSet]:
    """Writes images 0, 1, 2, ... (the numbers are their pixels) with members of their own as shards of a set."""

    def write(
        name: str, members: Sequence[Mapping[str, object]], names: Sequence[str] = (), split: str = "test"
    ) -> ImageSet:
        directory = tmp_path / name
        samples = []
        for number, others in enumerate(members):
            buffer = io.BytesIO()
            Image.fromarray(np.full((2, 2, 3), number, np.uint8)).save(buffer, "png")
            samples.append({"__key__": f"s{number:07d}", "png": buffer.getvalue(), **others})
        write_shards(directory / split, samples, samples_per_shard=4)
        if names:
            (directory / "classnames.txt").write_text("".join(f"{one}\n" for one in names))
        return ImageSet(name, str(directory), split, batch_size=4)

    return write


@pytest.fixture
def sets() -> Sets:
    """Opens sets of images of two pixels a side."""
    return Sets(2, Preprocessing(), lambda: "a tower")


@pytest.fixture
def unit_vectors() -> Callable[..., np.ndarray]:
    def make(count: int, size: int, seed: int = 0) -> np.ndarray:
        vectors = np.random.default_rng(seed).normal(size=(count, size))
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)

    return make
