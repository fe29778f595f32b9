"""The HET-XL classifier of features is an estimator of scikit-learn, and pays where labels are noisy."""

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score
from sklearn.utils.estimator_checks import check_estimator

from lit_het.sklearn import HetXLClassifier
from scripts.studies.noise.digits import PARTNER, Digits, digits
from tests.refusals import assert_refused


@pytest.fixture(scope="module")
def data() -> Digits:
    return digits(seed=0, share=0.4)


@pytest.fixture(scope="module")
def trained(data: Digits) -> HetXLClassifier:
    return HetXLClassifier(max_iter=20, num_eval_samples=16, random_state=0).fit(data.train, data.train_labels)


def fresh(model: HetXLClassifier) -> HetXLClassifier:
    """Returns an untrained estimator with the same parameters."""
    found: Any = clone(model)
    return found


@pytest.mark.slow
def test_it_keeps_the_rules_of_scikit_learn():
    # They train on many shapes, which compile in a third of the time without noise; with it, see below.
    fast = HetXLClassifier(head="deterministic", batch_size=300, max_iter=12, random_state=0)
    expected = {"check_sample_weight_equivalence_on_dense_data": "batches are drawn at random"}
    check_estimator(fast, expected_failed_checks=expected, on_skip=None)


@pytest.mark.slow
def test_on_noisy_labels_it_beats_a_linear_model_and_its_noise_is_larger(data: Digits, trained: HetXLClassifier):
    linear = LogisticRegression(max_iter=2000).fit(data.train, data.train_labels)
    test, labels = data.test, data.test_labels
    assert trained.score(test, labels) > linear.score(test, labels) + 0.03
    assert log_loss(labels, trained.predict_proba(test)) < log_loss(labels, linear.predict_proba(test)) - 0.02
    assert roc_auc_score(PARTNER[labels] != labels, trained.noise_norm(test)) > 0.6


@pytest.mark.slow
def test_a_seed_gives_the_same_model_and_a_row_the_same_prediction(data: Digits, trained: HetXLClassifier):
    test = data.test
    expected = trained.predict_proba(test)
    again = fresh(trained).fit(data.train, data.train_labels)
    np.testing.assert_array_equal(again.predict_proba(test), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(trained)).predict_proba(test), expected)
    np.testing.assert_allclose(trained.predict_proba(test[::-1][:7]), expected[::-1][:7], rtol=1e-5)


@pytest.mark.slow
def test_noise_can_be_left_out_of_predictions(data: Digits, trained: HetXLClassifier):
    test = data.test[:50]
    with_noise = trained.predict_proba(test)
    without = fresh(trained)
    without.__dict__.update(trained.__dict__)
    without.set_params(num_eval_samples=0)
    assert np.abs(without.predict_proba(test) - with_noise).max() > 1e-3
    np.testing.assert_allclose(without.predict_proba(test).sum(axis=1), 1)


def test_the_deterministic_head_has_no_noise():
    features = np.random.default_rng(0).normal(size=(300, 5))
    model = HetXLClassifier(head="deterministic", batch_size=16, random_state=0).fit(features, features[:, 0] > 0)
    assert not model.noise_norm(features).any()
    assert model.score(features, features[:, 0] > 0) > 0.9


def test_weights_count_and_rows_of_weight_zero_are_left_out():
    random = np.random.default_rng(0)
    features, labels = random.normal(size=(200, 3)), random.integers(2, size=200)
    model = HetXLClassifier(head="deterministic", batch_size=16, random_state=0)
    is_remaining = random.random(200) < 0.6
    remaining = fresh(model).fit(features[is_remaining], labels[is_remaining]).predict_proba(features)
    weighted = fresh(model).fit(features, labels, sample_weight=is_remaining).predict_proba(features)
    np.testing.assert_array_equal(weighted, remaining)
    likelier = fresh(model).fit(features, labels, sample_weight=1 + 9 * labels).predict_proba(features)
    assert likelier[:, 1].mean() > 0.8


def test_the_example_in_the_documents_runs():
    document = Path(__file__).parents[2] / "docs" / "heads.md"
    section = document.read_text().split("\n## A classifier in scikit-learn's form\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    features = np.random.default_rng(0).normal(size=(64, 3))
    names: dict[str, Any] = {"features": features, "labels": features[:, 0] > 0}
    exec(code, names)
    assert names["model"].num_eval_samples == 0


def test_wrong_parameters_are_named():
    features, labels = np.zeros((4, 2)), np.array([0, 1, 0, 1])
    wrong = [("head", "linear"), ("validation_fraction", 1.0), ("validation_fraction", "0.1"), ("learning_rate", "1")]
    wrong += [
        (name, value) for name in ("batch_size", "max_iter", "n_iter_no_change", "num_samples") for value in (0, "5")
    ]
    wrong += [("num_eval_samples", 1.5), ("num_eval_samples", 10**9), ("num_factors", None), ("weight_decay", np.nan)]
    for name, value in wrong:
        assert_refused(rf"^{name} = ", HetXLClassifier().set_params(**{name: value}).fit, features, labels)
