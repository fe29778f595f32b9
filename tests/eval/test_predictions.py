"""What a model says of images: probabilities, ranks, ties and the figures that follow."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from sklearn.metrics import balanced_accuracy_score, log_loss, top_k_accuracy_score

from lit_het.calibrations import Calibration, FittedTemperature
from lit_het.eval.features import Features
from lit_het.eval.metrics import scores
from lit_het.eval.metrics.calibration import HIGHEST_TEMPERATURE
from lit_het.eval.predictions import Predictions, Predictor, highest, log_probabilities, member_blocks, predict
from tests.eval import plain
from tests.refusals import assert_refused


def features(labels) -> Features:
    """Images 0, 1, 2, ... with the given labels."""
    labels = np.asarray(labels)
    numbers = np.arange(len(labels))
    return Features(numbers[:, None].astype(np.float32), labels, numbers)


def predictions(logits: np.ndarray, labels) -> Predictions:
    """The predictions of a model with these logits."""
    zeros = np.zeros(len(logits), np.float32)
    log_p = special.log_softmax(logits.astype(np.float64), axis=1).astype(np.float32)
    return Predictions(log_p, np.asarray(labels), np.arange(len(logits)), zeros, zeros)


def figures(logits: np.ndarray, labels) -> dict[str, float]:
    return scores.figures(predictions(logits, labels))[0]


def test_log_probabilities_alone_are_those_of_predictions(make_encoder, unit_vectors):
    encoder = make_encoder(unit_vectors(7, 4), {"x": np.ones(4)}, num_shards=2)
    predictor, images = Predictor(encoder, 3, unit_vectors(3, 4, seed=1)), features(np.arange(7) % 3)
    expected = predict(predictor, images, block_size=2).log_probabilities
    np.testing.assert_array_equal(log_probabilities(predictor, images, block_size=2), expected)


def test_a_perfect_model_scores_one_with_no_calibration_error(make_encoder):
    encoder = make_encoder(np.eye(7), {"x": np.eye(7)[0]}, temperature=0.01)
    found, errors = scores.figures(predict(Predictor(encoder, 7, np.eye(7)), features(range(7))))
    assert found["top1"] == found["top5"] == found["mean_reciprocal_rank"] == found["mean_class_recall"] == 1
    for name in ("nll", "brier", "ece", "ece_equal_mass"):
        assert found[name] == pytest.approx(0, abs=1e-6)
        assert errors[name] == pytest.approx(0, abs=1e-6)


def test_a_model_that_confuses_two_classes_loses_exactly_those():
    found = predictions(9 * np.eye(7), [1, 0, 2, 3, 4, 5, 6])
    assert found.predicted.tolist() == list(range(7))
    assert scores.figures(found)[0]["top1"] == pytest.approx(5 / 7)
    assert found.hits(1).tolist() == [0, 0, 1, 1, 1, 1, 1]


def test_a_collapsed_model_scores_exactly_chance_and_random_logits_nearly():
    found = figures(np.zeros((9, 9)), range(9))
    for name, value in scores.chance(9).items():
        assert found[name] == pytest.approx(value, abs=1e-6), name
    generator = np.random.default_rng(1)
    found = figures(generator.normal(size=(4000, 50)) / 100, generator.integers(50, size=4000))
    tolerances = {"top1": 0.01, "top5": 0.02, "mean_reciprocal_rank": 0.01, "nll": 0.1, "brier": 0.01}
    for name, tolerance in tolerances.items():
        assert found[name] == pytest.approx(scores.chance(50)[name], abs=tolerance)


def test_chance_over_four_names_is_computed_by_hand():
    assert scores.chance(4) == {
        "top1": 0.25,
        "top5": 1.0,
        "mean_class_recall": 0.25,
        "mean_reciprocal_rank": pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4),
        "nll": pytest.approx(np.log(4)),
        "brier": pytest.approx(3 * 0.25**2 + 0.75**2),
        "ece": 0.0,
        "ece_equal_mass": 0.0,
    }


def test_a_three_way_tie_counts_one_third():
    found = predictions(np.array([[0.8, 0.6, 0.6, 0.6]]), [2])
    # One name above, three tied: the true rank is 2, 3 or 4, each with probability 1/3.
    assert [ranks.tolist() for ranks in found.ranks()] == [[1], [3]]
    assert [found.hits(count)[0] for count in (1, 2, 3, 4)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert scores.figures(found)[0]["mean_reciprocal_rank"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_figures_agree_with_scikit_learn_whatever_the_order_of_images_and_names(seed: int):
    generator = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(9), generator.integers(9, size=51)])
    logits = 2 * generator.normal(size=(60, 9))
    found, errors = scores.figures(predictions(logits, labels))
    probabilities = special.softmax(logits, axis=1)
    for count, name in ((1, "top1"), (5, "top5")):
        assert found[name] == pytest.approx(top_k_accuracy_score(labels, logits, k=count, labels=range(9)))
    assert found["nll"] == pytest.approx(log_loss(labels, probabilities, labels=range(9)), rel=1e-5)
    assert found["brier"] == pytest.approx(((probabilities - np.eye(9)[labels]) ** 2).sum(axis=1).mean(), rel=1e-5)
    assert found["ece"] == pytest.approx(plain.calibration_error(probabilities, labels), abs=1e-5)
    assert found["mean_class_recall"] == pytest.approx(balanced_accuracy_score(labels, logits.argmax(axis=1)))
    ranks = 1 + (logits > logits[np.arange(60), labels][:, None]).sum(axis=1)
    assert found["mean_reciprocal_rank"] == pytest.approx((1 / ranks).mean())
    assert errors["top1"] == pytest.approx(np.sqrt(found["top1"] * (1 - found["top1"]) / 59))
    images, names = generator.permutation(60), generator.permutation(9)
    moved = figures(logits[images][:, names], np.argsort(names)[labels[images]])
    assert moved == pytest.approx(found, abs=1e-6)


def test_top_classes_are_in_descending_order_with_softmax_probabilities():
    logits = np.random.default_rng(0).normal(size=(12, 20))
    best, probabilities = predictions(logits, np.zeros(12, int)).top()
    order = np.argsort(-logits, axis=1)[:, :5]
    np.testing.assert_array_equal(best, order)
    expected = np.take_along_axis(special.softmax(logits, axis=1), order, axis=1)
    np.testing.assert_allclose(probabilities, expected, rtol=1e-5)
    assert highest(np.array([[0.1, 0.7, 0.3]]), 5).tolist() == [[1, 2, 0]], "of fewer than five classes all"


@pytest.mark.parametrize("block_size", [1, 4, 9, 100])
def test_noise_samples_average_probabilities_and_not_embeddings(unit_vectors, make_encoder, block_size: int):
    """1/S Σ_s softmax((α + ε_s) · β / τ), by a loop over images and samples (HET-XL App. M)."""
    images, names, labels = unit_vectors(9, 4), unit_vectors(5, 4, seed=1), np.arange(9) % 5
    noise = np.random.default_rng(2).normal(size=(9, 6, 4))
    encoder = make_encoder(images, {"x": names[0]}, temperature=0.3, noise=noise)
    found = predict(Predictor(encoder, len(names), names, samples=6), features(labels), block_size)
    expected, of_samples = np.zeros((9, 5)), np.zeros((9, 6, 5))
    for n in range(9):
        for s in range(6):
            of_samples[n, s] = special.softmax((images[n] + noise[n, s]) @ names.T / 0.3)
            expected[n] += of_samples[n, s] / 6
    np.testing.assert_allclose(np.exp(found.log_probabilities), expected, rtol=1e-4)
    blocks = member_blocks(Predictor(encoder, len(names), names, samples=6), features(labels), block_size)
    found_members, found_labels = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    np.testing.assert_allclose(np.exp(found_members), of_samples, rtol=1e-4)
    np.testing.assert_array_equal(found_labels, labels)
    logits = images @ names.T / 0.3
    np.testing.assert_allclose(found.log_normalizer, np.log(np.exp(logits).sum(axis=1)), rtol=1e-5)
    quiet = predict(Predictor(encoder, len(names), names), features(labels), block_size)
    np.testing.assert_allclose(np.exp(quiet.log_probabilities), special.softmax(logits, axis=1), rtol=1e-5)


@pytest.mark.parametrize("groups", [None, ((0, 3), (1,), (4, 2))])
@pytest.mark.parametrize(("samples", "temperature"), [(0, 0.5), (4, 3.0)])
def test_a_calibrated_model_scales_means_by_the_temperature_of_the_noise_and_leaves_members_as_trained(
    unit_vectors, make_encoder, groups, samples: int, temperature: float
):
    noise = np.random.default_rng(0).normal(size=(6, 4, 8)).astype(np.float32)
    raw = make_encoder(unit_vectors(6, 8), {"x": np.ones(8)}, noise=noise)
    fits = (FittedTemperature(value, 0.1, 1.0, 0.9) for value in (0.5, 3.0))
    model = dataclasses.replace(raw, calibration=Calibration(("x",), "", "", 6, 5, 4, *fits))
    classes, block = unit_vectors(5, 8, seed=1), (features(range(6)).values[None], np.zeros(1, np.int32))
    trained, found = (
        Predictor(one, 5 if groups is None else 3, classes, samples, groups=groups) for one in (raw, model)
    )
    # The mean is scaled, which is not the mean of scaled samples.
    mean = special.log_softmax(trained.log_probabilities(*block) / temperature, axis=-1)
    members = found.member_log_probabilities(*block)
    for applied in (found.log_probabilities(*block), found.pooled(members)):
        np.testing.assert_allclose(applied, mean, atol=1e-5)
    np.testing.assert_array_equal(members, trained.member_log_probabilities(*block))


def test_a_head_without_noise_has_one_temperature_for_all_predictions():
    fitted = FittedTemperature(2.0, 0.1, 1.0, 0.9)
    calibration = Calibration(("a", "b"), "98%:100%", "", 1234, 5, 0, fitted)
    assert calibration.fitted(16) is calibration.fitted(0) is fitted
    assert str(calibration) == "calibrated on 1,234 images of a b (98%:100%) (T = 2.00 ± 0.10)"


def test_each_half_of_the_images_is_calibrated_by_the_other(capsys):
    """A model that is ten times too sure of itself; the factor that fixes it is ten."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(6000, 5))
    labels = np.array([generator.choice(5, p=p) for p in special.softmax(logits, axis=1)])
    overconfident = predictions(10 * logits, labels)
    calibrated, factor = scores.calibrated(overconfident, "a set")
    assert factor == pytest.approx(10, rel=0.1)
    before, after = scores.figures(overconfident)[0], scores.figures(calibrated)[0]
    assert after["top1"] == before["top1"]
    assert after["nll"] < before["nll"]
    assert after["ece"] < 0.03 < before["ece"]
    np.testing.assert_array_equal(calibrated.predicted, overconfident.predicted)
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_sets_of_one_half_have_thresholds_of_the_other_and_cover_as_asked_after_calibration_too():
    """The mean over draws is ceil(21 * 0.9) / 21, if the halves are not those of the temperature."""
    generator = np.random.default_rng(0)
    shares = []
    for _ in range(200):
        logits = generator.normal(size=(40, 50))
        labels = (special.softmax(logits, axis=1).cumsum(axis=1) < generator.uniform(size=(40, 1))).sum(axis=1)
        calibrated, _ = scores.calibrated(predictions(9 * logits, labels), "a set")
        [(coverage, covered, size)] = scores.sets_of_half(calibrated, (0.9, 0.99))
        assert (coverage, covered.shape, size.shape) == (0.9, (20,), (20,))
        shares.append(covered.mean())
    error = np.std(shares, ddof=1) / np.sqrt(len(shares))
    assert error < 0.01
    assert np.mean(shares) == pytest.approx(19 / 21, abs=3 * error)


def test_figures_of_decisions_are_those_of_errors_by_confidence_and_of_the_measured_half():
    generator = np.random.default_rng(0)
    logits = 3 * generator.normal(size=(41, 6))
    model = predictions(logits, generator.integers(6, size=41))
    [(_, covered, size)] = scores.sets_of_half(model, (0.9,))
    found, errors = scores.decision_figures(model)
    assert found.keys() == errors.keys()
    assert (found["coverage90"], found["set_size90"]) == (covered.mean(), size.mean())
    assert errors["set_size90"] == pytest.approx(np.std(size, ddof=1) / np.sqrt(21))
    wrong = (model.predicted != model.labels)[np.argsort(-model.confidence)]
    assert found["aurc"] == pytest.approx((wrong.cumsum() / np.arange(1, 42)).mean())
    assert list(scores.decision_figures(model.take(np.arange(17)))[0]) == ["aurc", "excess_aurc"]


@pytest.mark.parametrize(("labels", "bound"), [(range(7), "0.01"), (np.roll(range(7), 1), "100")])
def test_a_temperature_at_a_bound_of_the_search_is_reported(labels, bound: str, capsys):
    scores.calibrated(predictions(np.eye(7), labels), "a set")
    [line] = capsys.readouterr().err.splitlines()
    assert f"a set: no temperature fits: the loss still decreases at {bound} times the model's" in line
    scores.report_if_unfitted("a set", [0.3, HIGHEST_TEMPERATURE])
    assert "the highest in the search" in capsys.readouterr().err, "of one of the halves"


def test_a_label_outside_the_names_and_a_diverged_model_are_errors_and_not_scores(make_encoder):
    predictor = Predictor(make_encoder(np.eye(7), {"x": np.eye(7)[0]}), 7, np.eye(7))
    for label in (-1, 7):
        assert_refused(f"label {label} lies outside the 7 classes", predict, predictor, features([0, label]))
    diverged = Predictor(make_encoder(np.full((1, 2), np.nan), {"x": np.zeros(2)}), 2, np.eye(2))
    assert_refused("not a number", predict, diverged, features([0]))


def test_several_labels_an_image_have_a_mean_average_precision():
    alone = np.array([[2.0, 1, 0], [0, 2, 1], [2, 0, 1]])
    labels = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1]], np.float32)
    several = scores.multi_label_figures(alone, labels)
    # Of the first class the one positive is at rank 1 or 2 of equals; the second at rank 1; the third at rank 1 of two.
    assert several == {"mean_average_precision": pytest.approx((1 / 2 + 1 + 1 / 2) / 3)}


def test_the_nll_of_soft_labels_is_that_of_hand_arithmetic():
    """Half the people say 0, half 1; the model gives them 1/2 and 1/4: (ln 2 + ln 4) / 2. All say 1: ln 4."""
    log_p = np.log(np.array([[1 / 2, 1 / 4, 1 / 4], [1 / 2, 1 / 4, 1 / 4]]))
    found = scores.soft_nll(log_p, np.array([[0.5, 0.5, 0], [0, 1, 0]]))
    np.testing.assert_allclose(found, [1.5 * np.log(2), np.log(4)])
    # An impossible class costs nothing unless somebody chose it.
    log_p = np.array([[0, -np.inf], [0, -np.inf]])
    assert scores.soft_nll(log_p, np.array([[1.0, 0.0], [0.9, 0.1]])).tolist() == [0, np.inf]


def test_the_nll_of_soft_labels_is_least_for_the_labels_themselves_and_that_of_one_hot_labels_the_usual_one():
    random = np.random.default_rng(0)
    soft, log_p = (function(random.normal(size=(50, 4)), axis=1) for function in (special.softmax, special.log_softmax))
    expected = [-sum(q * p for q, p in zip(*row, strict=True)) for row in zip(soft, log_p, strict=True)]
    np.testing.assert_allclose(scores.soft_nll(log_p, soft), expected)
    entropy = stats.entropy(soft, axis=1)
    np.testing.assert_allclose(scores.soft_nll(np.log(soft), soft), entropy)
    assert (scores.soft_nll(log_p, soft) > entropy).all()
    found = predictions(log_p, [0, 1] * 25)
    hard = scores.soft_nll(found.log_probabilities, np.eye(4)[[0, 1] * 25])
    assert hard.mean() == pytest.approx(scores.figures(found)[0]["nll"], rel=1e-6)
