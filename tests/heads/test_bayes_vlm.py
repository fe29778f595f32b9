"""BayesVLM's head: ProbCosine and probit against samples, the authors' code, and the deterministic head."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het.errors import UserError
from lit_het.heads.bayes_vlm import BayesVLMContrastiveConfig, Gaussians, prob_cosine, probit
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.losses.classification import mean_log_probabilities
from lit_het.losses.contrastive.gauss_newton import sigmoid_hessian, softmax_hessian
from tests.heads.test_contrastive import embeddings, numpy_unit

GOLDEN = Path(__file__).parents[1] / "golden" / "bayes_vlm.npz"
D = 6
KEY = jax.random.key(3)


def make(**changes):
    """Returns a head with a posterior of both sides."""
    head = BayesVLMContrastiveConfig(**changes).build(D, nnx.Rngs(0))
    random = np.random.default_rng(1)
    for posterior in (head.image_posterior, head.text_posterior):
        posterior.input_root[...] = jnp.asarray(random.normal(size=(D, D)) / 4, jnp.float32)
        posterior.output_variance[...] = jnp.asarray(random.uniform(0.1, 0.5, D), jnp.float32)
    return head


def gaussians(posterior, embedding):
    """Returns mean and variance, by the equation."""
    phi, root = numpy_unit(embedding), np.asarray(posterior.input_root[...])
    return phi, np.sum((phi @ root) ** 2, axis=1)[:, None] * np.asarray(posterior.output_variance[...])


def drawn(head, image, classes, key=KEY, count=4000):
    samples = head.logits(image, classes, key, count)
    return np.asarray(samples.logits(samples.prepare(image), samples.keys, jnp.arange(count)))


def golden():
    with np.load(GOLDEN) as file:
        return {name: jnp.asarray(array) for name, array in file.items()}


def test_prob_cosine_is_the_mean_and_variance_over_samples():
    random = np.random.default_rng(0)
    (mean, variance), (other, spread) = ((random.normal(size=(n, D)), random.uniform(0.1, 1, (n, D))) for n in (2, 3))
    first = mean + np.sqrt(variance) * random.normal(size=(400_000, 2, D))
    second = other + np.sqrt(spread) * random.normal(size=(400_000, 3, D))
    norms = np.sqrt(np.mean(np.sum(first**2, axis=2), axis=0)[:, None] * np.mean(np.sum(second**2, axis=2), axis=0))
    products = np.einsum("snd,skd->snk", first, second) / norms
    sides = [Gaussians(*(jnp.asarray(x, jnp.float32) for x in side)) for side in ((mean, variance), (other, spread))]
    found_mean, found_variance = prob_cosine(*sides)
    np.testing.assert_allclose(found_mean, products.mean(axis=0), atol=0.01)
    np.testing.assert_allclose(found_variance, products.var(axis=0), rtol=0.02)


def test_the_probit_is_close_to_the_mean_probability_over_normal_logits():
    mean, variance = np.array([-3.0, -1.0, 0.0, 0.5, 2.0]), np.array([0.1, 1.0, 3.0, 6.0, 9.0])
    logits = mean + np.sqrt(variance) * np.random.default_rng(0).normal(size=(200_000, 5))
    expected = np.mean(1 / (1 + np.exp(-logits)), axis=0)
    found = jax.nn.sigmoid(probit(jnp.asarray(mean, jnp.float32), jnp.asarray(variance, jnp.float32)))
    np.testing.assert_allclose(found, expected, atol=0.02)


def test_without_noise_predictions_are_bit_for_bit_those_of_the_model():
    (image, text), head = embeddings(), make()
    plain = DeterministicContrastiveConfig().build(D, nnx.Rngs(0))
    np.testing.assert_array_equal(head.image_key(image), plain.image_key(image))
    np.testing.assert_array_equal(head.text_key(text), plain.text_key(text))
    both = [one.logits(image, plain.text_key(text), None, 0) for one in (head, plain)]
    found, expected = (one.logits(one.prepare(image), None, jnp.arange(1)) for one in both)
    np.testing.assert_array_equal(found, expected)


def test_the_prediction_is_the_probit_of_prob_cosine():
    (image, text), head = embeddings(), make(prediction="probit")
    (mean, variance), (other, spread) = gaussians(head.image_posterior, image), gaussians(head.text_posterior, text)
    tau, expected = float(head.temperature()), np.zeros((len(image), len(text)))
    for n in range(len(image)):
        for k in range(len(text)):
            norms = np.sum(mean[n] ** 2 + variance[n]) * np.sum(other[k] ** 2 + spread[k])
            of_cosine = np.sum((mean[n] ** 2 + variance[n]) * spread[k] + variance[n] * other[k] ** 2) / norms
            logit = mean[n] @ other[k] / np.sqrt(norms) / tau
            expected[n, k] = logit / np.sqrt(1 + np.pi / 8 * of_cosine / tau**2)
    samples = head.logits(image, head.text_key(text), KEY, 16)
    found = samples.logits(samples.prepare(image), samples.keys, jnp.arange(samples.num_samples))
    np.testing.assert_allclose(found[:, 0], expected, rtol=1e-4)
    assert samples.num_samples == 1
    np.testing.assert_allclose(head.image_noise_norm(image), np.sqrt(variance.sum(axis=1)), rtol=1e-5)
    np.testing.assert_allclose(head.text_noise_norm(text), np.sqrt(spread.sum(axis=1)), rtol=1e-5)
    np.testing.assert_allclose(head.image_spectrum(image), -np.sort(-np.sqrt(variance), axis=1), rtol=1e-5)


def test_samples_of_the_weights_have_the_moments_of_prob_cosine():
    (image, text), head = embeddings(), make()
    tau = float(head.temperature())
    sides = [
        Gaussians(*map(jnp.asarray, gaussians(posterior, x)))
        for posterior, x in ((head.image_posterior, image), (head.text_posterior, text))
    ]
    mean, variance = (np.asarray(moment) for moment in prob_cosine(*sides))
    logits = drawn(head, image, head.text_key(text)) * tau
    np.testing.assert_allclose(logits.mean(axis=1), mean, atol=0.03)
    np.testing.assert_allclose(logits.var(axis=1), variance, rtol=0.1)


def test_samples_are_of_the_same_weights_for_all_images_and_calls_of_a_key():
    (image, text), head = embeddings(), make()
    classes = head.text_key(text)
    together = drawn(head, jnp.concatenate([image, image]), classes, count=6)
    np.testing.assert_allclose(together[:4], together[4:], rtol=1e-5)
    np.testing.assert_allclose(drawn(head, image[2:], classes, count=6), together[2:4], rtol=1e-4)
    assert not np.allclose(drawn(head, image, classes, jax.random.key(4), count=6), together[:4], rtol=0.1)


def test_the_mean_over_samples_does_not_depend_on_blocks(monkeypatch):
    (image, text), head = embeddings(), make()
    classes = head.text_key(text)
    expected = mean_log_probabilities(head.logits(image, classes, KEY, 6), jax.nn.log_softmax)
    monkeypatch.setattr("lit_het.heads.bayes_vlm._BLOCK", 4 * D * D)
    samples = head.logits(image, classes, KEY, 6)
    assert samples.samples_per_block == 2
    np.testing.assert_allclose(mean_log_probabilities(samples, jax.nn.log_softmax), expected, rtol=1e-5)


def test_a_name_has_the_variance_of_the_mean_of_its_prompts():
    head, (_, text) = make(), embeddings()
    prompts = head.text_key(text)
    name = head.mean_text_key(prompts[None])
    # All prompts pass through the same weights.
    normals = jnp.asarray(np.random.default_rng(0).normal(size=(20_000, D, D)), jnp.float32)
    means = head.text_posterior.samples(prompts, normals).mean(axis=1) / jnp.linalg.norm(prompts.mean(axis=0))
    mean, variance = head.text_posterior(name)
    np.testing.assert_allclose(mean[0], means.mean(axis=0), atol=0.02)
    np.testing.assert_allclose(variance[0], means.var(axis=0), rtol=0.05)


def test_a_head_without_a_posterior_has_no_variance():
    head, (image, _) = BayesVLMContrastiveConfig().build(D, nnx.Rngs(0)), embeddings()
    np.testing.assert_array_equal(head.image_noise_norm(image), 0)


@pytest.mark.parametrize("prediction", ["samples", "probit"])
def test_predictions_for_rows_of_zeros_are_finite(prediction):
    head, (_, text) = make(prediction=prediction), embeddings()
    # Evaluation pads blocks of images with them.
    assert np.isfinite(drawn(head, jnp.zeros((2, D)), head.text_key(text), count=1)).all()


def test_hessians_cosines_and_probits_are_those_of_the_authors_code():
    found = golden()
    sides = (found["image"], found["text"], jnp.ones(len(found["image"])), found["temperature"])
    np.testing.assert_allclose(softmax_hessian(*sides), found["softmax_hessian"], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(sigmoid_hessian(*sides, found["bias"]), found["sigmoid_hessian"], rtol=1e-3, atol=1e-3)
    gaussian = []
    for side in ("source", "target"):
        a, b = (np.linalg.inv(found[f"{side}_{factor}"]) for factor in "ab")
        phi = found[f"{side}_activations"]
        variance = np.einsum("np,pq,nq->n", phi, a, phi)[:, None] * np.diagonal(b)
        gaussian.append(Gaussians(found[f"{side}_embeddings"], jnp.asarray(variance, jnp.float32)))
    mean, variance = prob_cosine(*gaussian)
    mean, variance = mean / found["temperature"], variance / found["temperature"] ** 2
    np.testing.assert_allclose(mean, found["logits_mean"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(variance, found["logits_variance"], rtol=1e-4)
    np.testing.assert_allclose(probit(mean, variance), found["probit"], rtol=1e-4, atol=1e-5)


def test_the_authors_log_determinant_is_not_that_of_the_kronecker_product():
    found = golden()
    a, b = (np.linalg.slogdet(found[f"source_{factor}"])[1] for factor in "ab")
    p, q = (len(found[f"source_{factor}"]) for factor in "ab")
    dense = np.linalg.slogdet(np.kron(found["source_a"], found["source_b"]))[1]
    assert dense == pytest.approx(q * a + p * b, rel=1e-4)
    assert float(found["log_determinant"]) == pytest.approx(p * a + q * b, rel=1e-4)


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("num_negatives", 1, "1 must be at least 2"),
        ("pseudo_data_count", 0.0, "0.0 must be positive and finite"),
    ],
)
def test_what_makes_no_sense_is_refused(field, value, problem):
    with pytest.raises(UserError, match=problem):
        dataclasses.replace(BayesVLMContrastiveConfig(), **{field: value})
