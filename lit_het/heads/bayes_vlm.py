"""BayesVLM: a posterior of the last layer of both towers, which is fitted to a finished model without training it.

Each side has a linear layer ``g = φ W`` on its unit embeddings φ, at ``W = I``: predictions without noise are those of
the model. Its Laplace posterior (`lit_het.heads.laplace`) makes an embedding the Gaussian ``N(φ, (φᵀ A⁻¹ φ) B⁻¹)``, of
whose covariance the diagonal is kept. ProbCosine is the mean and the variance of the cosine of two such embeddings, in
closed form, with the norms replaced by their root mean squares (Baumann et al. 2024).
"""

import dataclasses
import math
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het.errors import FieldError, require_at_least, require_choice
from lit_het.heads.contrastive import DeterministicContrastive, unit
from lit_het.heads.covariance import standard_normals
from lit_het.heads.sampling import in_pairs, noiseless_samples
from lit_het.heads.temperature import LogTemperature, TemperatureConfig
from lit_het.types import LogitSamples

# Numbers that the samples of a block share or hold at a time: weights, embeddings or logits.
_BLOCK = 2**24


class Gaussians(NamedTuple):
    """Independent normal embeddings: mean and variance of every dimension."""

    mean: Float[Array, "b d"]
    variance: Float[Array, "b d"]

    def norm(self) -> Float[Array, " b"]:
        """Returns ``sqrt(E |g|²) = sqrt(|μ|² + Σ σ²)`` (plus 1e-8, as `unit`)."""
        return jnp.sqrt(jnp.sum(self.mean**2 + self.variance, axis=1)) + 1e-8


def prob_cosine(first: Gaussians, second: Gaussians) -> tuple[Float[Array, "b k"], Float[Array, "b k"]]:
    """Returns the mean and the variance of ``g · h / sqrt(E |g|² E |h|²)`` for every pair (BayesVLM, ProbCosine).

    With means μ and ν, ``E g·h = Σ μ ν`` and ``Var g·h = Σ (μ² + σ²) ς² + σ² ν²``.
    """
    norms = first.norm()[:, None] * second.norm()[None]
    variance = (first.mean**2 + first.variance) @ second.variance.T + first.variance @ (second.mean**2).T
    return first.mean @ second.mean.T / norms, variance / norms**2


def probit(mean: Float[Array, "*rows k"], variance: Float[Array, "*rows k"]) -> Float[Array, "*rows k"]:
    """Returns logits whose softmax or sigmoid approximates its mean over normal logits, ``μ / sqrt(1 + π/8 σ²)``."""
    return mean / jnp.sqrt(1 + math.pi / 8 * variance)


@dataclasses.dataclass(frozen=True)
class BayesVLMContrastiveConfig:
    """A Laplace posterior over the last layer of a finished model; ``lit-het add-noise`` fits it.

    Attributes:
        temperature: τ, that of the model.
        initial_bias: the bias of the model's logits, of the sigmoid loss; None for none.
        prediction: with noise, the mean over ``"samples"`` of the weights, or ``"probit"``, the paper's closed form
            for this mean, which has no samples.
        num_negatives: pairs of a batch of the Hessian, whose other side are the candidates; at most all pairs.
        pseudo_data_count: how many times every pair counts.

    Raises:
        UserError: an unknown prediction, fewer than two candidates, or a count that is not finite and positive.
    """

    temperature: TemperatureConfig = LogTemperature()
    initial_bias: float | None = None
    prediction: Literal["samples", "probit"] = "samples"
    num_negatives: int = 32768
    pseudo_data_count: float = 1.0

    has_image_noise: ClassVar[bool] = True
    num_samples: ClassVar[int] = 1
    antithetic: ClassVar[None] = None

    def __post_init__(self) -> None:
        require_choice(self, "prediction")
        require_at_least(2, self, "num_negatives")
        if not 0 < self.pseudo_data_count < math.inf:
            raise FieldError(self, "pseudo_data_count", f"{self.pseudo_data_count} must be positive and finite")

    def build(self, embedding_size: int, rngs: nnx.Rngs) -> "BayesVLMContrastive":
        """Returns the head for embeddings ``[b d]``; its variances are zero until a posterior is set."""
        return BayesVLMContrastive(self, embedding_size)


class LayerPosterior(nnx.Module):
    """Factors of the posterior of a layer, see `lit_het.heads.laplace.Posterior`."""

    def __init__(self, size: int):
        self.input_root = nnx.Param(jnp.zeros((size, size)))
        self.output_variance = nnx.Param(jnp.zeros(size))

    def __call__(self, embedding: Float[Array, "b d"]) -> Gaussians:
        """Returns ``N(φ, (φᵀ A⁻¹ φ) diag B⁻¹)`` for unit embeddings φ."""
        scale = jnp.sum((embedding @ self.input_root[...]) ** 2, axis=1, keepdims=True)
        return Gaussians(embedding, scale * self.output_variance[...][None])

    def samples(self, embedding: Float[Array, "b d"], normals: Float[Array, "t d d"]) -> Float[Array, "t b d"]:
        """Returns ``φ W_t`` for samples of the weights, ``W_t = I + R Ξ_t diag(B⁻¹)^½``."""
        noise = jnp.einsum("bd,tde->tbe", embedding @ self.input_root[...], normals)
        return embedding[None] + noise * jnp.sqrt(self.output_variance[...])[None, None]


class BayesVLMContrastive(DeterministicContrastive):
    """The head of a `BayesVLMContrastiveConfig`."""

    def __init__(self, config: BayesVLMContrastiveConfig, embedding_size: int):
        super().__init__(config.temperature, config.initial_bias)
        self.config = config
        self.image_posterior, self.text_posterior = LayerPosterior(embedding_size), LayerPosterior(embedding_size)

    def logits(
        self,
        image: Float[Array, "b d"],
        classes: Float[Array, "k d"],
        key: Key[Array, ""] | None,
        num_samples: int,
    ) -> LogitSamples:
        """Returns the model's logits without a key; with one S samples of the weights, or one of the probit logits.

        The samples have ProbCosine's mean and variance. All examples share the weights of a sample, and so do calls
        with the same key: the mutual information of two images is in their samples.
        """
        if key is None:
            return super().logits(image, classes, key, num_samples)
        if self.config.prediction == "probit":
            return noiseless_samples(image, lambda image: self._probit_logits(image, classes))
        pairs = in_pairs(None, num_samples)
        (k, d), n = classes.shape, len(image)

        def logits(image: Float[Array, "n d"], keys: Key[Array, " n"] | None, samples: Int[Array, " t"]) -> Array:
            assert keys is not None
            normals = standard_normals(keys[:1], samples, 2 * d * d, antithetic=pairs)[0].reshape(-1, 2, d, d)
            return self._sampled_logits(image, classes, normals)

        at_a_time = max(1, _BLOCK // max(2 * d * d, n * d, k * d, n * k))
        return LogitSamples(
            features=image,
            keys=jnp.broadcast_to(key, (n,)),
            prepare=self.image_key,
            logits=logits,
            num_samples=num_samples,
            examples_per_block=n,
            samples_per_block=min(num_samples, at_a_time),
        )

    def image_noise_norm(self, image: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns the root of the summed variances."""
        return jnp.sqrt(jnp.sum(self.image_posterior(unit(image)).variance, axis=1))

    def text_noise_norm(self, text: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns the root of the summed variances."""
        return jnp.sqrt(jnp.sum(self.text_posterior(unit(text)).variance, axis=1))

    def noise_metrics(
        self, image: Float[Array, "b d"], text: Float[Array, "b d"], valid: Bool[Array, " b"]
    ) -> dict[str, Float[Array, " b"]]:
        """Returns nothing, as nothing is trained."""
        return {}

    def image_spectrum(self, image: Float[Array, "b d"]) -> Float[Array, "b d"]:
        """Returns the standard deviations in descending order."""
        return jnp.sort(jnp.sqrt(self.image_posterior(unit(image)).variance), axis=1, descending=True)

    def _probit_logits(self, image: Float[Array, "n d"], classes: Float[Array, "k d"]) -> Float[Array, "n k"]:
        temperature = self.temperature()
        mean, variance = prob_cosine(self.image_posterior(self.image_key(image)), self.text_posterior(classes))
        return probit(mean / temperature, variance / temperature**2)

    def _sampled_logits(
        self, image: Float[Array, "n d"], classes: Float[Array, "k d"], normals: Float[Array, "t two d d"]
    ) -> Float[Array, "n t k"]:
        sides = ((self.image_posterior, image, normals[:, 0]), (self.text_posterior, classes, normals[:, 1]))
        images, texts = (
            posterior.samples(x, some) / posterior(x).norm()[None, :, None] for posterior, x, some in sides
        )
        return jnp.einsum("tnd,tkd->ntk", images, texts) / self.temperature()
