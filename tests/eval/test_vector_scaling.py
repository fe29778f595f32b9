import numpy as np
import pytest
from scipy import optimize, special

from lit_het.errors import UserError
from lit_het.eval.metrics.vector_scaling import VectorScaling, fit_vector_scaling


def biased_predictions(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Returns log-probabilities that are too sure and prefer the first class, and labels."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(600, 4))
    labels = np.array([generator.choice(4, p=p) for p in special.softmax(logits, axis=1)])
    return special.log_softmax(3 * logits + [2.0, 0, 0, 0], axis=1).astype(np.float32), labels


def test_the_formula_by_hand():
    log_p = np.log(np.array([[0.25, 0.75]]))
    scaled = VectorScaling(np.array([2.0, 1.0]), np.array([np.log(4.0), 0.0]))(log_p)
    # 4 * 0.25² = 0.25 against 0.75.
    np.testing.assert_allclose(np.exp(scaled), [[0.25, 0.75]], rtol=1e-6)


def test_the_fit_is_the_minimum_that_another_optimizer_finds_and_helps_on_other_images_of_the_same_kind():
    log_p, labels = biased_predictions()
    found, rows = fit_vector_scaling(log_p, labels), np.arange(len(labels))

    def nll(parameters: np.ndarray) -> float:
        scaled = special.log_softmax(log_p.astype(np.float64) * parameters[:4] + parameters[4:], axis=1)
        return -scaled[rows, labels].mean()

    best = optimize.minimize(nll, np.r_[np.ones(4), np.zeros(4)], method="Powell", options={"maxiter": 20_000})
    assert nll(np.r_[found.factor, found.bias]) <= best.fun + 1e-5
    assert best.fun < nll(np.r_[np.ones(4), np.zeros(4)]) - 0.1
    others, other_labels = biased_predictions(1)
    assert -found(others)[rows, other_labels].mean() < -others[rows, other_labels].mean() - 0.1


def test_images_of_a_vector_scaled_model_give_its_factors_and_biases():
    """The logits of an image share no constant, unlike log-probabilities, of which no factor per class is right."""
    generator = np.random.default_rng(0)
    logits = (2 * generator.normal(size=(20_000, 3)) + generator.normal(size=(20_000, 1))).astype(np.float32)
    factor, bias = np.array([0.5, 1.0, 2.0]), np.array([0.3, 0.0, -0.3])
    truth = VectorScaling(factor, bias)
    labels = np.array([generator.choice(3, p=p / p.sum()) for p in np.exp(truth(logits).astype(np.float64))])
    found = fit_vector_scaling(logits, labels)
    np.testing.assert_allclose(found.factor, factor, rtol=0.08)
    np.testing.assert_allclose(found.bias - found.bias[1], bias, atol=0.08)


def test_probabilities_of_zero_are_no_problem_but_rows_without_any_are():
    log_p = np.array([[0.0, -np.inf], [-np.inf, 0.0], [np.log(0.5), np.log(0.5)]], np.float32)
    assert np.isfinite(fit_vector_scaling(log_p, np.array([0, 1, 0]))(log_p[2:])).all()
    with pytest.raises(UserError):
        fit_vector_scaling(np.full((2, 2), np.nan, np.float32), np.array([0, 1]))
