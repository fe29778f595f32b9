"""What the library does not offer: smoothing by the noise, a temperature for every input, and an amplitude."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Key, UInt32

from lit_het.heads.base import ContrastiveHead
from lit_het.heads.covariance import Covariance
from lit_het.heads.noise_config import CovarianceConfig
from lit_het.heads.options import ContrastiveOptions
from lit_het.heads.sampling import noiseless_samples
from lit_het.heads.temperature_config import LogTemperature, TemperatureConfig
from lit_het.losses.base import weights
from lit_het.types import MASKED, EmbeddingSamples, LogitSamples, Queries


@dataclasses.dataclass(frozen=True)
class NoiseSmoothedSoftmaxLoss:
    """The softmax loss with a share of smoothing that is proportional to the noise norm of the query.

    Where Σ(x) is large, captions were unreliable in training. The share ``α_n = α |σ_n| / mean |σ|``, at most 1/2, has
    no gradient, or noise would grow to smooth more.

    Attributes:
        smoothing: α, the mean share where none is at its bound.
    """

    smoothing: float = 0.1

    likelihood: ClassVar[str] = "samples"

    def __call__(
        self,
        samples: EmbeddingSamples,
        valid: Bool[Array, " b"],
        ids: Sequence[UInt32[Array, "b 2"]] = (),
        weight: Float[Array, " b"] | None = None,
    ) -> Float[Array, ""]:
        """Returns the weighted mean over valid examples of half the sum of both directions; ``ids`` are unused."""
        sides = ((samples.image_queries, samples.text), (samples.text_queries, samples.image))
        losses = [self._losses(queries, keys, samples, valid) for queries, keys in sides]
        return jnp.sum(weights(valid, weight) * sum(losses)) / 2

    def _losses(
        self, queries: Queries | None, keys: Float[Array, "b d"], samples: EmbeddingSamples, valid: Bool[Array, " b"]
    ) -> Float[Array, " b"]:
        assert queries is not None, "both sides have noise"
        logits = jnp.where(valid[None, None], queries.products(keys) / samples.temperature, MASKED)
        log_p = jax.nn.logmeanexp(jax.nn.log_softmax(logits, axis=2), axis=1)
        uniform = jnp.mean(jax.nn.log_softmax(logits.mean(axis=1)), axis=1, where=valid[None])
        share = self.shares(queries, valid)
        return -(1 - share) * jnp.diagonal(log_p) - share * uniform

    def shares(self, queries: Queries, valid: Bool[Array, " b"]) -> Float[Array, " b"]:
        """Returns α_n of each query."""
        norm = jnp.sqrt(jnp.sum(jnp.var(jax.lax.stop_gradient(queries.materialize()), axis=1), axis=1))
        return jnp.minimum(
            self.smoothing * norm / (jnp.sum(norm, where=valid) / jnp.maximum(jnp.sum(valid), 1) + 1e-12), 0.5
        )


@dataclasses.dataclass(frozen=True)
class InputTemperatureConfig(ContrastiveOptions):
    """Deterministic embeddings with a temperature for every query, ``τ(x) = τ exp(w·x + b)``.

    Attributes:
        temperature: τ, at which τ(x) starts for every input.
    """

    temperature: TemperatureConfig = LogTemperature()

    def build(self, embedding_size: int, rngs: nnx.Rngs) -> "InputTemperature":
        """Returns the head."""
        return InputTemperature(self, embedding_size, rngs)


class InputTemperature(ContrastiveHead):
    """The head of an `InputTemperatureConfig`; images and texts have parameters of their own."""

    def __init__(self, config: InputTemperatureConfig, embedding_size: int, rngs: nnx.Rngs):
        super().__init__(config.temperature, initial_bias=None)
        zeros = nnx.initializers.zeros
        self.image_scale, self.text_scale = (
            nnx.Linear(embedding_size, 1, kernel_init=zeros, rngs=rngs) for _ in ("image", "text")
        )

    def __call__(
        self, image: Float[Array, "b d"], text: Float[Array, "b d"], key: Key[Array, ""] | None
    ) -> EmbeddingSamples:
        """Returns keys, and queries divided by ``τ(x) / τ``."""
        image, text = self.image_key(image), self.text_key(text)
        return EmbeddingSamples(
            image,
            text,
            Queries((image * jnp.exp(-self.image_scale(image)))[:, None]),
            Queries((text * jnp.exp(-self.text_scale(text)))[:, None]),
            self.temperature(),
        )

    def logits(
        self, image: Float[Array, "b d"], classes: Float[Array, "k d"], key: Key[Array, ""] | None, num_samples: int
    ) -> LogitSamples:
        """Returns one sample ``α · β / τ(α)``; ``key`` and ``num_samples`` are unused."""

        def logits(image: Float[Array, "b d"]) -> Float[Array, "b k"]:
            image = self.image_key(image)
            return image * jnp.exp(-self.image_scale(image)) @ classes.T / self.temperature()

        return noiseless_samples(image, logits)


class _NormalizedLinear(nnx.Module):
    """A dense layer whose kernel and bias together have the norm of a learned amplitude."""

    def __init__(self, linear: nnx.Linear):
        self.linear = linear
        self.log_amplitude = nnx.Param(jnp.log(self._norm()))

    def __call__(self, inputs: Float[Array, "n d"]) -> Float[Array, "n k"]:
        return self.linear(inputs) * jnp.exp(self.log_amplitude[...]) / self._norm()

    def _norm(self) -> Float[Array, ""]:
        return optax.tree.norm(nnx.to_pure_dict(nnx.state(self.linear, nnx.Param)))


@dataclasses.dataclass(frozen=True)
class AmplitudeConfig(CovarianceConfig):
    """A covariance whose factors are a learned scalar amplitude times a direction of norm 1."""

    def build(self, feature_size: int, noise_size: int, feature_norm: float, rngs: nnx.Rngs) -> Covariance:
        """Returns the module; only of the full form."""
        covariance: Any = super().build(feature_size, noise_size, feature_norm, rngs)
        covariance.factors = _NormalizedLinear(covariance.factors)
        return covariance
