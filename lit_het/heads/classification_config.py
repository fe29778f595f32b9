"""The configurations of the heads of classifiers, and of decoders, whose classes are tokens."""

import dataclasses
from typing import TYPE_CHECKING, TypeAlias

from lit_het.errors import FieldError, UserError, require_at_least
from lit_het.heads.logits_config import DenseLogits, LogitsConfig
from lit_het.heads.noise_config import CovarianceConfig, SamplingConfig, check_low_rank, check_sampling
from lit_het.heads.options import ClassificationOptions
from lit_het.heads.temperature_config import BoundedTemperature, FixedTemperature, TemperatureConfig

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.heads.het import HetClassifier
    from lit_het.heads.het_h import HetHClassifier
    from lit_het.heads.het_xl import HetXLClassifier


@dataclasses.dataclass(frozen=True)
class DeterministicConfig(ClassificationOptions):
    """A classifier without noise.

    Attributes:
        temperature: τ.
        initial_bias: initial value of the biases; about -6.9 suits sigmoid losses with many classes (SoViT Table 8).
        zero_kernel: whether the kernel of the logits is initially zero, for fine-tuning, instead of random.
        get_logits: from embeddings to logits.

    Raises:
        UserError: an initial value of parameters that a given function does not have.
    """

    temperature: TemperatureConfig = FixedTemperature()
    initial_bias: float = 0.0
    zero_kernel: bool = False
    get_logits: LogitsConfig = DenseLogits()

    def __post_init__(self) -> None:
        self.get_logits.check(self)


@dataclasses.dataclass(frozen=True)
class HetConfig(ClassificationOptions):
    """A classifier with noise in its logits; its parameters grow with the number of classes, about 2dk + rk.

    Attributes:
        covariance: Σ(x) of the noise in the logits.
        temperature: τ.
        sampling: number of noise samples, and how they are computed; ``order`` has no effect on noise in the logits.
        initial_bias: initial value of the biases of the logits.
        zero_kernel: whether the kernel of the logits is initially zero, for fine-tuning, instead of random.

    Raises:
        UserError: no samples of a diagonal covariance.
    """

    covariance: CovarianceConfig = CovarianceConfig(num_factors=50, form="efficient")
    temperature: TemperatureConfig = BoundedTemperature()
    sampling: SamplingConfig = SamplingConfig()
    initial_bias: float = 0.0
    zero_kernel: bool = False

    has_noise = True

    def __post_init__(self) -> None:
        if self.sampling.num_samples == 0:
            check_low_rank(self.covariance.is_diagonal)

    def build(self, feature_size: int, num_classes: int, rngs: "nnx.Rngs") -> "HetClassifier":
        """Returns the head for features ``[b d]`` and ``num_classes`` classes."""
        from lit_het.heads.het import HetClassifier

        return HetClassifier(self, feature_size, num_classes, rngs)


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
        UserError: no buckets, or the factored order, or no samples, without a second term of rank one.
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
        check_sampling(self.sampling, self.covariance)

    def build(self, feature_size: int, num_classes: int, rngs: "nnx.Rngs") -> "HetHClassifier":
        """Returns the head for features ``[b d]`` and ``num_classes`` classes.

        Raises:
            UserError: more buckets than classes.
        """
        from lit_het.heads.het_h import HetHClassifier

        if self.num_buckets > num_classes:
            raise UserError(
                f"HetHConfig: num_buckets = {self.num_buckets} is more than the {num_classes} classes; "
                f"set --task.head.num-buckets to at most {num_classes}, or use HetConfig"
            )
        return HetHClassifier(self, feature_size, num_classes, rngs)


@dataclasses.dataclass(frozen=True)
class HetXLConfig(ClassificationOptions):
    """A classifier with noise in its features; about 2d² + rd more parameters, independent of the number of classes.

    Attributes:
        covariance: Σ'(x) of the noise in the features.
        unshared_size: M, the size of the noise's own space with the matrix W' (Eq. 14); None shares W.
        temperature: τ.
        sampling: number of noise samples, and how they are computed.
        initial_bias: initial value of the biases of the logits.
        zero_kernel: whether the kernel of the logits is initially zero, for fine-tuning, instead of random.
        get_logits: from noisy embeddings to logits (Sec. 3.1).

    Raises:
        UserError: M below 1, or not of a dense layer; of a given function an initial value; the factored order of a
            layer that is not linear; this order, or no samples, without a second term of rank one.
    """

    covariance: CovarianceConfig = CovarianceConfig(num_factors=50, form="efficient")
    unshared_size: int | None = None
    temperature: TemperatureConfig = BoundedTemperature()
    sampling: SamplingConfig = SamplingConfig()
    initial_bias: float = 0.0
    zero_kernel: bool = False
    get_logits: LogitsConfig = DenseLogits()

    has_noise = True

    def __post_init__(self) -> None:
        if self.unshared_size is not None:
            require_at_least(1, self, "unshared_size")
        self.get_logits.check(self)
        name = type(self.get_logits).__name__
        if self.unshared_size is not None and not isinstance(self.get_logits, DenseLogits):
            raise FieldError(self, "unshared_size", f"{self.unshared_size} needs DenseLogits, not {name}; leave it out")
        if self.sampling.order == "factored" and not self.get_logits.is_linear:
            raise UserError(f"order = 'factored' needs a linear layer, not {name}; use the order 'cheaper'")
        check_sampling(self.sampling, self.covariance)

    def build(self, feature_size: int, num_classes: int, rngs: "nnx.Rngs") -> "HetXLClassifier":
        """Returns the head for features ``[b d]`` and ``num_classes`` classes."""
        from lit_het.heads.het_xl import HetXLClassifier

        return HetXLClassifier(self, feature_size, num_classes, rngs)


ClassificationHeadConfig: TypeAlias = HetXLConfig | HetConfig | HetHConfig | DeterministicConfig

TokenHeadConfig = DeterministicConfig | HetXLConfig
"""Heads that map features of a decoder to logits of the next token."""
