"""Where the true name of each image ranks among all names, and the figures that follow.

Ties are counted fairly: where several names share the score of the true one, each figure is its expectation
over a random order of those names. A collapsed model, or two classes with one name, thus score chance.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy import special

from eval.calibration import ReliabilityCurve, check_labels, reliability_of_confidence
from lit_het.errors import UserError

NUM_TOP = 5


@dataclasses.dataclass(frozen=True)
class EmbeddedImages:
    """The valid images of a set, in its order.

    Attributes:
        embeddings: unit embeddings without noise.
        labels: index of the true name.
        samples: noise samples of the same embeddings, or None to score without noise.
    """

    embeddings: Float[np.ndarray, "n d"]
    labels: Int[np.ndarray, " n"]
    samples: Float[np.ndarray, "n s d"] | None = None


@dataclasses.dataclass(frozen=True)
class ZeroShotResult:
    """Where the true name of each image stands among ``k`` names.

    Attributes:
        labels: index of the true name.
        num_above: names that score strictly higher than the true one.
        num_tied: names with exactly the score of the true one, itself included.
        top_classes: the best names, falling; min(5, k) of them.
        top_probabilities: their probabilities, ``softmax(cosine / τ)`` over all names, averaged over noise samples
            where there are any.
        label_log_probability: log-probability of the true name, in nats.
        image_embeddings: unit embeddings of the images.
        class_embeddings: unit embeddings of the names.
    """

    labels: Int[np.ndarray, " n"]
    num_above: Int[np.ndarray, " n"]
    num_tied: Int[np.ndarray, " n"]
    top_classes: Int[np.ndarray, "n top"]
    top_probabilities: Float[np.ndarray, "n top"]
    label_log_probability: Float[np.ndarray, " n"]
    image_embeddings: Float[np.ndarray, "n d"]
    class_embeddings: Float[np.ndarray, "k d"]

    @property
    def predictions(self) -> Int[np.ndarray, " n"]:
        """The best name of each image; of tied names, any one."""
        return self.top_classes[:, 0]

    @property
    def num_classes(self) -> int:
        """The number of names, k."""
        return self.class_embeddings.shape[0]

    def hits(self, count: int) -> Float[np.ndarray, " n"]:
        """Probability that the true name is among the best ``count``, over random orders of tied names."""
        return np.clip((count - self.num_above) / self.num_tied, 0.0, 1.0)

    def reliability(self, bins: int = 15) -> ReliabilityCurve:
        """Reliability curve of the best name."""
        return reliability_of_confidence(self.top_probabilities[:, 0], self.hits(1), bins)


def score(
    images: EmbeddedImages,
    class_embeddings: Float[np.ndarray, "k d"],
    temperature: float,
    block_size: int = 256,
) -> ZeroShotResult:
    """Rank all names for each image; memory is ``block_size`` x k, whatever the number of images.

    Without noise samples names rank by cosine, with them by ``1/S Σ_s softmax((α + ε_s) · β / τ)`` (HET-XL App. M).

    Args:
        images: the images; their labels index ``class_embeddings``.
        class_embeddings: unit embeddings of the names.
        temperature: τ, which divides the cosines.
        block_size: images, or noise samples of images, that are scored at a time.

    Raises:
        UserError: a label outside the names, or embeddings that are not finite.
    """
    check_labels(images.labels, len(class_embeddings))
    queries = images.embeddings[:, None] if images.samples is None else images.samples
    size = max(1, block_size // queries.shape[1])
    blocks = []
    for start in range(0, len(images.labels), size):
        block = slice(start, start + size)
        blocks.append(_score_block(queries[block], images.labels[block], class_embeddings, temperature))
    num_above, num_tied, top_classes, top_probabilities, label_log_probability = (
        np.concatenate(parts) for parts in zip(*blocks, strict=True)
    )
    return ZeroShotResult(
        labels=images.labels,
        num_above=num_above,
        num_tied=num_tied,
        top_classes=top_classes,
        top_probabilities=top_probabilities,
        label_log_probability=label_log_probability,
        image_embeddings=images.embeddings,
        class_embeddings=class_embeddings,
    )


def join(results: Sequence[ZeroShotResult]) -> ZeroShotResult:
    """Returns the results of several batches, over the same names, as one."""
    per_image = [field.name for field in dataclasses.fields(ZeroShotResult) if field.name != "class_embeddings"]
    joined = {name: np.concatenate([getattr(result, name) for result in results]) for name in per_image}
    return ZeroShotResult(**joined, class_embeddings=results[0].class_embeddings)


def _score_block(
    queries: np.ndarray, labels: np.ndarray, class_embeddings: np.ndarray, temperature: float
) -> tuple[np.ndarray, ...]:
    """The per-image fields of `ZeroShotResult` for one block ``[n s d]``, in their order."""
    cosines = queries @ class_embeddings.T
    if not np.isfinite(cosines).all():
        raise UserError("zero-shot: an embedding is not finite; training diverged, use an earlier checkpoint")
    samples = special.log_softmax(cosines.astype(np.float64) / temperature, axis=2)
    log_probabilities = special.logsumexp(samples, axis=1) - np.log(samples.shape[1])
    # Without noise ranks come from the cosines: probabilities of different names can round to the same number.
    scores = cosines[:, 0] if cosines.shape[1] == 1 else log_probabilities
    of_label = np.take_along_axis(scores, labels[:, None], axis=1)
    top = nearest_of_scores(scores, NUM_TOP)
    return (
        (scores > of_label).sum(axis=1),
        (scores == of_label).sum(axis=1),
        top,
        np.exp(np.take_along_axis(log_probabilities, top, axis=1)),
        np.take_along_axis(log_probabilities, labels[:, None], axis=1)[:, 0],
    )


def nearest(
    queries: Float[np.ndarray, "q d"], keys: Float[np.ndarray, "n d"], count: int = NUM_TOP
) -> Int[np.ndarray, "q top"]:
    """Indices of the ``count`` keys (or all, if fewer) with the highest inner product, falling."""
    return nearest_of_scores(queries @ keys.T, count)


def nearest_of_scores(scores: Float[np.ndarray, "q n"], count: int) -> Int[np.ndarray, "q top"]:
    """Indices of the ``count`` highest scores of each row (or all, if fewer), falling."""
    count = min(count, scores.shape[1])
    best = np.sort(np.argpartition(-scores, count - 1, axis=1)[:, :count], axis=1)
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1)


def chance(num_classes: int) -> dict[str, float]:
    """The figures of a uniform guess over ``num_classes`` names, under the names that `metrics` uses.

    A uniform guess is perfectly calibrated: a low calibration error is worth something only beside accuracy.
    """
    return {
        "top1": 1 / num_classes,
        "top5": min(5, num_classes) / num_classes,
        "mean_reciprocal_rank": float(_harmonic(num_classes)[-1] / num_classes),
        "nll": float(np.log(num_classes)),
        "ece": 0.0,
    }


def metrics(result: ZeroShotResult) -> dict[str, float]:
    """``top1``, ``top5``, ``mean_reciprocal_rank``, ``nll`` (nats), ``ece``, and ``chance_*`` for each."""
    harmonic = _harmonic(result.num_classes)
    # The true name's rank is even over (above, above + tied]: the mean of 1/rank is a difference of sums.
    reciprocal_rank = (harmonic[result.num_above + result.num_tied] - harmonic[result.num_above]) / result.num_tied
    figures = {
        "top1": float(result.hits(1).mean()),
        "top5": float(result.hits(5).mean()),
        "mean_reciprocal_rank": float(reciprocal_rank.mean()),
        "nll": float(-result.label_log_probability.mean()),
        "ece": result.reliability().expected_calibration_error,
    }
    return figures | {f"chance_{name}": value for name, value in chance(result.num_classes).items()}


def _harmonic(count: int) -> Float[np.ndarray, " count_plus_one"]:
    """Harmonic numbers H_0 .. H_count."""
    return np.concatenate([[0.0], np.cumsum(1 / np.arange(1, count + 1))])
