"""Calibration among names of which training captions had some: temperatures, and an offset between both kinds.

NumPy functions on log-probabilities ``[n k]``, class indices ``[n]`` and which of the names are seen ``[k]``.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import numpy as np
import scipy
from jaxtyping import Bool, Float, Int

from lit_het import arguments
from lit_het.calibrations import Calibrated, Calibration, FittedNames, Prior
from lit_het.errors import UserError
from lit_het.eval.metrics.calibration import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    check_labels,
    check_log_probabilities,
    fit,
    scaled,
)
from lit_het.eval.metrics.rows import row_blocks
from lit_het.eval.metrics.significance import standard_error

BALANCED = 0.5


class NoFit(Exception):
    """Images of seen and new names that no temperatures fit."""


def parse_prior(text: str) -> Prior:
    """Returns the prior of a text: "seen", "new", "balanced", or a share of new names such as "0.2".

    Raises:
        UserError: the text is not a prior.
    """
    if text in ("seen", "new"):
        return text
    try:
        share = BALANCED if text == "balanced" else float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < 1:
        raise UserError(
            f"prior {text}: give seen, new, balanced, or the share of right answers that are new names, between 0 and 1"
        )
    return share


def calibrated_by(calibrated: bool, prior: str | float | None) -> Calibrated:
    """Returns the two arguments of functions for users as one; raises a `UserError` if they do not fit."""
    arguments.flag(calibrated, "calibrated")
    if prior is None:
        return calibrated
    if not calibrated:
        raise UserError(
            "a prior is part of the calibration, which --uncalibrated (calibrated=False) leaves out; give one of them"
        )
    return parse_prior(str(prior))


def calibrated(
    calibration: Calibration, log_p: Float[np.ndarray, "n k"], seen: Bool[np.ndarray, " k"] | None, samples: int
) -> Float[np.ndarray, "n k"]:
    """Returns the log-probabilities of candidates as a calibration with its prior has them.

    With the priors "seen" and "new" no ranking changes.

    Args:
        calibration: of the model.
        log_p: as trained.
        seen: the candidates that training captions had; None if that is unknown.
        samples: S, the noise samples of the predictions; 0 without noise.
    """
    names, prior = calibration.fitted_names(samples), calibration.prior
    if names is None or seen is None or seen.all() or (prior == "seen" and seen.any()):
        return scaled(log_p, calibration.fitted(samples).temperature)
    if isinstance(prior, str) or not seen.any():
        return scaled(log_p, names.alone.temperature)
    return with_offset(log_p, seen, names, prior)


def with_offset(
    log_p: Float[np.ndarray, "n k"], seen: Bool[np.ndarray, " k"], names: FittedNames, share: float = BALANCED
) -> Float[np.ndarray, "n k"]:
    """Returns log-probabilities of `FittedNames` where a share of the right answers are new names, in float32.

    The offset is fitted to as many images of either kind, among K_new and K_seen names. Names of a kind being equally
    frequent, a name has the prior ``share / k_new``, or ``(1 - share) / k_seen``, and by Bayes' rule the offset is
    ``offset + log((1 - share) / share) + log(k_new / k_seen) - log(K_new / K_seen)``.
    """
    check_log_probabilities(log_p)
    result = np.empty(log_p.shape, np.float32)
    new_per_seen = (~seen).sum() / seen.sum()
    odds = math.log((1 - share) / share) + math.log(new_per_seen / names.new_per_seen)
    numbers = np.array([1 / names.temperature, names.offset + odds])
    for rows, gaps in _gaps(log_p):
        result[rows] = scipy.special.log_softmax(_logits(gaps, seen, numbers), axis=1)
    return result


def fit_names(
    log_p: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"], seen: Bool[np.ndarray, " k"]
) -> FittedNames:
    """Returns the temperature and the offset of the highest likelihood, images of either kind having half the weight.

    In 1/T and the offset the logits are linear, so that the loss is convex. The errors are the sandwich of Huber, as
    in `lit_het.eval.metrics.calibration.fit`, over the names of each kind: images of one name depend on one another.

    Raises:
        NoFit: there is no minimum between the bounds of the temperature.
    """
    check_labels(labels, log_p.shape[1])
    is_seen = seen[labels]
    if is_seen.all() or not is_seen.any():
        raise NoFit("all images are of seen names, or all of new ones")
    weight = np.where(is_seen, 0.5 / is_seen.sum(), 0.5 / (~is_seen).sum())

    @functools.lru_cache(maxsize=1)  # the optimizer asks for the curvature where it has asked for the loss
    def derivatives(*numbers: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return _derivatives(log_p, labels, seen, np.array(numbers), weight)

    def loss(numbers: np.ndarray) -> tuple[float, np.ndarray]:
        values, slopes, _ = derivatives(*numbers.tolist())
        return float(values.sum()), slopes.sum(axis=0)

    def curvature(numbers: np.ndarray) -> np.ndarray:
        return derivatives(*numbers.tolist())[2]

    inverse, offset = scipy.optimize.minimize(
        loss, np.array([1.0, 0.0]), jac=True, hess=curvature, method="trust-exact", options={"maxiter": 100}
    ).x
    _, slopes, hessian = derivatives(float(inverse), float(offset))
    slopes = slopes.copy()
    inside = inverse > 1 / HIGHEST_TEMPERATURE and inverse < 1 / LOWEST_TEMPERATURE
    if not inside or np.abs(slopes.sum(axis=0)).max() > 1e-3 or not np.linalg.eigvalsh(hessian).min() > 0:
        raise NoFit("no temperature and offset of seen and new names fit")
    # How many images either kind has is given, so that only what differs within a kind varies.
    for kind in (is_seen, ~is_seen):
        slopes[kind] -= slopes[kind].mean(axis=0)
    by_name = np.stack([np.bincount(labels, column) for column in slopes.T], axis=1)
    spread = np.linalg.inv(hessian)
    of_inverse, of_offset = np.sqrt(np.diag(spread @ (by_name.T @ by_name) @ spread)).tolist()
    try:
        alone = fit(log_p[~is_seen], labels[~is_seen], np.unique(labels[~is_seen], return_inverse=True)[1])
    except UserError as error:
        raise NoFit(f"of new names, {error}") from error
    # By the delta method the error of T is T² times that of 1/T.
    errors = of_inverse / float(inverse) ** 2, of_offset
    return FittedNames(float(1 / inverse), float(offset), float((~seen).sum() / seen.sum()), errors, alone)


@dataclasses.dataclass(frozen=True)
class SeenAgainstNew:
    """Top-1 of images of seen names against that of new names, as the offset between them moves.

    Attributes:
        seen, new: points of the curve, from an offset of minus infinity on.
    """

    seen: Float[np.ndarray, " p"]
    new: Float[np.ndarray, " p"]

    @property
    def area(self) -> float:
        """The area under the curve (AUSUC, Chao et al. 2016)."""
        return float(np.trapezoid(self.new, self.seen))


def seen_against_new(
    log_p: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"], seen: Bool[np.ndarray, " k"]
) -> SeenAgainstNew:
    """Returns the curve of an evaluation with images of both kinds."""
    is_seen = seen[labels]
    right, turns = np.empty(len(labels), bool), np.empty(len(labels))
    for rows in row_blocks(*log_p.shape):
        of_seen, of_new = (np.where(kind, log_p[rows].astype(np.float64), -np.inf) for kind in (seen, ~seen))
        right[rows] = np.where(is_seen[rows], of_seen.argmax(axis=1), of_new.argmax(axis=1)) == labels[rows]
        # The offset of seen names from which on the prediction is one of them.
        turns[rows] = of_new.max(axis=1) - of_seen.max(axis=1)
    offsets = np.unique(turns)
    # An image of a seen name is right from its turn on, one of a new name before.
    at = [np.searchsorted(np.sort(turns[right & kind]), offsets, "right") for kind in (is_seen, ~is_seen)]
    seen_top1 = np.concatenate([[0], at[0]]) / is_seen.sum()
    new_top1 = ((right & ~is_seen).sum() - np.concatenate([[0], at[1]])) / (~is_seen).sum()
    return SeenAgainstNew(seen_top1, new_top1)


def figures_of_kinds(
    correct: Float[np.ndarray, " n"], labels: Int[np.ndarray, " n"], seen: Bool[np.ndarray, " k"]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns top-1 of images of seen and of new names with standard errors, and their harmonic mean."""
    kinds = {"seen_top1": correct[seen[labels]], "new_top1": correct[~seen[labels]]}
    found = {name: float(values.mean()) for name, values in kinds.items()}
    errors = {name: standard_error(values) for name, values in kinds.items()}
    return {**found, "harmonic_top1": harmonic_mean(*found.values())}, errors


def harmonic_mean(one: float, other: float) -> float:
    """Returns the harmonic mean of two accuracies; 0 if both are."""
    return 2 * one * other / (one + other) if one + other else 0.0


def _gaps(log_p: Float[np.ndarray, "n k"]) -> Iterator[tuple[slice, Float[np.ndarray, "b k"]]]:
    """Yields ``log p - max log p`` in blocks of rows, finite."""
    for rows in row_blocks(*log_p.shape):
        block = log_p[rows].astype(np.float64)
        # A probability of zero stays one at any temperature.
        yield rows, np.maximum(block - block.max(axis=1, keepdims=True), -1e6)


def _logits(
    gaps: Float[np.ndarray, "b k"], seen: Bool[np.ndarray, " k"], numbers: Float[np.ndarray, " two"]
) -> Float[np.ndarray, "b k"]:
    """Returns the logits of 1/T and the offset."""
    return gaps * numbers[0] + numbers[1] * seen


def _derivatives(
    log_p: Float[np.ndarray, "n k"],
    labels: Int[np.ndarray, " n"],
    seen: Bool[np.ndarray, " k"],
    numbers: Float[np.ndarray, " two"],
    weight: Float[np.ndarray, " n"],
) -> tuple[Float[np.ndarray, " n"], Float[np.ndarray, "n two"], Float[np.ndarray, "two two"]]:
    """Returns the weighted loss of each image, its slopes by both numbers, and the sum of the second derivatives.

    With the features ``φ_j = (gap_j, [j is seen])`` of candidate j, they are ``E[φ] - φ(label)`` and the covariance of
    φ under the scaled probabilities.
    """
    values, slopes, hessian = np.empty(len(labels)), np.empty((len(labels), 2)), np.zeros((2, 2))
    for rows, gaps in _gaps(log_p):
        label, every = labels[rows], np.arange(len(gaps))
        logits = _logits(gaps, seen, numbers)
        logits -= logits.max(axis=1, keepdims=True)
        q = np.exp(logits)
        total = q.sum(axis=1)
        q /= total[:, None]
        moved = q * gaps
        mean = np.stack([moved.sum(axis=1), q @ seen], axis=1)
        both = moved @ seen
        second = np.stack([(moved * gaps).sum(axis=1), both, both, mean[:, 1]], axis=1).reshape(-1, 2, 2)
        values[rows] = weight[rows] * (np.log(total) - logits[every, label])
        slopes[rows] = weight[rows, None] * (mean - np.stack([gaps[every, label], seen[label]], axis=1))
        hessian += np.einsum("i,ijk->jk", weight[rows], second - mean[:, :, None] * mean[:, None, :])
    return values, slopes, hessian
