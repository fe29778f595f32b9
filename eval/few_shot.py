"""Few-shot classification: ridge regression in closed form on the features of a frozen tower (e3 App. A.5).

Each seed draws ``s`` training images of every class. Features are standardised by the mean and standard deviation of
these images, and a constant column is appended as a bias. Targets are 1 for the class and -1 for the others, and

    w = (XᵀX + l2 I)⁻¹ XᵀY = Xᵀ (XXᵀ + l2 I)⁻¹ Y,

whichever system is smaller. One eigendecomposition serves all values of ``l2``. Test images are classified with the
chosen ``l2`` only.

``l2`` is chosen without the test set, by cross-validation on the drawn images. The images of each class are split into
``min(s, 5)`` folds, and each fold is classified by a fit to the others. The ``l2`` with the most correct predictions is
chosen; among ties, the middle one. With one shot, no image can be held out: the folds then use two images per class, so
that each fit has one image per class, as the final fit does. A class with a single image is never held out. If all
classes have a single image, the middle ``l2`` of the grid is chosen.

Pure NumPy: fits run in float64, scores of test images in float32, block by block.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int

from lit_het.errors import UserError, pluralize
from lit_het.eval.fits import FewShotOptions
from lit_het.eval.metrics.calibration import correctness
from lit_het.eval.metrics.significance import standard_error

BIAS = 100.0
"""The value of the bias column: large, so that ``l2`` hardly regularises the bias."""

_NUM_FOLDS = 5
_BLOCK_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class FewShotResult:
    """Accuracies for every number of shots and every seed.

    Attributes:
        options: of the fits.
        test: accuracy on the test images at the chosen ``l2``.
        held_out: cross-validated accuracy of each ``l2``; NaN with a single ``l2``, or if no class has two images.
        chosen: index of the chosen ``l2``.
        short_classes: for each number of shots, how many classes have fewer training images; they use all of theirs.
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
        return np.array([standard_error(accuracies) for accuracies in self.test])


def few_shot(
    train: Float[np.ndarray, "n m f"],
    train_labels: Int[np.ndarray, " n"],
    test: Float[np.ndarray, "t m f"],
    test_labels: Int[np.ndarray, " t"],
    options: FewShotOptions | None = None,
    advance: Callable[[int], object] = lambda count: None,
) -> FewShotResult:
    """Fits classifiers to a few images of each class, and classifies the test images.

    Args:
        train: features of the training images, for each member of an ensemble; ``m`` = 1 for a single model.
        train_labels: their classes.
        test: features of the test images.
        test_labels: their classes.
        options: of the fits; None for the defaults.
        advance: called with 1 after each of ``len(shots) * len(seeds)`` fits.
    """
    options = options or FewShotOptions()
    classes, train_targets = np.unique(train_labels, return_inverse=True)
    test_targets = as_trained(test_labels, classes, "few-shot")
    train, test = (_members(features, options.ensemble, name) for features, name in ((train, "train"), (test, "test")))
    shape = (len(options.shots), len(options.seeds), len(options.l2))
    on_test, held_out = np.empty(shape[:2]), np.full(shape, np.nan)
    chosen = np.zeros(shape[:2], np.int64)
    for column, seed in enumerate(options.seeds):
        # One order per seed for all shots: 5 shots include the image of 1 shot.
        by_class = draw_order(train_targets, len(classes), seed)
        for row, shots in enumerate(options.shots):
            if len(options.l2) > 1:
                held_out[row, column] = _cross_validate(train, train_targets, by_class, shots, options.l2)
                chosen[row, column] = _middle_of_best(held_out[row, column])
            taken = np.concatenate([images[:shots] for images in by_class])
            fits = _fit_members(train, train_targets, taken, len(classes))
            strength = options.l2[int(chosen[row, column])]
            hits = _hits(fits, test, test_targets, np.arange(len(test_targets)), [strength])
            on_test[row, column] = hits.mean()
            advance(1)
    counts = np.bincount(train_targets)
    short_classes = tuple(int((counts < shots).sum()) for shots in options.shots)
    return FewShotResult(options, on_test, held_out, chosen, short_classes)


def draw_order(labels: Int[np.ndarray, " n"], num_classes: int, seed: int) -> list[Int[np.ndarray, " count"]]:
    """Returns the images of each class in the order in which a seed draws them; fewer shots are a prefix of more."""
    generator = np.random.default_rng(seed)
    return [generator.permutation(np.flatnonzero(labels == number)) for number in range(num_classes)]


@dataclasses.dataclass(frozen=True)
class Ridge:
    """A ridge regression, solved for every ``l2``; build it with `fit_ridge`.

    ``w = basis @ (coefficients / (eigenvalues + l2))``.

    Attributes:
        mean, scale: standardise features.
        basis: projects standardised features and the bias onto the eigenvectors.
        eigenvalues: of XᵀX or XXᵀ.
        coefficients: the targets in that basis.
    """

    mean: Float[np.ndarray, " f"]
    scale: Float[np.ndarray, " f"]
    basis: Float[np.ndarray, "f_plus_one q"]
    eigenvalues: Float[np.ndarray, " q"]
    coefficients: Float[np.ndarray, "q k"]

    def weights(self, l2: float) -> Float[np.ndarray, "f_plus_one k"]:
        """Returns ``w`` for standardised features, with the bias in its last row."""
        return self.basis @ self.at(l2)

    def at(self, l2: float) -> Float[np.ndarray, "q k"]:
        """Returns the matrix that maps the output of `project` to class scores."""
        return self.coefficients / (self.eigenvalues + l2)[:, None]

    def project(self, features: Float[np.ndarray, "b f"]) -> Float[np.ndarray, "b q"]:
        """Returns the features in the basis."""
        return _with_bias((features - self.mean) / self.scale) @ self.basis


def fit_ridge(features: Float[np.ndarray, "n f"], labels: Int[np.ndarray, " n"], num_classes: int) -> Ridge:
    """Fits targets ±1 in float64."""
    features = features.astype(np.float64)
    # The offset keeps constant features from being divided by 0.
    mean, scale = features.mean(axis=0), features.std(axis=0) + 1e-5
    x = _with_bias((features - mean) / scale)
    y = np.where(labels[:, None] == np.arange(num_classes), 1.0, -1.0)
    # Both systems have the same nonzero eigenvalues; the smaller one costs min(n, f)³.
    if len(x) < x.shape[1]:
        values, vectors = np.linalg.eigh(x @ x.T)
        basis, coefficients = x.T @ vectors, vectors.T @ y
    else:
        values, basis = np.linalg.eigh(x.T @ x)
        coefficients = basis.T @ (x.T @ y)
    # Rounding can make the eigenvalues of constant features slightly negative.
    return Ridge(mean, scale, basis, np.maximum(values, 0.0), coefficients)


def _with_bias(features: Float[np.ndarray, "n f"]) -> Float[np.ndarray, "n f_plus_one"]:
    return np.concatenate([features, np.full((len(features), 1), BIAS, features.dtype)], axis=1)


def as_trained(test_labels: np.ndarray, classes: np.ndarray, kind: str) -> np.ndarray:
    """Returns the test labels as indices into the classes of the training images."""
    if not len(classes) or not len(test_labels):
        raise UserError(f"{kind}: no {'test' if len(classes) else 'training'} images; check the path of the split")
    unknown = np.setdiff1d(test_labels, classes)
    if len(unknown):
        raise UserError(
            f"{kind}: label {unknown[0]} of the test images has no training image ({pluralize(len(unknown), 'label')} "
            "without); take both splits from the same data set"
        )
    return np.searchsorted(classes, test_labels)


def _members(features: Float[np.ndarray, "n m f"], ensemble: str, name: str) -> Float[np.ndarray, "n fits g"]:
    """Returns the features of each classifier: of all members together, or of each member."""
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
    """Returns whether the true class has the highest mean score over members, or 1 / number of tied classes."""
    blocks = []
    # Features and coefficients of members are concatenated, so that one product sums the members' scores.
    coefficients = [np.concatenate([fit.at(strength) for fit in fits]).astype(np.float32) for strength in l2]
    # Blocks of rows bound the memory of projected features and scores.
    for start in range(0, len(rows), _BLOCK_ROWS):
        chunk = rows[start : start + _BLOCK_ROWS]
        projected = np.concatenate([fit.project(features[chunk, m]) for m, fit in enumerate(fits)], axis=1)
        projected = projected.astype(np.float32)
        hits = np.empty((len(l2), len(chunk)))
        for number, coefficient in enumerate(coefficients):
            scores = projected @ coefficient
            hits[number] = correctness(scores, targets[chunk])
        blocks.append(hits)
    return np.concatenate(blocks, axis=1)


def _cross_validate(
    features: np.ndarray, targets: np.ndarray, by_class: Sequence[np.ndarray], shots: int, l2: Sequence[float]
) -> Float[np.ndarray, " l2"]:
    """Returns the cross-validated accuracy of each ``l2``."""
    hits = [
        _hits(_fit_members(features, targets, fitted, len(by_class)), features, targets, held_out, l2)
        for fitted, held_out in _folds(by_class, max(shots, 2))
    ]
    return np.concatenate(hits, axis=1).mean(axis=1) if hits else np.full(len(l2), np.nan)


def _folds(by_class: Sequence[np.ndarray], shots: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the images to fit and the images to classify."""
    num_folds = min(shots, _NUM_FOLDS)
    taken = [images[:shots] for images in by_class]
    drawn = np.concatenate(taken)
    # Single images get a fold number that is never held out.
    fold = np.concatenate([np.arange(len(images)) % num_folds if len(images) > 1 else [num_folds] for images in taken])
    for number in range(num_folds):
        if (fold == number).any():
            yield drawn[fold != number], drawn[fold == number]


def _middle_of_best(accuracy: Float[np.ndarray, " l2"]) -> int:
    # Accuracies are NaN where no image was held out: then every l2 ties.
    best = np.flatnonzero((accuracy == accuracy.max()) | np.isnan(accuracy))
    return int(best[len(best) // 2])
