"""The HET-XL classifier, with noise in the features: (Wᵀ (φ + ε'(x)) + bias) / τ (HET-XL Eq. 5).

If W is not shared, the noise has its own space and matrix: (Wᵀ φ + W'ᵀ ε'(x) + bias) / τ (Eq. 14).
"""

from flax import nnx
from jaxtyping import Array, Float, Key

from lit_het.heads.base import ClassificationHead
from lit_het.heads.classification_config import HetXLConfig
from lit_het.heads.covariance import Noise
from lit_het.heads.sampling import (
    is_factored,
    noiseless_samples,
    noisy_logit_samples,
    noisy_samples,
)
from lit_het.types import LogitSamples


class HetXLClassifier(ClassificationHead):
    """The head of a `HetXLConfig`."""

    def __init__(self, config: HetXLConfig, feature_size: int, num_classes: int, rngs: nnx.Rngs):
        super().__init__(config, feature_size, num_classes, rngs)
        self.config = config
        self.noise_size = config.unshared_size or feature_size
        shares = config.unshared_size is None
        self.unshared = None if shares else nnx.Linear(self.noise_size, num_classes, use_bias=False, rngs=rngs)
        # Features are outputs of a LayerNorm, so their norm is about the square root of their size.
        self.covariance = config.covariance.build(feature_size, self.noise_size, feature_size**0.5, rngs)

    def __call__(
        self, features: Float[Array, "b d"], key: Key[Array, ""] | None, num_samples: int | None = None
    ) -> LogitSamples:
        """Returns samples of logits divided by τ, or without a key one sample without noise.

        Args:
            features: φ(x).
            key: random key of the noise.
            num_samples: S; by default that of training.
        """
        sampling = self.config.sampling
        if key is None:
            return noiseless_samples(features, self.over_temperature)
        num_samples = sampling.num_samples if num_samples is None else num_samples

        def embeddings() -> LogitSamples:
            return noisy_samples(
                features,
                key,
                num_samples,
                sampling.block_size,
                lambda phi: (phi, self.covariance(phi)),
                lambda phi, epsilon: phi[:, None] + epsilon,
                antithetic=sampling.antithetic,
            )

        return self.with_outcomes(self._samples(features, key, num_samples), embeddings, key)

    def _samples(self, features: Float[Array, "b d"], key: Key[Array, ""], num_samples: int) -> LogitSamples:
        temperature, sampling = self.temperature(), self.config.sampling
        if self.config.get_logits.is_linear and is_factored(
            sampling.order,
            self.config.covariance,
            noise_size=self.noise_size,
            num_classes=self.logits.out_features,
            num_samples=num_samples,
        ):
            prepare = self._prepare_factored
            return noisy_logit_samples(
                features, key, num_samples, sampling.block_size, prepare, temperature, antithetic=sampling.antithetic
            )

        def prepare_direct(phi: Float[Array, "n d"]) -> tuple[Float[Array, "n _"], Noise]:
            return (phi if self.unshared is None else self.logits(phi)), self.covariance(phi)

        def logits(base: Float[Array, "n _"], epsilon: Float[Array, "n t q"]) -> Float[Array, "n t k"]:
            n, t, _ = epsilon.shape
            if self.unshared is not None:
                return (base[:, None] + self.unshared(epsilon.reshape(n * t, -1)).reshape(n, t, -1)) / temperature
            return self.over_temperature((base[:, None] + epsilon).reshape(n * t, -1)).reshape(n, t, -1)

        return noisy_samples(
            features, key, num_samples, sampling.block_size, prepare_direct, logits, antithetic=sampling.antithetic
        )

    def _prepare_factored(self, phi: Float[Array, "n d"]) -> tuple[Float[Array, "n k"], Noise]:
        kernel = (self.logits if self.unshared is None else self.unshared).kernel[...]
        return self.logits(phi), self.covariance(phi).project(kernel)
