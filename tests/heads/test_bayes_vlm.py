"""BayesVLM's head: ProbCosine and probit against samples, the authors' code, and the deterministic head."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import softmax

from lit_het.errors import UserError
from lit_het.heads.bayes_vlm import BayesVLMContrastiveConfig, Gaussians, LastLayer, last_layer, prob_cosine, probit
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.losses.classification import mean_log_probabilities
from lit_het.losses.contrastive.gauss_newton import sigmoid_hessian, softmax_hessian
from tests.heads.references import all_at_once
from tests.heads.test_contrastive import B

GOLDEN = Path(__file__).parents[1] / "golden" / "bayes_vlm.npz"
D = 6
KEY = jax.random.key(3)
# Inputs of the last layers of images and texts; without any a layer is at the identity.
SIZES = [(0, 0), (9, 4), (9, 0), (0, 4)]
each_size = pytest.mark.parametrize("sizes", SIZES, ids=["identity", "both", "image", "text"])


def make(sizes=(9, 4), **changes):
    """Returns a head with a posterior of both sides."""
    image, text = sizes
    config = BayesVLMContrastiveConfig(**changes)
    head = config.build(D, nnx.Rngs(0), image_input_size=image, text_input_size=text)
    random = np.random.default_rng(1)
    for posterior in (head.image_posterior, head.text_posterior):
        q = len(posterior.input_root[...])
        posterior.input_root[...] = jnp.asarray(random.normal(size=(q, q)) / 4, jnp.float32)
        posterior.output_variance[...] = jnp.asarray(random.uniform(0.1, 0.5, D), jnp.float32)
    return head


def outputs(sizes=(9, 4)):
    """Returns what towers tell of images and texts: g, and φ of a layer whose weights are drawn."""
    random = np.random.default_rng(0)
    found = []
    for size in sizes:
        phi, p = random.normal(size=(B, size)), random.normal(size=(size, D))
        g = phi @ p + 0.3 if size else 3 * random.normal(size=(B, D))
        found.append(jnp.asarray(np.concatenate([g, phi], axis=1), jnp.float32))
    return found


def gaussians(posterior, output):
    """Returns mean and variance of the embeddings, which are not unit vectors, by the equation."""
    g, phi = np.split(np.asarray(output), [D], axis=1)
    root = np.asarray(posterior.input_root[...])
    phi = np.concatenate([phi, np.ones((B, 1))], axis=1) if phi.size else g
    return g, np.sum((phi @ root) ** 2, axis=1)[:, None] * np.asarray(posterior.output_variance[...])


def drawn(head, image, classes, key=KEY, count=4000):
    logits = jax.jit(lambda image, classes, key: all_at_once(head.logits(image, classes, key, count)))
    return np.asarray(logits(image, classes, key))


def text_key(head, text):
    return jax.jit(head.text_key)(text)


def golden():
    with np.load(GOLDEN) as file:
        return dict(file)


def test_prob_cosine_is_the_mean_and_variance_over_samples():
    random = np.random.default_rng(0)
    (mean, variance), (other, spread) = ((random.normal(size=(n, D)), random.uniform(0.1, 1, (n, D))) for n in (2, 3))
    first = mean + np.sqrt(variance) * random.normal(size=(200_000, 2, D))
    second = other + np.sqrt(spread) * random.normal(size=(200_000, 3, D))
    norms = np.sqrt(np.mean(np.sum(first**2, axis=2), axis=0)[:, None] * np.mean(np.sum(second**2, axis=2), axis=0))
    products = np.einsum("snd,skd->snk", first, second) / norms
    sides = [Gaussians(*(jnp.asarray(x, jnp.float32) for x in side)) for side in ((mean, variance), (other, spread))]
    found_mean, found_variance = jax.jit(prob_cosine)(*sides)
    np.testing.assert_allclose(found_mean, products.mean(axis=0), atol=0.01)
    np.testing.assert_allclose(found_variance, products.var(axis=0), rtol=0.02)


def test_the_probit_is_close_to_the_mean_probability_over_normal_logits():
    mean, variance = np.array([-3.0, -1.0, 0.0, 0.5, 2.0]), np.array([0.1, 1.0, 3.0, 6.0, 9.0])
    logits = mean + np.sqrt(variance) * np.random.default_rng(0).normal(size=(200_000, 5))
    expected = np.mean(1 / (1 + np.exp(-logits)), axis=0)
    found = jax.jit(lambda *x: jax.nn.sigmoid(probit(*x)))(mean.astype(np.float32), variance.astype(np.float32))
    np.testing.assert_allclose(found, expected, atol=0.02)


@pytest.mark.parametrize(("deviation", "error"), [(1.0, 0.03), (3.0, 0.06)])
def test_the_probit_of_several_classes_is_close_to_their_mean_probabilities(deviation, error):
    random = np.random.default_rng(0)
    mean = random.normal(size=(20, 4))
    variance = (deviation * random.uniform(0.5, 1.5, (20, 4))) ** 2
    logits = mean + np.sqrt(variance) * random.normal(size=(20_000, 20, 4))
    expected = np.mean(np.exp(logits) / np.exp(logits).sum(axis=2, keepdims=True), axis=0)
    found = jax.jit(lambda *x: jax.nn.softmax(probit(*x)))(mean.astype(np.float32), variance.astype(np.float32))
    assert np.abs(np.asarray(found) - expected).mean() < error
    # Closer than probabilities without noise.
    assert np.abs(np.asarray(found) - expected).mean() < 0.7 * np.abs(softmax(mean, axis=1) - expected).mean()


@each_size
def test_without_noise_predictions_are_bit_for_bit_those_of_the_model(sizes):
    (image, text), head = outputs(sizes), make(sizes)
    plain = DeterministicContrastiveConfig().build(D, nnx.Rngs(0))

    @jax.jit
    def of_head(image, text):
        keys = head.image_key(image), head.text_key(text)
        return *keys, all_at_once(head.logits(image, keys[1], None, 0))

    @jax.jit
    def of_model(image, text):
        keys = plain.image_key(image), plain.text_key(text)
        return *keys, all_at_once(plain.logits(image, keys[1], None, 0))

    *keys, logits = map(np.asarray, of_head(image, text))
    *expected, expected_logits = map(np.asarray, of_model(*(np.asarray(side)[:, :D] for side in (image, text))))
    for key, unit in zip(keys, expected, strict=True):
        np.testing.assert_array_equal(key[:, :D], unit)
    np.testing.assert_allclose(keys[0] @ keys[1].T, expected[0] @ expected[1].T, atol=1e-6)
    np.testing.assert_array_equal(logits, expected_logits)


@each_size
def test_the_prediction_is_the_probit_of_prob_cosine(sizes):
    (image, text), head = outputs(sizes), make(sizes, prediction="probit")
    (mean, variance), (other, spread) = gaussians(head.image_posterior, image), gaussians(head.text_posterior, text)
    tau, expected = float(head.temperature()), np.zeros((len(image), len(text)))
    for n, k in np.ndindex(*expected.shape):
        norms = np.sum(mean[n] ** 2 + variance[n]) * np.sum(other[k] ** 2 + spread[k])
        of_cosine = np.sum((mean[n] ** 2 + variance[n]) * spread[k] + variance[n] * other[k] ** 2) / norms
        logit = mean[n] @ other[k] / np.sqrt(norms) / tau
        expected[n, k] = logit / np.sqrt(1 + np.pi / 8 * of_cosine / tau**2)

    @jax.jit
    def of_head(image, text):
        samples = head.logits(image, head.text_key(text), KEY, 16)
        norms = head.image_noise_norm(image), head.text_noise_norm(text)
        return all_at_once(samples), *norms, head.image_spectrum(image)

    logits, image_norm, text_norm, found_spectrum = map(np.asarray, of_head(image, text))
    assert logits.shape == (*expected.shape[:1], 1, expected.shape[1])
    np.testing.assert_allclose(logits[:, 0], expected, rtol=1e-4)
    # Of unit embeddings.
    norms, other_norms = (np.linalg.norm(g, axis=1) for g in (mean, other))
    np.testing.assert_allclose(image_norm, np.sqrt(variance.sum(axis=1)) / norms, rtol=1e-5)
    np.testing.assert_allclose(text_norm, np.sqrt(spread.sum(axis=1)) / other_norms, rtol=1e-5)
    spectrum = -np.sort(-np.sqrt(variance), axis=1) / norms[:, None]
    np.testing.assert_allclose(found_spectrum, spectrum, rtol=1e-5)


@pytest.mark.slow
def test_variances_are_those_of_embeddings_of_drawn_weights():
    """Weights P and b from N(P, A⁻¹ ⊗ diag B⁻¹), an attention pooling's residual, and the cosines of their products."""
    (image, text), head, random = outputs(), make(), np.random.default_rng(0)
    drawn = []
    for posterior, output in ((head.image_posterior, image), (head.text_posterior, text)):
        g, phi = np.split(np.asarray(output), [D], axis=1)
        phi = np.concatenate([phi, np.ones((B, 1))], axis=1)
        layer = random.normal(size=(phi.shape[1], D))
        residual = g - phi @ layer
        covariance = np.asarray(posterior.input_root[...]) @ np.asarray(posterior.input_root[...]).T
        factor = np.linalg.cholesky(covariance + 1e-9 * np.eye(len(covariance)))
        noise = np.einsum("qp,tpd->tqd", factor, random.normal(size=(20_000, *layer.shape)))
        weights = layer + noise * np.sqrt(np.asarray(posterior.output_variance[...]))
        drawn.append(phi @ weights + residual)
    norms = [np.sqrt(np.mean(np.sum(g**2, axis=2), axis=0)) for g in drawn]
    cosines = np.einsum("tnd,tkd->tnk", *drawn) / norms[0][:, None] / norms[1][None]
    layers = [jax.jit(lambda output: last_layer(output, D))(output) for output in (image, text)]
    mean, variance = jax.jit(lambda: prob_cosine(head.image_posterior(layers[0]), head.text_posterior(layers[1])))()
    np.testing.assert_allclose(mean, cosines.mean(axis=0), atol=0.01)
    np.testing.assert_allclose(variance, cosines.var(axis=0), rtol=0.06)


@pytest.mark.slow
@each_size
def test_samples_of_the_weights_have_the_moments_of_prob_cosine(sizes):
    (image, text), head = outputs(sizes), make(sizes)
    tau = float(head.temperature())
    sides = [
        Gaussians(*map(jnp.asarray, gaussians(posterior, x)))
        for posterior, x in ((head.image_posterior, image), (head.text_posterior, text))
    ]
    mean, variance = (np.asarray(moment) for moment in prob_cosine(*sides))
    logits = drawn(head, image, text_key(head, text)) * tau
    np.testing.assert_allclose(logits.mean(axis=1), mean, atol=0.03)
    np.testing.assert_allclose(logits.var(axis=1), variance, rtol=0.1)


def test_samples_are_of_the_same_weights_for_all_images_and_calls_of_a_key():
    (image, text), head = outputs(), make()
    classes = text_key(head, text)
    draw = jax.jit(lambda image, key: all_at_once(head.logits(image, classes, key, 6)))
    image = np.asarray(image)
    together = np.asarray(draw(np.concatenate([image, image]), KEY))
    np.testing.assert_allclose(together[:4], together[4:], rtol=1e-5)
    # The second half is padding.
    some = draw(np.concatenate([image[2:], 0 * image, 0 * image[2:]]), KEY)
    np.testing.assert_allclose(some[:2], together[2:4], rtol=1e-4)
    assert not np.allclose(draw(np.concatenate([image, image]), jax.random.key(4)), together, rtol=0.1)


def test_the_mean_over_samples_does_not_depend_on_blocks(monkeypatch):
    (image, text), head = outputs(), make()

    def mean(image, text):
        samples = head.logits(image, head.text_key(text), KEY, 6)
        sizes.append(samples.samples_per_block)
        return mean_log_probabilities(samples, jax.nn.log_softmax)

    sizes = []
    expected = jax.jit(mean)(image, text)
    monkeypatch.setattr("lit_het.heads.bayes_vlm._BLOCK", 2 * (10 + 5) * D)
    found = jax.jit(lambda image, text: mean(image, text))(image, text)
    assert sizes[0] >= 6
    assert sizes[1] == 2
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
@each_size
def test_a_name_has_the_variance_of_the_mean_of_its_prompts(sizes):
    head, (_, text) = make(sizes), outputs(sizes)
    prompts = head.text_key(text)
    name = head.mean_text_key(prompts[None])
    np.testing.assert_allclose(jnp.linalg.norm(name[:, :D]), 1, rtol=1e-5)
    # All prompts pass through the same weights.
    q = len(head.text_posterior.input_root[...])
    normals = jnp.asarray(np.random.default_rng(0).normal(size=(20_000, q, D)), jnp.float32)
    layers = [LastLayer(keys[:, :D], keys[:, D:] if keys.shape[1] > D else keys) for keys in (prompts, name)]
    means = head.text_posterior.samples(layers[0], normals).mean(axis=1) / jnp.linalg.norm(prompts[:, :D].mean(axis=0))
    mean, variance = head.text_posterior(layers[1])
    np.testing.assert_allclose(mean[0], means.mean(axis=0), atol=0.02)
    np.testing.assert_allclose(variance[0], means.var(axis=0), rtol=0.05)


def test_a_head_without_a_posterior_has_no_variance():
    head, (image, _) = BayesVLMContrastiveConfig().build(D, nnx.Rngs(0)), outputs((0, 0))
    np.testing.assert_array_equal(jax.jit(head.image_noise_norm)(image), 0)


@pytest.mark.parametrize("prediction", ["samples", "probit"])
def test_predictions_for_rows_of_zeros_are_finite(prediction):
    head, (_, text) = make(prediction=prediction), outputs()
    # Evaluation pads blocks of images with them.
    assert np.isfinite(drawn(head, np.zeros((2, D + 9), np.float32), text_key(head, text), count=1)).all()


@pytest.mark.slow
def test_hessians_cosines_and_probits_are_those_of_the_authors_code():
    found = golden()
    compiled = {"softmax": jax.jit(softmax_hessian), "sigmoid": jax.jit(sigmoid_hessian)}
    more = {"softmax": (), "sigmoid": (found["bias"],)}
    sides = (found["image"], found["text"], np.ones(len(found["image"]), np.float32), found["temperature"])
    for loss, hessian in compiled.items():
        np.testing.assert_allclose(hessian(*sides, *more[loss]), found[f"{loss}_hessian"], rtol=1e-3, atol=1e-3)
    # Of both batches of theirs, with the norms that the projection gives; SigLIP's has a bias.
    for loss, hessian in compiled.items():
        inputs, hessians = np.zeros((5, 5)), np.zeros((D, D))
        for rows in np.split(np.arange(len(found["kfac_image"])), 2):
            output = np.concatenate([found["kfac_image"], found["kfac_activations"]], axis=1)[rows]
            layer = jax.tree.map(np.asarray, jax.jit(lambda output: last_layer(output, D))(output))
            inputs += layer.inputs.T @ layer.inputs
            keys = found["kfac_text"][rows] / np.linalg.norm(found["kfac_text"][rows], axis=1, keepdims=True)
            ones = np.ones(len(rows), np.float32)
            hessians += hessian(layer.outputs, keys, ones, found["temperature"], *more[loss])
        q, root = len(found[f"{loss}_kfac_a"]), np.sqrt(len(found["kfac_image"]))
        np.testing.assert_allclose(inputs[:q, :q] / root, found[f"{loss}_kfac_a"], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(hessians / root, found[f"{loss}_kfac_b"], rtol=1e-3, atol=1e-4)
    gaussian = []
    for side in ("source", "target"):
        a, b = (np.linalg.inv(found[f"{side}_{factor}"]) for factor in "ab")
        phi = found[f"{side}_activations"]
        variance = np.einsum("np,pq,nq->n", phi, a, phi)[:, None] * np.diagonal(b)
        gaussian.append(Gaussians(found[f"{side}_embeddings"], variance.astype(np.float32)))
    mean, variance = map(np.asarray, jax.jit(prob_cosine)(*gaussian))
    mean, variance = mean / found["temperature"], variance / found["temperature"] ** 2
    np.testing.assert_allclose(mean, found["logits_mean"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(variance, found["logits_variance"], rtol=1e-4)
    np.testing.assert_allclose(jax.jit(probit)(mean, variance), found["probit"], rtol=1e-4, atol=1e-5)


def test_the_authors_log_determinant_is_not_that_of_the_kronecker_product():
    found = golden()
    source = {factor: np.asarray(found[f"source_{factor}"]) for factor in "ab"}
    a, b = (np.linalg.slogdet(factor)[1] for factor in source.values())
    p, q = map(len, source.values())
    dense = np.linalg.slogdet(np.kron(source["a"], source["b"]))[1]
    assert dense == pytest.approx(q * a + p * b, rel=1e-4)
    assert float(found["log_determinant"]) == pytest.approx(p * a + q * b, rel=1e-4)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UserError, match="1 must be at least 2"):
        BayesVLMContrastiveConfig(num_negatives=1)
    with pytest.raises(UserError, match=r"0.0 must be positive and finite"):
        BayesVLMContrastiveConfig(pseudo_data_count=0.0)
