"""Contrastive heads: noisy queries, noiseless keys (HET-XL Eq. 8, App. A.2, Table 7)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig, unit
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.temperature import LogTemperature

B, D, S = 4, 6, 3
COVARIANCE = CovarianceConfig(num_factors=2, initial_noise_norm=0.5)
KEY = jax.random.key(7)


def make(**changes):
    return HetXLContrastiveConfig(COVARIANCE, num_samples=S, **changes).build(D, nnx.Rngs(0))


def embeddings():
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(3 * random.normal(size=(B, D)), jnp.float32) for _ in range(2))


def numpy_unit(x):
    return np.asarray(x) / np.linalg.norm(x, axis=-1, keepdims=True)


def noise_of(head, image, text):
    """The noise that the head draws with KEY for these covariance inputs."""
    image_key, text_key = jax.random.split(KEY)
    return (
        np.asarray(head.image_covariance.sample(jnp.asarray(image), image_key, S)),
        np.asarray(head.text_covariance.sample(jnp.asarray(text), text_key, S)),
    )


def test_queries_are_noisy_and_keys_are_not():
    head, (image, text) = make(), embeddings()
    samples, quiet = head(image, text, KEY), head(image, text, None)
    np.testing.assert_array_equal(samples.image, quiet.image)
    np.testing.assert_array_equal(samples.text, quiet.text)
    assert samples.image_queries.shape == samples.text_queries.shape == (S, B, D)
    for s in range(S):
        assert not np.any(np.isclose(samples.image_queries[s], samples.image, atol=1e-6))
        assert not np.any(np.isclose(samples.text_queries[s], samples.text, atol=1e-6))


def test_the_default_normalises_before_the_noise_and_not_after():
    """Table 7's setting of Table 6: β / |β| + ε(β / |β|)."""
    config = HetXLContrastiveConfig()
    assert (config.normalize_before_noise, config.normalize_after_noise) == (True, False)
    assert (config.covariance.num_factors, config.covariance.form, config.num_samples) == (15, "full", 1)
    assert float(config.temperature.build()()) == pytest.approx(1 / 3)
    image, text = embeddings()
    samples = make()(image, text, KEY)
    np.testing.assert_allclose(jnp.linalg.norm(samples.image, axis=-1), 1, rtol=1e-5)
    assert np.all(np.abs(np.linalg.norm(samples.image_queries, axis=-1) - 1) > 1e-3)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_the_four_normalisations_of_table_7_equal_the_numpy_reference(before, after):
    head, (image, text) = make(normalize_before_noise=before, normalize_after_noise=after), embeddings()
    samples = head(image, text, KEY)
    image, text = (numpy_unit(x) if before else np.asarray(x) for x in (image, text))
    image_noise, text_noise = noise_of(head, image, text)
    last = numpy_unit if after else np.asarray
    np.testing.assert_allclose(samples.image_queries, last(image + image_noise), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(samples.text_queries, last(text + text_noise), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(samples.image, last(image), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(samples.text, last(text), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("side", ["image", "text"])
def test_one_noisy_side_leaves_the_other_deterministic_and_without_parameters(side):
    head, (image, text) = make(noisy=side), embeddings()
    samples = head(image, text, KEY)
    other = "text" if side == "image" else "image"
    np.testing.assert_array_equal(getattr(samples, f"{other}_queries")[0], getattr(samples, other))
    assert getattr(samples, f"{side}_queries").shape == (S, B, D)
    assert not np.allclose(getattr(samples, f"{side}_queries")[0], getattr(samples, side))
    assert set(nnx.to_pure_dict(nnx.state(head))) == {f"{side}_covariance", "temperature"}
    assert np.all(getattr(head, f"{side}_noise_norm")(image) > 0)
    np.testing.assert_array_equal(getattr(head, f"{other}_noise_norm")(image), np.zeros(B))


def test_without_a_key_the_head_equals_the_deterministic_head():
    image, text = embeddings()
    deterministic = DeterministicContrastiveConfig(LogTemperature(1 / 3)).build(D, nnx.Rngs(0))
    quiet, plain = make()(image, text, None), deterministic(image, text, KEY)
    for actual, expected in zip(jax.tree.leaves(quiet), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_a_deterministic_head_returns_unit_keys_as_its_only_queries():
    image, text = embeddings()
    samples = DeterministicContrastiveConfig(initial_bias=-10.0).build(D, nnx.Rngs(0))(image, text, KEY)
    np.testing.assert_allclose(samples.image, numpy_unit(image), rtol=1e-5)
    np.testing.assert_array_equal(samples.image_queries, samples.image[None])
    np.testing.assert_array_equal(samples.text_queries, samples.text[None])
    assert samples.bias is not None
    assert float(samples.bias) == -10.0
    assert float(samples.temperature) == pytest.approx(1 / 10)


def test_the_two_sides_have_their_own_covariances_and_noise():
    head, (image, _) = make(), embeddings()
    samples = head(image, image, KEY)
    assert not np.allclose(samples.image_queries, samples.text_queries)
    assert not np.allclose(head.image_noise_norm(image), head.text_noise_norm(image), rtol=1e-6)


def test_noise_norms_belong_to_the_normalised_embedding():
    head, (image, text) = make(), embeddings()
    assert head.image_covariance is not None
    assert head.text_covariance is not None
    np.testing.assert_allclose(head.image_noise_norm(image), head.image_covariance.noise_norm(unit(image)), rtol=1e-6)
    np.testing.assert_allclose(head.text_noise_norm(text), head.text_covariance.noise_norm(unit(text)), rtol=1e-6)
    np.testing.assert_allclose(head.image_noise_norm(image), head.image_noise_norm(5 * image), rtol=1e-5)


def test_unit_gives_norm_one_and_leaves_zeros_alone():
    rows = jnp.asarray([[3.0, 4.0], [0.0, 0.0]])
    np.testing.assert_allclose(unit(rows), [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)
