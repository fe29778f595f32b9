"""Gaussian embeddings whose variances come from the uncertainty tokens of the towers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

from lit_het.errors import UserError
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from tests.heads.test_contrastive import numpy_unit
from tests.losses.contrastive_cases import mesh_of

B, D, BIAS = 4, 6, -1.5
CONFIG = GaussianContrastiveConfig(initial_bias=BIAS, variances="towers", bottleneck=0.1, inclusion=1e-3)
ENCODER = EncoderConfig(width=16, depth=1, mlp_width=32, num_heads=2)


def make():
    return CONFIG.build(2 * D, nnx.Rngs(0))


def embeddings(b=B):
    """Returns means and log-variances, concatenated."""
    random = np.random.default_rng(0)
    parts = [(random.normal(size=(b, D)), random.normal(-2.0, 0.5, size=(b, D))) for _ in range(2)]
    return [jnp.asarray(np.concatenate(part, axis=1), jnp.float32) for part in parts]


def test_the_logits_and_norms_are_those_of_loops_over_pairs():
    head, (image, text) = make(), embeddings()
    assert set(nnx.to_pure_dict(nnx.state(head))) == {"temperature", "bias"}
    samples = head(image, text, None)
    logits = samples.image @ samples.text.T / samples.temperature + BIAS
    for n in range(B):
        for m in range(B):
            means = numpy_unit(image[n : n + 1, :D])[0] @ numpy_unit(text[m : m + 1, :D])[0]
            variances = np.exp(np.asarray(image)[n, D:]).sum() + np.exp(np.asarray(text)[m, D:]).sum()
            expected = (means - variances / 2) / float(head.temperature()) + BIAS
            assert float(logits[n, m]) == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(head.image_noise_norm(image), np.sqrt(np.exp(image[:, D:]).sum(axis=1)), rtol=1e-5)
    np.testing.assert_allclose(head.image_spectrum(image), -np.sort(-np.exp(image[:, D:] / 2), axis=1), rtol=1e-5)
    np.testing.assert_allclose(head.text_noise_norm(text), np.sqrt(np.exp(text[:, D:]).sum(axis=1)), rtol=1e-5)


def loss_of(graph, form: Any = "dense"):
    def loss(state, image, text):
        head = nnx.merge(graph, state)
        extra = sum(values.mean() for values in head.auxiliary_losses(image, text, None).values())
        return SigmoidLoss(form)(head(image, text, None)) + extra

    return loss


def test_gradients_are_finite_differences():
    graph, state = nnx.split(make())
    image, text = embeddings()
    arguments = jax.tree.map(np.asarray, (nnx.to_pure_dict(state), image, text))
    loss = loss_of(graph)
    check_grads(lambda *tree: loss(*jax.tree.map(jnp.asarray, tree)), arguments, order=1, modes=["rev"], rtol=1e-2)


def test_eight_devices_have_the_loss_and_the_gradient_of_one():
    graph, state = nnx.split(make())
    image, text = embeddings(16)
    expected = jax.value_and_grad(loss_of(graph), argnums=(1, 2))(state, image, text)
    with jax.set_mesh(mesh_of(8)):
        for form in ("gather", "ring"):
            found = jax.jit(jax.value_and_grad(loss_of(graph, form), argnums=(1, 2)))(state, image, text)
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
    with pytest.raises(UserError, match=r"task\.(image|text)_tower\.uncertainty_token = .* need each other"):
        dataclasses.replace(fitting, **change)
