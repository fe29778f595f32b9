"""The data that reports draw for predictions: curves of parts, confusions, and a few example images."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int
from PIL import Image

from lit_het.eval.evaluation import Drawing
from lit_het.eval.metrics.calibration import ReliabilityCurve, reliability_of_confidence
from lit_het.eval.metrics.classes import most_confused, worst_classes
from lit_het.eval.metrics.scores import sets_of_half
from lit_het.eval.metrics.selective import risk_coverage_curve
from lit_het.eval.metrics.significance import standard_error
from lit_het.eval.metrics.text_scores import TokenResult
from lit_het.eval.predictions import Predictions
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.texts import Written

NUM_EXTREMES = 12
# The number of worst classes, of confusions per class, and of images per confusion.
NUM_WORST, NUM_CONFUSIONS, NUM_OF_CONFUSION = 8, 3, 3
# The coverages of prediction sets that are drawn, and the number of points of a risk-coverage curve.
COVERAGES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
NUM_RISKS = 100
# The number of texts of a decoder that are shown.
NUM_TEXTS = 36
# The longest side, in pixels, of images in reports.
_LARGEST_SIDE = 160


def draw_predictions(parts: Mapping[str, Predictions], class_names: Sequence[str], opened: OpenSet) -> Drawing:
    """Returns curves of all parts; worst classes, confidences, noise norms and images of the first part.

    The arrays:

    - ``reliability/<part>`` ``[4 bins]``: lower edge, confidence, accuracy, count
    - ``sets/<part>`` ``[4 c]``: coverage asked for, coverage, mean number of classes, its standard error
    - ``risk/<part>`` ``[2 points]``: coverage, and the share of errors among these most confident images;
      ``risk/noise_norm``: where images of low noise count as confident, if there is noise
    - ``nll/<part>`` ``[n]``: of all images, in nats, for paired comparisons
    - for all images: ``confidence``, ``noise_norm``, ``correct``, ``true_class`` and ``predicted_class``
    - ``worst`` ``[c 4]``: confusions of the worst classes (true, predicted, count, of), the worst class first
    - for the images that are shown: ``image`` ``[p h w 3]``, ``row`` among all images, ``label``, ``top_classes``
      ``[p top]`` and ``top_probabilities``
    """
    plain = next(iter(parts.values()))
    worst = worst_classes(plain.hits(1), plain.label_log_p, plain.labels, plain.num_classes, NUM_WORST)
    confusions = most_confused(plain.predicted, plain.labels, worst.tolist(), NUM_CONFUSIONS)
    confidence = plain.confidence
    order = np.argsort(confidence, kind="stable")
    by_noise = np.argsort(plain.noise_norm, kind="stable") if plain.noise_norm.any() else order
    examples = [
        np.flatnonzero((plain.labels == pair.true) & (plain.predicted == pair.predicted))[:NUM_OF_CONFUSION]
        for pair in confusions
    ]
    spread = np.linspace(0, len(order) - 1, NUM_EXTREMES).astype(int)
    extremes = [rows for ranked in (order, by_noise) for rows in (ranked[:NUM_EXTREMES], ranked[-NUM_EXTREMES:])]
    shown = np.unique(np.concatenate([*extremes, spread, *examples]))
    top_classes, top_probabilities = plain.take(shown).top()
    arrays = {f"reliability/{name}": _bins(predictions.reliability()) for name, predictions in parts.items()}
    arrays |= {f"sets/{name}": _set_sizes(predictions) for name, predictions in parts.items()}
    arrays |= {f"risk/{name}": _risk(part.confidence, part) for name, part in parts.items()}
    if plain.noise_norm.any():
        arrays["risk/noise_norm"] = _risk(-plain.noise_norm, plain)
    arrays |= {f"nll/{name}": -part.label_log_p for name, part in parts.items()}
    arrays |= {
        "confidence": confidence,
        "noise_norm": plain.noise_norm,
        "correct": plain.hits(1),
        "true_class": plain.labels,
        "predicted_class": plain.predicted,
        "worst": np.array([(p.true, p.predicted, p.count, p.of) for p in confusions], np.int64).reshape(-1, 4),
        "row": shown,
        "label": plain.labels[shown],
        "top_classes": top_classes,
        "top_probabilities": top_probabilities,
        "image": thumbnails(opened, plain.positions[shown]),
    }
    return Drawing(arrays, {"class_names": class_names})


@dataclasses.dataclass(frozen=True)
class TextPart:
    """Texts that a decoder wrote about images, one in each row, with their confidence and how right they are, 0 to 1.

    Attributes:
        written: the texts.
        confidence: of each text.
        right: of each text.
        tokens: predictions of the tokens of true captions, or None.
    """

    written: Sequence[Written]
    confidence: Float[np.ndarray, " n"]
    right: Float[np.ndarray, " n"]
    tokens: TokenResult | None


def draw_texts(
    parts: Mapping[str, TextPart], titles: Sequence[str], positions: Int[np.ndarray, " n"], opened: OpenSet
) -> Drawing:
    """Returns curves of all parts, and texts of the first part that are spread evenly over the ranks of confidence.

    The arrays:

    - ``reliability/<part>`` and ``token_reliability/<part>`` ``[4 bins]``: lower edge, confidence, accuracy, count
    - ``risk/<part>`` ``[2 points]``: coverage, and the mean error of these most confident texts
    - for all texts: ``confidence`` and ``right``
    - for those that are shown: ``row`` among all, ``token_p`` ``[p tokens]``, NaN beyond, and ``image`` ``[p h w 3]``
      if the set has images

    Texts are ``titles`` and ``tokens``, side by side.

    Args:
        parts: by name; those of one set.
        titles: what is shown above each text: the true captions, or the question and its answers.
        positions: of each text's image in the set.
        opened: the set.
    """
    plain = next(iter(parts.values()))
    order = np.argsort(-plain.confidence, kind="stable")
    shown = order[np.unique(np.linspace(0, len(order) - 1, NUM_TEXTS).astype(int))]
    texts = [plain.written[int(row)] for row in shown]
    token_p = np.full((len(shown), max(len(text.tokens) for text in texts)), np.nan)
    for row, text in zip(token_p, texts, strict=True):
        row[: len(text.tokens)] = text.probabilities
    arrays = {
        "confidence": plain.confidence,
        "right": plain.right,
        "row": shown,
        "token_p": token_p,
    }
    if opened.has_images:
        arrays["image"] = thumbnails(opened, positions[shown])
    for name, part in parts.items():
        arrays[f"reliability/{name}"] = _bins(reliability_of_confidence(part.confidence, part.right))
        arrays[f"risk/{name}"] = _risk_points(part.confidence, 1 - part.right)
        if part.tokens is not None:
            arrays[f"token_reliability/{name}"] = _bins(part.tokens.reliability())
    tokens = [token for text in texts for token in text.tokens]
    return Drawing(arrays, {"titles": [titles[int(row)] for row in shown], "tokens": tokens})


def _bins(curve: ReliabilityCurve) -> Float[np.ndarray, "four bins"]:
    return np.stack([curve.edges[:-1], curve.confidence, curve.accuracy, curve.count])


def _set_sizes(predictions: Predictions) -> Float[np.ndarray, "four c"]:
    measured = sets_of_half(predictions, COVERAGES)
    rows = [(asked, covered.mean(), size.mean(), standard_error(size)) for asked, covered, size in measured]
    return np.array(rows).reshape(-1, 4).T


def _risk(confidence: Float[np.ndarray, " n"], predictions: Predictions) -> Float[np.ndarray, "two points"]:
    return _risk_points(confidence, 1 - predictions.hits(1))


def _risk_points(confidence: Float[np.ndarray, " n"], loss: Float[np.ndarray, " n"]) -> Float[np.ndarray, "two points"]:
    risks = risk_coverage_curve(confidence, loss)
    places = np.unique(np.ceil(np.linspace(0, risks.size, NUM_RISKS + 1)[1:]).astype(int))
    return np.stack([places / risks.size, risks[places - 1]])


def thumbnails(opened: OpenSet, positions: np.ndarray, side: int = _LARGEST_SIDE) -> np.ndarray:
    """Returns the preprocessed images, shrunk for reports ``[p h w 3]``, uint8; beside and below them is white."""
    small = []
    for pixels in opened.images([int(position) for position in positions]):
        image = Image.fromarray(pixels)
        image.thumbnail((side, side))
        small.append(np.asarray(image))
    shape = np.max([image.shape for image in small], axis=0)
    margins = ([(0, int(most - side)) for most, side in zip(shape, image.shape, strict=True)] for image in small)
    return np.stack([np.pad(image, margin, constant_values=255) for image, margin in zip(small, margins, strict=True)])
