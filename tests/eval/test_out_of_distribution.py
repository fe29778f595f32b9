import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats
from sklearn.covariance import ledoit_wolf
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from lit_het.eval.metrics.out_of_distribution import (
    FeatureModel,
    detection_errors,
    detection_figures,
    entropy_score,
    fit_features,
    max_probability_score,
)
from tests.refusals import assert_refused

seeds = st.integers(0, 2**32 - 1)
score = st.sampled_from([-np.inf, -1.0, 0.0, 0.5, 2.0])
groups = st.lists(score, min_size=1, max_size=40).map(np.array)


def features_of(seed: int, count: int = 60, dimension: int = 4, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    mix = generator.normal(size=(dimension, dimension))
    features = generator.normal(size=(count, dimension)) @ mix + 4 * generator.normal(size=(classes, dimension))[labels]
    return features.astype(np.float32), labels


def test_scores_by_hand_are_higher_for_the_flatter_prediction():
    logits = np.log(np.array([[8.0, 1.0, 1.0], [4.0, 4.0, 2.0]]))
    log_probabilities = logits - np.log(10)
    np.testing.assert_allclose(max_probability_score(log_probabilities), -np.log([0.8, 0.4]))
    sure, unsure = -(0.8 * np.log(0.8) + 0.2 * np.log(0.1)), -(0.8 * np.log(0.4) + 0.2 * np.log(0.2))
    np.testing.assert_allclose(entropy_score(log_probabilities), [sure, unsure])


@settings(max_examples=25, deadline=None)
@given(seeds)
def test_the_entropy_agrees_with_scipy_and_accepts_probabilities_of_zero(seed: int):
    logits = np.random.default_rng(seed).normal(size=(20, 5)) * 4
    np.testing.assert_allclose(entropy_score(special.log_softmax(logits, axis=1)), stats.entropy(np.exp(logits.T)))
    assert entropy_score(np.array([[0.0, -np.inf]])).tolist() == [0.0]
    np.testing.assert_allclose(entropy_score(np.full((1, 7), -np.log(7), np.float32)), np.log(7), rtol=1e-6)


def test_scores_do_not_depend_on_blocks(monkeypatch):
    logits = np.random.default_rng(0).normal(size=(20, 5))
    features, labels = features_of(0)
    model = fit_features(features, labels)
    whole = entropy_score(logits), model.relative_mahalanobis_score(features)
    monkeypatch.setattr("lit_het.eval.metrics.rows.VALUES_PER_BLOCK", 17)
    model = fit_features(features, labels)
    parts = entropy_score(logits), model.relative_mahalanobis_score(features)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def plain_distances(model_features: np.ndarray, labels: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Slow reference, with scikit-learn's shrinkage and an explicit inverse."""
    means = np.stack([model_features[labels == label].mean(axis=0) for label in np.unique(labels)])
    centred = model_features - means[np.unique(labels, return_inverse=True)[1]]
    covariance, _ = ledoit_wolf(centred.astype(np.float64), assume_centered=True)
    inverse = np.linalg.inv(covariance)
    return np.array([min((f - m) @ inverse @ (f - m) for m in means) for f in features])


@settings(max_examples=20, deadline=None)
@given(seeds, st.sampled_from([(60, 4), (12, 30)]))
def test_distances_agree_with_the_inverse_of_scikit_learns_shrunk_covariance(seed: int, shape: tuple[int, int]):
    features, labels = features_of(seed, *shape)
    others = features_of(seed + 1, 10, shape[1])[0] * 3
    model = fit_features(features.astype(np.float64), labels)
    nearest, background = plain_distances(features, labels, others), plain_distances(features, labels * 0, others)
    np.testing.assert_allclose(model.mahalanobis_score(others), nearest, rtol=1e-4)
    np.testing.assert_allclose(
        model.relative_mahalanobis_score(others), nearest - background, rtol=1e-4, atol=1e-4 * nearest.max()
    )


def test_with_many_images_the_covariance_is_that_of_lee_et_al():
    features, labels = features_of(0, count=30000)
    model = fit_features(features, labels)
    centred = features - np.stack([features[labels == label].mean(axis=0) for label in range(3)])[labels]
    np.testing.assert_allclose(model.classes.factor @ model.classes.factor.T, np.cov(centred.T, ddof=0), atol=2e-3)


def test_classes_without_images_have_no_mean():
    features, labels = features_of(0)
    gap = fit_features(features, labels * 5)
    assert gap.classes.means.shape == (3, 4)
    np.testing.assert_array_equal(gap.classes.means, fit_features(features, labels).classes.means)


def test_a_direction_in_which_all_images_vary_counts_in_the_distance_and_not_in_the_relative_one():
    generator = np.random.default_rng(0)
    labels = np.arange(4000) % 2
    features = generator.normal(size=(4000, 2))
    features[:, 0] += 20 * labels  # classes differ along the first axis, all images vary along the second
    model = fit_features(features, labels)
    near, far = np.array([[0.0, 0.0], [20.0, 0.0]]), np.array([[0.0, 8.0], [20.0, -8.0]])
    assert (model.mahalanobis_score(far) > model.mahalanobis_score(near) + 50).all()
    np.testing.assert_allclose(model.relative_mahalanobis_score(far), model.relative_mahalanobis_score(near), atol=2)


def test_with_fewer_images_than_dimensions_unseen_directions_are_far_and_two_images_are_enough():
    features = np.random.default_rng(0).normal(size=(12, 40)) * (np.arange(40) < 20)
    model = fit_features(features, np.arange(12) % 2)
    assert model.mahalanobis_score(10 * np.eye(40)[[39]])[0] > model.mahalanobis_score(features).max()
    model = fit_features(np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 3.0]]), np.array([0, 0]))
    assert np.isfinite(model.mahalanobis_score(np.ones((1, 3)))).all()


def test_features_without_a_gaussian_fit_are_rejected():
    assert_refused("have the same features", fit_features, np.eye(3), np.arange(3))
    assert_refused("no valid example", fit_features, np.zeros((0, 3)), np.zeros(0, int))
    assert_refused("not finite", fit_features, np.array([[np.nan], [1.0]]), np.zeros(2, int))
    model: FeatureModel = fit_features(*features_of(0))
    assert_refused("not finite", model.mahalanobis_score, np.full((1, 4), np.inf))


def plain_figures(inside: np.ndarray, outside: np.ndarray) -> dict[str, float]:
    scores = np.nan_to_num(np.concatenate([inside, outside]), neginf=-1e9)  # scikit-learn takes no infinity
    is_outside = np.arange(scores.size) >= inside.size
    passing, accepted, _ = roc_curve(~is_outside, -scores, drop_intermediate=False)
    return {
        "auroc": roc_auc_score(is_outside, scores),
        "aupr_out": average_precision_score(is_outside, scores),
        "aupr_in": average_precision_score(~is_outside, -scores),
        "fpr95": passing[np.flatnonzero(accepted >= 0.95 - 1e-12)[0]],
    }


@settings(max_examples=60, deadline=None)
@given(groups, groups)
def test_figures_agree_with_scikit_learn_on_ties(inside: np.ndarray, outside: np.ndarray):
    assert detection_figures(inside, outside) == pytest.approx(plain_figures(inside, outside))


@settings(max_examples=25, deadline=None)
@given(seeds, st.integers(1, 200), st.integers(1, 200))
def test_figures_agree_with_scikit_learn_on_random_scores(seed: int, num_inside: int, num_outside: int):
    generator = np.random.default_rng(seed)
    inside, outside = generator.normal(size=num_inside), generator.normal(size=num_outside) + 1
    assert detection_figures(inside, outside) == pytest.approx(plain_figures(inside, outside))


def test_figures_of_perfect_reversed_and_uninformative_scores_and_their_errors():
    low, high, names = np.arange(20.0), np.arange(20.0, 40), ("auroc", "aupr_out", "aupr_in", "fpr95")
    assert detection_figures(low, high) == dict(zip(names, (1, 1, 1, 0), strict=True))
    assert detection_figures(high, low)["auroc"] == 0
    assert detection_figures(high, low)["fpr95"] == 1
    same = np.zeros(30), np.zeros(10)
    assert detection_figures(*same) == pytest.approx(dict(zip(names, (0.5, 0.25, 0.75, 1), strict=True)))
    for pair in ((low, high), same):
        assert detection_errors(*pair) == pytest.approx(dict.fromkeys(names, 0))
    infinite = detection_errors(np.array([-np.inf, 0.0, 1.0]), np.array([-np.inf, 1.0, 2.0]))
    assert np.isfinite(list(infinite.values())).all()
    # Nineteen of twenty images inside are accepted.
    assert detection_figures(low, np.array([17.5, 18.0, 18.5]))["fpr95"] == pytest.approx(2 / 3)


def test_empty_groups_and_scores_of_nan_are_refused():
    for inside, outside in ((0, 3), (3, 0), (0, 0)):
        assert_refused("both sets need", detection_figures, np.zeros(inside), np.zeros(outside))
    assert_refused("not a number", detection_figures, np.array([np.nan]), np.zeros(2))
    for measure in (max_probability_score, entropy_score):
        assert_refused("example 1 has no finite", measure, np.array([[0.0, 0.0], [0.0, np.nan]]))


def resampled_errors(inside: np.ndarray, outside: np.ndarray, draws: int) -> dict[str, float]:
    """Slow reference: the bootstrap."""
    generator = np.random.default_rng(0)
    found = [
        detection_figures(*(generator.choice(group, group.size) for group in (inside, outside))) for _ in range(draws)
    ]
    return {name: float(np.std([figures[name] for figures in found], ddof=1)) for name in found[0]}


@pytest.mark.slow
@pytest.mark.parametrize("digits", [0, 8], ids=["many ties", "no ties"])
@pytest.mark.parametrize(("num_inside", "num_outside"), [(300, 200), (150, 500)])
def test_errors_are_those_of_a_plain_bootstrap(digits: int, num_inside: int, num_outside: int):
    generator = np.random.default_rng(1)
    inside, outside = generator.normal(size=num_inside), 1.3 * generator.normal(size=num_outside) + 1
    inside, outside = inside.round(digits), outside.round(digits)
    expected = resampled_errors(inside, outside, 1500)
    assert detection_errors(inside, outside) == pytest.approx(expected, rel=0.1)


def test_errors_are_the_deviation_of_figures_over_sets_drawn_anew():
    generator = np.random.default_rng(2)
    pairs = [(generator.normal(size=250), generator.normal(size=150) + 1.5) for _ in range(600)]
    figures = [detection_figures(*pair) for pair in pairs]
    errors = [detection_errors(*pair) for pair in pairs]
    for name in figures[0]:
        deviation = np.std([found[name] for found in figures], ddof=1)
        assert np.mean([found[name] for found in errors]) == pytest.approx(deviation, rel=0.12), name


def test_the_error_of_the_area_by_hand():
    """Outside beat 2, 1 and half of the 2 inside; inside are beaten by 2.5 and 1 of the 3 outside."""
    inside, outside = np.array([0.0, 2.0]), np.array([3.0, 1.0, 0.0])
    of_outside, of_inside = np.array([1, 0.5, 0.25]), np.array([2.5 / 3, 1 / 3])
    expected = np.sqrt(of_outside.var(ddof=1) / 3 + of_inside.var(ddof=1) / 2)
    assert detection_errors(inside, outside)["auroc"] == pytest.approx(expected)
    for num_inside, num_outside in ((1, 5), (5, 1)):
        assert np.isnan(list(detection_errors(np.zeros(num_inside), np.ones(num_outside)).values())).all()
