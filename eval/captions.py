"""Captions nearest to an image, among as many as fit on a disk."""

import hashlib
from collections.abc import Sequence
from typing import IO

import numpy as np
from jaxtyping import Float

from lit_het.console import Bar
from lit_het.data_pipelines.storage import reason
from lit_het.errors import UserError
from lit_het.eval.predictions import highest
from lit_het.eval.recognition import embed_texts
from lit_het.eval.rows import row_blocks
from lit_het.files import cache_folder, completed, kept_array
from lit_het.types import Encoder

_CAPTIONS_AT_A_TIME = 8192


class CaptionIndex:
    """Captions and their embeddings.

    Attributes:
        captions: each of them once.
        embeddings: unit vectors, which may lie on a disk.
    """

    def __init__(self, captions: Sequence[str], embeddings: Float[np.ndarray, "n d"]):
        self.captions, self.embeddings = captions, embeddings

    def nearest(self, query: Float[np.ndarray, " d"], count: int = 10) -> list[tuple[str, float]]:
        """Returns the captions of the largest inner products with a query (or all, if fewer), falling."""
        best, scores = np.zeros(0, np.int64), np.zeros(0, np.float32)
        for rows in row_blocks(*self.embeddings.shape):
            best = np.concatenate([best, np.arange(rows.start, rows.stop)])
            scores = np.concatenate([scores, self.embeddings[rows] @ query])
            kept = highest(scores[None], count)[0]
            best, scores = best[kept], scores[kept]
        return [(self.captions[row], float(score)) for row, score in zip(best.tolist(), scores, strict=True)]


def index_captions(encoder: Encoder, captions: Sequence[str]) -> CaptionIndex:
    """Embeds captions, a block at a time, into a file in the user's cache; the next time they are there.

    Raises:
        UserError: no captions, or the cache cannot be written.
    """
    if not captions:
        raise UserError("no captions to search; give at least one")
    assert encoder.text_tower, "embeddings of a text tower that is being trained cannot be kept"
    captions = tuple(dict.fromkeys(captions))
    content = hashlib.sha256("\n".join((encoder.text_tower, *captions)).encode())
    path = cache_folder("captions") / f"{content.hexdigest()[:32]}.npy"
    try:
        embeddings = kept_array(path)
        if embeddings is None or embeddings.ndim != 2 or len(embeddings) != len(captions) or embeddings.dtype != "<f4":
            path.parent.mkdir(parents=True, exist_ok=True)
            with completed(path) as partial, partial.open("wb") as file:
                _write(encoder, captions, file)
            embeddings = np.load(path, mmap_mode="r")
        return CaptionIndex(captions, embeddings)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({reason(error)}); set XDG_CACHE_HOME to a folder with room"
        ) from error


def _write(encoder: Encoder, captions: Sequence[str], file: IO[bytes]) -> None:
    with Bar("embedding captions", len(captions), "captions") as bar:
        for start in range(0, len(captions), _CAPTIONS_AT_A_TIME):
            block = embed_texts(encoder, captions[start : start + _CAPTIONS_AT_A_TIME], bar.advance)
            if not start:
                header = {"descr": "<f4", "fortran_order": False, "shape": (len(captions), block.shape[1])}
                np.lib.format.write_array_header_2_0(file, header)
            file.write(np.ascontiguousarray(block, "<f4").tobytes())
