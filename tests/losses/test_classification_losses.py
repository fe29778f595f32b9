"""Classification losses on noise samples: -log of the mean probability (HET-XL Eq. 2, Sec. 2.1)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import log_loss

from lit_het.losses.base import log_mean_probability, masked_mean
from lit_het.losses.classification import sigmoid_cross_entropy, softmax_cross_entropy

S, B, K = 3, 4, 5
RANDOM = np.random.default_rng(0)
LOGITS = RANDOM.normal(size=(S, B, K)) * 2
LABEL = np.array([0, 4, 2, 2])
TARGET = np.array([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [0.5, 0.25, 0, 0, 0]])


def reference_softmax(logits, label):
    """-log (1/S Σ_s exp(u_sy) / Σ_k exp(u_sk)) for each example."""
    losses = []
    for n in range(logits.shape[1]):
        probabilities = [np.exp(u[n, label[n]]) / np.exp(u[n]).sum() for u in logits]
        losses.append(-np.log(np.mean(probabilities)))
    return np.array(losses)


def reference_sigmoid(logits, target):
    """Σ_k -(t log p̄_k + (1 - t) log(1 - p̄_k)), p̄_k = 1/S Σ_s σ(u_sk), for each example."""
    losses = []
    for n in range(logits.shape[1]):
        loss = 0.0
        for k in range(logits.shape[2]):
            p = np.mean([1 / (1 + np.exp(-u[n, k])) for u in logits])
            loss -= target[n, k] * np.log(p) + (1 - target[n, k]) * np.log(1 - p)
        losses.append(loss)
    return np.array(losses)


def single(x):
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("samples", [1, S])
def test_softmax_cross_entropy_equals_the_numpy_reference(samples):
    actual = softmax_cross_entropy(single(LOGITS[:samples]), jnp.asarray(LABEL))
    np.testing.assert_allclose(actual, reference_softmax(LOGITS[:samples], LABEL), rtol=1e-5)


@pytest.mark.parametrize("samples", [1, S])
def test_sigmoid_cross_entropy_equals_the_numpy_reference(samples):
    actual = sigmoid_cross_entropy(single(LOGITS[:samples]), single(TARGET))
    np.testing.assert_allclose(actual, reference_sigmoid(LOGITS[:samples], TARGET), rtol=1e-5)


def test_the_mean_softmax_loss_is_scikit_learns_log_loss_of_the_mean_probability():
    probabilities = np.asarray(jax.nn.softmax(single(LOGITS)).mean(axis=0), np.float64)
    expected = log_loss(LABEL, probabilities / probabilities.sum(axis=1, keepdims=True), labels=range(K))
    np.testing.assert_allclose(softmax_cross_entropy(single(LOGITS), jnp.asarray(LABEL)).mean(), expected, rtol=1e-5)


def test_the_sigmoid_loss_is_scikit_learns_binary_log_loss_summed_over_classes():
    probabilities = np.asarray(jax.nn.sigmoid(single(LOGITS)).mean(axis=0), np.float64)
    target = (TARGET > 0.3).astype(int)
    expected = sum(log_loss(target[:, k], probabilities[:, k], labels=[0, 1]) for k in range(K))
    np.testing.assert_allclose(sigmoid_cross_entropy(single(LOGITS), single(target)).mean(), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("fast", "slow", "labels"),
    [
        (softmax_cross_entropy, reference_softmax, LABEL),
        (sigmoid_cross_entropy, reference_sigmoid, TARGET.astype(np.float32)),
    ],
    ids=["softmax", "sigmoid"],
)
def test_gradients_agree_with_finite_differences_of_the_reference(fast, slow, labels):
    gradient = np.asarray(jax.grad(lambda u: fast(u, jnp.asarray(labels)).sum())(single(LOGITS)))
    step = 1e-5
    for index in np.ndindex(S, B, K):
        change = np.zeros_like(LOGITS)
        change[index] = step
        slope = (slow(LOGITS + change, labels).sum() - slow(LOGITS - change, labels).sum()) / (2 * step)
        np.testing.assert_allclose(gradient[index], slope, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("scale", [1e4, -1e4])
def test_huge_logits_give_finite_losses_and_gradients(scale):
    logits = single(scale * np.eye(B, K)[None])

    def loss(logits):
        softmax = softmax_cross_entropy(logits, jnp.asarray(LABEL))
        return softmax.sum() + sigmoid_cross_entropy(logits, single(TARGET)).sum()

    value, gradient = jax.value_and_grad(loss)(logits)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))


def test_log_mean_probability_averages_probabilities_not_logarithms():
    # log((0.2 + 0.6) / 2) = log 0.4
    actual = log_mean_probability(jnp.log(jnp.asarray([0.2, 0.6])))
    assert float(actual) == pytest.approx(np.log(0.4), rel=1e-6)


def test_masked_mean_counts_valid_rows_only_and_ignores_what_the_others_hold():
    values, valid = jnp.asarray([1.0, np.nan, 4.0, np.inf]), jnp.asarray([True, False, True, False])
    value, gradient = jax.value_and_grad(masked_mean)(values, valid)
    assert float(value) == 2.5
    np.testing.assert_array_equal(gradient, [0.5, 0, 0.5, 0])
    assert float(masked_mean(values, jnp.zeros(4, bool))) == 0.0
