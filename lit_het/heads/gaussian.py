"""Gaussian embeddings of images and texts, compared by the closed-form sampled distance (PCME++, ProLIP).

An image is N(μ, diag σ²) and a text N(ν, diag ς²), with unit means. The mean squared distance of two samples is
``E |z - w|² = |μ - ν|² + |σ|² + |ς|²`` (PCME++ Eq. 1), and the logit is ``-E |z - w|² / (2τ) + 1/τ + bias``, that is
``(μ · ν - |σ|²/2 - |ς|²/2) / τ + bias`` (as ProLIP writes it). It is an inner product of longer keys, ``[μ, -|σ|²/2,
1]`` and ``[ν, 1, -|ς|²/2]``: every contrastive loss takes them as they are.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from lit_het.heads.base import ContrastiveHead, unit
from lit_het.heads.contrastive_config import GaussianContrastiveConfig
from lit_het.heads.covariance import Noise

# The log of a variance stays within these limits, so that no power of e overflows.
_LIMIT = 20.0
# The inclusion test multiplies variances by exp(10) and its logits by 1000, as the authors' code does: distances of
# means would outweigh the variances otherwise (docs/paper_map.md, 62).
_INCLUSION_VARIANCE, _INCLUSION_LOGIT = 10.0, 1000.0


class GaussianContrastive(ContrastiveHead):
    """The head of a `GaussianContrastiveConfig`; its keys have two entries more than the embeddings.

    So a sample of a logit is ``((μ + σ ξ) · ν - |σ|²/2 - |ς|²/2) / τ``.
    """

    def __init__(self, config: GaussianContrastiveConfig, embedding_size: int, rngs: nnx.Rngs):
        super().__init__(config.temperature, config.initial_bias)
        self.config = config
        bias_init = nnx.initializers.constant(2 * math.log(config.initial_noise_norm) - math.log(embedding_size))

        def log_variance() -> nnx.Linear | None:
            if config.variances == "towers":
                return None
            # A kernel of zeros: at first all examples are equally uncertain.
            return nnx.Linear(
                embedding_size, embedding_size, kernel_init=nnx.initializers.zeros, bias_init=bias_init, rngs=rngs
            )

        self.image_log_variance, self.text_log_variance = log_variance(), log_variance()

    def image_key(self, image: Float[Array, "b d"]) -> Float[Array, "b d_plus_two"]:
        """Returns ``[μ, -|σ|²/2, 1]``."""
        mean, log_variance = self._gaussian(image, self.image_log_variance)
        half = _noise(log_variance).trace()[:, None] / 2
        return jnp.concatenate([mean, -half, jnp.ones_like(half)], axis=1)

    def text_key(self, text: Float[Array, "b d"]) -> Float[Array, "b d_plus_two"]:
        """Returns ``[ν, 1, -|ς|²/2]``."""
        mean, log_variance = self._gaussian(text, self.text_log_variance)
        half = _noise(log_variance).trace()[:, None] / 2
        return jnp.concatenate([mean, jnp.ones_like(half), -half], axis=1)

    def mean_text_key(self, keys: Float[Array, "k t d_plus_two"]) -> Float[Array, "k d_plus_two"]:
        """Returns the key of each name from those of its prompts: the unit mean of ν, and the mean of |ς|²."""
        mean = keys.mean(axis=1)
        return jnp.concatenate([unit(mean[:, :-2]), mean[:, -2:]], axis=1)

    def auxiliary_losses(
        self, image: Float[Array, "b d"], text: Float[Array, "b d"], key: Key[Array, ""] | None
    ) -> dict[str, Float[Array, " b"]]:
        """Returns the weighted bottleneck and inclusion losses of each example; those of weight 0 are left out."""
        sides = self._gaussian(image, self.image_log_variance), self._gaussian(text, self.text_log_variance)
        found = {}
        if self.config.bottleneck:
            found["bottleneck_loss"] = self.config.bottleneck * sum(divergence(*side) for side in sides)
        if self.config.inclusion:
            found["inclusion_loss"] = self.config.inclusion * inclusion_loss(*sides[0], *sides[1])
        return found

    def masked_inclusion(
        self,
        image: Float[Array, "b d"],
        text: Float[Array, "b d"],
        masked_image: Float[Array, "b d"],
        masked_text: Float[Array, "b d"],
    ) -> Float[Array, " b"]:
        """Returns the inclusion losses of images in masked images, plus those of texts in masked texts (ProLIP)."""
        sides = (image, masked_image, self.image_log_variance), (text, masked_text, self.text_log_variance)
        return sum(
            (
                inclusion_loss(*self._gaussian(whole, layer), *self._gaussian(part, layer))
                for whole, part, layer in sides
            ),
            start=jnp.zeros(len(image)),
        )

    def image_noise(self, image: Float[Array, "b d"]) -> Noise:
        """Returns σ."""
        return _noise(self._gaussian(image, self.image_log_variance)[1])

    def text_noise(self, text: Float[Array, "b d"]) -> Noise:
        """Returns ς."""
        return _noise(self._gaussian(text, self.text_log_variance)[1])

    def _gaussian(
        self, embedding: Float[Array, "b _"], layer: nnx.Linear | None
    ) -> tuple[Float[Array, "b d"], Float[Array, "b d"]]:
        """Returns the unit mean and log σ²."""
        if layer is None:
            size = embedding.shape[1] // 2
            return unit(embedding[:, :size]), jnp.clip(embedding[:, size:], -_LIMIT, _LIMIT)
        mean = unit(embedding)
        return mean, jnp.clip(layer(mean), -_LIMIT, _LIMIT)


def _noise(log_variance: Float[Array, "b d"]) -> Noise:
    return Noise.diagonal(jnp.exp(log_variance / 2))


def divergence(mean: Float[Array, "b d"], log_variance: Float[Array, "b d"]) -> Float[Array, " b"]:
    """Returns ``KL(N(μ, σ²) | N(0, 1))``, the mean over dimensions."""
    return jnp.mean(jnp.exp(log_variance) + mean**2 - 1 - log_variance, axis=1) / 2


def inclusion(
    mean: Float[Array, "b d"],
    log_variance: Float[Array, "b d"],
    other_mean: Float[Array, "b d"],
    other_log_variance: Float[Array, "b d"],
) -> Float[Array, "b d"]:
    """Returns ``log ∫ p² q - log ∫ p q²`` in every dimension, positive where p is inside q (ProLIP).

    For Gaussians ``log ∫ p² q = -log σ - log(σ² + 2ς²)/2 - (μ - ν)² / (σ² + 2ς²)`` up to a constant.
    """
    first, second = log_variance + _INCLUSION_VARIANCE, other_log_variance + _INCLUSION_VARIANCE
    squares = (mean - other_mean) ** 2

    def overlap(inner: Float[Array, "b d"], outer: Float[Array, "b d"]) -> Float[Array, "b d"]:
        log_sum = jnp.logaddexp(inner, outer + math.log(2))
        return -inner / 2 - log_sum / 2 - squares * jnp.exp(-log_sum)

    return overlap(first, second) - overlap(second, first)


def inclusion_loss(
    mean: Float[Array, "b d"],
    log_variance: Float[Array, "b d"],
    other_mean: Float[Array, "b d"],
    other_log_variance: Float[Array, "b d"],
) -> Float[Array, " b"]:
    """Returns ``-log sigmoid`` of 1000 times the inclusion of p in q, the mean over dimensions (ProLIP)."""
    inside = inclusion(mean, log_variance, other_mean, other_log_variance)
    return jnp.mean(jax.nn.softplus(-_INCLUSION_LOGIT * inside), axis=1)
