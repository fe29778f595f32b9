"""Selective prediction: the risk of a model that answers only where it is most confident.

Pure NumPy functions on the confidence and the loss of each example. Examples of equal confidence count as answered in
random order: every figure is its expectation over these orders, so that none depends on the order of the data.
"""

import numpy as np
from jaxtyping import Float, Int

from lit_het.errors import UserError
from lit_het.eval.metrics.significance import bootstrap_error


def risk_coverage_curve(confidence: Float[np.ndarray, " n"], loss: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Returns the mean loss of the i most confident examples, for i = 1 .. n: the risk at coverage i / n.

    El-Yaniv and Wiener, "On the foundations of noise-free selective classification", JMLR 2010.
    """
    once = np.ones((1, _checked_size(confidence)), np.int64)
    sizes, sums = _by_confidence(confidence, loss, once)
    # Over random orders of tied examples, each of their places has the mean loss of all of them.
    return np.cumsum(np.repeat(sums / sizes, sizes[0])) / np.arange(1, confidence.size + 1)


def aurc(confidence: Float[np.ndarray, " n"], loss: Float[np.ndarray, " n"]) -> float:
    """Returns the area under the risk-coverage curve, in units of the loss: the mean risk over coverages 1/n .. 1.

    Geifman and El-Yaniv, "Selective classification for deep neural networks", NeurIPS 2017; the name is of Geifman,
    Uziel and El-Yaniv, "Bias-reduced uncertainty estimation for deep neural classifiers", ICLR 2019.
    """
    return float(risk_coverage_curve(confidence, loss).mean())


def excess_aurc(confidence: Float[np.ndarray, " n"], loss: Float[np.ndarray, " n"]) -> float:
    """Returns `aurc` minus that of the best order, lowest losses first (E-AURC of Geifman et al. 2019).

    It measures the confidences alone, where `aurc` also measures accuracy. The paper approximates the best area for
    losses of 0 and 1; here it is exact.
    """
    return aurc(confidence, loss) - aurc(-loss, loss)


def aurc_standard_errors(
    confidence: Float[np.ndarray, " n"], loss: Float[np.ndarray, " n"], groups: Int[np.ndarray, " n"] | None = None
) -> tuple[float, float]:
    """Returns the bootstrap standard errors over examples of `aurc` and of `excess_aurc`.

    Groups of dependent examples are as in `bootstrap_error`.
    """
    size = _checked_size(confidence)

    def area(times: Int[np.ndarray, "r n"]) -> Float[np.ndarray, " r"]:
        return _areas(*_by_confidence(confidence, loss, times))

    def excess(times: Int[np.ndarray, "r n"]) -> Float[np.ndarray, " r"]:
        return area(times) - _areas(*_by_confidence(-loss, loss, times))

    return bootstrap_error(area, size, groups=groups), bootstrap_error(excess, size, groups=groups)


def _areas(sizes: Int[np.ndarray, "r groups"], sums: Float[np.ndarray, "r groups"]) -> Float[np.ndarray, " r"]:
    """Returns the area of each resample, without its curve.

    The loss at place j is in the risks at j .. n, with weights 1/j .. 1/n: the area is the mean over places of the loss
    times 1/j + ... + 1/n, which is H_n - H_(j-1) with the harmonic numbers H. A group of tied examples has its mean
    loss at each of its places.
    """
    size = sizes.sum(axis=1)
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, size.max() + 1))])
    before = np.concatenate([[0.0], np.cumsum(harmonic)])
    places = np.cumsum(sizes, axis=1)
    # The sum of these weights over the places 1 .. m is m H_n - Σ_(j<m) H_j.
    up_to = places * harmonic[size][:, None] - before[places]
    of_group = np.diff(up_to, axis=1, prepend=0.0)
    return (sums / np.maximum(sizes, 1) * of_group).sum(axis=1) / size


def _by_confidence(
    confidence: Float[np.ndarray, " n"], loss: Float[np.ndarray, " n"], times: Int[np.ndarray, "r n"]
) -> tuple[Int[np.ndarray, "r groups"], Float[np.ndarray, "r groups"]]:
    """Returns numbers of examples and sums of losses by confidence, highest first, in resamples of each example."""
    order = np.argsort(-confidence, kind="stable")
    starts = np.flatnonzero(np.diff(confidence[order], prepend=np.inf))
    counts = np.take(times, order, axis=1)
    sums = np.add.reduceat(counts * loss[order].astype(np.float64), starts, axis=1)
    return np.add.reduceat(counts, starts, axis=1), sums


def _checked_size(confidence: Float[np.ndarray, " n"]) -> int:
    if confidence.size == 0:
        raise UserError("no valid example to score: check that the split holds labelled images that can be read")
    if np.isnan(confidence).any():
        raise UserError("a confidence is not a number; training diverged, use an earlier checkpoint")
    return confidence.size
