import dataclasses

import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from lit_het.apps.uncertainty.measuring import costs
from lit_het.eval.features import Features
from lit_het.eval.metrics import uncertainty
from lit_het.eval.predictions import Predictor
from lit_het.types import ImageFeatures
from tests.eval.fake_model import FakeModel

TOWER = ImageFeatures(lambda view: view[:, 0, 0, :1].astype(np.float32), 1, 1, "a tower")


@pytest.fixture
def images(sets, write_set):
    """Three images without labels."""
    return sets.open(dataclasses.replace(write_set("images", [{}] * 3), labelled=False))


def model_of(*samples):
    """Returns a member whose samples have the given probabilities for every image."""
    log_p = np.log(np.array(samples, np.float32))
    model = FakeModel(TOWER, lambda features, count, _: np.repeat(log_p[None, : max(1, count)], len(features), axis=0))
    return uncertainty.Member(Predictor(model, log_p.shape[1], samples=len(samples) if len(samples) > 1 else 0), TOWER)


def test_every_model_of_an_ensemble_weighs_the_same_whatever_its_number_of_samples(images):
    noisy, plain = model_of([0.7, 0.3], [0.5, 0.5], [0.9, 0.1]), model_of([0.1, 0.9])
    found = uncertainty.answers(uncertainty.Method((noisy, plain)), images, Features.unlabelled)
    assert found.sampled is not None
    mean = (0.7 + 0.1) / 2  # the samples of the noisy model have the mean 0.7
    np.testing.assert_allclose(np.exp(found.sampled.log_probabilities), [[mean, 1 - mean]] * 3, rtol=1e-5)

    def entropy(p):
        return -p * np.log(p) - (1 - p) * np.log(1 - p)

    of_samples = (np.mean(entropy(np.array([0.7, 0.5, 0.9]))) + entropy(0.1)) / 2
    np.testing.assert_allclose(found.scores["mutual_information"], entropy(mean) - of_samples, rtol=1e-4)


def test_a_prediction_in_closed_form_has_no_mutual_information(images):
    model = model_of([0.7, 0.3])
    closed = dataclasses.replace(model, predictor=dataclasses.replace(model.predictor, samples=4))
    found = uncertainty.answers(uncertainty.Method((closed,)), images, Features.unlabelled)
    assert found.sampled is not None
    assert set(found.scores) == {"max_probability", "entropy"}


def test_the_distance_is_that_of_the_nearest_training_image():
    generator = np.random.default_rng(0)
    values, training = generator.normal(size=(30, 6)).astype(np.float32), generator.normal(size=(50, 6))
    nearest = NearestNeighbors(n_neighbors=1, metric="cosine").fit(training)
    expected = nearest.kneighbors(values)[0][:, 0]
    np.testing.assert_allclose(uncertainty.neighbour_distance(values, training.astype(np.float32)), expected, atol=1e-6)


def test_a_score_that_follows_the_severity_has_a_correlation_of_one():
    rising = [np.full(3, level, float) for level in range(6)]
    assert uncertainty.severity_correlation(rising) == (pytest.approx(1), True)
    assert uncertainty.severity_correlation(rising[::-1]) == (pytest.approx(-1), False)
    assert uncertainty.severity_correlation([np.ones(3), np.ones(3)]) == (0.0, False)
    correlation, rises = uncertainty.severity_correlation([*rising[:3], rising[4], rising[3], rising[5]])
    assert 0.9 < correlation < 1
    assert not rises


def test_views_move_images_and_repeat_their_border():
    images = np.arange(4 * 4, dtype=np.uint8).reshape(1, 4, 4, 1)
    np.testing.assert_array_equal(uncertainty.shifted(images, 1, 0)[0, :, 0, 0], [0, 0, 4, 8])
    np.testing.assert_array_equal(uncertainty.shifted(images, 0, -1)[0, 0, :, 0], [1, 2, 3, 3])
    large = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    np.testing.assert_array_equal(uncertainty.shifted(large, -1, 0)[:, :60], large[:, 4:])


def test_a_tower_has_five_views_with_features_of_their_own():
    tower = ImageFeatures(lambda view: view.reshape(len(view), -1).astype(np.float32), 1, 1, "a tower")
    found = uncertainty.views(tower)
    images = np.arange(2 * 16 * 16, dtype=np.uint8).reshape(2, 16, 16, 1)
    assert found[0] is tower
    assert len({view.tower for view in found}) == len(uncertainty._SHIFTS) == 5
    np.testing.assert_array_equal(found[1].extract(images), tower.extract(uncertainty.shifted(images, 0, 1)))


def test_the_time_of_a_prediction_is_that_of_its_probabilities(images):
    def refuse(features):
        raise AssertionError("no prediction needs a noise norm")

    member = model_of([0.7, 0.3], [0.5, 0.5])
    assert isinstance(member.predictor.model, FakeModel)
    model = dataclasses.replace(member.predictor.model, noise_norm=refuse)
    member = dataclasses.replace(member, predictor=dataclasses.replace(member.predictor, model=model))
    found = costs(uncertainty.Method((member,)), images)
    assert found["tower_passes"] == 1
    assert 0 < found["quiet_microseconds"] < 1e6
    assert 0 < found["sampled_microseconds"] < 1e6


def test_the_images_of_a_set_are_read_once_for_all_views(images, monkeypatch):
    member, epochs, epoch = model_of([0.7, 0.3]), [], images.loader.epoch
    monkeypatch.setattr(images.loader, "epoch", lambda *given: (epochs.append(given), epoch(*given))[1])
    method = uncertainty.Method(tuple(dataclasses.replace(member, tower=view) for view in uncertainty.views(TOWER)))
    for _ in range(2):
        uncertainty.answers(method, images, Features.unlabelled)
        costs(method, images)
        images.features(TOWER)
    assert len(epochs) == 1


def test_answers_to_some_images_are_those_of_evenly_spread_ones(images):
    method = uncertainty.Method((model_of([0.7, 0.3], [0.5, 0.5]),))
    some = uncertainty.answers(method, images, Features.unlabelled, 2)
    np.testing.assert_array_equal(some.quiet.positions, [0, 1])
    assert len(uncertainty.answers(method, images, Features.unlabelled).quiet.positions) == 3
    assert all(len(values) == 2 for values in some.scores.values())
