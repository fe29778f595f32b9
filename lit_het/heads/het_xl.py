"""The HET-XL classifier: logits = (Wᵀ (φ + ε'(x)) + bias) / τ, the noise lives in the features (HET-XL Eq. 5)."""

import dataclasses
from collections.abc import Callable

from flax import nnx
from jaxtyping import Array, Float, Key

from lit_het.errors import require_at_least
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.temperature import BoundedTemperature, TemperatureConfig


@dataclasses.dataclass(frozen=True)
class HetXLConfig:
    """A classifier with HET-XL noise; defaults follow HET-XL App. N.1, where S = 1000.

    Attributes:
        covariance: Σ'(x) of the noise in the features.
        temperature: τ.
        num_samples: S, noise samples per example.
        initial_bias: start of every bias of the logits.
    """

    covariance: CovarianceConfig = CovarianceConfig(num_factors=50, form="efficient")
    temperature: TemperatureConfig = BoundedTemperature()
    num_samples: int = 16
    initial_bias: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_samples")

    def build(self, feature_size: int, num_classes: int, rngs: nnx.Rngs) -> "HetXLClassifier":
        """Returns the head for features ``[b d]`` and ``num_classes`` classes."""
        return HetXLClassifier(self, feature_size, num_classes, rngs)


class HetXLClassifier(nnx.Module):
    """The head of a `HetXLConfig`."""

    def __init__(self, config: HetXLConfig, feature_size: int, num_classes: int, rngs: nnx.Rngs):
        self.config = config
        bias_init = nnx.initializers.constant(config.initial_bias)
        self.logits = nnx.Linear(feature_size, num_classes, bias_init=bias_init, rngs=rngs)
        # Features come from a LayerNorm: their norm is about the square root of their size.
        self.covariance = config.covariance.build(feature_size, feature_size, feature_size**0.5, rngs)
        self.temperature = config.temperature.build()

    def __call__(
        self,
        features: Float[Array, "b d"],
        key: Key[Array, ""] | None,
        get_logits: Callable[[Float[Array, "n d"]], Float[Array, "n k"]] | None = None,
    ) -> Float[Array, "s b k"]:
        """Returns S samples of logits divided by τ, or without a key one sample without noise.

        Args:
            features: φ(x).
            key: randomness of the noise.
            get_logits: replaces ``Wᵀ φ + bias``, for a sharded or approximate softmax (HET-XL Sec. 3.1).
        """
        get_logits = get_logits or self.logits
        if key is None:
            return (get_logits(features) / self.temperature())[None]
        noisy = features[None] + self.covariance.sample(features, key, self.config.num_samples)
        s, b, d = noisy.shape
        return get_logits(noisy.reshape(s * b, d)).reshape(s, b, -1) / self.temperature()

    def noise_norm(self, features: Float[Array, "b d"]) -> Float[Array, " b"]:
        """Returns ``sqrt(tr Σ'(x))``."""
        return self.covariance.noise_norm(features)
