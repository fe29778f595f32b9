"""Gaussian embeddings: closed forms against samples and integrals, the loss against loops, and devices."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from scipy.integrate import quad
from scipy.stats import norm

from lit_het.errors import UserError
from lit_het.heads import gaussian
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from tests.heads.references import all_at_once
from tests.heads.test_contrastive import embeddings, numpy_unit
from tests.losses.contrastive_cases import mesh_of

B, D = 4, 6
BIAS = -1.5


def make(**changes) -> Any:
    """Returns a head whose variances differ between examples and dimensions."""
    config = GaussianContrastiveConfig(initial_bias=BIAS, initial_noise_norm=0.8, **changes)
    head: Any = config.build(D, nnx.Rngs(0))
    random = np.random.default_rng(1)
    for layer in (head.image_log_variance, head.text_log_variance):
        layer.kernel[...] = jnp.asarray(random.normal(size=(D, D)), jnp.float32)
    return head


def gaussians(head, image, text):
    """Returns means and standard deviations of both sides, in NumPy."""
    found = []
    for x, layer in ((image, head.image_log_variance), (text, head.text_log_variance)):
        mean = numpy_unit(x)
        log_variance = mean @ np.asarray(layer.kernel[...]) + np.asarray(layer.bias[...])
        found += [mean, np.exp(log_variance / 2)]
    return found


def reference_logits(head, image, text):
    """``(μ · ν - |σ|²/2 - |ς|²/2) / τ + bias`` by loops."""
    mean, deviation, text_mean, text_deviation = gaussians(head, image, text)
    logits = np.zeros((len(mean), len(text_mean)))
    for n, m in itertools.product(*map(range, logits.shape)):
        variances = np.sum(deviation[n] ** 2) + np.sum(text_deviation[m] ** 2)
        logits[n, m] = (mean[n] @ text_mean[m] - variances / 2) / float(head.temperature())
    return logits + BIAS


def test_products_of_keys_are_the_mean_squared_distance_of_samples():
    head, (image, text) = make(), embeddings()
    mean, deviation, text_mean, text_deviation = gaussians(head, image, text)
    samples = np.random.default_rng(0).normal(size=(2, 100_000, B, D))
    distances = np.sum((mean + deviation * samples[0] - text_mean - text_deviation * samples[1]) ** 2, axis=-1)
    products = np.sum(jax.jit(lambda *x: head.image_key(x[0]) * head.text_key(x[1]))(image, text), axis=1)
    error = distances.std(axis=0) / np.sqrt(len(distances))
    # E |z - w|² = 2 - 2 key · key for unit means.
    np.testing.assert_array_less(np.abs(distances.mean(axis=0) - (2 - 2 * products)), 4 * error)


def test_the_logits_are_those_of_pcme_plus_plus_and_prolip_and_the_sigmoid_loss_is_their_pairwise_loss():
    head, (image, text) = make(), embeddings()
    expected = reference_logits(head, image, text)
    samples = jax.tree.map(np.asarray, jax.jit(lambda *x: head(*x, jax.random.key(0)))(image, text))
    assert samples.image_queries is None
    logits = samples.image @ samples.text.T / samples.temperature + samples.bias
    np.testing.assert_allclose(logits, expected, rtol=1e-5)
    # PCME++ writes -a E |z - w|² + b: the same function with a = 1/(2τ) and b = 1/τ + bias.
    mean, deviation, text_mean, text_deviation = gaussians(head, image, text)
    distance = np.sum((mean[:, None] - text_mean[None]) ** 2, axis=-1)
    distance = distance + np.sum(deviation**2, axis=1)[:, None] + np.sum(text_deviation**2, axis=1)[None]
    tau = float(head.temperature())
    np.testing.assert_allclose(-distance / (2 * tau) + 1 / tau + BIAS, expected, rtol=1e-5)
    loss = np.sum(np.log1p(np.exp(-(2 * np.eye(B) - 1) * expected))) / B
    assert jax.jit(SigmoidLoss("dense"))(samples) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("loss", [SigmoidLoss("dense"), SoftmaxLoss("dense")], ids=["sigmoid", "softmax"])
def test_gradients_are_finite_differences(loss):
    graph, state = nnx.split(make(bottleneck=0.1, inclusion=1e-3))

    @jax.jit
    def total(state, image, text):
        head = nnx.merge(graph, state)
        extra = sum(values.mean() for values in head.auxiliary_losses(image, text, None).values())
        return loss(head(image, text, None)) + extra

    check_grads(total, jax.tree.map(np.asarray, (state, *embeddings())), order=1, modes=["rev"], rtol=1e-2)


def test_noisy_logits_scatter_around_the_mean_logits_with_the_variance_of_the_image():
    head, (image, text) = make(), embeddings()

    @jax.jit
    def of_pairs(image, text):
        classes = head.text_key(text)
        logits = [head.logits(image, classes, key, count) for key, count in ((jax.random.key(0), 4000), (None, 0))]
        return *map(all_at_once, logits), head.image_noise_norm(image), head.image_spectrum(image)

    drawn, mean, noise_norm, spectrum = map(np.asarray, of_pairs(image, text))
    mean = mean[:, 0]
    _, deviation, text_mean, _ = gaussians(head, image, text)
    expected = np.sqrt(deviation**2 @ (text_mean**2).T) / float(head.temperature())
    np.testing.assert_allclose(drawn.std(axis=1), expected, rtol=0.05)
    np.testing.assert_array_less(np.abs(drawn.mean(axis=1) - mean), 5 * expected / np.sqrt(4000))
    np.testing.assert_allclose(noise_norm, np.linalg.norm(deviation, axis=1), rtol=1e-5)
    np.testing.assert_allclose(spectrum, -np.sort(-deviation, axis=1), rtol=1e-5)


def test_the_initial_noise_has_the_configured_norm():
    head = GaussianContrastiveConfig(initial_noise_norm=0.3).build(D, nnx.Rngs(0))
    image, text = embeddings()
    np.testing.assert_allclose(head.image_noise_norm(image), 0.3, rtol=1e-5)
    np.testing.assert_allclose(head.text_noise_norm(text), 0.3, rtol=1e-5)


def test_the_key_of_a_name_is_the_unit_mean_of_its_prompts_with_their_mean_variance():
    head, (_, text) = make(), embeddings()
    _, _, mean, deviation = gaussians(head, text, text)
    keys = head.text_key(text).reshape(2, 2, -1)
    expected_mean = numpy_unit(mean.reshape(2, 2, D).mean(axis=1))
    expected_half = np.sum(deviation**2, axis=1).reshape(2, 2).mean(axis=1) / 2
    found = np.asarray(head.mean_text_key(keys))
    np.testing.assert_allclose(found[:, :D], expected_mean, rtol=1e-5)
    np.testing.assert_allclose(found[:, D], 1)
    np.testing.assert_allclose(found[:, D + 1], -expected_half, rtol=1e-5)


def test_the_bottleneck_is_the_divergence_from_a_standard_normal():
    mean, log_variance = np.array([[0.3, -1.0]]), np.array([[-2.0, 0.5]])

    def integrand(x, m, s):
        return norm.pdf(x, m, s) * (norm.logpdf(x, m, s) - norm.logpdf(x))

    expected = np.mean(
        [
            quad(integrand, m - 10 * s, m + 10 * s, args=(m, s))[0]
            for m, s in zip(mean[0], np.exp(log_variance[0] / 2), strict=True)
        ]
    )
    found = jax.jit(gaussian.divergence)(jnp.asarray(mean, jnp.float32), jnp.asarray(log_variance, jnp.float32))
    np.testing.assert_allclose(found, [expected], rtol=1e-5)


@pytest.mark.parametrize(
    ("first", "second"), [((0.0, 0.2), (0.1, 1.0)), ((0.5, 1.5), (-0.5, 0.4)), ((0.0, 1.0), (0.0, 1.0))]
)
def test_inclusion_compares_the_integrals_of_both_products(first, second):
    def overlap(p, q):
        return np.log(quad(lambda x: norm.pdf(x, *p) ** 2 * norm.pdf(x, *q), -15, 15, limit=200)[0])

    # The test multiplies variances by exp(10).
    arguments = [
        jnp.asarray([[value]], jnp.float32)
        for mean, deviation in (first, second)
        for value in (mean, 2 * np.log(deviation) - 10)
    ]
    expected = overlap(first, second) - overlap(second, first)
    np.testing.assert_allclose(jax.jit(gaussian.inclusion)(*arguments), [[expected]], rtol=1e-4, atol=1e-5)


def test_weights_of_zero_leave_losses_out():
    image, text = embeddings()
    assert make(bottleneck=0.0, inclusion=0.0).auxiliary_losses(image, text, None) == {}
    assert set(make().auxiliary_losses(image, text, None)) == {"bottleneck_loss", "inclusion_loss"}


@pytest.mark.devices
@pytest.mark.slow
def test_losses_and_gradients_are_equal_on_eight_devices():
    graph, state = nnx.split(make())
    image, text = embeddings(16)

    def loss(form):
        def value(state, image, text):
            return SigmoidLoss(form)(nnx.merge(graph, state)(image, text, None))

        return jax.jit(jax.value_and_grad(value))

    expected = loss("dense")(state, image, text)
    with jax.set_mesh(mesh_of(8)):
        for form in ("gather", "ring"):
            found = loss(form)(state, image, text)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(UserError, match="bottleneck = -1"):
        GaussianContrastiveConfig(bottleneck=-1.0)
    with pytest.raises(UserError, match=r"initial_noise_norm = 0.0 must be positive"):
        GaussianContrastiveConfig(initial_noise_norm=0.0)


# Variances from the uncertainty tokens of the towers.

CONFIG = GaussianContrastiveConfig(initial_bias=BIAS, variances="towers", bottleneck=0.1, inclusion=1e-3)
ENCODER = EncoderConfig(width=16, depth=1, mlp_width=32, num_heads=2)


def head_of_towers():
    return CONFIG.build(2 * D, nnx.Rngs(0))


def tower_outputs(b=B):
    """Returns means and log-variances, concatenated."""
    random = np.random.default_rng(0)
    parts = [(random.normal(size=(b, D)), random.normal(-2.0, 0.5, size=(b, D))) for _ in range(2)]
    return [jnp.asarray(np.concatenate(part, axis=1), jnp.float32) for part in parts]


def test_the_logits_and_norms_are_those_of_loops_over_pairs():
    head, (image, text) = head_of_towers(), tower_outputs()
    assert set(nnx.to_pure_dict(nnx.state(head))) == {"temperature", "bias"}

    @jax.jit
    def of_pairs(image, text):
        norms = head.image_noise_norm(image), head.text_noise_norm(text)
        return head(image, text, None), *norms, head.image_spectrum(image)

    samples, image_norm, text_norm, spectrum = jax.tree.map(np.asarray, of_pairs(image, text))
    logits = samples.image @ samples.text.T / samples.temperature + BIAS
    image, text = map(np.asarray, (image, text))
    for n, m in np.ndindex(B, B):
        variances = np.exp(image[n, D:]).sum() + np.exp(text[m, D:]).sum()
        cosine = numpy_unit(image[n, :D]) @ numpy_unit(text[m, :D])
        assert logits[n, m] == pytest.approx((cosine - variances / 2) / float(head.temperature()) + BIAS, rel=1e-4)
    np.testing.assert_allclose(image_norm, np.sqrt(np.exp(image[:, D:]).sum(axis=1)), rtol=1e-5)
    np.testing.assert_allclose(spectrum, -np.sort(-np.exp(image[:, D:] / 2), axis=1), rtol=1e-5)
    np.testing.assert_allclose(text_norm, np.sqrt(np.exp(text[:, D:]).sum(axis=1)), rtol=1e-5)


def loss_of(graph, form: Any = "dense"):
    def loss(state, image, text):
        head = nnx.merge(graph, state)
        extra = sum(values.mean() for values in head.auxiliary_losses(image, text, None).values())
        return SigmoidLoss(form)(head(image, text, None)) + extra

    return loss


def test_gradients_of_the_variances_of_towers_are_finite_differences():
    graph, state = nnx.split(head_of_towers())
    arguments = jax.tree.map(np.asarray, (nnx.to_pure_dict(state), *tower_outputs()))
    check_grads(jax.jit(loss_of(graph)), arguments, order=1, modes=["rev"], rtol=1e-2)


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_have_the_loss_and_the_gradient_of_one_with_variances_of_towers():
    graph, state = nnx.split(head_of_towers())
    arguments = state, *tower_outputs(16)
    expected = jax.jit(jax.value_and_grad(loss_of(graph), argnums=(1, 2)))(*arguments)
    with jax.set_mesh(mesh_of(8)):
        found = jax.jit(jax.value_and_grad(loss_of(graph, "ring"), argnums=(1, 2)))(*arguments)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), found, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"head": GaussianContrastiveConfig()},
        {"head": DeterministicContrastiveConfig()},
        {"image_tower": ViTConfig(8, 4, ENCODER, pooling="mean", projection_size=12)},
        {"text_tower": TextConfig(20, 4, 12, ENCODER)},
    ],
)
def test_tokens_of_both_towers_and_the_head_need_each_other(change):
    image_tower = ViTConfig(8, 4, ENCODER, pooling="mean", projection_size=6, uncertainty_token=True)
    text_tower = TextConfig(20, 4, 12, ENCODER, uncertainty_token=True)
    fitting = ContrastiveConfig(image_tower, text_tower, CONFIG, locked=())
    with pytest.raises(
        UserError, match=r"task\.(image|text)_tower(\.uncertainty_token does not fit task.head| has none)"
    ):
        dataclasses.replace(fitting, **change)
