"""Prediction sets: thresholds, coverage, and bad input."""

import dataclasses
import json
import math

import numpy as np
import pytest
from scipy import special

from lit_het.errors import UserError
from lit_het.eval.metrics import conformal
from tests.refusals import assert_refused


def drawn(count: int, seed: int, num_classes: int = 6, scale: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and labels that are drawn from them."""
    generator = np.random.default_rng(seed)
    logits = scale * generator.normal(size=(count, num_classes))
    labels = (special.softmax(logits, axis=1).cumsum(axis=1) < generator.uniform(size=(count, 1))).sum(axis=1)
    return special.log_softmax(logits, axis=1).astype(np.float32), np.minimum(labels, num_classes - 1)


def plain_sets(calibration: np.ndarray, labels: np.ndarray, new: np.ndarray, coverage: float) -> list[list[int]]:
    """Sets by the formula of Sadinle et al.: scores 1 - p_y, their quantile, a loop over images and classes."""
    scores = sorted(1 - math.exp(row[label]) for row, label in zip(calibration, labels, strict=True))
    highest = scores[math.ceil((len(scores) + 1) * coverage) - 1]
    sets = []
    for row in new:
        inside = [c for c, log_p in enumerate(row) if 1 - math.exp(log_p) <= highest + 1e-12]
        sets.append(inside or [int(np.argmax(row))])
    return sets


def test_the_threshold_of_four_examples_is_computed_by_hand():
    log_p = np.log([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3], [0.5, 0.5]])
    labels = np.array([0, 0, 1, 1])
    # The labels have 0.9, 0.5, 0.4, 0.3. (4 + 1) 0.6 = 3: the third highest; (4 + 1) 0.8 = 4: the fourth.
    found = conformal.fit_conformal(log_p, labels, (0.6, 0.8))
    assert np.exp(found.log_probabilities) == pytest.approx([0.4, 0.3])
    assert (found.num_examples, found.num_classes) == (4, 2)
    assert conformal.prediction_sets(log_p, found.at(0.6)).tolist() == [[1, 0], [1, 1], [1, 0], [1, 1]]


@pytest.mark.parametrize("coverage", [0.55, 0.7, 0.9])
def test_sets_agree_with_a_loop_over_images_and_classes(coverage: float):
    (calibration, labels), (new, _) = drawn(101, seed=0), drawn(60, seed=1)
    sets = conformal.prediction_sets(new, conformal.fit_conformal(calibration, labels, (coverage,)).at(coverage))
    assert [np.flatnonzero(row).tolist() for row in sets] == plain_sets(calibration, labels, new, coverage)


@pytest.mark.parametrize(("count", "coverage"), [(19, 0.9), (50, 0.8), (99, 0.95)])
@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_the_mean_coverage_of_new_images_is_the_one_asked_for(count: int, coverage: float, temperature: float):
    """P(label in set) = ceil((n + 1) coverage) / (n + 1) over draws, calibrated or not, where scores do not tie."""
    shares = []
    for seed in range(400):
        log_p, labels = drawn(count + 200, seed)
        log_p = special.log_softmax(log_p / temperature, axis=1)
        threshold = conformal.fit_conformal(log_p[:count], labels[:count], (coverage,)).at(coverage)
        # Not `prediction_sets`: these are never empty, and so have a higher coverage.
        shares.append((log_p[count:][np.arange(200), labels[count:]] >= threshold).mean())
    expected = math.ceil(round((count + 1) * coverage, 9)) / (count + 1)
    error = float(np.std(shares, ddof=1)) / math.sqrt(len(shares))
    assert error < 0.005
    assert np.mean(shares) == pytest.approx(expected, abs=3.5 * error)


def test_a_better_model_has_smaller_sets():
    sizes = []
    for scale in (0.5, 1.5, 4.0):
        log_p, labels = drawn(2000, seed=0, scale=scale)
        thresholds = conformal.fit_conformal(log_p[:1000], labels[:1000], (0.9,))
        sizes.append(conformal.prediction_sets(log_p[1000:], thresholds.at(0.9)).sum(axis=1).mean())
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 2 * sizes[2]


def test_a_set_is_never_empty_and_has_all_classes_and_examples_that_tie():
    log_p = np.log([[0.6, 0.3, 0.1], [0.4, 0.4, 0.2], [0.34, 0.33, 0.33]])
    sets = conformal.prediction_sets(log_p, threshold=math.log(0.9))
    assert sets.tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 0]]
    collapsed = np.full((30, 4), -math.log(4), np.float32)
    threshold = conformal.fit_conformal(collapsed, np.arange(30) % 4, (0.9,)).at(0.9)
    assert conformal.prediction_sets(collapsed, threshold).all()
    log_p = np.log(np.array([[0.8, 0.2]] * 12 + [[0.4, 0.6]] * 8, np.float32))
    threshold = conformal.fit_conformal(log_p, np.zeros(20, int), (0.7,)).at(0.7)
    assert conformal.prediction_sets(log_p, threshold)[:, 0].all()


@pytest.mark.parametrize(("coverage", "least"), [(0.5, 1), (0.8, 4), (0.9, 9), (0.95, 19), (0.99, 99)])
def test_a_coverage_needs_some_examples(coverage: float, least: int):
    log_p, labels = drawn(least, seed=0)
    assert conformal.min_examples(coverage) == least
    assert conformal.fit_conformal(log_p, labels, (coverage,)).at(coverage) == log_p[np.arange(least), labels].min()
    with pytest.raises(UserError, match=f"needs at least {least} calibration examples, and there are {least - 1};"):
        conformal.fit_conformal(log_p[1:], labels[1:], (coverage,))


def test_bad_predictions_and_coverages_outside_zero_and_one_are_refused():
    log_p, labels = drawn(50, seed=0)
    for coverage in (0.0, 1.0, -0.5, 90.0):
        assert_refused("must lie between 0 and 1", conformal.fit_conformal, log_p, labels, (coverage,))
    assert_refused("label 6 lies outside the 6 classes", conformal.fit_conformal, log_p, np.full(50, 6), (0.9,))
    log_p[3, 2] = np.nan
    for call, arguments in ((conformal.fit_conformal, (labels, (0.9,))), (conformal.prediction_sets, (-1.0,))):
        assert_refused("example 3 has no finite log-probabilities", call, log_p, *arguments)


def test_a_coverage_between_two_stored_ones_takes_the_higher():
    found = conformal.fit_conformal(*drawn(100, seed=0))
    assert found.coverages == conformal.COVERAGES
    assert found.at(0.895) == found.at(0.9) == found.log_probabilities[conformal.COVERAGES.index(0.9)]
    assert found.at(0.3) == found.log_probabilities[0]
    for coverage in (0.0, 0.995):
        assert_refused(r"must be above 0 and at most 0\.99", found.at, coverage)


def test_thresholds_are_equal_after_json_and_those_of_an_earlier_version_have_no_candidates(tmp_path):
    log_p, labels = drawn(100, seed=0)
    log_p[:30, 0], labels[:30] = -np.inf, 0
    digest = conformal.candidates_digest(np.eye(3, dtype=int))
    found = dataclasses.replace(conformal.fit_conformal(log_p, labels), candidates=digest)
    assert found.log_probabilities[-1] == -math.inf
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"conformal": found.to_json()}, allow_nan=False))
    assert conformal.read_conformal(path) == found
    path.write_text(stored("[0.9]", "[-1]"))
    assert conformal.read_conformal(path).candidates is None


def test_candidates_have_the_same_digest_in_any_order_and_another_for_any_other_token():
    tokens = np.array([[3, 1, 0], [5, 0, 0], [4, 2, 0]], np.int32)
    digest = conformal.candidates_digest(tokens)
    assert digest == conformal.candidates_digest(tokens[[2, 0, 1, 0]].astype(np.int64))
    for other in (tokens[:2], tokens[:, :2], tokens + (tokens == 2)):
        assert conformal.candidates_digest(other) != digest


def stored(coverages: str, log_probabilities: str) -> str:
    lists = f'"coverages": {coverages}, "log_probabilities": {log_probabilities}'
    return f'{{"conformal": {{"num_examples": 100, "num_classes": 6, {lists}}}}}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing, and prediction sets need its thresholds"),
        ("{}", "has no 'conformal'"),
        ('{"conformal": {}}', "has no 'coverages'"),
        ("not JSON", "cannot be read"),
        ("[1]", "cannot be read"),
        (stored("[0.9]", '["x"]'), "cannot be read"),
        (stored("[0.9]", "[]"), "do not match"),
        (stored("[]", "[]"), "do not match"),
        (stored("[0.8, 0.9]", "[-2, -1]"), "do not match"),
        (stored("[0.9, 0.8]", "[-1, -2]"), "do not match"),
        (stored("[90]", "[-1]"), "do not match"),
        (stored("[0.9]", "[NaN]"), "do not match"),
    ],
)
def test_a_file_without_thresholds_is_refused_in_one_line(tmp_path, content: str | None, message: str):
    path = tmp_path / "run" / "calibration.json"
    path.parent.mkdir()
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message) as raised:
        conformal.read_conformal(path)
    assert f"run lit-het calibrate {path.parent} --data SHARDS first" in str(raised.value)
    assert "\n" not in str(raised.value)
