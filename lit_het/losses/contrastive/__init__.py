"""Contrastive losses; `dense` has the formulas and is read first, the other modules compute them in less memory.

`sample_free` approximates the expectation over the noise without samples, `pairs` holds what a loss sees, `blocks` sums
over blocks of queries, `ring` passes keys between devices, `normalizers` computes softmax normalizers in a pass of
their own, `loss` puts them together, and `loss_config` has their configurations.
"""

from lit_het.losses.contrastive.loss_config import ContrastiveLoss, SigmoidLoss, SoftmaxLoss

__all__ = ["ContrastiveLoss", "SigmoidLoss", "SoftmaxLoss"]
