import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from sklearn.metrics import brier_score_loss, log_loss

from eval.calibration import (
    brier_score,
    expected_calibration_error,
    negative_log_likelihood,
    negative_log_likelihood_from_logits,
    reliability,
    reliability_of_confidence,
)
from lit_het.errors import UserError


def random_predictions(seed: int, count: int = 40, classes: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(count, classes)) * 3
    return logits, special.softmax(logits, axis=1), generator.integers(classes, size=count)


def test_hand_computed_scores_of_two_examples():
    probabilities, labels = np.array([[0.8, 0.2], [0.6, 0.4]]), np.array([0, 1])
    assert negative_log_likelihood(probabilities, labels) == pytest.approx(-(np.log(0.8) + np.log(0.4)) / 2)
    assert brier_score(probabilities, labels) == pytest.approx((2 * 0.2**2 + 2 * 0.6**2) / 2)


def test_hand_computed_calibration_error_of_four_examples_in_two_bins():
    # Bin (0, 0.5]: confidence 0.5, right once of once. Bin (0.5, 1]: mean confidence 0.8, right once of three.
    confidence, correct = np.array([0.5, 0.7, 0.8, 0.9]), np.array([1.0, 0.0, 0.0, 1.0])
    curve = reliability_of_confidence(confidence, correct, bins=2)
    np.testing.assert_allclose(curve.confidence, [0.5, 0.8])
    np.testing.assert_allclose(curve.accuracy, [1.0, 1 / 3])
    assert curve.count.tolist() == [1, 3]
    assert curve.expected_calibration_error == pytest.approx((1 * 0.5 + 3 * (0.8 - 1 / 3)) / 4)


def test_a_perfect_model_has_no_loss_and_no_calibration_error():
    probabilities, labels = np.eye(4), np.arange(4)
    assert negative_log_likelihood(probabilities, labels) == 0
    assert brier_score(probabilities, labels) == 0
    assert expected_calibration_error(probabilities, labels) == 0


def test_a_confidently_wrong_model_has_the_worst_scores():
    probabilities, labels = np.eye(4), np.roll(np.arange(4), 1)
    assert negative_log_likelihood(probabilities, labels) == np.inf
    assert brier_score(probabilities, labels) == 2
    assert expected_calibration_error(probabilities, labels) == 1


def test_a_uniform_guess_is_perfectly_calibrated_even_on_unbalanced_labels():
    probabilities, labels = np.full((10, 4), 0.25), np.zeros(10, int)
    assert expected_calibration_error(probabilities, labels) == pytest.approx(0)


def test_the_loss_from_logits_stays_finite_where_the_probability_underflows():
    logits, labels = np.array([[0.0, 2000.0]]), np.array([0])
    assert negative_log_likelihood_from_logits(logits, labels) == 2000
    assert negative_log_likelihood(special.softmax(logits, axis=1), labels) == np.inf


def test_confidences_on_the_bounds_and_rounded_above_one_fall_into_bins():
    curve = reliability_of_confidence(np.array([0.0, 0.25, 0.5, 1.0, 1.0 + 1e-7]), np.ones(5), bins=4)
    assert curve.count.tolist() == [2, 1, 0, 2]
    assert np.isnan(curve.accuracy[2])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_scores_agree_with_scikit_learn(seed: int):
    logits, probabilities, labels = random_predictions(seed)
    expected = log_loss(labels, probabilities, labels=range(5))
    assert negative_log_likelihood(probabilities, labels) == pytest.approx(expected)
    assert negative_log_likelihood_from_logits(logits, labels) == pytest.approx(expected)
    # With more than two classes scikit-learn does not halve the score either.
    assert brier_score(probabilities, labels) == pytest.approx(brier_score_loss(labels, probabilities, labels=range(5)))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_the_calibration_error_agrees_with_a_plain_loop_over_bins(seed: int, bins: int):
    _, probabilities, labels = random_predictions(seed)
    confidence, prediction = probabilities.max(axis=1), probabilities.argmax(axis=1)
    total = 0.0
    for number in range(bins):
        inside = (confidence > number / bins) & (confidence <= (number + 1) / bins)
        if inside.any():
            total += inside.sum() * abs(confidence[inside].mean() - (prediction == labels)[inside].mean())
    assert expected_calibration_error(probabilities, labels, bins) == pytest.approx(total / len(labels))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_curve_keeps_every_example_and_the_error_stays_between_zero_and_one(seed: int):
    _, probabilities, labels = random_predictions(seed)
    curve = reliability(probabilities, labels)
    assert curve.count.sum() == len(labels)
    assert 0 <= curve.expected_calibration_error <= 1


@pytest.mark.parametrize("label", [-1, 3])
@pytest.mark.parametrize("measure", [negative_log_likelihood, brier_score, expected_calibration_error])
def test_a_label_outside_the_classes_is_an_error_and_never_wraps_around(measure, label: int):
    with pytest.raises(UserError, match=f"label {label} lies outside the 3 classes"):
        measure(np.full((2, 3), 1 / 3), np.array([0, label]))


def test_no_examples_is_an_error_and_not_a_nan():
    with pytest.raises(UserError, match="no valid example"):
        brier_score(np.zeros((0, 3)), np.zeros(0, int))
    with pytest.raises(UserError, match="no valid example"):
        reliability_of_confidence(np.zeros(0), np.zeros(0))
