"""Losses: pure functions of what heads return; docs/heads.md uses them in a loop of one's own."""

from typing import TYPE_CHECKING, Any

from lit_het.losses.classification_config import SigmoidCrossEntropy, SoftmaxCrossEntropy
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.mixtures import LabelMixture

if TYPE_CHECKING:
    from lit_het.losses.classification import mean_log_probabilities

__all__ = [
    "LabelMixture",
    "SigmoidCrossEntropy",
    "SigmoidLoss",
    "SoftmaxCrossEntropy",
    "SoftmaxLoss",
    "mean_log_probabilities",
]


def __getattr__(name: str) -> Any:  # PEP 562: configurations compute no losses
    if name == "mean_log_probabilities":
        from lit_het.losses.classification import mean_log_probabilities

        return mean_log_probabilities
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
