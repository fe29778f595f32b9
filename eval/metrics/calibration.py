"""Calibration of predicted probabilities: Brier score, expected calibration error, temperature scaling.

Pure NumPy functions on log-probabilities ``[n k]`` and class indices ``[n]``. Where several classes tie for the highest
probability, the prediction counts as drawn evenly among them. A model that cannot distinguish its classes thus scores
chance, and not the luck of the lowest index.
"""

import dataclasses

import numpy as np
import scipy
from jaxtyping import Bool, Float, Int

from lit_het.calibrations import FittedTemperature
from lit_het.errors import UserError
from lit_het.eval.metrics.rows import row_blocks
from lit_het.eval.metrics.significance import bootstrap_error

DEFAULT_BINS = 15
# Beyond these bounds a fitted temperature only says "all predictions are correct" or "no better than chance".
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-2, 1e2


@dataclasses.dataclass(frozen=True)
class ReliabilityCurve:
    """Accuracy against confidence in bins of equal width or of equal mass.

    Attributes:
        edges: bounds of the bins, from 0 to 1; a bin includes its upper bound, the first bin also its lower bound.
        confidence: mean confidence in a bin, NaN where the bin is empty.
        accuracy: share of correct predictions in a bin, NaN where the bin is empty.
        count: number of examples in a bin.
    """

    edges: Float[np.ndarray, " bins_plus_one"]
    confidence: Float[np.ndarray, " bins"]
    accuracy: Float[np.ndarray, " bins"]
    count: Int[np.ndarray, " bins"]

    @property
    def expected_calibration_error(self) -> float:
        """Mean distance between confidence and accuracy, weighted by the number of examples in each bin.

        Naeini, Cooper and Hauskrecht, "Obtaining well calibrated probabilities using Bayesian binning", AAAI 2015; in
        the form of Guo et al., "On calibration of modern neural networks", ICML 2017, Eq. 3.
        """
        gaps = np.abs(self.confidence - self.accuracy)
        return float(np.nansum(self.count * gaps) / self.count.sum())


def check_labels(labels: Int[np.ndarray, " n"], num_classes: int) -> None:
    """Checks that there is at least one label and that every label is in ``[0, num_classes)``."""
    if labels.size == 0:
        raise UserError("no valid example to score: check that the split holds labelled images that can be read")
    outside = (labels < 0) | (labels >= num_classes)
    if outside.any():
        raise UserError(
            f"label {labels[outside][0]} lies outside the {num_classes} classes: "
            "the labels and the list of class names must come from the same data set"
        )


def brier_scores(log_probabilities: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Returns the squared distance between each image's probabilities and its one-hot label, from 0 to 2, in float64.

    The sum runs over all classes, as in Brier, "Verification of forecasts expressed in terms of
    probability", Monthly Weather Review 1950; some libraries halve it for two classes.
    """
    check_labels(labels, log_probabilities.shape[1])
    squares = np.empty(len(log_probabilities))
    for rows in row_blocks(*log_probabilities.shape):
        squares[rows] = np.exp(2 * log_probabilities[rows].astype(np.float64)).sum(axis=1)
    # |p - e_y|² = |p|² - 2 p_y + 1, without building the one-hot matrix.
    return squares - 2 * np.exp(_at_label(log_probabilities, labels).astype(np.float64)) + 1


def correctness(scores: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Returns the probability that the predicted class is the label: 1 or 0, or a fraction if the highest scores tie.

    Scores are probabilities or any increasing function of them, such as their logarithms.
    """
    check_labels(labels, scores.shape[1])
    # Exact equality, on purpose: ties come from identical images or class names, whose scores are bitwise equal.
    winners = scores == scores.max(axis=1)[:, None]
    return _at_label(winners, labels) / winners.sum(axis=1)


def reliability_of_confidence(
    confidence: Float[np.ndarray, " n"],
    correct: Float[np.ndarray, " n"],
    bins: int = DEFAULT_BINS,
    *,
    equal_mass: bool = False,
) -> ReliabilityCurve:
    """Computes the reliability curve from the confidence of each prediction and its correctness (0 to 1).

    Bins of equal mass (Nguyen and O'Connor, "Posterior calibration and exploratory analysis for natural language
    processing models", EMNLP 2015) hold n / bins examples each, rounded; examples of equal confidence share a bin, the
    lowest that any of them would be in, so that the curve never depends on their order. Remaining bins are empty.
    """
    edges = _edges(confidence, bins, equal_mass)
    members = bin_of(confidence, edges)
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
    groups: Int[np.ndarray, " n"] | None = None,
) -> float:
    """Returns the bootstrap standard error over examples of the expected calibration error, with fixed bins.

    With several predictors, it is the standard error of the mean of their calibration errors. Groups of dependent
    examples are as in `bootstrap_error`.
    """
    size, by_predictor = len(confidence), np.atleast_2d(confidence.T)
    members = np.stack([bin_of(values, _edges(values, bins, equal_mass)) for values in by_predictor])
    # Σ_b count_b |confidence_b - accuracy_b| / n is the sum over bins of |Σ gap| / n.
    gap = by_predictor.astype(np.float64) - np.atleast_2d(correct.T)
    # One sparse product sums the gaps of all predictors: predictor p has the rows from p * bins on.
    members += bins * np.arange(len(members))[:, None]
    example = np.broadcast_to(np.arange(size), members.shape)
    gap_by_bin = scipy.sparse.csr_array(
        (gap.ravel(), (members.ravel(), example.ravel())), shape=(bins * len(by_predictor), size)
    )

    def resampled(times: Int[np.ndarray, "r n"]) -> Float[np.ndarray, " r"]:
        return np.abs(gap_by_bin @ times.T).sum(axis=0) / (times.sum(axis=1) * len(by_predictor))

    return bootstrap_error(resampled, size, groups=groups)


def fit_temperature(
    log_probabilities: Float[np.ndarray, "n k"],
    labels: Int[np.ndarray, " n"],
    weight: Float[np.ndarray, " n"] | None = None,
) -> float:
    """Returns the T > 0 for which ``softmax(log p / T)`` has the lowest mean negative log-likelihood of the labels.

    Temperature scaling of Guo et al., "On calibration of modern neural networks", ICML 2017, Sec. 4.2. On
    probabilities averaged over noise samples or members it is "pool, then calibrate" of Rahaman and Thiery,
    "Uncertainty quantification and deep ensembles", NeurIPS 2021: the average is scaled, not the single predictions.

    The loss is convex in 1/T, so its slope changes sign at most once. Where the slope has no sign change between the
    bounds, the bound with the lower loss is returned: `LOWEST_TEMPERATURE` if every label is the most probable class
    (the loss decreases as T goes to 0), `HIGHEST_TEMPERATURE` if predictions are no better than chance. If all classes
    are equally probable, T has no effect, and 1 is returned.

    Args:
        log_probabilities: of all classes.
        labels: the right classes.
        weight: of each example in the mean; None for equal ones.
    """
    check_labels(labels, log_probabilities.shape[1])
    check_log_probabilities(log_probabilities)
    label_log_p = _at_label(log_probabilities, labels)
    if np.isneginf(label_log_p).any():
        example = int(np.flatnonzero(np.isneginf(label_log_p))[0])
        raise UserError(
            f"example {example} has a label of probability zero: no temperature can fix that; use an earlier checkpoint"
        )

    def slope(log_inverse: float) -> float:
        slopes, _ = _derivatives_of_loss(log_probabilities, label_log_p, np.exp(log_inverse))
        return float(np.average(slopes, weights=weight))

    # The root is searched on a log scale, where the bounds are symmetric about T = 1.
    hottest, coldest = -np.log(HIGHEST_TEMPERATURE), -np.log(LOWEST_TEMPERATURE)
    at_hottest, at_coldest = slope(hottest), slope(coldest)
    if at_hottest == at_coldest == 0:
        return 1.0
    if at_coldest <= 0:
        return LOWEST_TEMPERATURE
    if at_hottest >= 0:
        return HIGHEST_TEMPERATURE
    root = scipy.optimize.root_scalar(slope, bracket=(hottest, coldest), method="brentq", xtol=1e-9).root
    return float(np.exp(-root))


def fit(
    log_probabilities: Float[np.ndarray, "n k"],
    labels: Int[np.ndarray, " n"],
    image: Int[np.ndarray, " n"] | None = None,
) -> FittedTemperature:
    """Returns the temperature of `fit_temperature` with its standard error over images.

    With ``b = 1/T`` and the loss ``l_i(b)`` of image i, the error of ``b`` is ``sqrt(Σ l'²) / Σ l''``, the
    sandwich of Huber, "The behavior of maximum likelihood estimates under nonstandard conditions", 1967. (The inverse
    Fisher information ``1 / (n mean l'')`` holds only if the scaled probabilities are the true ones.) By the delta
    method the error of T is ``T²`` times that.

    Args:
        log_probabilities: of all classes.
        labels: the right classes.
        image: the image of each row, where several rows are of one image, such as the tokens of its caption; None where
            each row is another image. The loss of an image is the sum over its rows.
    """
    temperature = fit_temperature(log_probabilities, labels)
    label_log_p = _at_label(log_probabilities, labels)
    slopes, curvatures = _derivatives_of_loss(log_probabilities, label_log_p, 1 / temperature)
    if temperature == LOWEST_TEMPERATURE:
        raise UserError("no temperature fits: every label is the most probable one; take more, or harder images")
    if temperature == HIGHEST_TEMPERATURE or not curvatures.any():  # without curvature every T fits
        raise UserError(
            "no temperature fits: predictions are no better than chance; train longer, or check that the labels "
            "belong to the images"
        )
    by_image = slopes if image is None else np.bincount(image, slopes)
    error = temperature**2 * np.sqrt((by_image**2).sum()) / curvatures.sum()
    after = _at_label(scaled(log_probabilities, temperature), labels)
    means = (0.0 - float(values.mean(dtype=np.float64)) for values in (label_log_p, after))
    return FittedTemperature(temperature, float(error), *means)


def scaled(log_probabilities: Float[np.ndarray, "n k"], temperature: float) -> Float[np.ndarray, "n k"]:
    """Returns the log-probabilities of ``softmax(log p / T)``, in float32."""
    if not temperature > 0:
        raise UserError(f"the temperature is {temperature}: it must be above zero")
    check_log_probabilities(log_probabilities)
    result = np.empty(log_probabilities.shape, np.float32)
    for rows in row_blocks(*log_probabilities.shape):
        result[rows] = scipy.special.log_softmax(log_probabilities[rows].astype(np.float64) / temperature, axis=1)
    return result


def check_log_probabilities(log_probabilities: Float[np.ndarray, "n k"]) -> None:
    """Checks that every row has no NaN or infinity, and at least one class of nonzero probability."""
    # The maximum of a row is NaN if any entry is NaN, and minus infinity only if all entries are.
    bad = ~np.isfinite(log_probabilities.max(axis=1))
    if bad.any():
        raise UserError(
            f"example {int(np.flatnonzero(bad)[0])} has no finite log-probabilities; training diverged, "
            "use an earlier checkpoint"
        )


def _derivatives_of_loss(
    log_probabilities: Float[np.ndarray, "n k"], label_log_p: Float[np.ndarray, " n"], inverse: float
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, " n"]]:
    """Returns the first and the second derivative of each image's negative log-likelihood by 1/T.

    They are ``E[log p] - log p(label)`` and ``Var[log p]`` under the scaled p.
    """
    slopes, curvatures = np.empty(len(log_probabilities)), np.empty(len(log_probabilities))
    for rows in row_blocks(*log_probabilities.shape):
        block = log_probabilities[rows].astype(np.float64)
        highest = block.max(axis=1)
        # Subtracting the maximum prevents overflow, and rows of equal entries give exactly zero.
        block -= highest[:, None]
        weights = np.exp(block * inverse)
        weights /= weights.sum(axis=1, keepdims=True)
        # Classes of probability zero have weight zero: 0 instead of minus infinity keeps the product from being NaN.
        block[np.isneginf(block)] = 0.0
        mean = (weights * block).sum(axis=1)
        slopes[rows] = mean - (label_log_p[rows] - highest)
        curvatures[rows] = (weights * (block - mean[:, None]) ** 2).sum(axis=1)
    return slopes, curvatures


def _edges(confidence: Float[np.ndarray, " n"], bins: int, equal_mass: bool) -> Float[np.ndarray, " bins_plus_one"]:
    """Returns the bounds of the bins, from 0 to 1."""
    if confidence.size == 0:
        raise UserError("no valid example to score: check that the split holds labelled images that can be read")
    edges = np.linspace(0.0, 1.0, bins + 1)
    if equal_mass:
        # A bound is the confidence of the last example in its bin: ties never straddle a bound.
        edges[1:-1] = np.sort(confidence)[-(-np.arange(1, bins) * confidence.size // bins) - 1]
    return edges


def bin_of(confidence: Float[np.ndarray, " n"], edges: Float[np.ndarray, " bins_plus_one"]) -> Int[np.ndarray, " n"]:
    """Returns the bin of each example."""
    # A softmax can round to slightly more than one; digitize on inner edges puts it in the last bin.
    return np.digitize(confidence, edges[1:-1], right=True)


def _at_label(
    values: Float[np.ndarray, "n k"] | Bool[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]
) -> Float[np.ndarray, " n"] | Bool[np.ndarray, " n"]:
    """Returns the entry of each row at its label."""
    return np.take_along_axis(values, labels[:, None], axis=1)[:, 0]
