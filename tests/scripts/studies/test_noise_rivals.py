"""The rivals of noise in the study: smoothed labels, and a temperature for every input."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.covariance import Covariance, CovarianceConfig
from lit_het.losses.contrastive import SoftmaxLoss
from scripts.studies.noise.rivals import AmplitudeConfig, InputTemperatureConfig, SmoothedSoftmaxLoss

VALID = np.array([True, True, False, True, True])


def embeddings(rows=5, size=8):
    draws = np.random.default_rng(0).standard_normal((2, rows, size)).astype(np.float32)
    return jnp.asarray(draws[0]), jnp.asarray(draws[1])


@functools.cache
def samples_of(config):
    image, text = embeddings()
    return jax.jit(lambda image, text: config.build(8, nnx.Rngs(0))(image, text, jax.random.key(0)))(image, text)


@jax.jit
def losses(samples, valid, weight=None):
    """Returns the softmax loss and the one without smoothing."""
    return [loss(samples, valid, (), weight) for loss in (SoftmaxLoss(form="dense"), SmoothedSoftmaxLoss(0.0))]


def smoothed(samples, valid):
    return jax.jit(SmoothedSoftmaxLoss(0.3))(samples, valid)


def test_without_smoothing_it_is_the_softmax_loss():
    samples = samples_of(DeterministicContrastiveConfig())
    expected, found = losses(samples, VALID)
    assert found == pytest.approx(float(expected), rel=1e-5)
    weighted, found = losses(samples, VALID, np.array([1.0, 0.2, 1.0, 0.5, 1.0], np.float32))
    assert found == pytest.approx(float(weighted), rel=1e-5)
    assert float(weighted) != pytest.approx(float(expected), rel=1e-3)


def test_with_noise_and_without_smoothing_it_is_the_softmax_loss_of_the_mean_over_samples():
    samples = samples_of(HetXLContrastiveConfig(num_samples=4))
    assert samples.image_queries is not None
    expected, found = losses(samples, VALID)
    assert found == pytest.approx(float(expected), rel=1e-5)


def test_smoothing_takes_the_mean_over_samples_and_over_valid_keys():
    samples, expected = samples_of(HetXLContrastiveConfig(num_samples=4)), []
    for queries, keys in ((samples.image_queries, samples.text), (samples.text_queries, samples.image)):
        assert queries is not None
        products = jax.jit(lambda queries, keys: queries.products(keys))(queries, keys)
        logits = (np.asarray(products, np.float64) / float(samples.temperature))[VALID][:, :, VALID]
        p = np.exp(logits)
        log_p = np.log((p / p.sum(axis=2, keepdims=True)).mean(axis=1))
        expected.append(-((0.7 * np.eye(4) + 0.3 / 4) * log_p).sum(axis=1).mean())
    assert smoothed(samples, VALID) == pytest.approx(np.mean(expected), rel=1e-4)


def test_smoothing_is_the_cross_entropy_with_a_mixture():
    samples = samples_of(DeterministicContrastiveConfig())
    image, text = (np.asarray(side, np.float64) for side in (samples.image, samples.text))
    logits = image @ text.T / float(samples.temperature)
    target = 0.7 * np.eye(5) + 0.3 / 5
    expected = [
        -(target * (u - np.log(np.exp(u).sum(axis=1, keepdims=True)))).sum(axis=1).mean() for u in (logits, logits.T)
    ]
    assert smoothed(samples, np.ones(5, bool)) == pytest.approx(np.mean(expected), rel=1e-5)


def test_a_temperature_for_every_input_starts_as_one_temperature_and_then_scales_rows():
    head = InputTemperatureConfig().build(8, nnx.Rngs(0))
    image, text = embeddings()
    plain, _ = losses(samples_of(DeterministicContrastiveConfig()), VALID)
    found, _ = losses(head(image, text, None), VALID)
    assert found == pytest.approx(float(plain), rel=1e-5)
    before = head.logits(image, head.text_key(text), None, 0).prepare(image)
    assert head.image_scale.bias is not None
    head.image_scale.bias[...] = jnp.log(2.0)[None]
    after = head.logits(image, head.text_key(text), None, 0).prepare(image)
    np.testing.assert_allclose(after, before / 2, rtol=1e-5)
    # Training has the logits of evaluation for images, and texts have parameters of their own.
    samples = head(image, text, None)
    assert samples.image_queries is not None
    assert samples.text_queries is not None
    np.testing.assert_allclose(
        samples.image_queries.products(samples.text)[:, 0] / samples.temperature, after, rtol=1e-5
    )
    np.testing.assert_allclose(
        samples.text_queries.products(samples.image)[:, 0], (samples.text @ samples.image.T), rtol=1e-5
    )


def test_an_amplitude_starts_as_the_plain_covariance_and_ignores_the_size_of_the_kernel():
    plain, amplitude = (
        kind(num_factors=2, initial_noise_norm=0.1).build(8, 8, 1.0, nnx.Rngs(0))
        for kind in (CovarianceConfig, AmplitudeConfig)
    )
    features, _ = embeddings()
    scaled: Any = amplitude.factors

    def factors(covariance: Covariance) -> np.ndarray:
        return np.asarray(covariance(features).factors)

    expected = factors(plain)
    np.testing.assert_allclose(factors(amplitude), expected, rtol=1e-5)
    scaled.linear.kernel[...] *= 7.0
    np.testing.assert_allclose(factors(amplitude), expected, rtol=1e-5)
    scaled.log_amplitude[...] += jnp.log(2.0)
    np.testing.assert_allclose(factors(amplitude), 2 * expected, rtol=1e-5)
