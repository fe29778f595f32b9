"""Monte Carlo dropout: masks against loops in NumPy, their variance against many masks, and devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax
from scipy.stats import binomtest

from lit_het.errors import UserError
from lit_het.heads.mc_dropout import McDropoutContrastiveConfig
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.types import EmbeddingSamples
from tests.heads.references import all_at_once, noise_norms
from tests.heads.test_contrastive import numpy_unit
from tests.losses.contrastive_cases import mesh_of

B, D, K, P = 16, 32, 5, 0.25
KEY = jax.random.key(3)
RANDOM = np.random.default_rng(0)
IMAGE, TEXT = (jnp.asarray(RANDOM.normal(size=(B, D)), jnp.float32) for _ in range(2))


@functools.cache
def make(dropout=P):
    return McDropoutContrastiveConfig(initial_bias=-1.0, dropout=dropout).build(D, nnx.Rngs(0))


def masks_of(samples, side):
    """Returns which entries of unit embeddings were kept."""
    return np.asarray(getattr(samples, side)) != 0


def sampled_logits(head, count):
    classes = jax.jit(head.text_key)(np.asarray(TEXT)[:K])
    drawn = jax.jit(lambda image, classes: all_at_once(head.logits(image, classes, KEY, count)))(IMAGE, classes)
    return np.asarray(drawn, np.float64), np.asarray(classes, np.float64)


def test_training_compares_the_unit_vectors_of_what_was_kept():
    samples, _ = embedded(P)
    assert isinstance(samples, EmbeddingSamples)
    assert samples.image_queries is samples.text_queries is None
    for side, embedding in (("image", IMAGE), ("text", TEXT)):
        kept = masks_of(samples, side)
        np.testing.assert_allclose(getattr(samples, side), numpy_unit(np.where(kept, embedding, 0)), rtol=1e-5)
        assert binomtest(int(kept.sum()), kept.size, 1 - P).pvalue > 0.01
        assert len(np.unique(kept, axis=0)) == B  # a mask for each row
    assert (masks_of(samples, "image") != masks_of(samples, "text")).any()
    again, _ = embedded.__wrapped__(P)
    np.testing.assert_array_equal(again.image, samples.image)


def test_without_a_key_or_without_dropout_nothing_is_dropped():
    expected = [numpy_unit(IMAGE), numpy_unit(TEXT)]
    for samples in (embedded(P)[1], embedded(0.0)[0]):
        np.testing.assert_allclose([samples.image, samples.text], expected, rtol=1e-5)
    np.testing.assert_allclose(noise_norms(make(0.0), IMAGE, TEXT), 0, atol=1e-6)


@functools.cache
def embedded(dropout):
    """Returns the head's samples with and without a key."""
    head = make(dropout)
    return jax.jit(lambda image, text: (head(image, text, KEY), head(image, text, None)))(IMAGE, TEXT)


@pytest.mark.parametrize("loss", [SoftmaxLoss("dense"), SigmoidLoss("dense")], ids=["softmax", "sigmoid"])
def test_the_loss_and_its_gradient_are_those_of_embeddings_with_the_same_masks(loss):
    """The gradient along a direction, by differences of the NumPy loss."""
    head, random = make(), np.random.default_rng(1)
    images = np.asarray(IMAGE, np.float64), np.asarray(TEXT, np.float64)
    kept = [masks_of(embedded(P)[0], side) for side in ("image", "text")]

    def reference(*embeddings):
        image, text = (numpy_unit(np.where(mask, x, 0)) for mask, x in zip(kept, embeddings, strict=True))
        logits = image @ text.T / float(head.temperature()) - 1.0
        if isinstance(loss, SoftmaxLoss):
            return -(np.diag(log_softmax(logits, axis=1)) + np.diag(log_softmax(logits, axis=0))).mean() / 2
        return np.sum(np.log1p(np.exp(-(2 * np.eye(B) - 1) * logits))) / B

    value_and_grad = jax.jit(jax.value_and_grad(lambda image, text: loss(head(image, text, KEY)), argnums=(0, 1)))
    value, gradients = value_and_grad(IMAGE, TEXT)
    np.testing.assert_allclose(value, reference(*images), rtol=1e-5)
    directions = [random.normal(size=(B, D)) for _ in range(2)]
    ends = [reference(*(x + s * d for x, d in zip(images, directions, strict=True))) for s in (1e-5, -1e-5)]
    slope = sum(np.vdot(gradient, direction) for gradient, direction in zip(gradients, directions, strict=True))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / 2e-5, rtol=1e-3)
    for gradient, mask in zip(gradients, kept, strict=True):
        np.testing.assert_array_equal(np.asarray(gradient)[~mask], 0)


def test_noise_samples_are_logits_of_masked_images():
    head, count = make(), 4000
    drawn, classes = sampled_logits(head, count)
    masks = RANDOM.random((count, 1, D)) >= P
    z = np.where(masks, np.asarray(IMAGE, np.float64), 0)
    expected = z / np.linalg.norm(z, axis=2, keepdims=True) @ classes.T / float(head.temperature())
    error = np.sqrt(drawn.var(axis=1) / count + expected.var(axis=0) / count)
    np.testing.assert_array_less(np.abs(drawn.mean(axis=1) - expected.mean(axis=0)), 5 * error)
    np.testing.assert_allclose(drawn.std(axis=1), expected.std(axis=0), rtol=0.08)


def test_the_noise_norm_is_the_root_of_the_summed_variance_over_masks():
    head = make()
    masks = RANDOM.random((4000, 1, D)) >= P
    norms = noise_norms(head, IMAGE, TEXT)
    for found, embedding in zip(norms, (IMAGE, TEXT), strict=True):
        z = np.where(masks, np.asarray(embedding), 0)
        z /= np.linalg.norm(z, axis=2, keepdims=True)
        # Of sixteen masks.
        np.testing.assert_allclose(found, np.sqrt(z.var(axis=0).sum(axis=1)), rtol=0.25)
        np.testing.assert_allclose(np.mean(found), np.sqrt(z.var(axis=0).sum(axis=1)).mean(), rtol=0.1)
    spectrum = np.asarray(jax.jit(head.image_spectrum)(IMAGE))
    assert (np.diff(spectrum, axis=1) <= 0).all()
    np.testing.assert_allclose(np.linalg.norm(spectrum, axis=1), norms[0], rtol=1e-4)
    # A row does not depend on others.
    changed = np.where(np.arange(B)[:, None] == 3, IMAGE, np.float32(1))
    np.testing.assert_allclose(noise_norms(head, changed, TEXT)[0][3], norms[0][3], rtol=1e-5)


def test_the_variance_over_sixteen_masks_is_unbiased():
    """Over many entries the estimate hardly varies."""
    embedding = RANDOM.normal(size=(1, 8192)).astype(np.float32)
    kept = RANDOM.random((400, 8192)) >= P
    z = numpy_unit(np.where(kept, embedding, 0))
    expected = np.sum((z - z.mean(axis=0)) ** 2) / 399
    head = McDropoutContrastiveConfig(dropout=P).build(8192, nnx.Rngs(0))
    np.testing.assert_allclose(jax.jit(head.image_noise_norm)(embedding) ** 2, expected, rtol=0.02)


def test_a_row_of_which_everything_would_be_dropped_is_kept():
    config = McDropoutContrastiveConfig(dropout=0.9)
    head, (image, text) = config.build(2, nnx.Rngs(0)), (np.asarray(IMAGE)[:, :2], np.asarray(TEXT)[:, :2])

    def total(image, text):
        samples = head(image, text, KEY)
        return SigmoidLoss()(samples), samples

    gradients, samples = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(image, text)
    np.testing.assert_allclose(np.linalg.norm(samples.image, axis=1), 1, rtol=1e-5)
    assert masks_of(samples, "image").all(axis=1).any()
    assert all(np.isfinite(gradient).all() for gradient in gradients)


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_equal_one():
    head = make()

    def both(image, text):
        return jax.value_and_grad(lambda image, text: SigmoidLoss()(head(image, text, KEY)), (0, 1))(image, text)

    expected = jax.jit(both)(IMAGE, TEXT)
    with jax.set_mesh(mesh_of(8)):
        found = jax.jit(both)(IMAGE, TEXT)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UserError, match=r"dropout = 1.0 must be below 1"):
        McDropoutContrastiveConfig(dropout=1.0)
    with pytest.raises(UserError, match=r"dropout = -0.1 must be at least 0"):
        McDropoutContrastiveConfig(dropout=-0.1)
