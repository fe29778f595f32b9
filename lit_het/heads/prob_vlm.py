"""ProbVLM: a generalised Gaussian around each embedding, by an adapter on towers that need not be trained.

With unit embeddings z of images and of texts, an adapter predicts for each dimension a mean ẑ, a scale α and a shape β
of the density ``β / (2 α Γ(1/β)) exp(-(|z - ẑ| / α)^β)`` (Upadhyay et al. 2023); β = 2 is a normal, β = 1 a Laplace
distribution. It is trained by the likelihood of its own embedding and, weighted by λ, of that of the partner. The
variance ``α² Γ(3/β) / Γ(1/β)`` is aleatoric; the variance of ẑ over dropout masks is epistemic.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import gammaln
from jaxtyping import Array, Bool, Float, Key

from lit_het.heads.base import ContrastiveHead, unit
from lit_het.heads.contrastive_config import ProbVLMContrastiveConfig
from lit_het.heads.covariance import Noise

# Dropout masks that the epistemic variance is measured with, the same for all examples and calls.
_MASKS = 8
# Shapes below the first have variances of many orders of magnitude; densities above the second are nearly uniform.
_LEAST_SHAPE, _MOST_SHAPE = 0.5, 8.0
# Limits of log α: with the largest shape, (2 / α)^β and its derivatives stay finite in float32.
_LEAST_LOG_SCALE, _MOST_LOG_SCALE = -8.0, 5.0
# Below it |z - ẑ| / α counts as zero: the derivative of x^β with respect to β has log x.
_LEAST_DISTANCE = 1e-6


class GeneralizedGaussian(NamedTuple):
    """The distribution of each dimension of an embedding: mean ẑ, scale α and shape β."""

    mean: Float[Array, "b d"]
    scale: Float[Array, "b d"]
    shape: Float[Array, "b d"]

    def negative_log_likelihood(self, embedding: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns the mean over dimensions, in nats."""
        distance = jnp.maximum(jnp.abs(embedding - self.mean) / self.scale, _LEAST_DISTANCE)
        normalizer = jnp.log(2 * self.scale) + gammaln(1 / self.shape) - jnp.log(self.shape)
        return jnp.mean(distance**self.shape + normalizer, axis=1)

    def variance(self) -> Float[Array, "b d"]:
        """Returns ``α² Γ(3/β) / Γ(1/β)``."""
        return self.scale**2 * jnp.exp(gammaln(3 / self.shape) - gammaln(1 / self.shape))


class Branch(nnx.Module):
    """Two dense layers; the output starts at a constant."""

    def __init__(self, size: int, hidden_size: int, initial: float, rngs: nnx.Rngs):
        self.first = nnx.Linear(size, hidden_size, rngs=rngs)
        constant, zeros = nnx.initializers.constant(initial), nnx.initializers.zeros
        self.second = nnx.Linear(hidden_size, size, kernel_init=zeros, bias_init=constant, rngs=rngs)

    def __call__(self, x: Float[Array, "b d"]) -> Float[Array, "b d"]:
        """Returns the output."""
        return self.second(jax.nn.relu(self.first(x)))


class Adapter(nnx.Module):
    """Maps unit embeddings to generalised Gaussians; at first all are normal, around zero and of one size."""

    def __init__(self, config: ProbVLMContrastiveConfig, size: int, rngs: nnx.Rngs):
        self.dropout, hidden = config.dropout, config.hidden_size
        self.first, self.second = nnx.Linear(size, hidden, rngs=rngs), nnx.Linear(hidden, size, rngs=rngs)
        # Without a path around it: a mean that can copy its input would leave no error to explain.
        self.mean = Branch(size, hidden, 0.0, rngs)
        # A normal distribution of variance v has the scale sqrt(2 v).
        self.log_scale = Branch(size, hidden, math.log(config.initial_noise_norm * math.sqrt(2 / size)), rngs)
        self.log_shape = Branch(size, hidden, math.log(2.0), rngs)

    def __call__(
        self, embedding: Float[Array, "b d"], mask: Float[Array, "_ hidden"] | float = 1.0
    ) -> GeneralizedGaussian:
        """Returns the distributions; the mask of `masks` multiplies hidden units."""
        x = embedding + self.second(jax.nn.relu(self.first(embedding)) * mask)
        shape = jnp.exp(jnp.clip(self.log_shape(x), math.log(_LEAST_SHAPE), math.log(_MOST_SHAPE)))
        scale = jnp.exp(jnp.clip(self.log_scale(x), _LEAST_LOG_SCALE, _MOST_LOG_SCALE))
        return GeneralizedGaussian(self.mean(x), scale, shape)

    def masks(self, key: Key[Array, ""], count: int) -> Float[Array, "count hidden"]:
        """Returns dropout masks of mean 1."""
        kept = jax.random.bernoulli(key, 1 - self.dropout, (count, self.first.out_features))
        return kept / (1 - self.dropout)


class ProbVLMContrastive(ContrastiveHead):
    """The head of a `ProbVLMContrastiveConfig`."""

    def __init__(self, config: ProbVLMContrastiveConfig, embedding_size: int, rngs: nnx.Rngs):
        super().__init__(config.temperature, config.initial_bias)
        self.config = config
        self.image_adapter = Adapter(config, embedding_size, rngs)
        self.text_adapter = Adapter(config, embedding_size, rngs)

    def auxiliary_losses(
        self, image: Float[Array, "b d"], text: Float[Array, "b d"], key: Key[Array, ""] | None
    ) -> dict[str, Float[Array, " b"]]:
        """Returns the negative log-likelihood of both embeddings, and λ times that of the partners."""
        # The adapter explains embeddings, and does not move them.
        image, text = jax.lax.stop_gradient((unit(image), unit(text)))
        masks = 1.0, 1.0
        if key is not None:
            keys = jax.random.split(key)
            masks = (self.image_adapter.masks(keys[0], len(image)), self.text_adapter.masks(keys[1], len(text)))
        image_density, text_density = self.image_adapter(image, masks[0]), self.text_adapter(text, masks[1])
        own = image_density.negative_log_likelihood(image) + text_density.negative_log_likelihood(text)
        cross = image_density.negative_log_likelihood(text) + text_density.negative_log_likelihood(image)
        return {"likelihood_loss": own + self.config.cross_modal * cross}

    def image_noise(self, image: Float[Array, "b d"]) -> Noise:
        """Returns normal noise with the sum of both variances, aleatoric and epistemic."""
        return _noise(variances(self.image_adapter, image))

    def text_noise(self, text: Float[Array, "b d"]) -> Noise:
        """Returns normal noise with the sum of both variances."""
        return _noise(variances(self.text_adapter, text))

    def noise_metrics(
        self, image: Float[Array, "b d"], text: Float[Array, "b d"], valid: Bool[Array, " b"]
    ) -> dict[str, Float[Array, " b"]]:
        """Returns the effective rank of the noise, and the share of its variance that is epistemic, of each side."""
        found = super().noise_metrics(image, text, valid)
        for side, x, adapter in (("image", image, self.image_adapter), ("text", text, self.text_adapter)):
            aleatoric, epistemic = variances(adapter, x)
            found[f"{side}_epistemic_share"] = jnp.sum(epistemic, axis=1) / jnp.sum(aleatoric + epistemic, axis=1)
        return jax.lax.stop_gradient(found)


def variances(adapter: Adapter, embedding: Float[Array, "b d"]) -> tuple[Float[Array, "b d"], Float[Array, "b d"]]:
    """Returns the aleatoric variance, the mean over dropout masks, and the epistemic one, of ẑ over masks.

    The second is the unbiased estimate, ``Σ (ẑ - mean ẑ)² / (masks - 1)``, as in the authors' code.
    """

    def with_mask(mask: Float[Array, " hidden"]) -> tuple[Float[Array, "b d"], Float[Array, "b d"]]:
        # One mask for all rows: a prediction must not depend on the other rows of its block.
        found = adapter(unit(embedding), mask[None])
        return found.mean, found.variance()

    means, aleatoric = jax.lax.map(with_mask, adapter.masks(jax.random.key(0), _MASKS))
    return aleatoric.mean(axis=0), means.var(axis=0, ddof=1)


def _noise(variances: tuple[Float[Array, "b d"], Float[Array, "b d"]]) -> Noise:
    return Noise.diagonal(jnp.sqrt(sum(variances)))
