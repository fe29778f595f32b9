"""Losses: pure functions of what heads return; docs/heads.md uses them in a loop of one's own."""

from lit_het.losses.classification import SigmoidCrossEntropy, SoftmaxCrossEntropy, mean_log_probabilities
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.mixtures import LabelMixture

__all__ = [
    "LabelMixture",
    "SigmoidCrossEntropy",
    "SigmoidLoss",
    "SoftmaxCrossEntropy",
    "SoftmaxLoss",
    "mean_log_probabilities",
]
