"""Supervised classification: how probable a classifier holds the true class of each picture.

`classify` runs the model once over NumPy batches and keeps four numbers a picture, so that memory does not grow with
the number of classes; the figures follow from these. Where several classes share the highest probability, the
prediction is drawn evenly among them, as in `eval.calibration`.
"""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Float, Int

from eval.calibration import DEFAULT_BINS, ReliabilityCurve, check_labels, reliability_of_confidence
from lit_het.errors import UserError
from lit_het.types import Batch

# Probabilities are float32: what is smaller was rounded to zero, and its logarithm is lost.
SMALLEST_PROBABILITY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class ClassificationResult:
    """What a classifier says of each picture.

    Attributes:
        labels: the true class.
        label_probability: what the classifier gives it.
        confidence: the highest probability of any class.
        correct: probability that the predicted class is the true one: 1 or 0, or a fraction where classes tie.
        num_classes: k.
    """

    labels: Int[np.ndarray, " n"]
    label_probability: Float[np.ndarray, " n"]
    confidence: Float[np.ndarray, " n"]
    correct: Float[np.ndarray, " n"]
    num_classes: int

    def reliability(self, bins: int = DEFAULT_BINS) -> ReliabilityCurve:
        """Reliability curve of the predicted class."""
        return reliability_of_confidence(self.confidence, self.correct, bins)

    def metrics(self) -> dict[str, float]:
        """``nll`` (nats), ``top1`` (the papers' Prec@1), ``ece``, and ``underflow``.

        ``nll`` is the mean of ``-log p(label)``. Where ``p(label)`` is below float32's smallest normal number it counts
        as that number, 87.3 nats: ``underflow`` is the share of such pictures, and ``nll`` is a lower bound unless it
        is zero.
        """
        floored = np.maximum(self.label_probability.astype(np.float64), SMALLEST_PROBABILITY)
        return {
            "nll": float(-np.log(floored).mean()),
            "top1": float(self.correct.mean()),
            "ece": self.reliability().expected_calibration_error,
            "underflow": float((self.label_probability < SMALLEST_PROBABILITY).mean()),
        }


def classify(
    probabilities: Callable[[np.ndarray], np.ndarray],
    batches: Iterable[Batch],
    advance: Callable[[int], object] = lambda count: None,
) -> ClassificationResult:
    """Runs a classifier on labelled batches.

    Args:
        probabilities: pixels ``[b h w c]`` uint8 to probabilities ``[b k]``; it always sees whole batches, so that
            nothing is compiled twice.
        batches: NumPy batches with images and class indices; rows with ``valid = False`` are left out.
        advance: called with the valid images that were just finished.

    Raises:
        UserError: images or class indices are missing, a label is out of range, no row is valid, or a probability is
            not a finite number.
    """
    parts: list[tuple[np.ndarray, ...]] = []
    num_classes = 0
    for batch in batches:
        if batch.image is None:
            raise UserError("classification: a batch holds no images; evaluate on image shards")
        if batch.label is None or np.ndim(batch.label) != 1:
            raise UserError("classification: a batch holds no class indices; the shards need one .cls label an image")
        valid = np.asarray(batch.valid)
        # Rows are dropped after the model, whose input keeps one static shape.
        of_batch = np.asarray(probabilities(np.asarray(batch.image)))[valid]
        labels = np.asarray(batch.label)[valid]
        num_classes = of_batch.shape[1]
        if len(labels):
            parts.append((labels, *_score(of_batch, labels)))
        advance(len(labels))
    if not parts:
        raise UserError("classification: the set holds no valid image; check its path and its shards")
    labels, label_probability, confidence, correct = (np.concatenate(column) for column in zip(*parts, strict=True))
    return ClassificationResult(labels, label_probability, confidence, correct, num_classes)


def _score(probabilities: Float[np.ndarray, "b k"], labels: Int[np.ndarray, " b"]) -> tuple[np.ndarray, ...]:
    """Probability of the label, confidence and share of the label among the most probable classes ``[b]`` each."""
    check_labels(labels, probabilities.shape[1])
    if not np.isfinite(probabilities).all():
        raise UserError("classification: a probability is not finite; training diverged, use an earlier checkpoint")
    of_label = np.take_along_axis(probabilities, labels[:, None], axis=1)[:, 0]
    confidence = probabilities.max(axis=1)
    num_tied = (probabilities == confidence[:, None]).sum(axis=1)
    return of_label, confidence, (of_label == confidence) / num_tied
