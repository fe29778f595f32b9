"""Metrics of ensembles: of the mean prediction, of each member, and the diversity of members.

Members are e3 members, separate models (a deep ensemble) or noise samples, with log-probabilities ``[n m k]``.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import scipy
from jaxtyping import Float, Int

from lit_het.errors import UserError
from lit_het.eval.metrics.calibration import (
    brier_scores,
    calibration_standard_error,
    check_labels,
    check_log_probabilities,
    correctness,
    reliability_of_confidence,
)
from lit_het.eval.metrics.diversity import Diversity, Members, mutual_information
from lit_het.eval.metrics.rows import row_blocks
from lit_het.eval.metrics.significance import standard_error

# With more members, ensembles of only some numbers of members are scored, and at most so many of each number.
FEW = 10


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
class Smaller:
    """Ensembles of some of the members.

    Attributes:
        joint: scores of g ensembles.
        mutual_information: as in `Diversity`, of each.
    """

    joint: Scores
    mutual_information: Float[np.ndarray, "n g"]


@dataclasses.dataclass(frozen=True)
class EnsembleResult:
    """An ensemble and its members on the same images.

    Attributes:
        members: scores of each member.
        joint: scores of the ensemble.
        diversity: of the members.
        smaller: ensembles of `groups`, by their number of members.
    """

    members: Scores
    joint: Scores
    diversity: Diversity
    smaller: Mapping[int, Smaller]

    @property
    def num_members(self) -> int:
        """How many predictors there are, m."""
        return self.members.correct.shape[1]

    def figures(self, *, each_member: bool = False) -> tuple[dict[str, float], dict[str, float]]:
        """Returns metrics and their standard errors over images.

        ``joint_*`` are the `Scores.figures` of the ensemble, ``individual_*`` their means over members, as compared in
        e3 App. I; the others are those of `Diversity.figures`. With ``each_member`` there are also
        ``member_<number>/*``, numbered from 1.
        """
        parts = {"joint_": self.joint, "individual_": self.members}
        if each_member:
            parts |= {f"member_{number + 1}/": self.members.member(number) for number in range(self.num_members)}
        found, errors = self.diversity.figures(1 - self.joint.correct)
        for part, scores in parts.items():
            part_figures, part_errors = scores.figures()
            found |= {f"{part}{name}": value for name, value in part_figures.items()}
            errors |= {f"{part}{name}": value for name, value in part_errors.items()}
        return found, errors

    def figures_of_smaller(self) -> dict[str, Float[np.ndarray, " sizes"]]:
        """Returns the numbers of members ``size``, and by them the figures ``size/*`` and errors ``size/*/error``.

        The mutual information grows with the number of members, unlike means over pairs, which estimate the same value.
        """
        arrays: dict[str, list[float]] = {"size": []}
        for size, smaller in sorted(self.smaller.items()):
            arrays["size"].append(size)
            figures, errors = smaller.joint.figures()
            information = smaller.mutual_information.mean(axis=1)
            figures["mutual_information"] = float(information.mean())
            errors["mutual_information"] = standard_error(information)
            for name, value in figures.items():
                arrays.setdefault(f"size/{name}", []).append(value)
                arrays.setdefault(f"size/{name}/error", []).append(errors[name])
        return {name: np.array(values, np.float64) for name, values in arrays.items()}


def groups(num_members: int) -> dict[int, Int[np.ndarray, "g size"]]:
    """Returns members that form smaller ensembles, by their number: consecutive ones, the first group from the first.

    Of up to `FEW` members there are all sizes, and every member is in equally many groups of a size: they follow one
    another around the circle of members. Of more members there are the powers of two and all members together, and at
    most `FEW` groups of a size without a common member.
    """
    if num_members <= FEW:
        sizes = {size: num_members // math.gcd(num_members, size) for size in range(1, num_members + 1)}
    else:
        powers = (2**power for power in range(num_members.bit_length()))
        sizes = {size: min(FEW, num_members // size) for size in (*powers, num_members)}
    return {size: (np.arange(count * size) % num_members).reshape(count, size) for size, count in sizes.items()}


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

    `EnsembleResult.smaller` has the mean predictions of some of the members.
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
        diversity=_join([result.diversity for result in results]),
        smaller={
            size: Smaller(
                _join([result.smaller[size].joint for result in results]),
                np.concatenate([result.smaller[size].mutual_information for result in results]),
            )
            for size in results[0].smaller
        },
    )


_Joined = TypeVar("_Joined", Scores, Diversity)


def _join(parts: Sequence[_Joined], how: Callable[..., np.ndarray] = np.concatenate) -> _Joined:
    fields = (field.name for field in dataclasses.fields(parts[0]))
    return type(parts[0])(*(how([getattr(part, name) for part in parts]) for name in fields))


def _score_block(
    log_probabilities: Float[np.ndarray, "b m k"], labels: Int[np.ndarray, " b"], joint: Float[np.ndarray, "b k"] | None
) -> EnsembleResult:
    members, num_members = Members.of(log_probabilities), log_probabilities.shape[1]
    return EnsembleResult(
        members=_join([_scores(member, labels) for member in log_probabilities.swapaxes(0, 1)], np.column_stack),
        joint=_scores(_log_mean(log_probabilities) if joint is None else joint.astype(np.float64), labels),
        diversity=members.diversity(),
        smaller={size: _score_smaller(members, of_size, labels) for size, of_size in groups(num_members).items()},
    )


def _score_smaller(members: Members, of_size: Int[np.ndarray, "g size"], labels: Int[np.ndarray, " b"]) -> Smaller:
    of_label = np.take_along_axis(members.log_probabilities, labels[:, None, None], axis=2)[:, :, 0]
    joint, information = [], []
    for group in of_size:
        # Without logarithms of all classes, which would take several times as long.
        mean = members.probabilities[:, group].mean(axis=1)
        label_log_probability = scipy.special.logsumexp(of_label[:, group], axis=1) - np.log(len(group))
        joint.append(
            Scores(
                label_log_probability,
                brier=(mean**2).sum(axis=1) - 2 * np.exp(label_log_probability) + 1,
                confidence=mean.max(axis=1),
                correct=correctness(mean, labels),
            )
        )
        information.append(mutual_information(mean, members.entropies[:, group]))
    return Smaller(_join(joint, np.column_stack), np.column_stack(information))


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
