"""Predictions for one image: bands over noise samples, invalid labels, and ranks among evaluated sets."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import special

from lit_het.eval import answers
from lit_het.eval.evaluation import Drawing, Record
from lit_het.types import ImageFeatures
from tests.eval.fake_model import FakeModel
from tests.refusals import assert_refused

LABELS = ("a cat", "a dog", "a bird")
VECTORS = np.eye(3)
NOISE = np.random.default_rng(0).normal(0, 0.2, (3, 64, 3))


@pytest.fixture
def encoder(make_encoder):
    """Image number n is nearest to label n; image 0 has no noise norm."""
    return make_encoder(VECTORS, LABELS, noise=NOISE)


@pytest.fixture
def ask(encoder):
    predictor = answers.label_predictor(encoder, LABELS)
    return lambda image, samples=0: answers.answer(predictor, np.array([image], np.float32), samples)


def test_probabilities_are_the_softmax_of_cosines_and_bands_hold_the_samples(ask):
    found = ask(2, samples=64)
    np.testing.assert_allclose(found.probability, special.softmax(VECTORS[2] / 0.1), rtol=1e-5)
    of_samples = special.softmax((VECTORS[2] + NOISE[2]) / 0.1, axis=1)
    np.testing.assert_allclose(found.samples, of_samples, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(found.noisy, of_samples.mean(axis=0), rtol=1e-4)
    np.testing.assert_allclose(found.band, np.quantile(of_samples, [0.05, 0.95], axis=0), rtol=1e-4, atol=1e-7)
    assert found.noise_norm == 2
    assert found.order[0] == 2
    # Without noise or samples there is no band.
    for quiet in (ask(0, samples=32), ask(1)):
        assert quiet.noisy is quiet.samples is quiet.band is None


def test_members_of_a_model_share_their_samples_and_disagree_beside_them(encoder):
    predictor = answers.label_predictor(replace(encoder, text_members=2), LABELS)
    found = answers.answer(predictor, np.array([2], np.float32), samples=32)
    of_samples = special.softmax((VECTORS[2] + NOISE[2]) / 0.1, axis=1)
    assert found.noisy is not None
    assert found.samples is not None
    np.testing.assert_allclose(found.noisy, of_samples.mean(axis=0), rtol=1e-4)
    assert len(found.samples) == 64
    # Predictions alternate between the members.
    members, mean = of_samples.reshape(32, 2, 3).mean(axis=0), of_samples.mean(axis=0)
    expected = np.mean([(p * np.log(p / mean)).sum() for p in members])
    assert found.mutual_information == pytest.approx(expected, rel=1e-3)
    assert (
        answers.answer(answers.label_predictor(encoder, LABELS), np.array([2], np.float32)).mutual_information is None
    )


def test_the_axis_ends_at_a_round_number_above_all_probabilities(ask):
    found = ask(2)
    assert found.scale == 1
    rare = replace(found, probability=np.array([0.03, 0.01], np.float32))
    assert rare.scale == 0.05
    samples = np.array([[0.01, 0.02]] * 99 + [[0.01, 0.15]], np.float32)  # one far above the band
    assert replace(rare, samples=samples).scale == 0.2


def test_a_prediction_set_has_the_probable_labels_in_order_and_at_least_one(ask):
    unsure = replace(ask(2), probability=np.array([0.3, 0.0, 0.7], np.float32))
    for threshold, expected in ((0.2, [2, 0]), (0.5, [2]), (0.9, [2])):
        assert unsure.prediction_set(np.log(threshold)) == expected
    assert unsure.prediction_set(-np.inf) == [2, 0, 1]


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("count", [1, 3, 70])
def test_features_are_those_of_each_image_in_batches_of_one_shape(make_encoder, num_shards: int, count: int):
    tower = make_encoder(VECTORS, {"a": VECTORS[0]}, num_shards=num_shards).features
    shapes = set()

    def extract(view: np.ndarray) -> np.ndarray:
        shapes.add(view.shape)
        return np.asarray(tower.extract(view))

    images = [np.full((2, 2, 3), number, np.uint8) for number in range(count)]
    found = list(answers.features_of(replace(tower, extract=extract), images, count))
    np.testing.assert_array_equal(np.stack(found)[:, 0], range(count))
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ((), "no labels"),
        (("a cat",), "'a cat' is the only label"),
        (("a cat", "a dog", "a cat"), "'a cat' is repeated"),
    ],
)
def test_invalid_lists_of_labels_are_rejected(encoder, labels, message):
    for refuse in (answers.require_distinct_labels, lambda labels: answers.label_predictor(encoder, labels)):
        assert_refused(message, refuse, labels)


def test_labels_are_split_by_lines_or_by_commas_in_a_single_line():
    assert answers.split_labels(" a cat,a dog ,, ") == ("a cat", "a dog")
    assert answers.split_labels("crane, the bird\n\ncrane, the machine\n") == ("crane, the bird", "crane, the machine")
    assert answers.split_labels("  ") == ()


def classifier(probability: float, noisy: float) -> FakeModel:
    def logits(features: np.ndarray, count: int, names: np.ndarray | None) -> np.ndarray:
        first = noisy if count else probability
        return np.log(np.array([[[first, 1 - first]] * 2 * max(1, count)], np.float32))

    return FakeModel(
        features=ImageFeatures(lambda view: view, num_members=2, num_shards=1, tower=""),
        logits=logits,
        noise_norm=lambda features: np.ones(len(features), np.float32),
        num_classes=2,
        has_noise=True,
    )


def test_a_classifier_predicts_its_own_classes_with_noise_samples_of_every_member():
    found = answers.answer(answers.label_predictor(classifier(0.9, 0.8), LABELS[:2]), np.zeros(4, np.float32))
    np.testing.assert_allclose(found.probability, [0.9, 0.1], rtol=1e-5)
    assert found.noisy is not None
    np.testing.assert_allclose(found.noisy, [0.8, 0.2], rtol=1e-5)
    assert found.samples is not None
    assert found.samples.shape == (64, 2)


def test_a_classifier_rejects_another_number_of_labels_and_a_diverged_one_every_image():
    message = "trained on 2 classes, and there are 3 labels"
    assert_refused(message, answers.label_predictor, classifier(0.9, 0.8), LABELS)
    diverged = answers.label_predictor(classifier(np.nan, 0.8), LABELS[:2])
    assert_refused("training diverged", answers.answer, diverged, np.zeros(4, np.float32))


def test_noise_is_ranked_in_sets_evaluated_at_the_same_step():
    def record(name: str, step: int, **arrays: np.ndarray) -> Record:
        return Record("zero_shot", name, {}, {}, {}, step, {}, Drawing(arrays))

    norms = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    records = [record("pets", 7, noise_norm=norms), record("old", 6, noise_norm=norms), record("other", 7)]
    (rank,) = answers.noise_ranks(0.35, records, step=7)
    assert str(rank) == "75% of the 4 images of pets have less"
    assert answers.noise_ranks(0.0, records, step=7) == []
