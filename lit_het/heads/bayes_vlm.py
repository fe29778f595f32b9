"""BayesVLM: a posterior of the last layer of both towers, which is fitted to a finished model without training it.

Each tower ends with a linear layer ``g = φ P + b`` (to which attention pooling adds a residual), and its output tells φ
too. The Laplace posterior of P and b (`lit_het.heads.laplace`) makes an embedding the Gaussian ``N(g,
(φᵀ A⁻¹ φ) B⁻¹)``, of whose covariance the diagonal is kept; predictions without noise are those of the model. A tower
that ends otherwise has the layer ``g = g I``. ProbCosine is the mean and the variance of the cosine of two such
embeddings, in closed form, with the norms replaced by their root mean squares (Baumann et al. 2024).
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lit_het.heads.base import ContrastiveHead, Pairs, unit
from lit_het.heads.contrastive_config import BayesVLMContrastiveConfig
from lit_het.heads.covariance import Noise, standard_normals
from lit_het.heads.sampling import in_pairs, noiseless_samples
from lit_het.types import LogitSamples, Params

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


class LastLayer(NamedTuple):
    """Outputs and inputs of a layer: g and ``[φ, 1]``, or where it is at the identity, g twice."""

    outputs: Float[Array, "b d"]
    inputs: Float[Array, "b q"]


def last_layer(tower_output: Float[Array, "b d_plus_p"], embedding_size: int) -> LastLayer:
    """Returns the last layer's outputs and inputs of what a tower returns, ``[g, φ]`` or g alone."""
    outputs, inputs = tower_output[:, :embedding_size], tower_output[:, embedding_size:]
    if not inputs.shape[1]:
        return LastLayer(outputs, outputs)
    return LastLayer(outputs, jnp.concatenate([inputs, jnp.ones_like(inputs[:, :1])], axis=1))


class LayerPosterior(nnx.Module):
    """Factors of the posterior of a layer, see `lit_het.heads.laplace.Posterior`."""

    def __init__(self, num_inputs: int, num_outputs: int):
        self.input_root = nnx.Param(jnp.zeros((num_inputs, num_inputs), jnp.float32))
        self.output_variance = nnx.Param(jnp.zeros(num_outputs, jnp.float32))

    def __call__(self, layer: LastLayer) -> Gaussians:
        """Returns ``N(g, (φᵀ A⁻¹ φ) diag B⁻¹)``."""
        scale = jnp.sum((layer.inputs @ self.input_root[...]) ** 2, axis=1, keepdims=True)
        return Gaussians(layer.outputs, scale * self.output_variance[...][None])

    def samples(self, layer: LastLayer, normals: Float[Array, "t q d"]) -> Float[Array, "t b d"]:
        """Returns g for samples of the weights, ``P + R Ξ_t diag(B⁻¹)^½``."""
        noise = jnp.einsum("bq,tqd->tbd", layer.inputs @ self.input_root[...], normals)
        return layer.outputs[None] + noise * jnp.sqrt(self.output_variance[...])[None, None]


class BayesVLMContrastive(ContrastiveHead):
    """The head of a `BayesVLMContrastiveConfig`; keys are longer than embeddings where a text tower tells its φ.

    The key of a text is ``[g, φ, 1] / |g|``, that of an image ``[g / |g|, 0]``: their product is the cosine.

    Attributes:
        embedding_size: d, the entries of a key that are the embedding.
    """

    def __init__(
        self, config: BayesVLMContrastiveConfig, embedding_size: int, image_input_size: int, text_input_size: int
    ):
        super().__init__(config.temperature, config.initial_bias)
        self.config, self.embedding_size, self.has_text_input = config, embedding_size, bool(text_input_size)
        # The bias is a weight of the constant input 1.
        self.image_posterior, self.text_posterior = (
            LayerPosterior(size + 1 if size else embedding_size, embedding_size)
            for size in (image_input_size, text_input_size)
        )

    def logits(
        self,
        image: Float[Array, "b d_plus_p"],
        classes: Float[Array, "k d_plus_q"],
        key: Key[Array, ""] | None,
        num_samples: int,
    ) -> LogitSamples:
        """Returns the model's logits without a key; with one S samples of the weights, or one of the probit logits.

        The samples have ProbCosine's mean and variance. All examples share the weights of a sample, and so do calls
        with the same key: the mutual information of two images is in their samples.
        """
        temperature, text = self.temperature(), self._layer_of(classes)
        if key is None:
            return noiseless_samples(image, lambda image: self._unit(image) @ text.outputs.T / temperature)
        if self.config.prediction == "probit":
            return noiseless_samples(image, lambda image: self._probit_logits(self._scaled(image), text))
        pairs, k, n, d = in_pairs(None, num_samples), len(classes), len(image), self.embedding_size
        weights = [posterior.input_root.shape[0] * d for posterior in (self.image_posterior, self.text_posterior)]

        def logits(image: LastLayer, keys: Key[Array, " n"] | None, samples: Int[Array, " t"]) -> Array:
            assert keys is not None
            normals = standard_normals(keys[:1], samples, sum(weights), antithetic=pairs)[0]
            return self._sampled_logits(
                image,
                text,
                normals[:, : weights[0]].reshape(len(samples), -1, d),
                normals[:, weights[0] :].reshape(len(samples), -1, d),
            )

        at_a_time = max(1, _BLOCK // max(sum(weights), n * d, k * d, n * k))
        return LogitSamples(
            features=image,
            keys=jnp.broadcast_to(key, (n,)),
            prepare=self._scaled,
            logits=logits,
            num_samples=num_samples,
            examples_per_block=n,
            samples_per_block=min(num_samples, at_a_time),
        )

    def image_key(self, image: Float[Array, "b d_plus_p"]) -> Float[Array, "b d_plus_q"]:
        """Returns unit image embeddings, and zeros in the place of a text's φ."""
        width = self.text_posterior.input_root.shape[0] if self.has_text_input else 0
        return jnp.concatenate([self._unit(image), jnp.zeros((image.shape[0], width))], axis=1)

    def text_key(self, text: Float[Array, "b d_plus_p"]) -> Float[Array, "b d_plus_q"]:
        """Returns unit text embeddings, and the inputs of the last layer divided by the same norms."""
        layer = self._scaled(text)
        return jnp.concatenate(layer, axis=1) if self.has_text_input else layer.outputs

    def mean_text_key(self, keys: Float[Array, "k t d_plus_q"]) -> Float[Array, "k d_plus_q"]:
        """Returns the mean over prompts, divided by the norm of its embedding."""
        mean = keys.mean(axis=1)
        return mean / (jnp.linalg.norm(mean[:, : self.embedding_size], axis=1, keepdims=True) + 1e-8)

    def image_noise(self, image: Float[Array, "b d_plus_p"]) -> Noise:
        """Returns the variances of unit embeddings."""
        return Noise.diagonal(jnp.sqrt(self.image_posterior(self._scaled(image)).variance))

    def text_noise(self, text: Float[Array, "b d_plus_p"]) -> Noise:
        """Returns the variances of unit embeddings."""
        return Noise.diagonal(jnp.sqrt(self.text_posterior(self._scaled(text)).variance))

    def fitted(self, pairs: Pairs) -> Params:
        """Returns the posteriors of both sides."""
        from lit_het.heads.bayes_vlm_fit import posteriors  # needs SciPy's optimizers

        return posteriors(self, pairs)

    def _unit(self, tower_output: Float[Array, "b d_plus_p"]) -> Float[Array, "b d"]:
        return unit(tower_output[:, : self.embedding_size])

    def _scaled(self, tower_output: Float[Array, "b d_plus_p"]) -> LastLayer:
        """Returns outputs and inputs of the last layer, divided by the norm of the outputs: cosines do not change."""
        outputs, inputs = last_layer(tower_output, self.embedding_size)
        norms = jnp.linalg.norm(outputs, axis=1, keepdims=True)
        # Padding is zero, and stays so.
        return LastLayer(self._unit(tower_output), jnp.where(norms > 0, inputs / (norms + 1e-8), 0.0))

    def _layer_of(self, classes: Float[Array, "k d_plus_q"]) -> LastLayer:
        outputs = classes[:, : self.embedding_size]
        return LastLayer(outputs, classes[:, self.embedding_size :] if self.has_text_input else outputs)

    def _probit_logits(self, image: LastLayer, text: LastLayer) -> Float[Array, "n k"]:
        temperature = self.temperature()
        mean, variance = prob_cosine(self.image_posterior(image), self.text_posterior(text))
        return probit(mean / temperature, variance / temperature**2)

    def _sampled_logits(
        self,
        image: LastLayer,
        text: LastLayer,
        image_normals: Float[Array, "t p d"],
        text_normals: Float[Array, "t q d"],
    ) -> Float[Array, "n t k"]:
        sides = ((self.image_posterior, image, image_normals), (self.text_posterior, text, text_normals))
        images, texts = (
            posterior.samples(layer, some) / posterior(layer).norm()[None, :, None] for posterior, layer, some in sides
        )
        return jnp.einsum("tnd,tkd->ntk", images, texts) / self.temperature()
