"""The deterministic classifier: logits = (Wᵀ φ + bias) / τ (HET-XL Eq. 1)."""

import dataclasses

from lit_het.heads.base import ClassificationOptions
from lit_het.heads.temperature import FixedTemperature, TemperatureConfig


@dataclasses.dataclass(frozen=True)
class DeterministicConfig(ClassificationOptions):
    """A classifier without noise.

    Attributes:
        temperature: τ.
        initial_bias: initial value of the biases; about -6.9 suits sigmoid losses with many classes (SoViT Table 8).
        zero_kernel: whether the kernel of the logits is initially zero, for fine-tuning, instead of random.
    """

    temperature: TemperatureConfig = FixedTemperature()
    initial_bias: float = 0.0
    zero_kernel: bool = False
