import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from sklearn.metrics import average_precision_score, balanced_accuracy_score, confusion_matrix

from lit_het.eval.metrics import classes
from lit_het.eval.metrics.calibration import correctness
from tests.refusals import assert_refused

seeds = st.integers(0, 2**32 - 1)


def log_probabilities_of(seed: int, count: int = 30) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(size=(count, 6)) * 3
    return special.log_softmax(logits, axis=1).astype(np.float32)


def test_recall_counts_classes_alike_and_leaves_empty_ones_out():
    # Class 0: three of three. Class 2: none of one. Class 1 has no images.
    correct, labels = np.array([1.0, 1.0, 1.0, 0.0]), np.array([0, 0, 0, 2])
    np.testing.assert_array_equal(classes.recall_per_class(correct, labels, 3), [1, np.nan, 0])
    assert classes.mean_class_recall(np.array([[3.0, 0, 0]] * 4), labels) == 0.5
    assert classes.mean_class_recall(np.zeros((4, 2)), np.array([0, 0, 0, 1])) == 0.5, "classes that all tie"
    assert_refused("label 3 lies outside", classes.mean_class_recall, np.ones((1, 3)), np.array([3]))


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_figures_agree_with_scikit_learn(seed: int):
    scores, random = log_probabilities_of(seed), np.random.default_rng(seed)
    labels, predictions = random.integers(6, size=30), scores.argmax(axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a predicted class without images
        expected = balanced_accuracy_score(labels, predictions)
    assert classes.mean_class_recall(scores, labels) == pytest.approx(expected)
    matrix = confusion_matrix(labels, predictions, labels=range(6))
    found = np.diag(np.diag(matrix))
    for pair in classes.most_confused(predictions, labels, range(6), count=6):
        found[pair.true, pair.predicted] = pair.count
        assert pair.of == (labels == pair.true).sum()
    np.testing.assert_array_equal(found, matrix)
    targets = random.random(scores.shape) < 0.3
    targets[0] = True  # every class has a positive
    assert classes.mean_average_precision(scores, targets) == pytest.approx(average_precision_score(targets, scores))
    # Sets of one class have the ordinary accuracy.
    correct = classes.relabelled_correctness(scores, labels[:, None].tolist())
    np.testing.assert_allclose(correct, correctness(scores, labels))


def test_the_worst_classes_are_those_of_the_lowest_recall_and_then_of_the_lowest_probability():
    labels = np.array([0, 0, 1, 2, 3, 4, 4])
    correct = np.array([1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    label_log_p = np.array([-9.0, -9.0, -1.0, -3.0, -0.1, -1.0, -4.0])
    assert classes.worst_classes(correct, label_log_p, labels, 6, count=9).tolist() == [2, 4, 1, 0]
    assert classes.worst_classes(correct, label_log_p, labels, 6, count=2).tolist() == [2, 4]
    assert classes.worst_classes(np.ones(7), label_log_p, labels, 6, count=9).tolist() == []
    impossible = np.array([-100.0, -np.inf])
    assert classes.worst_classes(np.zeros(2), impossible, np.array([0, 1]), 2, count=1).tolist() == [1]


def test_the_most_frequent_confusions_of_each_class_come_first_and_ties_by_class():
    labels = np.array([0, 0, 0, 0, 1, 2, 2])
    predictions = np.array([2, 2, 1, 0, 2, 1, 0])
    found = classes.most_confused(predictions, labels, [2, 0], count=1)
    assert found == [classes.Confusion(2, 0, 1, of=2), classes.Confusion(0, 2, 2, of=4)]
    assert classes.most_confused(labels, labels, [0, 1, 2], count=2) == []


def test_average_precision_by_hand():
    """Falling order: right, wrong, right. Precision 1 at recall 1/2, 2/3 at recall 1."""
    found = classes.average_precision(np.array([0.1, 0.9, 0.5]), np.array([True, True, False]))
    assert found == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([-np.inf, -2.0, -0.5, 0.0, 0.25]), st.booleans()), min_size=1, max_size=25))
def test_average_precision_agrees_with_scikit_learn_on_ties(examples: list[tuple[float, bool]]):
    scores, positive = np.array([s for s, _ in examples]), np.array([p for _, p in examples])
    found = classes.average_precision(scores, positive)
    if positive.any():
        # scikit-learn takes no infinity.
        assert found == pytest.approx(average_precision_score(positive, np.maximum(scores, -1e9)))
    else:
        assert np.isnan(found)


def test_classes_without_positives_are_left_out_of_the_mean_and_what_has_none_is_refused():
    scores, targets = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([[True, False], [False, False]])
    np.testing.assert_array_equal(classes.average_precision_per_class(scores, targets), [1, np.nan])
    assert classes.mean_average_precision(scores, targets) == 1
    assert_refused("no image has a label", classes.mean_average_precision, np.zeros((2, 2)), np.zeros((2, 2), bool))
    assert_refused("not a number", classes.mean_average_precision, np.array([[np.nan]]), np.array([[True]]))


def test_accuracy_of_sets_accepts_any_of_them_and_leaves_empty_ones_out():
    scores = np.log(np.array([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.2, 0.2, 0.6]]))
    np.testing.assert_array_equal(classes.relabelled_correctness(scores, [[1, 0], [], [0, 1]]), [1, np.nan, 0])
    assert classes.relabelled_accuracy(scores, [[1, 0], [], [0, 1]]) == 0.5
    # Tied classes count by the share that is acceptable, and those given twice once.
    assert classes.relabelled_accuracy(np.zeros((1, 4)), [[2, 0, 2]]) == 0.5


@pytest.mark.parametrize(
    ("scores", "sets", "message"),
    [
        (np.zeros((2, 3)), [[0]], "1 sets of labels for 2 images"),
        (np.zeros((1, 3)), [[3]], "label 3 lies outside"),
        (np.zeros((2, 3)), [[], []], "no image has an acceptable label"),
        (np.zeros((0, 3)), [], "no image has an acceptable label"),
        (np.full((1, 2), np.nan), [[0]], "not a number"),
    ],
)
def test_sets_that_do_not_fit_the_images_are_refused(scores, sets, message):
    assert_refused(message, classes.relabelled_accuracy, scores, sets)


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_candidates_add_their_probabilities_and_all_classes_sum_to_one(seed: int):
    log_probabilities = log_probabilities_of(seed)
    probabilities = np.exp(log_probabilities.astype(float))
    expected = np.stack([probabilities[:, [5, 1]].sum(1), probabilities[:, 0], probabilities[:, 2:4].sum(1)], axis=1)
    found = classes.merge_candidates(log_probabilities, [[5, 1], [0], [2, 3]])
    assert found.dtype == np.float32
    np.testing.assert_allclose(np.exp(found), expected / expected.sum(1, keepdims=True), rtol=1e-5)
    # One candidate a class: the softmax over those logits alone.
    alone = classes.merge_candidates(log_probabilities, [[4], [0], [3]])
    softmax = special.log_softmax(log_probabilities[:, [4, 0, 3]], axis=1)
    np.testing.assert_allclose(alone, softmax, rtol=1e-5, atol=1e-6)


def test_members_and_noise_samples_are_merged_one_by_one():
    log_probabilities = log_probabilities_of(0).reshape(10, 3, 6)
    found = classes.merge_candidates(log_probabilities, [[5, 1], [0]])
    np.testing.assert_array_equal(found[:, 2], classes.merge_candidates(log_probabilities[:, 2], [[5, 1], [0]]))


def test_merging_does_not_depend_on_blocks_and_takes_probabilities_of_zero(monkeypatch):
    log_probabilities = log_probabilities_of(0)
    log_probabilities[3, :2] = -np.inf
    whole = classes.merge_candidates(log_probabilities, [[0, 1], [4]])
    assert whole[3].tolist() == [-np.inf, 0]
    monkeypatch.setattr("lit_het.eval.metrics.rows.VALUES_PER_BLOCK", 8)
    np.testing.assert_array_equal(classes.merge_candidates(log_probabilities, [[0, 1], [4]]), whole)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ([[0], []], "class 1 has no candidates"),
        ([[0], [6]], "label 6 lies outside"),
        ([[0, 1], [1]], "candidate 1 is listed twice"),
        ([], "no valid example"),
    ],
)
def test_candidates_that_are_no_mapping_are_refused(candidates: list[list[int]], message: str):
    assert_refused(message, classes.merge_candidates, log_probabilities_of(0), candidates)
    assert_refused("example 0 has no finite", classes.merge_candidates, np.array([[-np.inf, 0.0]]), [[0]])
