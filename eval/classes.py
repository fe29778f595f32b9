"""Figures that look at classes one by one: recall, average precision, confusions, sets of classes.

Scores ``[n k]`` are log-probabilities or anything that rises with them. Of tied classes the prediction is drawn evenly,
as in `lit_het.eval.calibration`: such a figure is its expectation.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from lit_het.errors import UserError
from lit_het.eval.calibration import check_labels, check_log_probabilities, correctness
from lit_het.eval.rows import row_blocks


@dataclasses.dataclass(frozen=True)
class Confusion:
    """How often images of one class were taken for another.

    Attributes:
        true: the class of the images.
        predicted: the class that they were taken for.
        count: images of which that is so.
        of: all images of the true class.
    """

    true: int
    predicted: int
    count: int
    of: int


def recall_per_class(
    correct: Float[np.ndarray, " n"], labels: Int[np.ndarray, " n"], num_classes: int
) -> Float[np.ndarray, " k"]:
    """Share of each class's images that were recognised, NaN for a class without images.

    Args:
        correct: probability that an image's prediction is its label, such as `lit_het.eval.calibration.correctness`.
        labels: the true classes.
        num_classes: k.

    Raises:
        UserError: no examples, or a label outside the classes.
    """
    check_labels(labels, num_classes)
    with np.errstate(invalid="ignore"):
        return np.bincount(labels, correct, num_classes) / np.bincount(labels, minlength=num_classes)


def mean_class_recall(scores: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> float:
    """Mean of `recall_per_class` over the classes that have images ("balanced accuracy", and Pets' published figure).

    Brodersen et al., "The balanced accuracy and its posterior distribution", ICPR 2010; Parkhi et al., "Cats and dogs",
    CVPR 2012.

    Raises:
        UserError: no examples, or a label outside the classes.
    """
    return float(np.nanmean(recall_per_class(correctness(scores, labels), labels, scores.shape[1])))


def worst_classes(
    correct: Float[np.ndarray, " n"],
    of_label: Float[np.ndarray, " n"],
    labels: Int[np.ndarray, " n"],
    num_classes: int,
    count: int,
) -> Int[np.ndarray, " worst"]:
    """The at most ``count`` classes of the lowest recall, rising; classes that are always recognised are left out.

    With few images a class many recalls are equal: then the classes that their images give the lowest mean
    log-probability come first.

    Args:
        correct: probability that an image's prediction is its label.
        of_label: log-probability of an image's label.
        labels: the true classes.
        num_classes: k.
        count: of the classes that are returned.

    Raises:
        UserError: no examples, or a label outside the classes.
    """
    recall = recall_per_class(correct, labels, num_classes)
    with np.errstate(invalid="ignore"):
        likelihood = np.bincount(labels, of_label, num_classes) / np.bincount(labels, minlength=num_classes)
    order = np.lexsort((likelihood, recall))
    return order[recall[order] < 1][:count]  # NaN, of classes without images, is not below 1


def most_confused(
    predictions: Int[np.ndarray, " n"], labels: Int[np.ndarray, " n"], classes: Sequence[int], count: int
) -> list[Confusion]:
    """What images of each class were taken for: its ``count`` most frequent wrong predictions, ties by class number.

    Args:
        predictions: the predicted classes.
        labels: the true classes.
        classes: those that are looked at, in the order of what is returned.
        count: of wrong predictions for each.
    """
    found = []
    for true in classes:
        answers = predictions[labels == true]
        wrong, counts = np.unique(answers[answers != true], return_counts=True)
        # A stable sort keeps the rising order of classes among equals.
        for place in np.argsort(-counts, kind="stable")[:count]:
            found.append(Confusion(int(true), int(wrong[place]), int(counts[place]), len(answers)))
    return found


def average_precision(scores: Float[np.ndarray, " n"], positive: Bool[np.ndarray, " n"]) -> float:
    """Precision at each distinct score, weighted by the recall gained there; NaN without positives.

    The sum without interpolation, which scikit-learn too calls average precision; tied scores are one threshold, so
    that their order does not matter.

    Raises:
        UserError: a score is NaN.
    """
    _check_numbers(scores)
    if not positive.any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    last_of_tie = np.append(np.flatnonzero(falling[1:] != falling[:-1]), scores.size - 1)
    found = np.cumsum(positive[order])[last_of_tie]
    return float((np.diff(found, prepend=0) * (found / (last_of_tie + 1))).sum() / found[-1])


def average_precision_per_class(
    scores: Float[np.ndarray, "n k"], targets: Bool[np.ndarray, "n k"]
) -> Float[np.ndarray, " k"]:
    """`average_precision` of each class of a set with several labels an image, NaN for a class without positives.

    Everingham et al., "The Pascal visual object classes (VOC) challenge", IJCV 2010, without its
    interpolation.

    Raises:
        UserError: a score is NaN.
    """
    return np.array([average_precision(column, target) for column, target in zip(scores.T, targets.T, strict=True)])


def mean_average_precision(scores: Float[np.ndarray, "n k"], targets: Bool[np.ndarray, "n k"]) -> float:
    """Mean of `average_precision_per_class` over the classes that have positives (mAP).

    Raises:
        UserError: a score is NaN, or no class has positives.
    """
    if not targets.any():
        raise UserError("mean average precision: no image has a label; check the set's labels")
    return float(np.nanmean(average_precision_per_class(scores, targets)))


def relabelled_correctness(
    scores: Float[np.ndarray, "n k"], acceptable: Sequence[Sequence[int]]
) -> Float[np.ndarray, " n"]:
    """Probability that the predicted class is one of an image's acceptable ones, NaN where there are none.

    Args:
        scores: of all classes.
        acceptable: the acceptable classes of each image.

    Raises:
        UserError: as many sets as images are needed, classes inside the scores', and no score that is NaN.
    """
    num_images, num_classes = scores.shape
    if len(acceptable) != num_images:
        raise UserError(f"{len(acceptable)} sets of labels for {num_images} images: both must be of one data set")
    _check_numbers(scores)
    # Once each: a class named twice would count twice among tied ones.
    sets = [sorted(set(classes)) for classes in acceptable]
    sizes = np.array([len(classes) for classes in sets], np.int64)
    rows = np.repeat(np.arange(num_images), sizes)
    columns = np.array([number for classes in sets for number in classes], np.int64)
    if len(columns):
        check_labels(columns, num_classes)
    winners = scores == scores.max(axis=1)[:, None]
    hits = np.bincount(rows, winners[rows, columns], num_images) / winners.sum(axis=1)
    return np.where(sizes > 0, hits, np.nan)


def relabelled_accuracy(scores: Float[np.ndarray, "n k"], acceptable: Sequence[Sequence[int]]) -> float:
    """Share of images whose predicted class is an acceptable one, over the images that have any.

    The accuracy on reassessed labels (ReaL) of Beyer et al., "Are we done with ImageNet?", 2020.

    Raises:
        UserError: as in `relabelled_correctness`, or all sets are empty.
    """
    correct = relabelled_correctness(scores, acceptable)
    if np.isnan(correct).all():
        raise UserError("no image has an acceptable label: check the file of labels")
    return float(np.nanmean(correct))


def merge_candidates(
    log_probabilities: Float[np.ndarray, "*rows c"], candidates: Sequence[Sequence[int]]
) -> Float[np.ndarray, "*rows k"]:
    """Log-probabilities of a set's classes, each the sum over its candidates, renormalised over all candidates.

    With one candidate a class it is the softmax over those logits alone, as ImageNet-A and -R are scored (Hendrycks
    et al., "Natural adversarial examples", CVPR 2021, and "The many faces of robustness", ICCV 2021); several are what
    ObjectNet needs, some of whose classes hold several of ImageNet's (Barbu et al., NeurIPS 2019). Noise samples
    are renormalised one by one where they are given one by one, before their average.

    Args:
        log_probabilities: of ``c`` candidate classes, for any rows of images, members or noise samples.
        candidates: those that make up each of the ``k`` classes; a candidate may be left out, and belongs to one class.

    Raises:
        UserError: a class has no candidates, a candidate is outside the classes or in two of them, or an image gives
            none of them any probability.
    """
    *shape, num_candidates = log_probabilities.shape
    order = _check_candidates(candidates, num_candidates)
    mapped = log_probabilities.reshape(-1, num_candidates)[:, order]
    check_log_probabilities(mapped)
    starts = np.cumsum([0, *map(len, candidates[:-1])])
    result = np.empty((len(mapped), len(candidates)), np.float32)
    for rows in row_blocks(*mapped.shape):
        sums = np.logaddexp.reduceat(mapped[rows].astype(np.float64), starts, axis=1)
        result[rows] = sums - np.logaddexp.reduce(sums, axis=1, keepdims=True)
    return result.reshape(*shape, len(candidates))


def _check_candidates(candidates: Sequence[Sequence[int]], num_candidates: int) -> Int[np.ndarray, " mapped"]:
    """All candidates, class after class."""
    for number, of_class in enumerate(candidates):
        if not len(of_class):
            raise UserError(f"class {number} has no candidates: give it one, or leave it and its images out")
    order = np.array([candidate for of_class in candidates for candidate in of_class], np.int64)
    check_labels(order, num_candidates)
    values, counts = np.unique(order, return_counts=True)
    if (counts > 1).any():
        raise UserError(
            f"candidate {values[counts > 1][0]} is named twice: its probability can count in one class only"
        )
    return order


def _check_numbers(scores: np.ndarray) -> None:
    if np.isnan(scores).any():
        raise UserError("a score is not a number; training diverged, use an earlier checkpoint")
