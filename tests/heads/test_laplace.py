"""The Laplace posterior of a linear layer against dense Kronecker products, and its prior precision."""

import numpy as np
import pytest
from scipy import optimize

from lit_het.errors import UserError
from lit_het.heads.laplace import Factors, fit, log_marginal_likelihood

P, Q = 4, 3


def factors(seed=0, scale=1.0):
    inputs, outputs = (np.random.default_rng(seed).normal(size=(20, size)) for size in (P, Q))
    return Factors(scale * inputs.T @ inputs, outputs.T @ outputs)


def balanced(factors):
    """Scales both factors to one mean eigenvalue."""
    balance = np.sqrt(np.trace(factors.inputs) / P / (np.trace(factors.outputs) / Q))
    return Factors(factors.inputs / balance, factors.outputs * balance)


def dense_precision(factors, precision):
    root = np.sqrt(precision)
    return np.kron(factors.inputs + root * np.eye(P), factors.outputs + root * np.eye(Q))


@pytest.mark.parametrize("precision", [0.01, 1.0, 300.0])
def test_the_marginal_likelihood_is_that_of_the_dense_determinant(precision):
    some, squared_norm = factors(), 2.5
    a, b = (np.linalg.eigvalsh(factor) for factor in some)
    found = log_marginal_likelihood(a, b, squared_norm, precision)
    log_prior = -precision * squared_norm / 2 + P * Q * np.log(precision) / 2
    expected = log_prior - np.linalg.slogdet(dense_precision(some, precision))[1] / 2
    assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_the_prior_precision_is_the_root_of_the_derivative(scale):
    some, squared_norm = factors(scale=scale), 2.5
    a, b = (np.linalg.eigvalsh(factor) for factor in balanced(some))

    def derivative(log):
        root = np.exp(log / 2)
        return (Q * np.sum(a / (a + root)) + P * np.sum(b / (b + root))) / 2 - np.exp(log) * squared_norm

    expected = np.exp(optimize.root_scalar(derivative, bracket=(-60, 20)).root)
    assert fit(some, squared_norm, 1.0, "image").precision == pytest.approx(expected, rel=1e-4)


def test_variances_are_those_of_the_dense_inverse():
    some = factors()
    found = fit(some, 2.5, 1.0, "image")
    covariance = np.linalg.inv(dense_precision(balanced(some), found.precision))
    for phi in np.random.default_rng(1).normal(size=(5, P)):
        # The output has the covariance (φ ⊗ I)ᵀ (A⁻¹ ⊗ B⁻¹) (φ ⊗ I), of which the diagonal is kept.
        layer = np.kron(phi[:, None], np.eye(Q))
        expected = np.diagonal(layer.T @ covariance @ layer)
        np.testing.assert_allclose(np.sum((phi @ found.input_root) ** 2) * found.output_variance, expected, rtol=1e-5)


def test_pairs_that_count_twice_are_pairs_given_twice():
    some = factors()
    twice, given_twice = fit(some, 2.5, 4.0, "image"), fit(Factors(2 * some.inputs, 2 * some.outputs), 2.5, 1.0, "x")
    np.testing.assert_allclose(twice.output_variance, given_twice.output_variance, rtol=1e-6)
    assert twice.precision == pytest.approx(given_twice.precision)
    assert (twice.output_variance < fit(some, 2.5, 1.0, "image").output_variance).all()


def test_the_units_of_inputs_and_outputs_do_not_matter():
    some = factors()
    found, other = (fit(scaled, 2.5, 1.0, "x") for scaled in (some, Factors(some.inputs * 1e4, some.outputs / 1e4)))
    assert other.precision == pytest.approx(found.precision)
    np.testing.assert_allclose(other.output_variance, found.output_variance, rtol=1e-5)


def test_factors_and_variances_that_are_not_finite_are_refused():
    some = factors()
    with pytest.raises(UserError, match="the Hessian of the text side is not finite; check the temperature"):
        fit(some._replace(outputs=np.full((Q, Q), np.inf)), 2.5, 1.0, "text")
    with pytest.raises(UserError, match="the pairs say nothing about the text side"):
        fit(some._replace(outputs=np.zeros((Q, Q))), 2.5, 1.0, "text")
    with pytest.raises(UserError, match="variances of the text side are not finite; choose another"):
        fit(some, 2.5, 1e200, "text")


def test_a_hessian_of_rounding_errors_is_refused():
    some, noise = factors(), np.diag([1e-9, -1e-9, 1e-10])
    with pytest.raises(UserError, match="predicts the pairs almost perfectly, which leaves no Hessian of the text"):
        fit(some._replace(outputs=noise), 2.5, 1.0, "text")
    fit(some._replace(outputs=some.outputs + noise), 2.5, 1.0, "text")
