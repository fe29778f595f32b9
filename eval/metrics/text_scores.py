"""Metrics of texts that a decoder writes, and of its predictions of the tokens of given texts, with standard errors."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from lit_het.eval.metrics.calibration import (
    DEFAULT_BINS,
    ReliabilityCurve,
    bin_of,
    calibration_standard_error,
    reliability_of_confidence,
)
from lit_het.eval.metrics.captions import bleu, cider_d, rouge_l
from lit_het.eval.metrics.selective import aurc, aurc_standard_errors
from lit_het.eval.metrics.significance import bootstrap_error, standard_error
from lit_het.texts import TokenPredictions

Figures = tuple[dict[str, float], dict[str, float]]
"""Metrics, and the standard errors of those that have one."""


@dataclasses.dataclass(frozen=True)
class TokenResult:
    """How well the tokens of given texts are predicted from those before them; rows are tokens of all texts.

    Attributes:
        nll: of the token, in nats.
        confidence: the largest probability of any token.
        correct: 1 where the most probable token is the given one.
        image: the number of the token's image.
    """

    nll: Float[np.ndarray, " t"]
    confidence: Float[np.ndarray, " t"]
    correct: Float[np.ndarray, " t"]
    image: Int[np.ndarray, " t"]

    @classmethod
    def of(cls, predictions: TokenPredictions, image: Int[np.ndarray, " n"]) -> "TokenResult":
        """Returns the tokens of texts, whose images are given by number."""
        counted = predictions.counted
        nll, confidence, correct = (
            rows[counted].astype(np.float64)
            for rows in (-predictions.log_p, predictions.confidence, predictions.is_top)
        )
        return cls(nll, confidence, correct, np.repeat(image, counted.sum(axis=1)))

    @classmethod
    def join(cls, parts: Sequence["TokenResult"]) -> "TokenResult":
        """Joins the tokens of several parts of a set."""
        return cls(*map(np.concatenate, zip(*map(dataclasses.astuple, parts), strict=True)))

    def reliability(self) -> ReliabilityCurve:
        """Returns the reliability curve of the most probable token."""
        return reliability_of_confidence(self.confidence, self.correct)

    def figures(self) -> Figures:
        """Returns ``log_perplexity`` (nats per token), ``perplexity``, ``token_top1`` and ``token_ece``.

        They are means over tokens; standard errors are bootstrapped over images, since tokens of one depend.
        """
        curve = self.reliability()
        found = {
            "log_perplexity": float(self.nll.mean()),
            "perplexity": float(np.exp(self.nll.mean())),
            "token_top1": float(self.correct.mean()),
            "token_ece": curve.expected_calibration_error,
        }
        _, image = np.unique(self.image, return_inverse=True)
        size = int(image.max()) + 1
        count, nll, correct = (np.bincount(image, values, size) for values in (None, self.nll, self.correct))
        gap = np.zeros((size, DEFAULT_BINS))
        np.add.at(gap, (image, bin_of(self.confidence, curve.edges)), self.confidence - self.correct)
        errors = {
            "log_perplexity": bootstrap_error(lambda times: (times @ nll) / (times @ count), size),
            "token_top1": bootstrap_error(lambda times: (times @ correct) / (times @ count), size),
            "token_ece": bootstrap_error(lambda times: np.abs(times @ gap).sum(axis=1) / (times @ count), size),
        }
        errors["perplexity"] = found["perplexity"] * errors["log_perplexity"]
        return found, errors


def caption_figures(captions: Sequence[str], references: Sequence[Sequence[str]]) -> Figures:
    """Returns ``cider`` (CIDEr-D, times 100), ``bleu4`` and ``rouge_l`` of captions, which are tokenized.

    BLEU is of all captions together and has no standard error.
    """
    by_image = {"cider": 100 * cider_d(captions, references), "rouge_l": rouge_l(captions, references)}
    found = {name: float(values.mean()) for name, values in by_image.items()}
    errors = {name: standard_error(values) for name, values in by_image.items()}
    return {"cider": found["cider"], "bleu4": float(bleu(captions, references)[3]), "rouge_l": found["rouge_l"]}, errors


def confidence_figures(
    confidence: Float[np.ndarray, " n"], right: Float[np.ndarray, " n"], image: Int[np.ndarray, " n"]
) -> Figures:
    """Returns ``ece`` and ``aurc`` of texts, where their probability is the confidence.

    Args:
        confidence: of each text.
        right: how right it is, 0 to 1.
        image: its number; standard errors are bootstrapped over images, since texts about one depend.
    """
    curve = reliability_of_confidence(confidence, right)
    found = {"ece": curve.expected_calibration_error, "aurc": aurc(confidence, 1 - right)}
    area, _ = aurc_standard_errors(confidence, 1 - right, image)
    return found, {"ece": calibration_standard_error(confidence, right, groups=image), "aurc": area}
