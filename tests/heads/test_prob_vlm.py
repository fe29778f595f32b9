"""ProbVLM: the generalised Gaussian against scipy and samples, its adapter, and both kinds of variance."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.test_util import check_grads
from scipy.stats import gennorm, norm

from lit_het.errors import UserError
from lit_het.heads import prob_vlm
from lit_het.heads.prob_vlm import GeneralizedGaussian, ProbVLMContrastiveConfig
from tests.heads.references import all_at_once
from tests.heads.test_contrastive import B, D, embeddings, numpy_unit

KEY = jax.random.key(3)


def make(*, perturbed=True, **changes) -> Any:
    """Returns a head, by default with output layers that depend on the embedding."""
    head = ProbVLMContrastiveConfig(**{"hidden_size": 16, **changes}).build(D, nnx.Rngs(0))
    random = np.random.default_rng(0)
    for adapter in (head.image_adapter, head.text_adapter) if perturbed else ():
        for layer in (adapter.mean.second, adapter.log_scale.second, adapter.log_shape.second):
            layer.kernel[...] = jnp.asarray(0.5 * random.normal(size=layer.kernel[...].shape), jnp.float32)
    return head


def density(b=3, d=5, seed=0):
    random = np.random.default_rng(seed)
    mean, scale, shape = random.normal(size=(b, d)), random.uniform(0.3, 2, (b, d)), random.uniform(0.5, 4, (b, d))
    return GeneralizedGaussian(*(jnp.asarray(x, jnp.float32) for x in (mean, scale, shape)))


def test_the_likelihood_is_that_of_a_generalised_normal_distribution():
    found = density()
    x = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    mean, scale, shape = map(np.asarray, found)
    expected = -gennorm.logpdf(x, shape, loc=mean, scale=scale).mean(axis=1)
    likelihood = jax.jit(lambda found: found.negative_log_likelihood(jnp.asarray(x)))
    np.testing.assert_allclose(likelihood(found), expected, rtol=1e-5)
    normal = GeneralizedGaussian(found.mean, found.scale, jnp.full_like(found.shape, 2.0))
    expected = -norm.logpdf(x, mean, scale / np.sqrt(2)).mean(axis=1)
    np.testing.assert_allclose(likelihood(normal), expected, rtol=1e-5)


def test_the_variance_is_that_of_samples():
    found = density()
    mean, scale, shape = map(np.asarray, found)
    variance = jax.jit(lambda found: found.variance())(found)
    np.testing.assert_allclose(variance, gennorm.var(shape, scale=scale), rtol=1e-4)
    drawn: Any = gennorm.rvs(shape, loc=mean, scale=scale, size=(100_000, 3, 5), random_state=0)
    np.testing.assert_allclose(variance, drawn.var(axis=0), rtol=0.1)


def test_gradients_of_the_likelihood_are_finite_differences_and_finite_at_the_mean():
    x = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)

    @jax.jit
    def total(*parts):
        return GeneralizedGaussian(*parts).negative_log_likelihood(jnp.asarray(x)).sum()

    check_grads(total, tuple(map(np.asarray, density())), order=1, modes=["rev"], rtol=1e-2, atol=1e-2)
    at_mean = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(jnp.asarray(x), *density()[1:])
    assert all(np.isfinite(gradient).all() for gradient in at_mean)


def test_embeddings_stay_and_the_first_noise_is_normal_with_the_configured_norm():
    head, (image, text) = make(perturbed=False, dropout=0.5), embeddings()

    @jax.jit
    def of_images(image, text):
        samples = head(image, text, KEY)
        return samples, head.image_noise_norm(image), head.image_adapter(samples.image)

    samples, noise_norm, found = of_images(image, text)
    assert samples.image_queries is None
    np.testing.assert_allclose(samples.image, numpy_unit(image), rtol=1e-5)
    np.testing.assert_allclose(noise_norm, 1.0, rtol=1e-4)
    np.testing.assert_allclose(found.shape, 2, rtol=1e-5)
    np.testing.assert_array_equal(found.mean, 0)


def test_the_loss_is_the_likelihood_of_both_embeddings_and_of_their_partners():
    head, (image, text) = make(cross_modal=0.25), embeddings()
    found = jax.jit(lambda *x: head.auxiliary_losses(*x, None)["likelihood_loss"])(image, text)
    expected = np.zeros(B)
    for adapter, x, other in ((head.image_adapter, image, text), (head.text_adapter, text, image)):
        mean, scale, shape = map(np.asarray, jax.jit(adapter)(numpy_unit(x)))
        for weight, target in ((1.0, x), (0.25, other)):
            expected -= weight * gennorm.logpdf(numpy_unit(target), shape, loc=mean, scale=scale).mean(axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_extreme_scales_and_shapes_have_finite_losses_and_gradients():
    head, (image, text) = make(perturbed=False), embeddings()
    graph = nnx.split(head)[0]

    @jax.jit
    def found(state):
        def loss(state):
            return nnx.merge(graph, state).auxiliary_losses(image, text, None)["likelihood_loss"].mean()

        return jax.value_and_grad(loss)(state), nnx.merge(graph, state).image_noise_norm(image)

    for log_scale, log_shape in itertools.product([-90.0, 90.0], repeat=2):
        for adapter in (head.image_adapter, head.text_adapter):
            adapter.log_scale.second.bias[...] = jnp.full(D, log_scale)
            adapter.log_shape.second.bias[...] = jnp.full(D, log_shape)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(found(nnx.state(head))))


def test_the_loss_of_the_adapter_moves_no_embedding():
    head = make()

    def total(image, text):
        return head.auxiliary_losses(image, text, KEY)["likelihood_loss"].sum()

    for gradient in jax.jit(jax.grad(total, argnums=(0, 1)))(*embeddings()):
        np.testing.assert_array_equal(gradient, 0)


def test_without_dropout_nothing_is_epistemic_and_rows_do_not_depend_on_others():
    image = np.asarray(embeddings()[0])

    def variances(adapter):
        return jax.jit(lambda image: prob_vlm.variances(adapter, image))

    aleatoric, epistemic = map(np.asarray, variances(make(dropout=0.0).image_adapter)(image))
    np.testing.assert_allclose(epistemic, 0, atol=1e-12)
    assert (aleatoric > 0).all()
    found = variances(make(dropout=0.3).image_adapter)
    aleatoric, epistemic = map(np.asarray, found(image))
    assert (epistemic > 0).all()
    changed = map(np.asarray, found(np.where(np.arange(B)[:, None] == 1, image, np.float32(1))))
    for all_rows, alone, rtol in zip((aleatoric, epistemic), changed, (1e-5, 1e-4), strict=True):
        np.testing.assert_allclose(alone[1], all_rows[1], rtol=rtol)


def test_the_epistemic_variance_is_unbiased(monkeypatch):
    adapter, (image, _) = make(dropout=0.3).image_adapter, embeddings()
    groups = np.asarray(adapter.masks(KEY, 4000)).reshape(500, 8, -1)

    def epistemic(masks):
        monkeypatch.setattr(prob_vlm.Adapter, "masks", lambda *_: masks)
        return prob_vlm.variances(adapter, image)[1]

    found = jax.jit(jax.vmap(epistemic))(groups)
    each = jax.jit(jax.vmap(lambda mask: adapter(jnp.asarray(numpy_unit(image)), mask[None]).mean))(
        groups.reshape(4000, -1)
    )
    found, everything = np.asarray(found, np.float64), np.asarray(each, np.float64)
    means = everything[:8]
    np.testing.assert_allclose(found[0], np.sum((means - means.mean(axis=0)) ** 2, axis=0) / 7, rtol=1e-4)
    np.testing.assert_allclose(found.mean(axis=0).sum(), everything.var(axis=0).sum(), rtol=0.02)


def test_noisy_logits_scatter_with_both_variances():
    head, (image, text) = make(dropout=0.3), embeddings()
    classes, tau = head.text_key(text), float(head.temperature())

    @jax.jit
    def of_images(image):
        logits = all_at_once(head.logits(image, classes, KEY, 4000))
        variances = prob_vlm.variances(head.image_adapter, image)
        return logits, *variances, head.image_noise_norm(image), head.image_spectrum(image)

    drawn, aleatoric, epistemic, noise_norm, spectrum = map(np.asarray, of_images(image))
    both = aleatoric + epistemic
    expected = np.sqrt(both @ (np.asarray(classes) ** 2).T) / tau
    np.testing.assert_allclose(drawn.std(axis=1), expected, rtol=0.05)
    mean = numpy_unit(image) @ np.asarray(classes).T / tau
    np.testing.assert_array_less(np.abs(drawn.mean(axis=1) - mean), 5 * expected / np.sqrt(4000))
    np.testing.assert_allclose(noise_norm, np.sqrt(both.sum(axis=1)), rtol=1e-5)
    np.testing.assert_allclose(spectrum, -np.sort(-np.sqrt(both), axis=1), rtol=1e-5)


@pytest.mark.slow
def test_it_learns_which_images_have_uncertain_captions():
    """Captions of images with a positive first entry scatter ten times as far as those of others."""
    random = np.random.default_rng(0)
    image = numpy_unit(random.normal(size=(512, D)))
    spread = np.where(image[:, :1] > 0, 0.3, 0.03)
    text = image + spread * random.normal(size=image.shape)
    pairs = jnp.asarray(image, jnp.float32), jnp.asarray(text, jnp.float32)
    graph, state = nnx.split(make(perturbed=False, cross_modal=1.0, dropout=0.05))
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(state, moments, key):
        def loss(state):
            return nnx.merge(graph, state).auxiliary_losses(*pairs, key)["likelihood_loss"].mean()

        updates, moments = optimizer.update(jax.grad(loss)(state), moments)
        return optax.apply_updates(state, updates), moments

    moments = optimizer.init(state)
    for number in range(300):
        state, moments = step(state, moments, jax.random.key(number))
    norms = np.asarray(nnx.merge(graph, state).image_noise_norm(pairs[0]))
    assert norms[image[:, 0] > 0.1].mean() > 2 * norms[image[:, 0] < -0.1].mean()


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UserError, match=r"dropout = 1.0 must be below 1"):
        ProbVLMContrastiveConfig(dropout=1.0)
    with pytest.raises(UserError, match="hidden_size = 0"):
        ProbVLMContrastiveConfig(hidden_size=0)
    with pytest.raises(UserError, match="initial_noise_norm"):
        ProbVLMContrastiveConfig(initial_noise_norm=float("inf"))
