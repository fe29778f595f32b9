"""The rivals of noise in the study: a temperature for every input, and an amplitude."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.heads.covariance import Covariance, CovarianceConfig
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.types import EmbeddingSamples, Queries
from scripts.studies.noise.rivals import AmplitudeConfig, InputTemperatureConfig, NoiseSmoothedSoftmaxLoss

VALID = np.array([True, True, False, True, True])


def embeddings(rows=5, size=8):
    draws = np.random.default_rng(0).standard_normal((2, rows, size)).astype(np.float32)
    return jnp.asarray(draws[0]), jnp.asarray(draws[1])


@functools.cache
def samples_of(config):
    image, text = embeddings()
    return jax.jit(lambda image, text: config.build(8, nnx.Rngs(0))(image, text, jax.random.key(0)))(image, text)


@jax.jit
def loss_of(samples):
    return SoftmaxLoss(form="dense")(samples, jnp.asarray(VALID))


def test_equal_noise_smooths_all_equally_and_twice_the_noise_twice_as_much():
    image, text = embeddings()
    loss, valid = NoiseSmoothedSoftmaxLoss(0.2), jnp.asarray(VALID)

    def queries(mean, sizes):
        steps = np.array([-1.0, 1.0], np.float32)[None, :, None] * np.asarray(sizes, np.float32)[:, None, None]
        return Queries(mean[:, None] + steps)

    equal = EmbeddingSamples(image, text, queries(image, np.ones(5)), queries(text, np.ones(5)), jnp.float32(0.7))
    expected = jax.jit(SoftmaxLoss("dense", duplicates="negatives", label_smoothing=0.2))(equal, valid)
    assert jax.jit(loss)(equal, valid) == pytest.approx(float(expected), rel=1e-5)
    shares = jax.jit(loss.shares)(queries(image, [1, 2, 9, 1, 20]), valid)
    np.testing.assert_allclose(shares, [1 / 30, 2 / 30, 0.3, 1 / 30, 0.5], rtol=1e-5)


def test_a_temperature_for_every_input_starts_as_one_temperature_and_then_scales_rows():
    head = InputTemperatureConfig().build(8, nnx.Rngs(0))
    image, text = embeddings()
    plain = loss_of(samples_of(DeterministicContrastiveConfig()))
    assert loss_of(head(image, text, None)) == pytest.approx(float(plain), rel=1e-5)
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
