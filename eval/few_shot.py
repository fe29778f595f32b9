"""Few-shot classification: ridge regression in closed form on the features of a frozen tower (e3 App. A.5).

A seed takes ``s`` training images of every class. Their features are whitened by their own mean and deviation, a
constant joins them as a bias, targets are 1 for the class and -1 for the others, and

    w = (XᵀX + l2 I)⁻¹ XᵀY = Xᵀ (XXᵀ + l2 I)⁻¹ Y,

whichever system is smaller. One eigendecomposition serves all ``l2``; test images see the chosen one alone.

``l2`` is chosen without the test set, by cross-validation on the images that the seed took: those of each class are
dealt into ``min(s, 5)`` folds, each fold is classified by a fit to the others, and the ``l2`` with the most right
answers wins, of several the middle one. A single shot leaves nothing to hold out: there the folds are of two images a
class, so that each fit has one, as the final one has. A class with a single image is never held out; where all are
such classes, the middle ``l2`` is taken.

Pure NumPy: fits in float64, scores of test images in float32, block by block.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from lit_het.errors import UserError, require_choice
from lit_het.eval.calibration import correctness
from lit_het.eval.significance import standard_error

BIAS = 100.0
"""What the column of the bias holds: large, so that ``l2`` hardly holds the bias back."""

_NUM_FOLDS = 5
_BLOCK_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class FewShotOptions:
    """What is fitted.

    Attributes:
        shots: images of each class.
        seeds: each takes images of its own.
        l2: strengths of the regularisation to choose from, rising.
        ensemble: members' features concatenated for one classifier (``"joint"``, as the paper does), or a classifier
            for each member and their scores averaged (``"disjoint"``; e3 App. A.5.1, Table 9).

    Raises:
        UserError: nothing to fit, or a value out of range.
    """

    shots: tuple[int, ...] = (1, 5, 10, 25)
    seeds: tuple[int, ...] = (0, 1, 2)
    l2: tuple[float, ...] = tuple(2.0**power for power in range(-10, 21))
    ensemble: Literal["joint", "disjoint"] = "joint"

    def __post_init__(self) -> None:
        require_choice(self, "ensemble")
        for name in ("shots", "seeds", "l2"):
            if not getattr(self, name):
                raise UserError(f"few-shot: {name} is empty; name at least one")
        if min(self.shots) < 1:
            raise UserError(f"few-shot: shots = {min(self.shots)} must be at least 1")
        if min(self.seeds) < 0:
            raise UserError(f"few-shot: seeds = {min(self.seeds)} must be at least 0")
        if min(self.l2) <= 0:
            raise UserError(f"few-shot: l2 = {min(self.l2)} must be positive")


@dataclasses.dataclass(frozen=True)
class FewShotResult:
    """Accuracies of every number of shots and seed.

    Attributes:
        options: what was fitted.
        test: accuracy on the test images at the chosen ``l2``.
        held_out: accuracy of each ``l2`` on folds of the training images; NaN where there is but one ``l2``, or no
            class has two images.
        chosen: index of the ``l2`` that held-out images chose.
        short_classes: for each number of shots, how many classes have fewer training images, and take these.
    """

    options: FewShotOptions
    test: Float[np.ndarray, "shots seeds"]
    held_out: Float[np.ndarray, "shots seeds l2"]
    chosen: Int[np.ndarray, "shots seeds"]
    short_classes: tuple[int, ...]

    @property
    def mean(self) -> Float[np.ndarray, " shots"]:
        """Mean accuracy over seeds."""
        return self.test.mean(axis=1)

    @property
    def standard_error(self) -> Float[np.ndarray, " shots"]:
        """Standard error of the mean over seeds; NaN with one seed."""
        return np.array([standard_error(of_seeds) for of_seeds in self.test])


def few_shot(
    train: Float[np.ndarray, "n m f"],
    train_labels: Int[np.ndarray, " n"],
    test: Float[np.ndarray, "t m f"],
    test_labels: Int[np.ndarray, " t"],
    options: FewShotOptions | None = None,
    advance: Callable[[int], object] = lambda count: None,
) -> FewShotResult:
    """Fits a few images of each class and classifies the test images.

    Args:
        train: features of each member of an ensemble, ``m`` = 1 for a single model.
        train_labels: class of each training image.
        test: features of the test images.
        test_labels: their classes.
        options: what is fitted; None for the defaults.
        advance: called with 1 after each of ``len(shots) * len(seeds)`` fits.

    Raises:
        UserError: no images, a test label that no training image has, or features that are not finite.
    """
    options = options or FewShotOptions()
    classes, train_targets = np.unique(train_labels, return_inverse=True)
    test_targets = _targets(test_labels, classes)
    train, test = (_members(features, options.ensemble, name) for features, name in ((train, "train"), (test, "test")))
    shape = (len(options.shots), len(options.seeds), len(options.l2))
    on_test, held_out = np.empty(shape[:2]), np.full(shape, np.nan)
    chosen = np.zeros(shape[:2], np.int64)
    for column, seed in enumerate(options.seeds):
        of_class = pick(train_targets, len(classes), seed)
        for row, shots in enumerate(options.shots):
            if len(options.l2) > 1:
                held_out[row, column] = _cross_validate(train, train_targets, of_class, shots, options.l2)
                chosen[row, column] = _middle_of_best(held_out[row, column])
            taken = np.concatenate([images[:shots] for images in of_class])
            fits = _fit_members(train, train_targets, taken, len(classes))
            strength = options.l2[int(chosen[row, column])]
            hits = _hits(fits, test, test_targets, np.arange(len(test_targets)), [strength])
            on_test[row, column] = hits.mean()
            advance(1)
    counts = np.bincount(train_targets)
    short_classes = tuple(int((counts < shots).sum()) for shots in options.shots)
    return FewShotResult(options, on_test, held_out, chosen, short_classes)


def pick(labels: Int[np.ndarray, " n"], num_classes: int, seed: int) -> list[Int[np.ndarray, " of_class"]]:
    """The images of each class in the order in which a seed takes them; fewer shots take a prefix of more."""
    generator = np.random.default_rng(seed)
    return [generator.permutation(np.flatnonzero(labels == number)) for number in range(num_classes)]


@dataclasses.dataclass(frozen=True)
class Ridge:
    """A ridge regression for every ``l2``; build it with `fit_ridge`.

    ``w = basis @ (coefficients / (eigenvalues + l2))``.

    Attributes:
        mean, scale: whiten features.
        basis: from whitened features and the bias to eigenvectors.
        eigenvalues: of XᵀX or XXᵀ.
        coefficients: the targets in that basis.
    """

    mean: Float[np.ndarray, " f"]
    scale: Float[np.ndarray, " f"]
    basis: Float[np.ndarray, "f_plus_one q"]
    eigenvalues: Float[np.ndarray, " q"]
    coefficients: Float[np.ndarray, "q k"]

    def weights(self, l2: float) -> Float[np.ndarray, "f_plus_one k"]:
        """``w`` for whitened features, the bias in its last row."""
        return self.basis @ self.at(l2)

    def at(self, l2: float) -> Float[np.ndarray, "q k"]:
        """From what `project` returns to the scores of classes."""
        return self.coefficients / (self.eigenvalues + l2)[:, None]

    def project(self, features: Float[np.ndarray, "b f"]) -> Float[np.ndarray, "b q"]:
        """Features in the basis."""
        return _with_bias((features - self.mean) / self.scale) @ self.basis


def fit_ridge(features: Float[np.ndarray, "n f"], labels: Int[np.ndarray, " n"], num_classes: int) -> Ridge:
    """Fits targets of ±1, in float64."""
    features = features.astype(np.float64)
    mean, scale = features.mean(axis=0), features.std(axis=0) + 1e-5
    x = _with_bias((features - mean) / scale)
    y = np.where(labels[:, None] == np.arange(num_classes), 1.0, -1.0)
    if len(x) < x.shape[1]:
        values, vectors = np.linalg.eigh(x @ x.T)
        basis, coefficients = x.T @ vectors, vectors.T @ y
    else:
        values, basis = np.linalg.eigh(x.T @ x)
        coefficients = basis.T @ (x.T @ y)
    # Rounding may make those of constant features negative.
    return Ridge(mean, scale, basis, np.maximum(values, 0.0), coefficients)


def _with_bias(features: Float[np.ndarray, "n f"]) -> Float[np.ndarray, "n f_plus_one"]:
    return np.concatenate([features, np.full((len(features), 1), BIAS, features.dtype)], axis=1)


def _targets(test_labels: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Test labels as positions among the classes."""
    if not len(classes) or not len(test_labels):
        raise UserError(f"few-shot: no {'test' if len(classes) else 'training'} images; check the path of the split")
    unknown = np.setdiff1d(test_labels, classes)
    if len(unknown):
        raise UserError(
            f"few-shot: label {unknown[0]} of the test images has no training image ({len(unknown)} such labels); "
            "take both splits from one data set"
        )
    return np.searchsorted(classes, test_labels)


def _members(features: Float[np.ndarray, "n m f"], ensemble: str, name: str) -> Float[np.ndarray, "n fits g"]:
    """Features of each classifier that is fitted."""
    if not np.isfinite(features).all():
        raise UserError(f"few-shot: a feature of the {name} images is not finite; use an earlier checkpoint")
    return features.reshape(len(features), 1, -1) if ensemble == "joint" else features


def _fit_members(features: np.ndarray, targets: np.ndarray, taken: np.ndarray, num_classes: int) -> list[Ridge]:
    members = range(features.shape[1])
    return [fit_ridge(features[taken, member], targets[taken], num_classes) for member in members]


def _hits(
    fits: Sequence[Ridge],
    features: Float[np.ndarray, "n m f"],
    targets: Int[np.ndarray, " n"],
    rows: Int[np.ndarray, " b"],
    l2: Sequence[float],
) -> Float[np.ndarray, "l2 b"]:
    """Whether the mean score of the members is highest for the true class; classes that tie share the answer."""
    parts = []
    coefficients = [np.concatenate([fit.at(strength) for fit in fits]).astype(np.float32) for strength in l2]
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        projected = np.concatenate([fit.project(features[block, m]) for m, fit in enumerate(fits)], axis=1)
        projected = projected.astype(np.float32)
        of_block = np.empty((len(l2), len(block)))
        for number, coefficient in enumerate(coefficients):
            scores = projected @ coefficient
            of_block[number] = correctness(scores, targets[block])
        parts.append(of_block)
    return np.concatenate(parts, axis=1)


def _cross_validate(
    features: np.ndarray, targets: np.ndarray, of_class: Sequence[np.ndarray], shots: int, l2: Sequence[float]
) -> Float[np.ndarray, " l2"]:
    """Accuracy on images that were held out, for each ``l2``."""
    hits = [
        _hits(_fit_members(features, targets, fitted, len(of_class)), features, targets, held_out, l2)
        for fitted, held_out in _folds(of_class, max(shots, 2))
    ]
    return np.concatenate(hits, axis=1).mean(axis=1) if hits else np.full(len(l2), np.nan)


def _folds(of_class: Sequence[np.ndarray], shots: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Images to fit and images to classify."""
    num_folds = min(shots, _NUM_FOLDS)
    taken = [images[:shots] for images in of_class]
    images = np.concatenate(taken)
    fold = np.concatenate([np.arange(len(part)) % num_folds if len(part) > 1 else [num_folds] for part in taken])
    for number in range(num_folds):
        if (fold == number).any():
            yield images[fold != number], images[fold == number]


def _middle_of_best(accuracy: Float[np.ndarray, " l2"]) -> int:
    best = np.flatnonzero((accuracy == accuracy.max()) | np.isnan(accuracy))  # nothing was held out: any
    return int(best[len(best) // 2])
