"""Figures of several labels per image, where every class has a probability of its own."""

import numpy as np
import pytest
from scipy import special

from lit_het.eval.metrics.multi_label import ensemble_figures, figures, joint
from tests.refusals import assert_refused

# Two images and two classes; probabilities of the classes.
PROBABILITIES = np.array([[0.8, 0.4], [0.1, 0.5]])
TARGETS = np.array([[1.0, 1.0], [0.0, 1.0]])


def both(probabilities: np.ndarray) -> np.ndarray:
    """Log-probabilities of classes and of their absence."""
    return np.log(np.stack([probabilities, 1 - probabilities], axis=-2)).astype(np.float32)


def test_figures_are_means_over_images_and_classes():
    found, errors = figures(both(PROBABILITIES), TARGETS)
    losses = -np.log([[0.8, 0.4], [0.9, 0.5]])
    assert found["binary_nll"] == pytest.approx(losses.mean())
    assert errors["binary_nll"] == pytest.approx(losses.mean(axis=1).std(ddof=1) / np.sqrt(2))
    assert found["binary_brier"] == pytest.approx((0.2**2 + 0.6**2 + 0.1**2 + 0.5**2) / 4)
    # Either most probable class is a label of its image.
    assert found["precision_at_1"] == 1
    # Every image is alone in its bin: of class 0 they miss by 0.2 and 0.1, of class 1 by 0.6 and 0.5.
    assert found["classwise_ece"] == pytest.approx(((0.2 + 0.1) / 2 + (0.6 + 0.5) / 2) / 2)
    assert found["mean_average_precision"] == pytest.approx(1)
    assert "classwise_ece" not in errors


def test_images_without_labels_count_in_all_but_the_precision_of_the_top_class():
    found, errors = figures(both(np.array([[0.6, 0.4], [0.3, 0.2], [0.9, 0.1]])), np.array([[1, 0], [0, 0], [0, 1.0]]))
    assert found["precision_at_1"] == 0.5
    assert errors["precision_at_1"] == pytest.approx(0.5)
    assert found["binary_nll"] == pytest.approx(-np.log([0.6, 0.6, 0.7, 0.8, 0.1, 0.1]).mean())
    assert_refused("no image has a label", figures, both(PROBABILITIES), np.zeros((2, 2)))


def test_the_calibration_error_is_that_of_each_class_in_turn():
    random = np.random.default_rng(0)
    probabilities, targets = random.random((50, 3)), (random.random((50, 3)) < 0.3).astype(float)
    expected = []
    for p, y in zip(probabilities.T, targets.T, strict=True):
        bins = np.ceil(15 * p)
        expected.append(sum(abs((p - y)[bins == number].sum()) for number in range(1, 16)) / 50)
    assert figures(both(probabilities), targets)[0]["classwise_ece"] == pytest.approx(np.mean(expected), abs=1e-6)


def test_probabilities_near_one_keep_their_digits():
    logits = np.array([[60.0, -60.0]])
    log_p = np.stack([special.log_expit(logits), special.log_expit(-logits)], axis=1).astype(np.float32)
    assert figures(log_p, np.array([[0.0, 1.0]]))[0]["binary_nll"] == pytest.approx(60)


def test_an_ensemble_is_the_mean_of_its_members_probabilities():
    members = np.stack([PROBABILITIES, PROBABILITIES[::-1]], axis=1)
    found, _ = ensemble_figures(both(members), TARGETS, each_member=True)
    mean = PROBABILITIES.mean(axis=0)
    np.testing.assert_allclose(np.exp(joint(both(members)))[:, 0], [mean, mean], rtol=1e-6)
    assert found["joint_binary_nll"] == pytest.approx(figures(both(np.stack([mean, mean])), TARGETS)[0]["binary_nll"])
    alone = [figures(both(one), TARGETS)[0] for one in (PROBABILITIES, PROBABILITIES[::-1])]
    for name, value in alone[0].items():
        assert found[f"member_1/{name}"] == pytest.approx(value)
        assert found[f"individual_{name}"] == pytest.approx((value + alone[1][name]) / 2)
    # KL(0.8 || 0.1) and back, KL(0.4 || 0.5) and back, of two outcomes each; the same for both images.
    pairs = ((0.8, 0.1), (0.1, 0.8), (0.4, 0.5), (0.5, 0.4))
    expected = [p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q)) for p, q in pairs]
    assert found["kl"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert not [name for name in ensemble_figures(both(members), TARGETS)[0] if name.startswith("member_")]
