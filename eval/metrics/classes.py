"""Metrics by class: recall, average precision, confusions, sets of acceptable classes.

Scores ``[n k]`` are log-probabilities or any increasing function of them. Where classes tie, the prediction counts as
drawn evenly among them, as in `lit_het.eval.metrics.calibration`: the metric is its expectation.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from lit_het.errors import UserError
from lit_het.eval.metrics.calibration import check_labels, check_log_probabilities, correctness
from lit_het.eval.metrics.rows import row_blocks


@dataclasses.dataclass(frozen=True)
class Confusion:
    """How often images of one class were predicted as another.

    Attributes:
        true: the class of the images.
        predicted: the class that was predicted.
        count: images of the true class with that prediction.
        of: all images of the true class.
    """

    true: int
    predicted: int
    count: int
    of: int


def recall_per_class(
    correct: Float[np.ndarray, " n"], labels: Int[np.ndarray, " n"], num_classes: int
) -> Float[np.ndarray, " k"]:
    """Returns the recall of each class, NaN for a class without images.

    Args:
        correct: probability that an image's prediction is its label, such as `calibration.correctness`.
        labels: the true classes.
        num_classes: k.
    """
    check_labels(labels, num_classes)
    with np.errstate(invalid="ignore"):
        return np.bincount(labels, correct, num_classes) / np.bincount(labels, minlength=num_classes)


def mean_class_recall(scores: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> float:
    """Returns the mean of `recall_per_class` over classes with images ("balanced accuracy", as published for Pets).

    Brodersen et al., "The balanced accuracy and its posterior distribution", ICPR 2010; Parkhi et al., "Cats and dogs",
    CVPR 2012.
    """
    return float(np.nanmean(recall_per_class(correctness(scores, labels), labels, scores.shape[1])))


def worst_classes(
    correct: Float[np.ndarray, " n"],
    label_log_p: Float[np.ndarray, " n"],
    labels: Int[np.ndarray, " n"],
    num_classes: int,
    count: int,
) -> Int[np.ndarray, " worst"]:
    """Returns up to ``count`` classes in ascending order of recall, without classes of recall 1.

    With few images per class, many recalls are equal. Classes of equal recall are ordered by the mean log-probability
    of the label, the lowest first.

    Args:
        correct: probability that an image's prediction is its label.
        label_log_p: log-probability of an image's label.
        labels: the true classes.
        num_classes: k.
        count: the maximum number of classes.
    """
    recall = recall_per_class(correct, labels, num_classes)
    with np.errstate(invalid="ignore"):
        likelihood = np.bincount(labels, label_log_p, num_classes) / np.bincount(labels, minlength=num_classes)
    order = np.lexsort((likelihood, recall))
    # NaN < 1 is false, which drops classes without images.
    return order[recall[order] < 1][:count]


def most_confused(
    predictions: Int[np.ndarray, " n"], labels: Int[np.ndarray, " n"], classes: Sequence[int], count: int
) -> list[Confusion]:
    """Returns the ``count`` most frequent wrong predictions of each class; ties are in the order of class indices.

    Args:
        predictions: the predicted classes.
        labels: the true classes.
        classes: true classes to report, in the order of the result.
        count: the maximum number of wrong predictions per class.
    """
    found = []
    for true in classes:
        answers = predictions[labels == true]
        wrong, counts = np.unique(answers[answers != true], return_counts=True)
        # A stable sort keeps equal counts in ascending order of classes.
        for place in np.argsort(-counts, kind="stable")[:count]:
            found.append(Confusion(int(true), int(wrong[place]), int(counts[place]), len(answers)))
    return found


def average_precision(scores: Float[np.ndarray, " n"], positive: Bool[np.ndarray, " n"]) -> float:
    """Returns the precision at each distinct score, weighted by the increase in recall; NaN without positives.

    The sum is not interpolated, as in scikit-learn's ``average_precision_score``. Tied scores are one threshold, so
    their order does not matter.
    """
    _check_numbers(scores)
    if not positive.any():
        return float("nan")
    order = np.argsort(-scores, kind="stable")
    falling = scores[order]
    # Precision is taken after the last image of a tie, where it does not depend on their order.
    last_of_tie = np.append(np.flatnonzero(falling[1:] != falling[:-1]), scores.size - 1)
    found = np.cumsum(positive[order])[last_of_tie]
    return float((np.diff(found, prepend=0) * (found / (last_of_tie + 1))).sum() / found[-1])


def average_precision_per_class(
    scores: Float[np.ndarray, "n k"], targets: Bool[np.ndarray, "n k"]
) -> Float[np.ndarray, " k"]:
    """Returns the `average_precision` of each class of a multi-label set, NaN for a class without positives.

    Everingham et al., "The Pascal visual object classes (VOC) challenge", IJCV 2010, without its interpolation.
    """
    return np.array([average_precision(column, target) for column, target in zip(scores.T, targets.T, strict=True)])


def mean_average_precision(scores: Float[np.ndarray, "n k"], targets: Bool[np.ndarray, "n k"]) -> float:
    """Returns the mean of `average_precision_per_class` over classes with positives (mAP)."""
    if not targets.any():
        raise UserError("mean average precision: no image has a label; check the set's labels")
    return float(np.nanmean(average_precision_per_class(scores, targets)))


def relabelled_correctness(
    scores: Float[np.ndarray, "n k"], acceptable: Sequence[Sequence[int]]
) -> Float[np.ndarray, " n"]:
    """Returns the probability that the predicted class is an acceptable class of the image; NaN where there is none.

    Args:
        scores: of every class.
        acceptable: the acceptable classes of each image.
    """
    num_images, num_classes = scores.shape
    if len(acceptable) != num_images:
        raise UserError(
            f"{len(acceptable)} sets of labels for {num_images} images: both must come from the same data set"
        )
    _check_numbers(scores)
    # Duplicates are removed: a repeated class would count twice in a tie.
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
    """Returns the share of images whose predicted class is acceptable, among images with an acceptable class.

    The accuracy on reassessed labels (ReaL) of Beyer et al., "Are we done with ImageNet?", 2020.
    """
    correct = relabelled_correctness(scores, acceptable)
    if np.isnan(correct).all():
        raise UserError("no image has an acceptable label: check the file of labels")
    return float(np.nanmean(correct))


def merge_candidates(
    log_probabilities: Float[np.ndarray, "*rows c"], candidates: Sequence[Sequence[int]]
) -> Float[np.ndarray, "*rows k"]:
    """Sums the probabilities of each class's candidates, and renormalises over the candidates of all classes.

    With one candidate per class, this is the softmax over those logits only, as ImageNet-A and ImageNet-R are scored
    (Hendrycks et al., "Natural adversarial examples", CVPR 2021, and "The many faces of robustness", ICCV 2021).
    ObjectNet needs several candidates per class: some of its classes contain several of ImageNet's (Barbu et al.,
    NeurIPS 2019). Every row is renormalised separately: noise samples given as rows are renormalised before averaging.

    Args:
        log_probabilities: of ``c`` candidates; rows may be images, members or noise samples.
        candidates: the candidates of each of the ``k`` classes. A candidate belongs to at most one class.

    Returns:
        Log-probabilities of the ``k`` classes.
    """
    *shape, num_candidates = log_probabilities.shape
    order = _check_candidates(candidates, num_candidates)
    mapped = log_probabilities.reshape(-1, num_candidates)[:, order]
    check_log_probabilities(mapped)
    # Candidates of a class are adjacent in ``order``, so one reduction adds the probabilities of all classes.
    starts = np.cumsum([0, *map(len, candidates[:-1])])
    result = np.empty((len(mapped), len(candidates)), np.float32)
    for rows in row_blocks(*mapped.shape):
        sums = np.logaddexp.reduceat(mapped[rows].astype(np.float64), starts, axis=1)
        result[rows] = sums - np.logaddexp.reduce(sums, axis=1, keepdims=True)
    return result.reshape(*shape, len(candidates))


def _check_candidates(candidates: Sequence[Sequence[int]], num_candidates: int) -> Int[np.ndarray, " mapped"]:
    """Returns the candidates of all classes, concatenated in the order of classes."""
    for number, class_candidates in enumerate(candidates):
        if not len(class_candidates):
            raise UserError(f"class {number} has no candidates: give it one, or remove the class and its images")
    order = np.array([candidate for class_candidates in candidates for candidate in class_candidates], np.int64)
    check_labels(order, num_candidates)
    values, counts = np.unique(order, return_counts=True)
    if (counts > 1).any():
        raise UserError(
            f"candidate {values[counts > 1][0]} is listed twice: its probability can count in one class only"
        )
    return order


def _check_numbers(scores: np.ndarray) -> None:
    if np.isnan(scores).any():
        raise UserError("a score is not a number; training diverged, use an earlier checkpoint")
