"""The deterministic classifier: logits = (Wᵀ φ + bias) / τ (HET-XL Eq. 1)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.logits import LogitsLayer, logits_layer
from lit_het.heads.sampling import noiseless_samples
from lit_het.types import LogitSamples


class DeterministicClassifier(nnx.Module):
    """The head of a `DeterministicConfig`."""

    def __init__(self, config: DeterministicConfig, feature_size: int, num_classes: int, rngs: nnx.Rngs):
        self.logits: LogitsLayer = logits_layer(
            feature_size, num_classes, rngs, zero_kernel=config.zero_kernel, initial_bias=config.initial_bias
        )
        self.temperature = config.temperature.build()

    def __call__(
        self, features: Float[Array, "b d"], key: Key[Array, ""] | None, num_samples: int | None = None
    ) -> LogitSamples:
        """Returns one sample, logits divided by τ; ``key`` and ``num_samples`` are unused."""
        temperature = self.temperature()
        return noiseless_samples(features, lambda phi: self.logits(phi) / temperature)

    def noise_norm(self, features: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns zeros."""
        return jnp.zeros(features.shape[0])

    def spectrum(self, features: Float[Array, "b d"]) -> Float[Array, "b _"]:
        """Returns an empty array, as there is no noise."""
        return jnp.zeros((features.shape[0], 0))
