"""Metrics of ensembles: of the mean prediction, of each member, and the diversity of members.

Members are e3 members, separate models (a deep ensemble) or noise samples, with log-probabilities ``[n m k]``.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy import special

from lit_het.errors import UserError
from lit_het.eval.calibration import (
    brier_scores,
    calibration_standard_error,
    check_labels,
    check_log_probabilities,
    correctness,
    reliability_of_confidence,
)
from lit_het.eval.rows import row_blocks
from lit_het.eval.significance import standard_error


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of each image, for one predictor ``[n]`` or several predictors ``[n m]``.

    Attributes:
        label_log_probability: log-probability of the true class, in nats.
        brier: squared distance between the probabilities and the one-hot label.
        confidence: the highest probability of any class.
        correct: probability that the predicted class is the true one: 1 or 0, or a fraction where classes tie.
    """

    label_log_probability: Float[np.ndarray, "n *m"]
    brier: Float[np.ndarray, "n *m"]
    confidence: Float[np.ndarray, "n *m"]
    correct: Float[np.ndarray, "n *m"]

    def figures(self) -> tuple[dict[str, float], dict[str, float]]:
        """Returns ``nll`` (nats), ``top1``, ``brier`` and ``ece`` as means over predictors, and their standard errors.

        Standard errors are over images, with the predictors fixed.
        """
        parts = {"nll": -self.label_log_probability, "top1": self.correct, "brier": self.brier}
        by_image = {name: np.atleast_2d(values.T).mean(axis=0) for name, values in parts.items()}
        found = {name: float(values.mean()) for name, values in by_image.items()}
        errors = {name: standard_error(values) for name, values in by_image.items()}
        pairs = zip(np.atleast_2d(self.confidence.T), np.atleast_2d(self.correct.T), strict=True)
        curves = [reliability_of_confidence(confidence, correct) for confidence, correct in pairs]
        found["ece"] = float(np.mean([curve.expected_calibration_error for curve in curves]))
        errors["ece"] = calibration_standard_error(self.confidence, self.correct)
        return found, errors

    def member(self, member: int) -> "Scores":
        """Returns the scores of one of several predictors."""
        return Scores(*(getattr(self, field.name)[:, member] for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class EnsembleResult:
    """An ensemble and its members on the same images.

    Attributes:
        members: scores of each member.
        joint: scores of the ensemble.
        diversity: KL divergence between the predictions of two members, averaged over all ordered pairs, in nats.
    """

    members: Scores
    joint: Scores
    diversity: Float[np.ndarray, " n"]

    @property
    def num_members(self) -> int:
        """How many predictors there are, m."""
        return self.members.correct.shape[1]

    def figures(self, *, each_member: bool = False) -> tuple[dict[str, float], dict[str, float]]:
        """Returns metrics and their standard errors over images.

        ``joint_*`` are the `Scores.figures` of the ensemble, ``individual_*`` their means over members, as compared in
        e3 App. I; ``kl`` is the diversity. With ``each_member`` there are also ``member_<number>/*``, numbered from 1.
        """
        parts = {"joint_": self.joint, "individual_": self.members}
        if each_member:
            parts |= {f"member_{number + 1}/": self.members.member(number) for number in range(self.num_members)}
        found, errors = {"kl": float(self.diversity.mean())}, {"kl": standard_error(self.diversity)}
        for part, scores in parts.items():
            part_figures, part_errors = scores.figures()
            found |= {f"{part}{name}": value for name, value in part_figures.items()}
            errors |= {f"{part}{name}": value for name, value in part_errors.items()}
        return found, errors


def mean_prediction(
    log_probabilities: Float[np.ndarray, "n m k"], weights: Float[np.ndarray, " m"] | None = None
) -> Float[np.ndarray, "n k"]:
    """Returns the log of the members' mean probability, in float32; by default all have equal weights.

    The prediction of Lakshminarayanan, Pritzel and Blundell, "Simple and scalable predictive uncertainty estimation
    using deep ensembles", NeurIPS 2017, and of e3, Sec. 2.2.
    """
    num_images, num_members, num_classes = log_probabilities.shape
    if num_members == 1:
        return log_probabilities[:, 0].astype(np.float32, copy=False)
    result = np.empty((num_images, num_classes), np.float32)
    for rows in row_blocks(num_images, num_members * num_classes):
        result[rows] = _log_mean(log_probabilities[rows].astype(np.float64), weights)
    return result


def score_ensemble(
    log_probabilities: Float[np.ndarray, "n m k"],
    labels: Int[np.ndarray, " n"],
    joint: Float[np.ndarray, "n k"] | None = None,
) -> EnsembleResult:
    """Scores the prediction of the ensemble, by default the members' mean prediction, and each member.

    Diversity is e3's (Sec. 2.2): the mean over pairs of ``KL(p_i || p_j)``. The paper's "all pairs" are taken as pairs
    of different members in both orders, so that the order of members does not matter.

    Raises:
        UserError: fewer than two members, no images, a label outside the classes, or a row without finite
            log-probabilities.
    """
    num_images, num_members, num_classes = log_probabilities.shape
    if num_members < 2:
        raise UserError("an ensemble needs at least two members")
    check_labels(labels, num_classes)
    for member in range(num_members):
        check_log_probabilities(log_probabilities[:, member])
    return join(
        [
            _score_block(
                log_probabilities[rows].astype(np.float64), labels[rows], None if joint is None else joint[rows]
            )
            for rows in row_blocks(num_images, num_members * num_classes)
        ]
    )


def join(results: Sequence[EnsembleResult]) -> EnsembleResult:
    """Concatenates the results of several batches of images for the same members."""
    return EnsembleResult(
        members=_join([result.members for result in results]),
        joint=_join([result.joint for result in results]),
        diversity=np.concatenate([result.diversity for result in results]),
    )


def _join(parts: Sequence[Scores], how: Callable[..., np.ndarray] = np.concatenate) -> Scores:
    fields = [field.name for field in dataclasses.fields(Scores)]
    return Scores(*(how([getattr(part, name) for part in parts]) for name in fields))


def _score_block(
    log_probabilities: Float[np.ndarray, "b m k"], labels: Int[np.ndarray, " b"], joint: Float[np.ndarray, "b k"] | None
) -> EnsembleResult:
    return EnsembleResult(
        members=_join([_scores(member, labels) for member in log_probabilities.swapaxes(0, 1)], np.column_stack),
        joint=_scores(_log_mean(log_probabilities) if joint is None else joint.astype(np.float64), labels),
        diversity=mean_divergence(log_probabilities),
    )


def _scores(log_probabilities: Float[np.ndarray, "b k"], labels: Int[np.ndarray, " b"]) -> Scores:
    return Scores(
        label_log_probability=np.take_along_axis(log_probabilities, labels[:, None], axis=1)[:, 0],
        brier=brier_scores(log_probabilities, labels),
        confidence=np.exp(log_probabilities.max(axis=1)),
        correct=correctness(log_probabilities, labels),
    )


def _log_mean(
    log_probabilities: Float[np.ndarray, "b m k"], weights: Float[np.ndarray, " m"] | None = None
) -> Float[np.ndarray, "b k"]:
    weights = np.ones(log_probabilities.shape[1]) if weights is None else weights
    # In the logarithm: probabilities of many classes round to zero in float32. SciPy takes five times as long.
    highest = np.maximum(log_probabilities.max(axis=1), np.finfo(np.float64).min)
    sums = np.einsum("bmk,m->bk", np.exp(log_probabilities - highest[:, None]), weights / weights.sum())
    with np.errstate(divide="ignore"):  # log 0 is -inf
        return np.log(sums) + highest


def mean_divergence(log_probabilities: Float[np.ndarray, "b m k"]) -> Float[np.ndarray, " b"]:
    """Returns the mean of KL(p_i || p_j) over ordered pairs of members, in time linear in their number."""
    # KL(p_i || p_i) is zero, so the sum runs over all m² pairs. With sums over classes,
    # Σ_ij Σ p_i (log p_i - log p_j) = m Σ_i Σ p_i log p_i - Σ (Σ_i p_i) (Σ_j log p_j).
    num_members = log_probabilities.shape[1]
    probabilities = np.exp(log_probabilities)
    mass, logs = probabilities.sum(axis=1), log_probabilities.sum(axis=1)
    # A class of probability zero in every member adds nothing; 0 * -inf would be NaN.
    logs[mass == 0] = 0.0
    own = -special.entr(probabilities).sum(axis=(1, 2))
    return (num_members * own - (mass * logs).sum(axis=1)).clip(min=0) / (num_members * (num_members - 1))
