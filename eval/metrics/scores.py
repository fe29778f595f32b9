"""Metrics of predictions, their standard errors, and their chance levels."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from lit_het.console import message
from lit_het.eval.metrics.calibration import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    brier_scores,
    calibration_standard_error,
    fit_temperature,
    reliability_of_confidence,
    scaled,
)
from lit_het.eval.metrics.classes import mean_average_precision, mean_class_recall
from lit_het.eval.metrics.conformal import fit_conformal, min_examples, prediction_sets
from lit_het.eval.metrics.selective import aurc, aurc_standard_errors, excess_aurc
from lit_het.eval.metrics.significance import standard_error
from lit_het.eval.predictions import Predictions


def figures(predictions: Predictions) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the metrics of single-label images, and standard errors of all but ``mean_class_recall``.

    The metrics are ``top1``, ``top5``, ``mean_class_recall``, ``mean_reciprocal_rank``, ``nll`` (nats), ``brier`` (0 to
    2), ``ece`` and ``ece_equal_mass``. Standard errors are over images; those of calibration errors are bootstrapped.
    """
    values = per_image(predictions)
    found = {name: float(by_image.mean()) for name, by_image in values.items()}
    errors = {name: standard_error(by_image) for name, by_image in values.items()}
    confidence, hits = predictions.confidence, values["top1"]
    # No standard error: it is not a mean over images, but over classes of different sizes.
    found["mean_class_recall"] = mean_class_recall(predictions.log_probabilities, predictions.labels)
    for name, equal_mass in (("ece", False), ("ece_equal_mass", True)):
        curve = reliability_of_confidence(confidence, hits, equal_mass=equal_mass)
        found[name] = curve.expected_calibration_error
        errors[name] = calibration_standard_error(confidence, hits, equal_mass=equal_mass)
    return found, errors


def multi_label_figures(scores: Float[np.ndarray, "n k"], labels: Float[np.ndarray, "n k"]) -> dict[str, float]:
    """Returns ``mean_average_precision`` of multi-label images.

    Images are ranked by the scores of a class, not by its softmax probability, which depends on the other classes.
    """
    return {"mean_average_precision": mean_average_precision(scores, labels > 0)}


def per_image(predictions: Predictions) -> dict[str, Float[np.ndarray, " n"]]:
    """Returns per-image values of the metrics that are means over images."""
    above, tied = predictions.ranks()
    harmonic = _harmonic(predictions.num_classes)
    return {
        # Tied classes share the credit: with t of them in first place, each counts 1 / t.
        "top1": np.clip((1 - above) / tied, 0.0, 1.0),
        "top5": np.clip((5 - above) / tied, 0.0, 1.0),
        # With ties the rank is uniform over above + 1, ..., above + tied: the mean of 1 / rank is a difference of
        # harmonic numbers.
        "mean_reciprocal_rank": (harmonic[above + tied] - harmonic[above]) / tied,
        "nll": -predictions.label_log_p.astype(np.float64),
        "brier": brier_scores(predictions.log_probabilities, predictions.labels),
    }


def soft_nll(
    log_probabilities: Float[np.ndarray, "n k"], soft_labels: Float[np.ndarray, "n k"]
) -> Float[np.ndarray, " n"]:
    """Returns the cross-entropy of each image's label distribution and prediction, in nats.

    It is least, the entropy of the labels, for a prediction that equals them (Peterson et al., "Human uncertainty makes
    classification more robust", ICCV 2019, on CIFAR-10H).

    Args:
        log_probabilities: of every class.
        soft_labels: the distribution of human answers over the classes.
    """
    with np.errstate(invalid="ignore"):
        # A class that nobody chose adds nothing, even where its probability is zero.
        terms = np.where(soft_labels > 0, soft_labels * log_probabilities.astype(np.float64), 0.0)
    return -terms.sum(axis=1)


def calibrated(predictions: Predictions, name: str, seed: int = 0) -> tuple[Predictions, float]:
    """Scales each random half of the images by the temperature that was fitted on the other half.

    Thus all images count in the metrics, and no image affects its own temperature.

    Args:
        predictions: for the images of a set.
        name: of the set, for `report_if_unfitted`.
        seed: of the halves.

    Returns:
        Scaled predictions, and the geometric mean of both temperatures: the factor by which to multiply the model's
        temperature.
    """
    count = len(predictions.labels)
    if count < 2:
        return predictions, 1.0
    halves = random_halves(count, seed)
    log_p = np.empty_like(predictions.log_probabilities)
    temperatures = []
    for fitted, held_out in (halves, halves[::-1]):
        # Fitted on one half and applied to the other: a temperature fitted on the images that it scales would look too
        # good.
        temperatures.append(fit_temperature(predictions.log_probabilities[fitted], predictions.labels[fitted]))
        log_p[held_out] = scaled(predictions.log_probabilities[held_out], temperatures[-1])
    report_if_unfitted(name, temperatures)
    return dataclasses.replace(predictions, log_probabilities=log_p), float(np.exp(np.mean(np.log(temperatures))))


def decision_figures(predictions: Predictions) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the metrics of answers that may be several classes, or none, and their standard errors.

    The metrics are ``aurc`` and ``excess_aurc`` of errors, and from 18 images on ``coverage90`` and ``set_size90``
    (classes) of prediction sets for 90 %, as `sets_of_half` measures them. Standard errors of areas are bootstrapped;
    those of sets are over the measured images, for the threshold that was fitted.
    """
    confidence, wrong = predictions.confidence, 1 - predictions.hits(1)
    found = {"aurc": aurc(confidence, wrong), "excess_aurc": excess_aurc(confidence, wrong)}
    errors = dict(zip(found, aurc_standard_errors(confidence, wrong), strict=True))
    for _, covered, size in sets_of_half(predictions, (0.9,)):
        for name, by_image in (("coverage90", covered), ("set_size90", size)):
            found[name], errors[name] = float(by_image.mean()), standard_error(by_image)
    return found, errors


def sets_of_half(
    predictions: Predictions, coverages: Sequence[float], seed: int = 1
) -> list[tuple[float, Float[np.ndarray, " half"], Float[np.ndarray, " half"]]]:
    """Measures prediction sets of a random half of the images, with thresholds from the other half.

    Only one half is measured: each half with the threshold of the other would have exactly the coverage asked for, up
    to a term of second order, because what one threshold covers too much the other covers too little.

    Args:
        predictions: for the images of a set.
        coverages: ascending; those that need more images are left out.
        seed: of the halves. It differs from that of `calibrated`: with the same halves, thresholds and sets would come
            from predictions of two temperatures, and the guarantee of coverage would be lost.

    Returns:
        For each coverage: the coverage, whether each set has the true class (1 or 0), and its number of classes.
    """
    log_p, labels = predictions.log_probabilities, predictions.labels
    fitted, measured = random_halves(len(labels), seed)
    coverages = [coverage for coverage in coverages if min_examples(coverage) <= len(fitted)]
    if not coverages:
        return []
    thresholds = fit_conformal(log_p[fitted], labels[fitted], coverages)
    found = []
    for coverage in coverages:
        sets = prediction_sets(log_p[measured], thresholds.at(coverage))
        covered = sets[np.arange(len(measured)), labels[measured]]
        found.append((coverage, covered.astype(np.float64), sets.sum(axis=1, dtype=np.float64)))
    return found


def report_if_unfitted(name: str, temperatures: Sequence[float]) -> None:
    """Reports temperatures at a bound of the search of `fit_temperature`: no temperature fits."""
    for bound, which in ((LOWEST_TEMPERATURE, "lowest"), (HIGHEST_TEMPERATURE, "highest")):
        if bound in temperatures:
            message(
                f"{name}: no temperature fits: the loss still decreases at {bound:g} times the model's temperature, "
                f"the {which} in the search; calibrated figures use this temperature"
            )


def chance(num_classes: int) -> Mapping[str, float]:
    """Returns the figures of a uniform guess over the classes.

    A uniform guess is perfectly calibrated: read a low calibration error together with the accuracy.
    """
    return {
        "top1": 1 / num_classes,
        "top5": min(5, num_classes) / num_classes,
        "mean_class_recall": 1 / num_classes,
        "mean_reciprocal_rank": float(_harmonic(num_classes)[-1] / num_classes),
        "nll": float(np.log(num_classes)),
        "brier": 1 - 1 / num_classes,
        "ece": 0.0,
        "ece_equal_mass": 0.0,
    }


def random_halves(count: int, seed: int) -> tuple[Int[np.ndarray, " fitted"], Int[np.ndarray, " measured"]]:
    """Returns the rows of two random halves; the second has one more if the count is odd."""
    order = np.random.default_rng(seed).permutation(count)
    return order[: count // 2], order[count // 2 :]


def _harmonic(count: int) -> Float[np.ndarray, " count_plus_one"]:
    """Returns the harmonic numbers H_0 .. H_count."""
    return np.concatenate([[0.0], np.cumsum(1 / np.arange(1, count + 1))])
