"""A model whose embeddings are chosen by the test: pictures and captions are keys into tables of vectors."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import pytest

from lit_het.types import Batch, Encoder


@pytest.fixture
def make_encoder() -> Callable[..., Encoder]:
    def make(
        image_vectors: np.ndarray,
        caption_vectors: Mapping[str, np.ndarray],
        temperature: float = 0.1,
        noise: np.ndarray | None = None,
    ) -> Encoder:
        captions = list(caption_vectors)
        text_table = np.stack([caption_vectors[caption] for caption in captions])

        def of_image(image: np.ndarray) -> np.ndarray:
            return image[:, 0, 0, 0].astype(int)

        def samples_of_image(image: np.ndarray, count: int, seed: int) -> np.ndarray:
            assert noise is not None
            return (image_vectors[of_image(image)][:, None] + noise[of_image(image), :count]).astype(np.float32)

        return Encoder(
            image_samples=samples_of_image,
            image=lambda image: image_vectors[of_image(image)].astype(np.float32),
            text=lambda tokens: text_table[tokens[:, 0]].astype(np.float32),
            image_noise_norm=lambda image: of_image(image).astype(np.float32),
            text_noise_norm=lambda tokens: np.zeros(len(tokens), np.float32),
            tokenize=lambda texts: np.array([[captions.index(text)] for text in texts], np.int32),
            temperature=temperature,
        )

    return make


@pytest.fixture
def make_batches() -> Callable[..., Callable[[], Iterator[Batch]]]:
    """Pictures 0, 1, 2, ... with the given labels, in batches whose last is padded."""

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
def unit_vectors() -> Callable[..., np.ndarray]:
    def make(count: int, size: int, seed: int = 0) -> np.ndarray:
        vectors = np.random.default_rng(seed).normal(size=(count, size))
        return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)

    return make
