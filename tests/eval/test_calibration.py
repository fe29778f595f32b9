from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special
from sklearn.metrics import brier_score_loss, log_loss

from lit_het.errors import UserError
from lit_het.eval.metrics.calibration import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    ReliabilityCurve,
    brier_scores,
    calibration_standard_error,
    correctness,
    fit,
    fit_temperature,
    reliability_of_confidence,
    scaled,
)
from lit_het.eval.metrics.scores import figures
from lit_het.eval.predictions import Predictions
from tests.eval import plain
from tests.refusals import assert_refused

seeds = st.integers(0, 2**32 - 1)


def random_predictions(seed: int, count: int = 40, classes: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(count, classes)) * 3
    return logits, special.softmax(logits, axis=1), generator.integers(classes, size=count)


@np.errstate(divide="ignore")
def figures_of(probabilities: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """The metrics of predictions with these probabilities."""
    nothing = np.zeros(len(labels))
    return figures(Predictions(np.log(probabilities), labels, np.arange(len(labels)), nothing, nothing))[0]


def curve_of(probabilities: np.ndarray, labels: np.ndarray, bins: int = 15) -> ReliabilityCurve:
    return reliability_of_confidence(probabilities.max(axis=1), correctness(probabilities, labels), bins)


def test_hand_computed_scores_of_two_examples_stay_finite_where_the_probability_underflows():
    probabilities, labels = np.array([[0.8, 0.2], [0.6, 0.4]]), np.array([0, 1])
    found = figures_of(probabilities, labels)
    assert found["nll"] == pytest.approx(-(np.log(0.8) + np.log(0.4)) / 2)
    assert found["brier"] == pytest.approx((2 * 0.2**2 + 2 * 0.6**2) / 2)
    log_p, nothing = special.log_softmax([[0.0, 2000.0]], axis=1), np.zeros(1)
    found, _ = figures(Predictions(log_p, np.array([0]), np.array([0]), nothing, nothing))
    assert (found["nll"], found["brier"]) == (2000, 2)


def test_hand_computed_calibration_errors_of_four_examples_in_two_bins():
    confidence, correct = np.array([0.9, 0.7, 0.8, 0.5]), np.array([1.0, 0.0, 0.0, 1.0])
    # Bin (0, 0.5]: confidence 0.5, right once of once. Bin (0.5, 1]: mean confidence 0.8, right once of three.
    curve = reliability_of_confidence(confidence, correct, bins=2)
    np.testing.assert_allclose(curve.confidence, [0.5, 0.8])
    np.testing.assert_allclose(curve.accuracy, [1.0, 1 / 3])
    assert curve.count.tolist() == [1, 3]
    assert curve.expected_calibration_error == pytest.approx((1 * 0.5 + 3 * (0.8 - 1 / 3)) / 4)
    # Halves: confidence 0.5 and 0.7, right once: |0.6 - 0.5|. Confidence 0.8 and 0.9, right once: |0.85 - 0.5|.
    curve = reliability_of_confidence(confidence, correct, bins=2, equal_mass=True)
    np.testing.assert_allclose(curve.edges, [0, 0.7, 1])
    assert curve.count.tolist() == [2, 2]
    assert curve.expected_calibration_error == pytest.approx((0.1 + 0.35) / 2)


def test_perfect_and_confidently_wrong_models_have_the_extreme_scores_and_a_uniform_guess_is_calibrated():
    names = ("nll", "brier", "ece", "ece_equal_mass")
    perfect, wrong = (figures_of(np.eye(4), np.roll(np.arange(4), shift)) for shift in (0, 1))
    assert [perfect[name] for name in names] == [0, 0, 0, 0]
    assert [wrong[name] for name in names] == [np.inf, 2, 1, 1]
    unbalanced = figures_of(np.full((10, 4), 0.25), np.zeros(10, int))
    assert unbalanced["ece"] == unbalanced["ece_equal_mass"] == pytest.approx(0)


def test_confidences_on_the_bounds_and_rounded_above_one_fall_into_bins_and_one_for_all_into_one():
    curve = reliability_of_confidence(np.array([0.0, 0.25, 0.5, 1.0, 1.0 + 1e-7]), np.ones(5), bins=4)
    assert curve.count.tolist() == [2, 1, 0, 2]
    assert np.isnan(curve.accuracy[2])
    curve = reliability_of_confidence(np.full(10, 0.5), np.ones(10), bins=4, equal_mass=True)
    assert curve.count.tolist() == [10, 0, 0, 0]


@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(1, 30))
def test_scores_agree_with_scikit_learn_and_the_calibration_error_with_a_plain_loop_over_bins(seed: int, bins: int):
    _, probabilities, labels = random_predictions(seed)
    found = figures_of(probabilities, labels)
    assert found["nll"] == pytest.approx(log_loss(labels, probabilities, labels=range(5)))
    # With more than two classes scikit-learn does not halve the score either.
    assert found["brier"] == pytest.approx(brier_score_loss(labels, probabilities, labels=range(5)))
    for number in (bins, 15):
        curve = curve_of(probabilities, labels, number)
        expected = plain.calibration_error(probabilities, labels, number)
        assert curve.expected_calibration_error == pytest.approx(expected)
        assert curve.count.sum() == len(labels)
        assert 0 <= curve.expected_calibration_error <= 1


@pytest.mark.parametrize("label", [-1, 3])
@pytest.mark.parametrize("measure", [brier_scores, correctness, fit_temperature])
def test_a_label_outside_the_classes_is_an_error_and_never_wraps_around(measure, label: int):
    with pytest.raises(UserError, match=f"label {label} lies outside the 3 classes"):
        measure(np.log(np.full((2, 3), 1 / 3)), np.array([0, label]))


def test_no_examples_is_an_error_and_not_a_nan():
    for measure in (reliability_of_confidence, calibration_standard_error):
        assert_refused("no valid example", measure, np.zeros(0), np.zeros(0))
    assert_refused("no valid example", brier_scores, np.zeros((0, 3)), np.zeros(0, int))


def log_predictions(seed: int, count: int = 40, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    logits, _, labels = random_predictions(seed, count, classes)
    return special.log_softmax(logits, axis=1).astype(np.float32), labels


@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(1, 60), st.integers(1, 20))
def test_bins_of_equal_mass_are_those_of_a_sorted_split(seed: int, count: int, bins: int):
    generator = np.random.default_rng(seed)
    confidence, correct = generator.random(count), generator.integers(2, size=count).astype(float)
    order = np.argsort(confidence)
    bounds = [-(-number * count // bins) for number in range(bins + 1)]
    shares = [order[start:stop] for start, stop in pairwise(bounds)]
    curve = reliability_of_confidence(confidence, correct, bins, equal_mass=True)
    assert curve.count.tolist() == [len(share) for share in shares]
    expected = sum(abs((confidence[share] - correct[share]).sum()) for share in shares) / count
    assert curve.expected_calibration_error == pytest.approx(expected)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.2, 0.5, 0.9]), st.booleans()), min_size=1, max_size=30), st.randoms())
def test_bins_of_equal_mass_do_not_depend_on_the_order_of_ties(examples: list[tuple[float, bool]], random):
    def curve(examples):
        confidence, correct = np.array(examples, float).T
        return reliability_of_confidence(confidence, correct, bins=7, equal_mass=True)

    first = curve(examples)
    random.shuffle(examples)
    assert curve(examples).count.tolist() == first.count.tolist()
    assert curve(examples).expected_calibration_error == pytest.approx(first.expected_calibration_error)


def test_the_most_probable_class_of_tied_ones_is_drawn_evenly():
    scores = np.array([[0.4, 0.4, 0.2], [0.1, 0.2, 0.7]])
    assert correctness(scores, np.array([1, 2])).tolist() == [0.5, 1.0]
    assert correctness(np.log(scores), np.array([2, 0])).tolist() == [0.0, 0.0]


def loss_at(log_p: np.ndarray, labels: np.ndarray) -> Callable[[float], float]:
    """Returns the mean loss of predictions as a function of the logarithm of a temperature."""

    def loss(log_temperature: float) -> float:
        scores = special.log_softmax(log_p.astype(np.float64) / np.exp(log_temperature), axis=1)
        return -scores[np.arange(len(labels)), labels].mean()

    return loss


def test_labels_drawn_from_the_scaled_probabilities_give_their_temperature_back():
    generator = np.random.default_rng(0)
    true = special.log_softmax(generator.normal(size=(20000, 4)) * 2, axis=1)
    labels = (generator.random((20000, 1)) > np.cumsum(np.exp(true), axis=1)).sum(axis=1).clip(max=3)
    overconfident = special.log_softmax(true * 2.5, axis=1)
    assert fit_temperature(overconfident, labels) == pytest.approx(2.5, rel=0.03)


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_the_fitted_temperature_has_the_lowest_loss_of_a_plain_search(seed: int):
    log_probabilities, labels = log_predictions(seed, count=200)
    loss, found = loss_at(log_probabilities, labels), fit_temperature(log_probabilities, labels)
    best = optimize.minimize_scalar(loss, bounds=np.log([LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE]), method="bounded")
    assert loss(np.log(found)) <= best.fun + 1e-7
    assert LOWEST_TEMPERATURE <= found <= HIGHEST_TEMPERATURE


def test_the_weight_of_an_example_counts_it_as_often_and_a_class_of_probability_zero_does_not_disturb_the_fit():
    random = np.random.default_rng(0)
    log_p = special.log_softmax(random.normal(size=(40, 3)), axis=1)
    labels, times = random.integers(3, size=40), random.integers(4, size=40)
    labels[:25] = log_p[:25].argmax(axis=1)
    repeated = fit_temperature(log_p.repeat(times, axis=0), labels.repeat(times))
    assert fit_temperature(log_p, labels, times.astype(float)) == pytest.approx(repeated, rel=1e-6)
    assert fit_temperature(log_p, labels) != pytest.approx(repeated, rel=1e-2)
    wider = np.concatenate([log_p, np.full((40, 1), -np.inf)], axis=1)
    assert fit_temperature(wider, labels) == fit_temperature(log_p, labels)


def test_the_fit_of_a_model_that_is_always_right_or_wrong_ends_at_a_bound_and_a_uniform_guess_stays():
    assert fit_temperature(np.log(np.full((3, 3), 0.2) + 0.4 * np.eye(3)), np.arange(3)) == LOWEST_TEMPERATURE
    assert fit_temperature(np.log(np.full((3, 3), 0.45) - 0.35 * np.eye(3)), np.arange(3)) == HIGHEST_TEMPERATURE
    assert fit_temperature(np.full((4, 3), -np.log(3), np.float32), np.array([0, 1, 2, 0])) == 1


def test_labels_of_probability_zero_and_nan_are_rejected():
    impossible, labels = np.array([[0.0, -1.0], [0.0, -np.inf]]), np.array([0, 1])
    assert_refused("example 1 has a label of probability zero", fit_temperature, impossible, labels)
    for bad in (np.nan, np.inf, -np.inf):
        broken = np.array([[0.0, -1.0], [bad, bad]])
        assert_refused("example 1 has no finite", fit_temperature, broken, labels)
        assert_refused("example 1 has no finite", scaled, broken, 2.0)


def test_scores_the_fit_and_the_scaling_do_not_depend_on_blocks(monkeypatch):
    log_p, labels = log_predictions(5)
    brier, temperature, whole = (brier_scores(log_p, labels), fit_temperature(log_p, labels), scaled(log_p, 1.7))
    monkeypatch.setattr("lit_het.eval.metrics.rows.VALUES_PER_BLOCK", 17)
    np.testing.assert_array_equal(brier_scores(log_p, labels), brier)
    assert fit_temperature(log_p, labels) == pytest.approx(temperature)
    np.testing.assert_array_equal(scaled(log_p, 1.7), whole)


def test_scaled_probabilities_sum_to_one_and_keep_their_order():
    log_probabilities, _ = log_predictions(7)
    result = scaled(log_probabilities, 3.0)
    assert result.dtype == np.float32
    np.testing.assert_allclose(np.exp(result).sum(axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(np.argsort(result), np.argsort(log_probabilities))
    np.testing.assert_allclose(scaled(log_probabilities, 1.0), log_probabilities, atol=1e-6)
    for temperature in (0.0, -1.0, np.nan):
        assert_refused("must be above zero", scaled, np.zeros((1, 2)), temperature)


@pytest.mark.parametrize("equal_mass", [False, True])
def test_the_standard_error_of_the_calibration_error_is_that_of_a_plain_bootstrap(equal_mass: bool):
    generator = np.random.default_rng(0)
    confidence = generator.random(300)
    correct = (generator.random(300) < confidence**2).astype(float)
    edges = reliability_of_confidence(confidence, correct, equal_mass=equal_mass).edges
    members = np.digitize(confidence, edges[1:-1], right=True)
    figures = []
    for _ in range(400):
        drawn = generator.integers(300, size=300)
        gaps = [(confidence - correct)[drawn][members[drawn] == number].sum() for number in range(len(edges) - 1)]
        figures.append(np.abs(gaps).sum() / 300)
    found = calibration_standard_error(confidence, correct, equal_mass=equal_mass)
    assert found == pytest.approx(np.std(figures, ddof=1), rel=0.15)
    assert found == calibration_standard_error(confidence, correct, equal_mass=equal_mass)


def test_the_standard_error_of_several_predictors_is_that_of_their_mean_on_the_same_images():
    generator = np.random.default_rng(0)
    confidence = generator.random((400, 3)).round(2)
    correct = (generator.random((400, 3)) < confidence**2).astype(float)
    draws = generator.integers(400, size=(500, 400))
    means = [
        np.mean([reliability_of_confidence(c, y).expected_calibration_error for c, y in zip(*pair, strict=True)])
        for pair in ((confidence[drawn].T, correct[drawn].T) for drawn in draws)
    ]
    assert calibration_standard_error(confidence, correct) == pytest.approx(np.std(means, ddof=1), rel=0.12)
    same = calibration_standard_error(np.repeat(confidence[:, :1], 3, axis=1), np.repeat(correct[:, :1], 3, axis=1))
    assert same == pytest.approx(calibration_standard_error(confidence[:, 0], correct[:, 0]))


def test_the_standard_error_falls_with_the_root_of_the_examples():
    confidence, correct = np.full(100, 0.9), np.repeat([1.0, 0.0], 50)
    few, many = (calibration_standard_error(np.tile(confidence, r), np.tile(correct, r)) for r in (1, 16))
    assert few / many == pytest.approx(4, rel=0.2)


def miscalibrated(seed: int, count: int, factor: float) -> tuple[np.ndarray, np.ndarray]:
    """Predictions whose true temperature is ``factor``, and labels drawn from them."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(count, 6)) * 2
    labels = np.array([generator.choice(6, p=p) for p in special.softmax(logits, axis=1)])
    return special.log_softmax(logits * factor, axis=1).astype(np.float32), labels


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
def test_a_fit_is_the_minimum_that_scipy_finds_with_the_losses_before_and_after(factor: float):
    log_p, labels = miscalibrated(0, 500, factor)
    loss, found = loss_at(log_p, labels), fit(log_p, labels)
    minimum: Any = optimize.minimize_scalar(loss, bracket=(-1, 1))
    assert found.temperature == pytest.approx(np.exp(minimum.x), rel=1e-5)
    assert found.nll_before == pytest.approx(loss(0.0), rel=1e-6)
    assert found.nll_after == pytest.approx(minimum.fun, rel=1e-6)
    # The labels were drawn at this temperature.
    assert abs(found.temperature - factor) < 4 * found.standard_error


@pytest.mark.slow
@pytest.mark.parametrize("is_misspecified", [False, True])
def test_the_error_of_a_temperature_is_that_of_a_bootstrap(is_misspecified: bool):
    log_p, labels = miscalibrated(1, 400, 2.0)
    if is_misspecified:  # half of the images at another temperature, where the Fisher information alone is wrong
        log_p[::2] = special.log_softmax(log_p[::2] * 6, axis=1)
    generator = np.random.default_rng(2)
    resamples = (generator.integers(len(labels), size=len(labels)) for _ in range(400))
    deviation = np.std([fit_temperature(log_p[rows], labels[rows]) for rows in resamples])
    # The deviation of 400 resamples has a relative error of 1 / sqrt(800).
    assert fit(log_p, labels).standard_error == pytest.approx(deviation, rel=0.15)


@pytest.mark.parametrize(
    ("log_p", "message"),
    [
        (np.log([[0.9, 0.1], [0.2, 0.8]]), "every label is the most probable one"),
        (np.log([[0.1, 0.9], [0.8, 0.2]]), "no better than chance"),
        (np.log([[0.5, 0.5], [0.5, 0.5]]), "no better than chance"),
    ],
)
def test_predictions_that_no_temperature_fits_are_refused(log_p: np.ndarray, message: str):
    assert_refused(message, fit, log_p, np.array([0, 1]))
