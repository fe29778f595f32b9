import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from lit_het.eval.metrics.ensembles import join, mean_prediction, score_ensemble
from tests.eval import plain
from tests.refusals import assert_refused

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(2, 5)


def members_of(seed: int, members: int = 3, count: int = 12, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(count, members, classes)) * 2
    return special.log_softmax(logits, axis=2).astype(np.float32), generator.integers(classes, size=count)


def test_two_members_by_hand():
    """p = (3/4, 1/4), q = (1/4, 3/4): mean (1/2, 1/2); KL either way 3/4 log 3 - 1/4 log 3 = log(3) / 2."""
    log_probabilities = np.log(np.array([[[0.75, 0.25], [0.25, 0.75]]]))
    np.testing.assert_allclose(mean_prediction(log_probabilities), np.log([[0.5, 0.5]]), rtol=1e-6)
    found = score_ensemble(log_probabilities, np.array([0])).figures()[0]
    assert found["kl"] == pytest.approx(np.log(3) / 2)
    assert found["joint_nll"] == pytest.approx(np.log(2))
    assert found["individual_nll"] == pytest.approx((-np.log(0.75) - np.log(0.25)) / 2)
    # A tie of the joint prediction counts half; one member is right.
    assert (found["joint_top1"], found["individual_top1"]) == (0.5, 0.5)
    assert found["joint_brier"] == pytest.approx(0.5)
    assert found["individual_brier"] == pytest.approx((2 / 16 + 18 / 16) / 2)
    assert found["joint_ece"] == pytest.approx(0)
    assert found["individual_ece"] == pytest.approx((0.25 + 0.75) / 2)


@settings(max_examples=25, deadline=None)
@given(seeds, sizes)
def test_figures_agree_with_scikit_learn_and_a_plain_loop_over_bins(seed: int, members: int):
    log_probabilities, labels = members_of(seed, members)
    probabilities = special.softmax(log_probabilities.astype(np.float64), axis=2).swapaxes(0, 1)
    found, _ = score_ensemble(log_probabilities, labels).figures()
    measures = {
        "nll": lambda p: log_loss(labels, p, labels=range(5)),
        "brier": lambda p: brier_score_loss(labels, p, labels=range(5)),
        "top1": lambda p: accuracy_score(labels, p.argmax(axis=1)),
        "ece": lambda p: plain.calibration_error(p, labels),
    }
    for name, measure in measures.items():
        assert found[f"individual_{name}"] == pytest.approx(np.mean([measure(p) for p in probabilities]), rel=1e-5)
        assert found[f"joint_{name}"] == pytest.approx(measure(probabilities.mean(axis=0)), rel=1e-5)
    # The mean is never worse than its members.
    for name in ("nll", "brier"):
        assert found[f"joint_{name}"] <= found[f"individual_{name}"] + 1e-12
    mean = mean_prediction(log_probabilities)
    assert mean.dtype == np.float32
    np.testing.assert_allclose(np.exp(mean), np.exp(log_probabilities).mean(axis=1), rtol=1e-5)


def test_equal_members_have_the_scores_of_their_ensemble_and_their_order_does_not_matter():
    log_probabilities, labels = members_of(0)
    found = score_ensemble(np.repeat(log_probabilities[:, :1], 4, axis=1), labels).figures()[0]
    assert found["kl"] == pytest.approx(0, abs=1e-12)
    for name in ("nll", "top1", "ece", "brier"):
        assert found[f"joint_{name}"] == pytest.approx(found[f"individual_{name}"])
    one, other = (
        score_ensemble(log_p, labels).figures()[0] for log_p in (log_probabilities, log_probabilities[:, ::-1])
    )
    assert other == pytest.approx(one)


def test_probabilities_of_zero_give_an_infinite_divergence_only_where_another_member_disagrees():
    both = np.array([[[0.0, -np.inf], [0.0, -np.inf]]])
    one = np.array([[[0.0, -np.inf], [np.log(0.5), np.log(0.5)]]])
    assert score_ensemble(both, np.array([0])).diversity.kl.tolist() == [0]
    assert score_ensemble(one, np.array([0])).diversity.kl.tolist() == [np.inf]


def test_batches_join_to_the_result_of_all_and_blocks_change_nothing(monkeypatch):
    log_probabilities, labels = members_of(2)
    whole = score_ensemble(log_probabilities, labels)
    parts = [score_ensemble(log_probabilities[rows], labels[rows]) for rows in (slice(0, 5), slice(5, 12))]
    assert join(parts).figures() == whole.figures()
    mean = mean_prediction(log_probabilities)
    monkeypatch.setattr("lit_het.eval.metrics.rows.VALUES_PER_BLOCK", 40)
    assert score_ensemble(log_probabilities, labels).figures() == whole.figures()
    np.testing.assert_array_equal(mean_prediction(log_probabilities), mean)


@pytest.mark.slow
def test_standard_errors_are_those_of_a_plain_bootstrap_over_images(monkeypatch):
    log_probabilities, labels = members_of(4, members=3, count=300)
    labels = np.where(np.arange(300) % 3, log_probabilities.mean(axis=1).argmax(axis=1), labels)
    whole = score_ensemble(log_probabilities, labels)
    found, errors = whole.figures()
    assert set(found) == set(errors)
    # Draws need no errors of their own.
    monkeypatch.setattr("lit_het.eval.metrics.ensembles.calibration_standard_error", lambda confidence, correct: 0.0)
    draws = np.random.default_rng(0).integers(300, size=(400, 300))
    resampled = [score_ensemble(log_probabilities[rows], labels[rows]).figures()[0] for rows in draws]
    for name in found:
        deviation = np.std([figures[name] for figures in resampled], ddof=1)
        assert errors[name] == pytest.approx(deviation, rel=0.15), name


def test_a_member_alone_has_the_figures_of_its_predictions():
    log_probabilities, labels = members_of(5)
    twice = np.repeat(log_probabilities[:, [1]], 2, axis=1)
    alone, errors = score_ensemble(log_probabilities, labels).members.member(1).figures()
    expected, expected_errors = score_ensemble(twice, labels).figures()
    for name in alone:
        assert alone[name] == pytest.approx(expected[f"individual_{name}"])
        assert errors[name] == pytest.approx(expected_errors[f"individual_{name}"])


def test_a_single_member_is_rejected():
    log_probabilities, labels = members_of(3)
    assert_refused("at least two members", score_ensemble, log_probabilities[:, :1], labels)
    assert_refused("label 5 lies outside", score_ensemble, log_probabilities, labels * 0 + 5)
    assert_refused("no valid example", score_ensemble, log_probabilities[:0], labels[:0])
    log_probabilities[4, 1] = np.nan
    assert_refused("example 4 has no finite", score_ensemble, log_probabilities, labels)
