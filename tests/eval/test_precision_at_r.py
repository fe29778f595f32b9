import numpy as np
import pytest

from lit_het.eval.metrics import precision_at_r
from lit_het.eval.metrics.precision_at_r import of_classes


def by_loop(scores: np.ndarray, is_match: np.ndarray) -> tuple[float, float]:
    """R-Precision and AP@R of one query, as ECCV Caption defines them."""
    order, r = np.argsort(-scores, kind="stable"), int(is_match.sum())
    precision = average = 0.0
    for place in range(1, r + 1):
        if is_match[order[place - 1]]:
            precision += 1 / r
            average += is_match[order[:place]].mean() / r
    return precision, average


def test_a_ranking_by_hand():
    # Matches in places 1, 3 and 5 of R = 3: two of the best three; (1/1 + 2/3) / 3.
    scores, matches = np.array([[5.0, 4, 3, 2, 1]]), np.array([[True, False, True, False, True]])
    precision, average = precision_at_r.precision_at_r(scores, matches)
    np.testing.assert_allclose(precision, [2 / 3])
    np.testing.assert_allclose(average, [5 / 9])


def test_many_queries_agree_with_loops():
    generator = np.random.default_rng(0)
    scores, matches = generator.normal(size=(30, 40)), generator.random((30, 40)) < 0.2
    found = np.stack(precision_at_r.precision_at_r(scores, matches), axis=1)
    np.testing.assert_allclose(found, [by_loop(*pair) for pair in zip(scores, matches, strict=True)])


def test_class_names_look_for_the_images_of_their_class(monkeypatch):
    generator = np.random.default_rng(1)
    labels = np.array([0, 0, 1, 1, 1, 2])  # the third class has one image, and does not count
    scores = generator.normal(size=(6, 4))
    expected = np.mean([by_loop(scores[:, k], labels == k) for k in (0, 1)], axis=0)
    monkeypatch.setattr(precision_at_r, "_QUERIES_PER_BLOCK", 1)
    np.testing.assert_allclose(of_classes(scores, labels), expected)


def test_queries_without_matches_and_classes_of_one_image_have_no_precision():
    matches = np.array([[True, True, True], [False] * 3])
    mixed = precision_at_r.precision_at_r(np.zeros((2, 3)), matches)
    np.testing.assert_array_equal(mixed, [[1.0, np.nan]] * 2)
    assert np.isnan(precision_at_r.precision_at_r(np.zeros((1, 3)), matches[1:])).all()
    assert of_classes(np.zeros((2, 2)), np.array([0, 1])) == pytest.approx((np.nan, np.nan), nan_ok=True)
