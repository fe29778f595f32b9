"""How well a model tells images of other kinds from those it knows: scores of images, and figures of scores.

Every score ``[n]`` is higher the more likely its image is out of distribution. The head's noise norm already is one.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import linalg, special, stats

from lit_het.errors import UserError
from lit_het.eval.calibration import check_labels, check_log_probabilities
from lit_het.eval.classes import average_precision
from lit_het.eval.rows import row_blocks
from lit_het.eval.significance import standard_error

# The estimated share can be zero, of two images for one, where the covariance has no inverse without it.
SMALLEST_SHRINKAGE = 1e-6


def max_probability_score(log_probabilities: Float[np.ndarray, "n k"]) -> Float[np.ndarray, " n"]:
    """Minus the log of the highest probability, which orders images as minus the probability does.

    The logarithm still tells apart probabilities that float32 rounds to one. Hendrycks and Gimpel, "A baseline for
    detecting misclassified and out-of-distribution examples in neural networks", ICLR 2017.

    Raises:
        UserError: a row holds no probabilities.
    """
    check_log_probabilities(log_probabilities)
    return -log_probabilities.max(axis=1)


def entropy_score(log_probabilities: Float[np.ndarray, "n k"]) -> Float[np.ndarray, " n"]:
    """Entropy of the prediction, in nats.

    Raises:
        UserError: a row holds no probabilities.
    """
    check_log_probabilities(log_probabilities)
    result = np.empty(len(log_probabilities))
    for rows in row_blocks(*log_probabilities.shape):
        result[rows] = special.entr(np.exp(log_probabilities[rows].astype(np.float64))).sum(axis=1)
    return result


@dataclasses.dataclass(frozen=True)
class Gaussians:
    """Gaussians of one covariance and several means.

    Attributes:
        factor: lower Cholesky factor of the covariance.
        means: centres, divided by the factor.
    """

    factor: Float[np.ndarray, "d d"]
    means: Float[np.ndarray, "k d"]

    def distance(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """Squared Mahalanobis distance to the nearest mean."""
        result = np.empty(len(features))
        for rows in row_blocks(len(features), max(*self.means.shape, features.shape[1])):
            whitened = _divided(features[rows].astype(np.float64), self.factor)
            squares = (whitened**2).sum(axis=1)[:, None] - 2 * whitened @ self.means.T + (self.means**2).sum(axis=1)
            result[rows] = squares.min(axis=1).clip(min=0)
        return result


@dataclasses.dataclass(frozen=True)
class FeatureModel:
    """What the features of training images look like: Gaussians of the classes, and one of all images.

    Attributes:
        classes: a mean a class.
        background: a single mean.
    """

    classes: Gaussians
    background: Gaussians

    def mahalanobis_score(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """Squared Mahalanobis distance to the nearest class.

        Lee et al., "A simple unified framework for detecting out-of-distribution samples and adversarial attacks",
        NeurIPS 2018, Eq. 2, without its perturbed inputs and its ensemble over layers.

        Raises:
            UserError: a feature is not finite.
        """
        _check_finite(features)
        return self.classes.distance(features)

    def relative_mahalanobis_score(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """The distance to the nearest class, less that to the mean of all images.

        Ren et al., "A simple fix to Mahalanobis distance for improving near-OOD detection", 2021: directions in which
        all images vary alike say nothing of classes, and cancel.

        Raises:
            UserError: a feature is not finite.
        """
        return self.mahalanobis_score(features) - self.background.distance(features)


def fit_features(features: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"]) -> FeatureModel:
    """Fits the Gaussians to training features; classes without images have none.

    Covariances are shrunk towards a multiple of the identity by the share of Ledoit and Wolf, "A well-conditioned
    estimator for large-dimensional covariance matrices", Journal of Multivariate Analysis 2004. The share goes to zero
    as images become many, which leaves the papers' estimate; with fewer images than dimensions the covariance still
    has an inverse. A pseudo-inverse would have one too, but would ignore every direction in which no training image
    lies, the very ones that a strange image may take.

    Raises:
        UserError: no images, a feature is not finite, or images do not differ within their classes.
    """
    _check_finite(features)
    check_labels(labels, int(labels.max(initial=0)) + 1)
    _, classes = np.unique(labels, return_inverse=True)
    return FeatureModel(_fit(features, classes), _fit(features, np.zeros_like(classes)))


def detection_figures(inside: Float[np.ndarray, " n"], outside: Float[np.ndarray, " m"]) -> dict[str, float]:
    """How well scores tell images outside the distribution from those inside.

    ``auroc`` is the probability that an image outside scores higher, ties counting half. ``aupr_out`` and ``aupr_in``
    are average precisions with the images outside as positives, found by high scores, or those inside, by low ones.
    ``fpr95`` is the share of images outside that pass where 95 % of those inside do: the false positive rate at a
    true positive rate of 95 % with the images inside as positives, as in Liang et al. (ODIN, ICLR 2018) and e3's
    tables. See docs/paper_map.md.

    Args:
        inside: scores of images in distribution.
        outside: scores of images out of distribution.

    Raises:
        UserError: one of the groups is empty, or a score is NaN.
    """
    if not inside.size or not outside.size:
        raise UserError("out of distribution: both sets need at least one image")
    scores = np.concatenate([inside, outside])
    if np.isnan(scores).any():
        raise UserError("out of distribution: a score is not a number; training diverged, use an earlier checkpoint")
    is_outside = np.arange(scores.size) >= inside.size
    rank_sum = stats.rankdata(scores)[is_outside].sum()
    wins = rank_sum - outside.size * (outside.size + 1) / 2
    # The lowest threshold that at least 95 % pass, counted in integers: 0.95 n may round to above an integer.
    threshold = np.sort(inside)[-(-19 * inside.size // 20) - 1]
    return {
        "auroc": float(wins / (inside.size * outside.size)),
        "aupr_out": average_precision(scores, is_outside),
        "aupr_in": average_precision(-scores, ~is_outside),
        "fpr95": float((outside <= threshold).mean()),
    }


def detection_errors(inside: Float[np.ndarray, " n"], outside: Float[np.ndarray, " m"]) -> dict[str, float]:
    """Standard errors of `detection_figures` over the images of both sets; NaN where a set is a single image.

    ``auroc`` has that of DeLong, DeLong and Clarke-Pearson, "Comparing the areas under two or more correlated receiver
    operating characteristic curves", Biometrics 1988. Average precisions have theirs of the same kind, from what each
    image weighs in them: the infinitesimal jackknife of Efron, "Nonparametric estimates of standard error",
    Biometrika 1981. That of ``fpr95`` is the bootstrap's, threshold included, in its limit of infinitely many draws.
    """
    scores = np.concatenate([inside, outside])
    is_outside = np.arange(scores.size) >= inside.size
    # The share of the other set that each image beats (outside), or is beaten by (inside: less one, the same).
    own_rank = np.concatenate([stats.rankdata(inside), stats.rankdata(outside)])
    beaten = (stats.rankdata(scores) - own_rank) / np.where(is_outside, inside.size, outside.size)
    weights = {
        "auroc": beaten,
        "aupr_out": _weight_in_precision(scores, is_outside),
        "aupr_in": _weight_in_precision(-scores, ~is_outside),
    }
    errors = {
        name: float(np.hypot(standard_error(of_image[is_outside]), standard_error(of_image[~is_outside])))
        for name, of_image in weights.items()
    }
    return {**errors, "fpr95": _error_of_passing(inside, outside)}


def _weight_in_precision(scores: Float[np.ndarray, " n"], positive: Bool[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """How the average precision grows with the weight of each image, times the images of its group."""
    levels, level_of = np.unique(-scores, return_inverse=True)
    own, others = (np.bincount(level_of[group], minlength=len(levels)) for group in (positive, ~positive))
    found, passed = np.cumsum(own), np.cumsum(own + others)
    # More weight at one score changes the precision there and at all lower scores.
    gained = np.cumsum((own * (passed - found) / passed**2)[::-1])[::-1]
    lost = np.cumsum((own * found / passed**2)[::-1])[::-1]
    ratio = others.sum() / own.sum()
    return np.where(positive, (found / passed + gained)[level_of], -ratio * lost[level_of])


def _error_of_passing(inside: Float[np.ndarray, " n"], outside: Float[np.ndarray, " m"]) -> float:
    """Bootstrap standard error of the share of images outside that pass the threshold of those inside."""
    if min(inside.size, outside.size) < 2:
        return float("nan")
    rank = -(-19 * inside.size // 20)
    # Of n places drawn from n, the rank-th lowest is at most i with the probability that at least `rank` are.
    at_most = special.betainc(rank, inside.size - rank + 1, np.arange(inside.size + 1) / inside.size)
    probability = np.diff(at_most)
    passing = np.searchsorted(np.sort(outside), np.sort(inside), side="right") / outside.size
    of_threshold = probability @ (passing - probability @ passing) ** 2
    return float(np.sqrt(of_threshold + probability @ (passing * (1 - passing)) / outside.size))


def _fit(features: Float[np.ndarray, "n d"], classes: Int[np.ndarray, " n"]) -> Gaussians:
    """Means and the shrunk covariance about them; every class up to the highest has images."""
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
    factor = linalg.cholesky(_shrunk(covariance, fourth, size), lower=True)
    return Gaussians(factor, _divided(means, factor))


def _shrunk(covariance: Float[np.ndarray, "d d"], fourth: float, size: int) -> Float[np.ndarray, "d d"]:
    """Ledoit and Wolf's estimate, from the covariance and the mean fourth power of the norms of centred examples."""
    identity = np.eye(len(covariance))
    scale = np.trace(covariance) / len(covariance)
    if scale == 0:
        raise UserError("the features of a class do not differ: give more than one image a class, or other features")
    distance = ((covariance - scale * identity) ** 2).sum()
    noise = (fourth - (covariance**2).sum()) / size
    share = 1.0 if noise >= distance else max(noise / distance, SMALLEST_SHRINKAGE)
    return (1 - share) * covariance + share * scale * identity


def _divided(vectors: Float[np.ndarray, "n d"], factor: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "n d"]:
    """Vectors in which a covariance of this factor is the identity."""
    return linalg.solve_triangular(factor, vectors.T, lower=True).T


def _check_finite(features: np.ndarray) -> None:
    if not np.isfinite(features).all():
        raise UserError("a feature is not finite; training diverged, use an earlier checkpoint")
