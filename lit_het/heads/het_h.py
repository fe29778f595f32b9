"""The HET-H classifier, whose classes share noise by a hash: (Wᵀ φ + bias + ε''(x)[h(c)]) / τ (HET-XL Eq. 9)."""

import dataclasses
import functools
import hashlib

import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lit_het.errors import UserError, require_at_least
from lit_het.heads.base import ClassificationHead, ClassificationOptions
from lit_het.heads.covariance import CovarianceConfig, Noise
from lit_het.heads.sampling import (
    SamplingConfig,
    check_order,
    is_factored,
    noiseless_samples,
    noisy_logit_samples,
    noisy_samples,
)
from lit_het.heads.temperature import BoundedTemperature, TemperatureConfig
from lit_het.types import LogitSamples

# Multiply-adds that take as long as gathering one number for its class, forward and backward (docs/benchmarks.md).
GATHER_COST = 100


@dataclasses.dataclass(frozen=True)
class HetHConfig(ClassificationOptions):
    """A classifier whose classes share H coordinates of noise.

    Attributes:
        num_buckets: H; in the paper the size of the features.
        hash_seed: seed of the hash from classes to buckets.
        covariance: Σ''(x) of the noise in the buckets.
        temperature: τ.
        sampling: number of noise samples, and how they are computed.
        initial_bias: initial value of the biases of the logits.
        zero_kernel: whether the kernel of the logits is initially zero, for fine-tuning, instead of random.

    Raises:
        UserError: no buckets, or the factored order without a second term of rank one.
    """

    num_buckets: int = 768
    hash_seed: int = 0
    covariance: CovarianceConfig = CovarianceConfig(num_factors=50, form="efficient")
    temperature: TemperatureConfig = BoundedTemperature()
    sampling: SamplingConfig = SamplingConfig()
    initial_bias: float = 0.0
    zero_kernel: bool = False

    has_noise = True

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_buckets")
        check_order(self.sampling.order, self.covariance)

    def build(self, feature_size: int, num_classes: int, rngs: nnx.Rngs) -> "HetHClassifier":
        """Returns the head for features ``[b d]`` and ``num_classes`` classes.

        Raises:
            UserError: more buckets than classes.
        """
        if self.num_buckets > num_classes:
            raise UserError(
                f"HetHConfig: num_buckets = {self.num_buckets} is more than the {num_classes} classes; "
                f"set --task.head.num-buckets to at most {num_classes}, or use HetConfig"
            )
        return HetHClassifier(self, feature_size, num_classes, rngs)


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
            return noiseless_samples(features, lambda phi: self.logits(phi) / temperature)
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

        def logits(base: Float[Array, "n k"], noise: Noise, normals: Float[Array, "n t z"]) -> Float[Array, "n t k"]:
            return (base[:, None] + noise.apply(normals)[..., buckets]) / temperature

        return noisy_samples(
            features, key, num_samples, sampling.block_size, prepare, logits, antithetic=sampling.antithetic
        )
