"""What the library does not offer: a temperature for every input, and an amplitude of the noise."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Float, Key

from lit_het.heads.base import ContrastiveHead
from lit_het.heads.covariance import Covariance
from lit_het.heads.noise_config import CovarianceConfig
from lit_het.heads.options import ContrastiveOptions
from lit_het.heads.sampling import noiseless_samples
from lit_het.heads.temperature_config import LogTemperature, TemperatureConfig
from lit_het.types import EmbeddingSamples, LogitSamples, Queries


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
