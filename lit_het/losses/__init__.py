"""Losses: pure functions of what heads return; docs/heads.md uses them in a loop of one's own."""

from lit_het.losses.classification import (
    LabelMixture,
    SigmoidCrossEntropy,
    SoftmaxCrossEntropy,
    mean_log_probabilities,
)
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss

__all__ = [
    "LabelMixture",
    "SigmoidCrossEntropy",
    "SigmoidLoss",
    "SoftmaxCrossEntropy",
    "SoftmaxLoss",
    "mean_log_probabilities",
]
