"""Heads: embeddings in, a distribution of logits or embeddings out; docs/heads.md uses them in a loop of one's own."""

from lit_het.heads.bayes_vlm import BayesVLMContrastiveConfig
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.heads.het import HetConfig
from lit_het.heads.het_h import HetHConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.learning_rates import learning_rate_factors
from lit_het.heads.mc_dropout import McDropoutContrastiveConfig
from lit_het.heads.prob_vlm import ProbVLMContrastiveConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature, LogTemperature

__all__ = [
    "BayesVLMContrastiveConfig",
    "BoundedTemperature",
    "CovarianceConfig",
    "DeterministicConfig",
    "DeterministicContrastiveConfig",
    "FixedTemperature",
    "GaussianContrastiveConfig",
    "HetConfig",
    "HetHConfig",
    "HetXLConfig",
    "HetXLContrastiveConfig",
    "LogTemperature",
    "McDropoutContrastiveConfig",
    "ProbVLMContrastiveConfig",
    "SamplingConfig",
    "learning_rate_factors",
]
