"""Nearest captions of an image, from an index that may be larger than memory."""

import hashlib
from collections.abc import Sequence
from typing import IO

import numpy as np
from jaxtyping import Float

from lit_het.console import Bar
from lit_het.data_pipelines.shards.storage import reason
from lit_het.errors import UserError
from lit_het.eval.metrics.rows import row_blocks
from lit_het.eval.predictions import highest
from lit_het.eval.sets.recognition import embed_texts
from lit_het.files import cache_folder, cached_array, completed
from lit_het.types import EvaluatedModel

_BLOCK_CAPTIONS = 8192


class CaptionIndex:
    """Captions and their embeddings.

    Attributes:
        captions: without duplicates.
        embeddings: unit vectors, which may be memory-mapped from a file.
    """

    def __init__(self, captions: Sequence[str], embeddings: Float[np.ndarray, "n d"]):
        self.captions, self.embeddings = captions, embeddings

    def nearest(self, query: Float[np.ndarray, " d"], count: int = 10) -> list[tuple[str, float]]:
        """Returns the captions with the largest inner products with a query (or all, if fewer), in descending order."""
        best, scores = np.zeros(0, np.int64), np.zeros(0, np.float32)
        for rows in row_blocks(*self.embeddings.shape):
            # The best so far compete with each new block, so that only ``count`` scores are held between blocks.
            best = np.concatenate([best, np.arange(rows.start, rows.stop)])
            scores = np.concatenate([scores, self.embeddings[rows] @ query])
            top = highest(scores[None], count)[0]
            best, scores = best[top], scores[top]
        return [(self.captions[row], float(score)) for row, score in zip(best.tolist(), scores, strict=True)]


def index_captions(model: EvaluatedModel, captions: Sequence[str]) -> CaptionIndex:
    """Embeds captions block by block into a file in the user's cache, or reads that file if it exists."""
    if not captions:
        raise UserError("no captions to search; give at least one")
    assert model.text is not None
    assert model.text.tower, "embeddings of a text tower that is being trained cannot be cached"
    # Without duplicates, in the given order: a caption must not fill several of the nearest places.
    captions = tuple(dict.fromkeys(captions))
    # The tower is part of the name: captions of a model that was trained further are embedded anew.
    content = hashlib.sha256("\n".join((model.text.tower, *captions)).encode())
    path = cache_folder("captions") / f"{content.hexdigest()[:32]}.npy"
    try:
        embeddings = cached_array(path)
        if embeddings is None or embeddings.ndim != 2 or len(embeddings) != len(captions) or embeddings.dtype != "<f4":
            path.parent.mkdir(parents=True, exist_ok=True)
            with completed(path) as partial, partial.open("wb") as file:
                _write(model, captions, file)
            # Mapped, not read: the file may be larger than memory.
            embeddings = np.load(path, mmap_mode="r")
        return CaptionIndex(captions, embeddings)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({reason(error)}); set XDG_CACHE_HOME to a folder with free space"
        ) from error


def _write(model: EvaluatedModel, captions: Sequence[str], file: IO[bytes]) -> None:
    with Bar("embedding captions", len(captions), "captions") as bar:
        for start in range(0, len(captions), _BLOCK_CAPTIONS):
            block = embed_texts(model, captions[start : start + _BLOCK_CAPTIONS], bar.advance)
            if not start:
                header = {"descr": "<f4", "fortran_order": False, "shape": (len(captions), block.shape[1])}
                # The header needs the embedding size, which is known after the first block. Rows are then appended.
                np.lib.format.write_array_header_2_0(file, header)
            file.write(np.ascontiguousarray(block, "<f4").tobytes())
