"""Metrics of images with several labels, for models whose classes have probabilities of their own (a sigmoid loss).

Log-probabilities ``[n two k]`` are those of each class and of its absence, in nats; targets ``[n k]`` are zeros and
ones.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from lit_het.errors import UserError
from lit_het.eval.metrics.calibration import reliability_of_confidence
from lit_het.eval.metrics.classes import mean_average_precision
from lit_het.eval.metrics.diversity import Members
from lit_het.eval.metrics.ensembles import mean_prediction
from lit_het.eval.metrics.rows import row_blocks
from lit_het.eval.metrics.significance import standard_error


def figures(
    log_p: Float[np.ndarray, "n two k"], targets: Float[np.ndarray, "n k"]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns metrics of independent class probabilities, and standard errors over images of those that are means.

    ``precision_at_1`` is the share of images (with any label) whose most probable class is one of theirs: Prec@1 of
    HET-XL, Tables 1 to 5. ``binary_nll`` (nats) and ``binary_brier`` (0 to 1) are means over images and classes: the
    training loss is ``binary_nll`` times the number of classes. ``classwise_ece`` is the calibration error of a class's
    probability, averaged over classes (Kull et al., "Beyond temperature scaling", NeurIPS 2019). It and
    ``mean_average_precision`` have no standard error.
    """
    return _means([log_p], targets)


def ensemble_figures(
    members: Float[np.ndarray, "n m two k"], targets: Float[np.ndarray, "n k"], *, each_member: bool = False
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the `figures` of the members' mean probabilities and of members, and how much members disagree.

    ``joint_*`` are those of the ensemble, ``individual_*`` means over members, ``member_<number>/*`` those of each;
    ``kl`` is the KL divergence between two members' predictions of a class, averaged over pairs and classes, in nats.
    """
    by_member = list(members.swapaxes(0, 1))
    parts: Mapping[str, Sequence[np.ndarray]] = {"joint_": [joint(members)], "individual_": by_member}
    if each_member:
        parts = {**parts, **{f"member_{number + 1}/": [one] for number, one in enumerate(by_member)}}
    disagreement = _divergence(members)
    found, errors = {"kl": float(disagreement.mean())}, {"kl": standard_error(disagreement)}
    for part, predictions in parts.items():
        part_figures, part_errors = _means(predictions, targets)
        found |= {f"{part}{name}": value for name, value in part_figures.items()}
        errors |= {f"{part}{name}": value for name, value in part_errors.items()}
    return found, errors


def joint(members: Float[np.ndarray, "n m two k"]) -> Float[np.ndarray, "n two k"]:
    """Returns the log of the mean probability over members or noise samples, of each class and of its absence."""
    return mean_prediction(members.reshape(*members.shape[:2], -1)).reshape(len(members), *members.shape[2:])


def _means(
    predictions: Sequence[Float[np.ndarray, "n two k"]], targets: Float[np.ndarray, "n k"]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the mean of the figures of several predictors, and standard errors over images."""
    if not targets.any():
        raise UserError("no image has a label; check the set's labels")
    per_image = [_per_image(log_p, targets) for log_p in predictions]
    by_image = {name: np.mean([one[name] for one in per_image], axis=0) for name in per_image[0]}
    found = {
        "mean_average_precision": [mean_average_precision(log_p[:, 0], targets > 0) for log_p in predictions],
        **{name: [np.nanmean(values)] for name, values in by_image.items()},
        "classwise_ece": [_classwise_ece(log_p[:, 0], targets) for log_p in predictions],
    }
    errors = {name: standard_error(values[~np.isnan(values)]) for name, values in by_image.items()}
    return {name: float(np.mean(values)) for name, values in found.items()}, errors


def _per_image(
    log_p: Float[np.ndarray, "n two k"], targets: Float[np.ndarray, "n k"]
) -> dict[str, Float[np.ndarray, " n"]]:
    precision, nll, brier = np.empty((3, len(targets)))
    for rows in row_blocks(*targets.shape):
        is_label = targets[rows] > 0
        present, absent = log_p[rows].astype(np.float64).swapaxes(0, 1)
        # Tied classes share the credit, as everywhere.
        is_top = present == present.max(axis=1, keepdims=True)
        hits = (is_top & is_label).sum(axis=1) / is_top.sum(axis=1)
        precision[rows] = np.where(is_label.any(axis=1), hits, np.nan)
        nll[rows] = -np.where(is_label, present, absent).mean(axis=1)
        brier[rows] = np.square(np.exp(present) - is_label).mean(axis=1)
    return {"precision_at_1": precision, "binary_nll": nll, "binary_brier": brier}


def _classwise_ece(log_p: Float[np.ndarray, "n k"], targets: Float[np.ndarray, "n k"]) -> float:
    curves = (
        reliability_of_confidence(np.exp(of_class.astype(np.float64)), labels)
        for of_class, labels in zip(log_p.T, targets.T, strict=True)
    )
    return float(np.mean([curve.expected_calibration_error for curve in curves]))


def _divergence(members: Float[np.ndarray, "n m two k"]) -> Float[np.ndarray, " n"]:
    """Returns the mean over classes of the members' pairwise KL divergence, each a prediction of two outcomes."""
    num_images, num_members, _, num_classes = members.shape
    found = np.empty(num_images)
    for rows in row_blocks(num_images, 2 * num_members * num_classes):
        outcomes = members[rows].astype(np.float64).transpose(0, 3, 1, 2).reshape(-1, num_members, 2)
        found[rows] = Members.of(outcomes).diversity().kl.reshape(-1, num_classes).mean(axis=1)
    return found
