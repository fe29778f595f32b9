"""Out-of-distribution detection: scores of images, and metrics of scores.

A higher score ``[n]`` means that the image is more likely out of distribution. The head's noise norm is also a score.
"""

import dataclasses

import numpy as np
import scipy
from jaxtyping import Bool, Float, Int

from lit_het.errors import UserError
from lit_het.eval.metrics.calibration import check_labels, check_log_probabilities
from lit_het.eval.metrics.classes import average_precision
from lit_het.eval.metrics.rows import row_blocks
from lit_het.eval.metrics.significance import standard_error

# The estimated shrinkage can be zero, for example with two images, where the covariance is singular without shrinkage.
SMALLEST_SHRINKAGE = 1e-6


def max_probability_score(log_probabilities: Float[np.ndarray, "n k"]) -> Float[np.ndarray, " n"]:
    """Returns minus the log of the highest probability, which ranks images as minus the probability does.

    The logarithm still distinguishes probabilities that float32 rounds to one. Hendrycks and Gimpel, "A baseline for
    detecting misclassified and out-of-distribution examples in neural networks", ICLR 2017.
    """
    check_log_probabilities(log_probabilities)
    return -log_probabilities.max(axis=1)


def entropy_score(log_probabilities: Float[np.ndarray, "n k"]) -> Float[np.ndarray, " n"]:
    """Returns the entropy of the prediction, in nats."""
    check_log_probabilities(log_probabilities)
    result = np.empty(len(log_probabilities))
    for rows in row_blocks(*log_probabilities.shape):
        result[rows] = scipy.special.entr(np.exp(log_probabilities[rows].astype(np.float64))).sum(axis=1)
    return result


@dataclasses.dataclass(frozen=True)
class Gaussians:
    """Gaussians with one covariance and several means.

    Attributes:
        factor: lower Cholesky factor of the covariance.
        means: whitened means, ``factor⁻¹ μ``.
    """

    factor: Float[np.ndarray, "d d"]
    means: Float[np.ndarray, "k d"]

    def distance(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """Returns the squared Mahalanobis distance to the nearest mean."""
        result = np.empty(len(features))
        # Blocks of rows bound the memory of the float64 copy and of the distances to all means.
        for rows in row_blocks(len(features), max(*self.means.shape, features.shape[1])):
            whitened = _whitened(features[rows].astype(np.float64), self.factor)
            # |a - b|² by one matrix product instead of all differences; rounding can make it slightly negative, hence
            # the clip.
            squares = (whitened**2).sum(axis=1)[:, None] - 2 * whitened @ self.means.T + (self.means**2).sum(axis=1)
            result[rows] = squares.min(axis=1).clip(min=0)
        return result


@dataclasses.dataclass(frozen=True)
class FeatureModel:
    """Gaussians fitted to the features of training images.

    Attributes:
        classes: one mean per class.
        background: a single mean of all images.
    """

    classes: Gaussians
    background: Gaussians

    def mahalanobis_score(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """Returns the squared Mahalanobis distance to the nearest class.

        Lee et al., "A simple unified framework for detecting out-of-distribution samples and adversarial attacks",
        NeurIPS 2018, Eq. 2, without the paper's input perturbation and its ensemble over layers.
        """
        _check_finite(features)
        return self.classes.distance(features)

    def relative_mahalanobis_score(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """Returns the distance to the nearest class minus the distance to the mean of all images.

        Ren et al., "A simple fix to Mahalanobis distance for improving near-OOD detection", 2021: directions in
        which all images vary equally carry no information about classes, and cancel.
        """
        return self.mahalanobis_score(features) - self.background.distance(features)


def fit_features(features: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"]) -> FeatureModel:
    """Fits the Gaussians to training features; classes without images are left out.

    Covariances are shrunk towards a multiple of the identity, with the weight of Ledoit and Wolf, "A well-conditioned
    estimator for large-dimensional covariance matrices", Journal of Multivariate Analysis 2004. With
    many images the weight goes to zero, which gives the papers' estimate. With fewer images than dimensions, the
    covariance is still invertible. A pseudo-inverse would ignore every direction without training images, in which an
    out-of-distribution image may lie.
    """
    _check_finite(features)
    check_labels(labels, int(labels.max(initial=0)) + 1)
    _, classes = np.unique(labels, return_inverse=True)
    return FeatureModel(_fit(features, classes), _fit(features, np.zeros_like(classes)))


def detection_figures(inside: Float[np.ndarray, " n"], outside: Float[np.ndarray, " m"]) -> dict[str, float]:
    """Computes how well scores distinguish out-of-distribution images from in-distribution images.

    - ``auroc``: the probability that an out-of-distribution image has the higher score; ties count half.
    - ``aupr_out``: average precision with out-of-distribution images as positives, ranked by descending scores.
    - ``aupr_in``: average precision with in-distribution images as positives, ranked by ascending scores.
    - ``fpr95``: the share of out-of-distribution images that do not exceed the lowest score that at least 95 % of
      in-distribution images do not exceed. That is the false positive rate at a true positive rate of 95 %
      with in-distribution images as positives, as in Liang et al. (ODIN, ICLR 2018) and the tables of e3.

    See docs/paper_map.md.

    Args:
        inside: scores of in-distribution images.
        outside: scores of out-of-distribution images.
    """
    if not inside.size or not outside.size:
        raise UserError("out of distribution: both sets need at least one image")
    scores = np.concatenate([inside, outside])
    if np.isnan(scores).any():
        raise UserError("out of distribution: a score is not a number; training diverged, use an earlier checkpoint")
    is_outside = np.arange(scores.size) >= inside.size
    rank_sum = scipy.stats.rankdata(scores)[is_outside].sum()
    # AUROC is the Mann-Whitney statistic; mid-ranks count ties half.
    wins = rank_sum - outside.size * (outside.size + 1) / 2
    # The lowest threshold that at least 95 % pass. Integer arithmetic, as 0.95 * n can round above an integer.
    threshold = np.sort(inside)[-(-19 * inside.size // 20) - 1]
    return {
        "auroc": float(wins / (inside.size * outside.size)),
        "aupr_out": average_precision(scores, is_outside),
        "aupr_in": average_precision(-scores, ~is_outside),
        "fpr95": float((outside <= threshold).mean()),
    }


def detection_errors(inside: Float[np.ndarray, " n"], outside: Float[np.ndarray, " m"]) -> dict[str, float]:
    """Computes standard errors of `detection_figures` over the images of both sets; NaN where a set has one image.

    ``auroc`` uses DeLong, DeLong and Clarke-Pearson, "Comparing the areas under two or more correlated receiver
    operating characteristic curves", Biometrics 1988. Average precisions use the infinitesimal jackknife of Efron,
    "Nonparametric estimates of standard error", Biometrika 1981, from the influence of each image. ``fpr95`` uses the
    bootstrap in closed form, the limit of infinitely many resamples, threshold included.
    """
    scores = np.concatenate([inside, outside])
    is_outside = np.arange(scores.size) >= inside.size
    # For images outside: the share of the other set with lower scores, ties counting half. For images inside: the same
    # share, which differs from the share with higher scores by sign and a constant, so the variance is the same.
    own_rank = np.concatenate([scipy.stats.rankdata(inside), scipy.stats.rankdata(outside)])
    lower = (scipy.stats.rankdata(scores) - own_rank) / np.where(is_outside, inside.size, outside.size)
    influences = {
        "auroc": lower,
        "aupr_out": _influence_on_precision(scores, is_outside),
        "aupr_in": _influence_on_precision(-scores, ~is_outside),
    }
    errors = {
        name: float(np.hypot(standard_error(influence[is_outside]), standard_error(influence[~is_outside])))
        for name, influence in influences.items()
    }
    return {**errors, "fpr95": _error_of_fpr95(inside, outside)}


def _influence_on_precision(
    scores: Float[np.ndarray, " n"], positive: Bool[np.ndarray, " n"]
) -> Float[np.ndarray, " n"]:
    """Returns the derivative of the average precision by the weight of each image, times the size of its group."""
    levels, level_of = np.unique(-scores, return_inverse=True)
    own, others = (np.bincount(level_of[group], minlength=len(levels)) for group in (positive, ~positive))
    found, passed = np.cumsum(own), np.cumsum(own + others)
    # More weight at one score changes the precision at this score and at all lower scores.
    gained = np.cumsum((own * (passed - found) / passed**2)[::-1])[::-1]
    lost = np.cumsum((own * found / passed**2)[::-1])[::-1]
    ratio = others.sum() / own.sum()
    return np.where(positive, (found / passed + gained)[level_of], -ratio * lost[level_of])


def _error_of_fpr95(inside: Float[np.ndarray, " n"], outside: Float[np.ndarray, " m"]) -> float:
    """Returns the bootstrap standard error of ``fpr95``."""
    if min(inside.size, outside.size) < 2:
        return float("nan")
    rank = -(-19 * inside.size // 20)
    # In a resample of n indices, the rank-th lowest is at most i if at least `rank` of them are: a binomial tail, which
    # the regularised incomplete beta function gives exactly.
    at_most = scipy.special.betainc(rank, inside.size - rank + 1, np.arange(inside.size + 1) / inside.size)
    probability = np.diff(at_most)
    passing = np.searchsorted(np.sort(outside), np.sort(inside), side="right") / outside.size
    threshold_variance = probability @ (passing - probability @ passing) ** 2
    return float(np.sqrt(threshold_variance + probability @ (passing * (1 - passing)) / outside.size))


def _fit(features: Float[np.ndarray, "n d"], classes: Int[np.ndarray, " n"]) -> Gaussians:
    """Fits class means and the shrunk within-class covariance; every class has images."""
    size, dimension = features.shape
    means = np.zeros((int(classes.max()) + 1, dimension))
    for rows in row_blocks(size, dimension):
        np.add.at(means, classes[rows], features[rows])
    means /= np.bincount(classes)[:, None]
    covariance, fourth = np.zeros((dimension, dimension)), 0.0
    for rows in row_blocks(size, dimension):
        centred = features[rows] - means[classes[rows]]
        covariance += centred.T @ centred / size
        fourth += float(((centred**2).sum(axis=1) ** 2).sum()) / size
    factor = scipy.linalg.cholesky(_shrunk(covariance, fourth, size), lower=True)
    return Gaussians(factor, _whitened(means, factor))


def _shrunk(covariance: Float[np.ndarray, "d d"], fourth: float, size: int) -> Float[np.ndarray, "d d"]:
    """Returns Ledoit and Wolf's estimate; ``fourth`` is the mean fourth power of the norms of centred examples."""
    identity = np.eye(len(covariance))
    scale = np.trace(covariance) / len(covariance)
    if scale == 0:
        raise UserError(
            "all images of a class have the same features: give more than one image per class, or other features"
        )
    distance = ((covariance - scale * identity) ** 2).sum()
    # The expected squared error of the sample covariance, estimated from fourth moments.
    noise = (fourth - (covariance**2).sum()) / size
    share = 1.0 if noise >= distance else max(noise / distance, SMALLEST_SHRINKAGE)
    # Shrinking towards the mean variance keeps the trace.
    return (1 - share) * covariance + share * scale * identity


def _whitened(vectors: Float[np.ndarray, "n d"], factor: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "n d"]:
    """Returns ``factor⁻¹ v`` for each vector: a covariance with this Cholesky factor becomes the identity."""
    return scipy.linalg.solve_triangular(factor, vectors.T, lower=True).T


def _check_finite(features: np.ndarray) -> None:
    if not np.isfinite(features).all():
        raise UserError("a feature is not finite; training diverged, use an earlier checkpoint")
