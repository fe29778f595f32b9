"""Panoptic quality (Kirillov et al. 2019), as COCO's evaluation counts it."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from lit_het.eval.metrics.significance import bootstrap_error, ratio_of_means

_MATCHED = 0.5
"""The IoU above which segments match; each then has one match at most."""

FIGURES = ("pq", "sq", "rq")
"""Panoptic quality, and the qualities of segmentation and recognition whose product it is for a class."""


@dataclasses.dataclass(frozen=True)
class TrueSegments:
    """The segments of an image, in the order of its JSON.

    Attributes:
        places: of each pixel in the arrays below, from 1; 0 for void.
        labels: of each segment the class, from 1.
        are_crowds: whether each is of many objects, which need not be found.
    """

    places: Int[np.ndarray, "h w"]
    labels: Int[np.ndarray, " t"]
    are_crowds: Bool[np.ndarray, " t"]


def counts(truth: TrueSegments, predicted: Int[np.ndarray, "h w 2"], num_classes: int) -> Float[np.ndarray, "k four"]:
    """Returns what an image adds to each class: IoU of matched segments, their number, wrong and missed segments.

    Segments of one class match if their IoU is above 1/2, where the union leaves out what is predicted on void. A
    crowd is neither matched nor missed, and a segment is not wrong of which more than half lies on void and on a crowd
    of its class (in COCO's evaluation, of several crowds of a class the last in its JSON).

    Args:
        truth: of the image.
        predicted: class (0 for void) and number of the instance of each pixel.
        num_classes: k.
    """
    # A column for each pair of class and instance; sorting the pairs of all pixels would take 200 times as long.
    width = int(predicted[..., 1].max()) + 1
    columns, shape = predicted[..., 0] * width + predicted[..., 1], (len(truth.labels) + 1, (num_classes + 1) * width)
    shared = np.bincount((truth.places * shape[1] + columns).ravel(), minlength=shape[0] * shape[1]).reshape(shape)
    # Void is no segment, of the truth or of the prediction.
    segments = width + np.flatnonzero(shared[:, width:].any(axis=0))
    labels, on_void, inside = segments // width, shared[0, segments], shared[1:, segments]
    areas = on_void + inside.sum(axis=0)
    iou = inside / np.maximum(shared[1:].sum(axis=1)[:, None] + areas - inside - on_void, 1)
    is_match = (iou > _MATCHED) & (truth.labels[:, None] == labels) & ~truth.are_crowds[:, None]
    is_missed = ~is_match.any(axis=1) & ~truth.are_crowds
    ignored = on_void.copy()
    for label in np.unique(truth.labels[truth.are_crowds]):
        crowd = np.flatnonzero(truth.are_crowds & (truth.labels == label))[-1]
        ignored[labels == label] += inside[crowd, labels == label]
    is_wrong = ~is_match.any(axis=0) & (ignored / areas <= 0.5)
    added = (
        (labels, (iou * is_match).sum(axis=0)),
        (labels, is_match.any(axis=0)),
        (labels, is_wrong),
        (truth.labels, is_missed),
    )
    return np.stack([np.bincount(of, values, num_classes + 1)[1:] for of, values in added], axis=1)


def qualities(counted: Float[np.ndarray, "*rows k four"]) -> Float[np.ndarray, "*rows k three"]:
    """Returns PQ, SQ and RQ of each class; NaN of classes that are neither in the truth nor predicted.

    PQ = Σ IoU / (TP + FP/2 + FN/2), SQ = Σ IoU / TP, which is 0 without a match, and RQ = PQ / SQ.
    """
    iou, matched, wrong, missed = np.moveaxis(counted, -1, 0)
    with np.errstate(invalid="ignore"):
        recognition = matched / (matched + wrong / 2 + missed / 2)
    segmentation = np.where(np.isnan(recognition), np.nan, iou / np.maximum(matched, 1))
    return np.stack([recognition * segmentation, segmentation, recognition], axis=-1)


def figures(
    by_image: Float[np.ndarray, "n k four"], are_things: Bool[np.ndarray, " k"]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns means of PQ, SQ and RQ over all classes, things and stuff, numbers of classes, and standard errors.

    Classes that are neither in the truth nor predicted are left out. Errors are by the bootstrap over images.

    Args:
        by_image: the `counts` of each image.
        are_things: whether each class is of things.
    """
    num_images, num_classes, _ = by_image.shape
    found, errors = {}, {}
    for part, chosen in (("", np.ones(num_classes, bool)), ("things/", are_things), ("stuff/", ~are_things)):
        counted = by_image[:, chosen]
        is_seen = counted.any(axis=(0, 2))
        if not is_seen.any():
            continue
        counted = counted[:, is_seen]
        for place, name in enumerate(FIGURES):

            def mean(times: Int[np.ndarray, "r n"], counted: np.ndarray = counted, place: int = place) -> np.ndarray:
                of_classes = qualities(np.tensordot(times.astype(np.float64), counted, 1))
                return np.nanmean(of_classes[..., place], axis=1)

            found[part + name] = float(mean(np.ones((1, num_images), np.int64))[0])
            errors[part + name] = bootstrap_error(mean, num_images)
        found[f"{part}num_classes"] = float(is_seen.sum())
    return found, errors


def class_errors(by_image: Float[np.ndarray, "n k four"]) -> Float[np.ndarray, " k"]:
    """Returns the standard error of the PQ of each class by the delta method, as it is a ratio of means over images."""
    iou, matched, wrong, missed = np.moveaxis(by_image, -1, 0)
    of = matched + wrong / 2 + missed / 2
    return np.array(
        [ratio_of_means(one, other)[1] if other.any() else np.nan for one, other in zip(iou.T, of.T, strict=True)]
    )
