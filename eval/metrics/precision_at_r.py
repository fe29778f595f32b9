"""Retrieval with several true matches: R-Precision and mAP@R (Musgrave et al., ECCV 2020; ECCV Caption, ECCV 2022)."""

import numpy as np
from jaxtyping import Bool, Float, Int

from lit_het.eval.predictions import highest

_QUERIES_PER_BLOCK = 256


def precision_at_r(
    scores: Float[np.ndarray, "q n"], is_match: Bool[np.ndarray, "q n"]
) -> tuple[Float[np.ndarray, " q"], Float[np.ndarray, " q"]]:
    """Returns R-Precision and AP@R of each query, where R is its number of matches.

    R-Precision is the share of matches among the R best items. ``AP@R = 1/R Σ_{i=1}^R P(i) match(i)``, where P(i) is
    the share of matches among the i best. A query without matches has NaN. Which of tied items is the last of
    the R best is arbitrary.
    """
    r = is_match.sum(axis=1)
    most = int(r.max(initial=0))
    if not most:
        return np.full(len(scores), np.nan), np.full(len(scores), np.nan)
    hits = np.take_along_axis(is_match, highest(scores, most), axis=1)
    place = np.arange(1, most + 1)
    counted = hits & (place <= r[:, None])
    precision = np.cumsum(hits, axis=1) / place
    with np.errstate(invalid="ignore"):
        return counted.sum(axis=1) / r, (precision * counted).sum(axis=1) / r


def of_classes(scores: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> tuple[float, float]:
    """Returns mean R-Precision and mAP@R of class names that look for the images of their class.

    Only classes with two images or more count: for one, both are recall at 1. NaN if there are none.
    """
    classes, counts = np.unique(labels, return_counts=True)
    queries = classes[counts > 1]
    if not len(queries):
        return float("nan"), float("nan")
    parts = []
    for start in range(0, len(queries), _QUERIES_PER_BLOCK):
        block = queries[start : start + _QUERIES_PER_BLOCK]
        parts.append(precision_at_r(scores[:, block].T, labels[None] == block[:, None]))
    r_precision, average = (np.concatenate(part) for part in zip(*parts, strict=True))
    return float(r_precision.mean()), float(average.mean())
