"""How far predicted probabilities can be trusted: Brier score, calibration error, temperature.

Pure NumPy functions on log-probabilities ``[n k]`` and class indices ``[n]``. Where several classes share the highest
probability, the prediction is taken as drawn evenly among them, so that a model that cannot tell its classes apart
scores chance and not the luck of the lowest index.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import optimize, sparse, special

from lit_het.errors import UserError
from lit_het.eval.rows import row_blocks
from lit_het.eval.significance import bootstrap_error

DEFAULT_BINS = 15
# Outside these bounds a fitted temperature says no more than "all right" or "no better than chance".
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-2, 1e2


@dataclasses.dataclass(frozen=True)
class ReliabilityCurve:
    """Accuracy against confidence in bins of equal width or of equal mass.

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
        """Mean distance between confidence and accuracy, weighted by the examples in each bin.

        Naeini, Cooper and Hauskrecht, "Obtaining well calibrated probabilities using Bayesian binning", AAAI 2015; in
        the form of Guo et al., "On calibration of modern neural networks", ICML 2017, Eq. 3.
        """
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


def brier_scores(log_probabilities: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Squared distance between each image's probabilities and its one-hot label, from 0 to 2, in float64.

    The sum runs over all classes, as in Brier, "Verification of forecasts expressed in terms of
    probability", Monthly Weather Review 1950; some libraries halve it for two classes.

    Raises:
        UserError: no examples, or a label outside the classes.
    """
    check_labels(labels, log_probabilities.shape[1])
    squares = np.empty(len(log_probabilities))
    for rows in row_blocks(*log_probabilities.shape):
        squares[rows] = np.exp(2 * log_probabilities[rows].astype(np.float64)).sum(axis=1)
    # |p - e_y|² = |p|² - 2 p_y + 1, without building the one-hot matrix.
    return squares - 2 * np.exp(_of_label(log_probabilities, labels).astype(np.float64)) + 1


def correctness(scores: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Probability that the predicted class is the label: 1 or 0, or a fraction where the highest scores tie.

    Scores are probabilities or anything that rises with them, such as their logarithms.

    Raises:
        UserError: no examples, or a label outside the classes.
    """
    check_labels(labels, scores.shape[1])
    winners = scores == scores.max(axis=1)[:, None]
    return _of_label(winners, labels) / winners.sum(axis=1)


def reliability_of_confidence(
    confidence: Float[np.ndarray, " n"],
    correct: Float[np.ndarray, " n"],
    bins: int = DEFAULT_BINS,
    *,
    equal_mass: bool = False,
) -> ReliabilityCurve:
    """Reliability curve from the confidence in each prediction and whether it was right (0 to 1).

    Bins of equal mass (Nguyen and O'Connor, "Posterior calibration and exploratory analysis for natural language
    processing models", EMNLP 2015) hold n / bins examples each, rounded; examples of one confidence share a bin, the
    lowest that one of them would have been in, so that the curve never depends on their order. Bins left without any
    are empty.

    Raises:
        UserError: no examples.
    """
    edges = _edges(confidence, bins, equal_mass)
    members = _bin_of(confidence, edges)
    count = np.bincount(members, minlength=bins)
    with np.errstate(invalid="ignore"):
        return ReliabilityCurve(
            edges=edges,
            confidence=np.bincount(members, weights=confidence, minlength=bins) / count,
            accuracy=np.bincount(members, weights=correct, minlength=bins) / count,
            count=count,
        )


def calibration_standard_error(
    confidence: Float[np.ndarray, "n *m"],
    correct: Float[np.ndarray, "n *m"],
    bins: int = DEFAULT_BINS,
    *,
    equal_mass: bool = False,
) -> float:
    """Bootstrap standard error over examples of the expected calibration error, its bins kept where they are.

    Of several predictors it is that of the mean of their errors.

    Raises:
        UserError: no examples.
    """
    size, of_predictors = len(confidence), np.atleast_2d(confidence.T)
    bin_of = np.stack([_bin_of(values, _edges(values, bins, equal_mass)) for values in of_predictors])
    # Σ_b count_b |confidence_b - accuracy_b| / n is the sum over bins of |Σ gap| / n.
    gap = of_predictors.astype(np.float64) - np.atleast_2d(correct.T)
    bin_of += bins * np.arange(len(bin_of))[:, None]
    example = np.broadcast_to(np.arange(size), bin_of.shape)
    gap_by_bin = sparse.csr_array(
        (gap.ravel(), (bin_of.ravel(), example.ravel())), shape=(bins * len(of_predictors), size)
    )

    def error_of(times: Int[np.ndarray, "r n"]) -> Float[np.ndarray, " r"]:
        return np.abs(gap_by_bin @ times.T).sum(axis=0) / gap.size

    return bootstrap_error(error_of, size)


def fit_temperature(log_probabilities: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> float:
    """The T > 0 for which ``softmax(log p / T)`` gives the labels the lowest mean negative log-likelihood.

    Temperature scaling of Guo et al., "On calibration of modern neural networks", ICML 2017, Sec. 4.2. On
    probabilities averaged over noise samples or members it is "pool, then calibrate" of Rahaman and Thiery,
    "Uncertainty quantification and deep ensembles", NeurIPS 2021: the average is scaled, not its parts.

    The loss is convex in 1/T, so that its slope has one sign change at most. Where it has none between the bounds,
    the bound with the lower loss is returned: `LOWEST_TEMPERATURE` where every label is the most probable class (the
    loss falls as T goes to 0), `HIGHEST_TEMPERATURE` where predictions are no better than chance. Where every class
    is equally probable T changes nothing and is 1.

    Raises:
        UserError: no examples, a label outside the classes, or one of probability zero.
    """
    check_labels(labels, log_probabilities.shape[1])
    check_log_probabilities(log_probabilities)
    of_label = _of_label(log_probabilities, labels)
    if np.isneginf(of_label).any():
        example = int(np.flatnonzero(np.isneginf(of_label))[0])
        raise UserError(f"example {example} has a label of probability zero: no temperature can mend that")

    def slope(log_inverse: float) -> float:
        return _slope_of_loss(log_probabilities, of_label, np.exp(log_inverse))

    hottest, coldest = -np.log(HIGHEST_TEMPERATURE), -np.log(LOWEST_TEMPERATURE)
    at_hottest, at_coldest = slope(hottest), slope(coldest)
    if at_hottest == at_coldest == 0:
        return 1.0
    if at_coldest <= 0:
        return LOWEST_TEMPERATURE
    if at_hottest >= 0:
        return HIGHEST_TEMPERATURE
    root = optimize.root_scalar(slope, bracket=(hottest, coldest), method="brentq", xtol=1e-9).root
    return float(np.exp(-root))


def scaled(log_probabilities: Float[np.ndarray, "n k"], temperature: float) -> Float[np.ndarray, "n k"]:
    """Log-probabilities of ``softmax(log p / T)``, in float32.

    Raises:
        UserError: the temperature is not above zero, or a row holds no probabilities.
    """
    if not temperature > 0:
        raise UserError(f"the temperature is {temperature}: it must be above zero")
    check_log_probabilities(log_probabilities)
    result = np.empty(log_probabilities.shape, np.float32)
    for rows in row_blocks(*log_probabilities.shape):
        result[rows] = special.log_softmax(log_probabilities[rows].astype(np.float64) / temperature, axis=1)
    return result


def check_log_probabilities(log_probabilities: Float[np.ndarray, "n k"]) -> None:
    """Demand numbers below infinity, and in every row at least one class of some probability.

    Raises:
        UserError: a row holds NaN or infinity, or nothing but zero probabilities.
    """
    # The highest of a row is NaN if any is, and minus infinity only if all are.
    bad = ~np.isfinite(log_probabilities.max(axis=1))
    if bad.any():
        raise UserError(
            f"example {int(np.flatnonzero(bad)[0])} has no finite log-probabilities; training diverged, "
            "use an earlier checkpoint"
        )


def _slope_of_loss(
    log_probabilities: Float[np.ndarray, "n k"], of_label: Float[np.ndarray, " n"], inverse: float
) -> float:
    """Derivative of the mean negative log-likelihood by 1/T: the mean of E[log p] - log p(label) under the scaled p."""
    total = 0.0
    for rows in row_blocks(*log_probabilities.shape):
        block = log_probabilities[rows].astype(np.float64)
        highest = block.max(axis=1)
        # Relative to the highest: no overflow, and rows of equal entries give exactly zero.
        block -= highest[:, None]
        weights = np.exp(block * inverse)
        # Classes of probability zero have weight zero, and add nothing.
        block[np.isneginf(block)] = 0.0
        total += float(((weights * block).sum(axis=1) / weights.sum(axis=1)).sum())
        total -= float((of_label[rows] - highest).sum())
    return total / len(log_probabilities)


def _edges(confidence: Float[np.ndarray, " n"], bins: int, equal_mass: bool) -> Float[np.ndarray, " bins_plus_one"]:
    """Bounds of the bins, from 0 to 1."""
    if confidence.size == 0:
        raise UserError("no valid example to score: check that the split holds labelled images that can be read")
    edges = np.linspace(0.0, 1.0, bins + 1)
    if equal_mass:
        # The last example of each share, itself: no bound lies between the values of a tie.
        edges[1:-1] = np.sort(confidence)[-(-np.arange(1, bins) * confidence.size // bins) - 1]
    return edges


def _bin_of(confidence: Float[np.ndarray, " n"], edges: Float[np.ndarray, " bins_plus_one"]) -> Int[np.ndarray, " n"]:
    """The bin of each example."""
    # A softmax can round to slightly more than one; digitize on inner edges puts it in the last bin.
    return np.digitize(confidence, edges[1:-1], right=True)


def _of_label(
    values: Float[np.ndarray, "n k"] | Bool[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]
) -> Float[np.ndarray, " n"] | Bool[np.ndarray, " n"]:
    """The entry of each row at its label."""
    return np.take_along_axis(values, labels[:, None], axis=1)[:, 0]
