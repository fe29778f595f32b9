"""The HET-H classifier, whose classes share noise by a hash: (Wᵀ φ + bias + ε''(x)[h(c)]) / τ (HET-XL Eq. 9)."""

import functools
import hashlib

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lit_het.heads.base import ClassificationHead
from lit_het.heads.classification_config import HetHConfig
from lit_het.heads.covariance import Noise
from lit_het.heads.sampling import (
    is_factored,
    noiseless_samples,
    noisy_logit_samples,
    noisy_samples,
)
from lit_het.types import LogitSamples

# Multiply-adds that take as long as gathering one number for its class, forward and backward (docs/benchmarks.md).
GATHER_COST = 100


@functools.lru_cache
def hash_classes(num_classes: int, num_buckets: int, seed: int) -> Int[np.ndarray, " k"]:
    """Returns h, the bucket of each class: the same on every machine and in every version."""
    # Not a CRC: it is linear, so that with 2ⁿ buckets the same classes would collide for every seed.

    def bucket(number: int) -> int:
        digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % num_buckets

    return np.array([bucket(number) for number in range(num_classes)])


class HetHClassifier(ClassificationHead):
    """The head of a `HetHConfig`."""

    def __init__(self, config: HetHConfig, feature_size: int, num_classes: int, rngs: nnx.Rngs):
        super().__init__(config, feature_size, num_classes, rngs)
        self.config = config
        # Features are outputs of a LayerNorm, so their norm is about the square root of their size.
        self.covariance = config.covariance.build(feature_size, config.num_buckets, feature_size**0.5, rngs)

    @property
    def bucket_of_class(self) -> Int[np.ndarray, " k"]:
        """h, the bucket of each class."""
        return hash_classes(self.logits.out_features, self.config.num_buckets, self.config.hash_seed)

    def __call__(
        self, features: Float[Array, "b d"], key: Key[Array, ""] | None, num_samples: int | None = None
    ) -> LogitSamples:
        """Returns S samples of logits divided by τ, by default as in training; without a key one without noise."""
        temperature, sampling = self.temperature(), self.config.sampling
        if key is None:
            return noiseless_samples(features, self.over_temperature)
        num_samples = sampling.num_samples if num_samples is None else num_samples
        num_classes, buckets = self.logits.out_features, self.bucket_of_class

        def prepare(phi: Float[Array, "n d"]) -> tuple[Float[Array, "n k"], Noise]:
            return self.logits(phi), self.covariance(phi)

        if is_factored(
            sampling.order,
            self.config.covariance,
            noise_size=self.config.num_buckets,
            num_classes=num_classes,
            num_samples=num_samples,
            cost=GATHER_COST * num_classes,
        ):

            def prepare_gathered(phi: Float[Array, "n d"]) -> tuple[Float[Array, "n k"], Noise]:
                base, noise = prepare(phi)
                return base, noise.take(buckets)

            return noisy_logit_samples(
                features,
                key,
                num_samples,
                sampling.block_size,
                prepare_gathered,
                temperature,
                antithetic=sampling.antithetic,
            )

        def logits(base: Float[Array, "n k"], epsilon: Float[Array, "n t h"]) -> Float[Array, "n t k"]:
            return (base[:, None] + epsilon[..., buckets]) / temperature

        return noisy_samples(
            features, key, num_samples, sampling.block_size, prepare, logits, antithetic=sampling.antithetic
        )
