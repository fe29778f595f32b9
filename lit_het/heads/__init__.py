"""Heads: embeddings in, a distribution of logits or embeddings out; docs/heads.md uses them in a loop of one's own."""

from typing import TYPE_CHECKING, Any

from lit_het.heads.classification_config import DeterministicConfig, HetConfig, HetHConfig, HetXLConfig
from lit_het.heads.contrastive_config import (
    BayesVLMContrastiveConfig,
    DeterministicContrastiveConfig,
    GaussianContrastiveConfig,
    HetXLContrastiveConfig,
    McDropoutContrastiveConfig,
    ProbVLMContrastiveConfig,
)
from lit_het.heads.logits_config import (
    DenseLogits,
    GivenLogits,
    HierarchicalSoftmax,
    SampledSoftmax,
    get_logits,
)
from lit_het.heads.noise_config import CovarianceConfig, SamplingConfig
from lit_het.heads.temperature_config import BoundedTemperature, FixedTemperature, LogTemperature

if TYPE_CHECKING:
    from lit_het.heads.learning_rates import learning_rate_factors

__all__ = [
    "BayesVLMContrastiveConfig",
    "BoundedTemperature",
    "CovarianceConfig",
    "DenseLogits",
    "DeterministicConfig",
    "DeterministicContrastiveConfig",
    "FixedTemperature",
    "GaussianContrastiveConfig",
    "GivenLogits",
    "HetConfig",
    "HetHConfig",
    "HetXLConfig",
    "HetXLContrastiveConfig",
    "HierarchicalSoftmax",
    "LogTemperature",
    "McDropoutContrastiveConfig",
    "ProbVLMContrastiveConfig",
    "SampledSoftmax",
    "SamplingConfig",
    "get_logits",
    "learning_rate_factors",
]


def __getattr__(name: str) -> Any:  # PEP 562: configurations need no Flax
    if name == "learning_rate_factors":
        from lit_het.heads.learning_rates import learning_rate_factors

        return learning_rate_factors
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
