"""How far predicted probabilities can be trusted: negative log-likelihood, Brier score, calibration error.

Pure NumPy functions on probabilities ``[n k]`` (rows sum to one) and class indices ``[n]``. Where several
classes share the highest probability, the prediction is taken as drawn evenly among them, so that a model
that cannot tell its classes apart scores chance and not the luck of the lowest index.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import special

from lit_het.errors import UserError

DEFAULT_BINS = 15


@dataclasses.dataclass(frozen=True)
class ReliabilityCurve:
    """Accuracy against confidence in bins of equal width.

    Attributes:
        edges: bounds of the bins, from 0 to 1; a bin holds its upper bound, the first also its lower.
        confidence: mean confidence in a bin, NaN where the bin is empty.
        accuracy: share of right predictions in a bin, NaN where the bin is empty.
        count: examples in a bin.
    """

    edges: Float[np.ndarray, " bins_plus_one"]
    confidence: Float[np.ndarray, " bins"]
    accuracy: Float[np.ndarray, " bins"]
    count: Int[np.ndarray, " bins"]

    @property
    def expected_calibration_error(self) -> float:
        """Mean distance between confidence and accuracy, weighted by the examples in each bin."""
        gaps = np.abs(self.confidence - self.accuracy)
        return float(np.nansum(self.count * gaps) / self.count.sum())


def check_labels(labels: Int[np.ndarray, " n"], num_classes: int) -> None:
    """Demand at least one label and every label in ``[0, num_classes)``.

    Raises:
        UserError: there are no labels, or one lies outside the classes.
    """
    if labels.size == 0:
        raise UserError("no valid example to score: check that the split holds labelled images that can be read")
    outside = (labels < 0) | (labels >= num_classes)
    if outside.any():
        raise UserError(
            f"label {labels[outside][0]} lies outside the {num_classes} classes: "
            "the labels and the list of class names must come from the same data set"
        )


def negative_log_likelihood(probabilities: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> float:
    """Mean ``-log p(label)`` in nats; infinite where a label was given probability zero.

    Raises:
        UserError: no examples, or a label outside the classes.
    """
    check_labels(labels, probabilities.shape[1])
    with np.errstate(divide="ignore"):
        return float(-np.log(_of_label(probabilities, labels).astype(np.float64)).mean())


def negative_log_likelihood_from_logits(logits: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> float:
    """Mean ``-log softmax(logits)[label]`` in nats, finite for any finite logits.

    Raises:
        UserError: no examples, or a label outside the classes.
    """
    check_labels(labels, logits.shape[1])
    return float(-_of_label(special.log_softmax(logits.astype(np.float64), axis=-1), labels).mean())


def brier_score(probabilities: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> float:
    """Mean squared distance between the probabilities and the one-hot label, from 0 to 2.

    The sum runs over all classes, as in Brier, "Verification of forecasts expressed in terms of
    probability", Monthly Weather Review 1950; some libraries halve it for two classes.

    Raises:
        UserError: no examples, or a label outside the classes.
    """
    check_labels(labels, probabilities.shape[1])
    exact = probabilities.astype(np.float64)
    # |p - e_y|² = |p|² - 2 p_y + 1, without building the one-hot matrix.
    return float(((exact**2).sum(axis=1) - 2 * _of_label(exact, labels) + 1).mean())


def expected_calibration_error(
    probabilities: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"], bins: int = DEFAULT_BINS
) -> float:
    """Expected calibration error of the most likely class, over bins of equal width.

    Naeini, Cooper and Hauskrecht, "Obtaining well calibrated probabilities using Bayesian binning", AAAI
    2015; in the form of Guo et al., "On calibration of modern neural networks", ICML 2017, Eq. 3.

    Raises:
        UserError: no examples, or a label outside the classes.
    """
    return reliability(probabilities, labels, bins).expected_calibration_error


def reliability(
    probabilities: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"], bins: int = DEFAULT_BINS
) -> ReliabilityCurve:
    """Reliability curve of the most likely class.

    Raises:
        UserError: no examples, or a label outside the classes.
    """
    check_labels(labels, probabilities.shape[1])
    confidence = probabilities.max(axis=1)
    winners = probabilities == confidence[:, None]
    return reliability_of_confidence(confidence, _of_label(winners, labels) / winners.sum(axis=1), bins)


def reliability_of_confidence(
    confidence: Float[np.ndarray, " n"], correct: Float[np.ndarray, " n"], bins: int = DEFAULT_BINS
) -> ReliabilityCurve:
    """Reliability curve from the confidence in each prediction and whether it was right (0 to 1).

    Raises:
        UserError: no examples.
    """
    if confidence.size == 0:
        raise UserError("no valid example to score: check that the split holds labelled images that can be read")
    edges = np.linspace(0.0, 1.0, bins + 1)
    # A softmax can round to slightly more than one; digitize on inner edges puts it in the last bin.
    members = np.digitize(confidence, edges[1:-1], right=True)
    count = np.bincount(members, minlength=bins)
    with np.errstate(invalid="ignore"):
        return ReliabilityCurve(
            edges=edges,
            confidence=np.bincount(members, weights=confidence, minlength=bins) / count,
            accuracy=np.bincount(members, weights=correct, minlength=bins) / count,
            count=count,
        )


def _of_label(
    values: Float[np.ndarray, "n k"] | Bool[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]
) -> Float[np.ndarray, " n"] | Bool[np.ndarray, " n"]:
    """The entry of each row at its label."""
    return np.take_along_axis(values, labels[:, None], axis=1)[:, 0]
