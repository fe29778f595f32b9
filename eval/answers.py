"""Predictions for single images: the probability of each label, and its spread over noise samples."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jaxtyping import Float, Real

from lit_het import arguments
from lit_het.data_pipelines.texts.prompts import BARE_TEMPLATE
from lit_het.errors import UserError
from lit_het.eval.evaluation import Record
from lit_het.eval.metrics.conformal import prediction_sets
from lit_het.eval.metrics.diversity import information_of_members
from lit_het.eval.predictions import Predictor
from lit_het.eval.sets.recognition import embed_class_names, require_head, seen_names
from lit_het.tasks import quantities
from lit_het.texts import SourceTexts
from lit_het.types import EvaluatedModel, ImageFeatures

# The band of a probability lies between these quantiles of its noise samples.
BAND = (0.05, 0.95)
BATCH_SIZE = 32
"""Images that go through the tower together."""
_AXIS_ENDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The prediction for one image.

    Attributes:
        probability: of each label, without noise.
        noise_norm: ``sqrt(tr Σ(x))``; 0 for a deterministic head.
        noisy: the mean probabilities over noise samples, or in closed form; None without noise.
        samples: the probabilities of each noise sample; None without noise, and of a closed form.
        raw: ``probability`` as trained, where the others are calibrated; else None.
        pair: the probability that each label fits the image, independent of other labels: the sigmoid of a model that
            was trained with one, as trained; else None.
        mutual_information: of the label and the member, in nats, as trained; None of a model with one member.
    """

    probability: Float[np.ndarray, " k"]
    noise_norm: float
    noisy: Float[np.ndarray, " k"] | None = None
    samples: Float[np.ndarray, "s k"] | None = None
    raw: Float[np.ndarray, " k"] | None = None
    pair: Float[np.ndarray, " k"] | None = None
    mutual_information: float | None = None

    @property
    def band(self) -> Float[np.ndarray, "two k"] | None:
        """The `BAND` of each label over noise samples: lower ends, then upper ends; None without two samples."""
        if self.samples is None or len(self.samples) < 2:
            return None
        return np.quantile(self.samples, BAND, axis=0).astype(np.float32)

    @property
    def scale(self) -> float:
        """The upper end of an axis that shows all probabilities: a round number."""
        return axis_end(float(max(self.probability.max(), 0 if self.samples is None else self.samples.max())))

    @property
    def order(self) -> list[int]:
        """The labels by descending probability without noise."""
        return np.argsort(-self.probability, kind="stable").tolist()

    def prediction_set(self, threshold: float) -> list[int]:
        """Returns the labels in the conformal prediction set by descending probability without noise.

        Args:
            threshold: the lowest log-probability, of `lit_het.eval.metrics.conformal.ConformalThresholds`.
        """
        # A probability of zero has the logarithm minus infinity.
        with np.errstate(divide="ignore"):
            inside = prediction_sets(np.log(self.probability)[None], threshold)[0]
        return [place for place in self.order if inside[place]]


def axis_end(highest: float) -> float:
    """Returns the upper end of an axis that shows probabilities up to ``highest``: a round number."""
    return next((end for end in _AXIS_ENDS if highest <= end), 1.0)


def split_labels(text: str) -> tuple[str, ...]:
    """Splits text into labels: one per line or, in a single line, separated by commas."""
    lines = text.strip().split("\n")
    return tuple(filter(None, (part.strip() for part in (lines if len(lines) > 1 else text.split(",")))))


def require_distinct_labels(labels: Sequence[str]) -> None:
    """Checks that there are at least two labels, all different."""
    if not labels:
        raise UserError("no labels; give two or more")
    if len(labels) == 1:
        raise UserError(f"{labels[0]!r} is the only label, so its probability is always 1; give two or more")
    repeated = [label for label in dict.fromkeys(labels) if labels.count(label) > 1]
    if repeated:
        raise UserError(f"label {repeated[0]!r} is repeated; keep one")


def label_predictor(
    model: EvaluatedModel, labels: Sequence[str], templates: Sequence[str] = BARE_TEMPLATE
) -> Predictor:
    """Returns a predictor over labels; for a classifier, the labels name its classes, in order."""
    require_distinct_labels(labels)
    if model.text is not None:
        embeddings = embed_class_names(model, labels, templates)
        return Predictor(model, len(labels), embeddings, seen=seen_names(model, labels, templates))
    require_head(model)
    if len(labels) != model.num_classes:
        raise UserError(
            f"the classifier was trained on {model.num_classes} classes, and there are {len(labels)} labels; "
            "give the names of its classes, in order"
        )
    return Predictor(model, len(labels))


def features_of(
    tower: ImageFeatures | SourceTexts, images: Iterable[np.ndarray], count: int
) -> Iterator[Real[np.ndarray, " f"]]:
    """Yields the image tower's features of each image; all batches have the same shape, so that JAX compiles once.

    Args:
        tower: the tower.
        images: preprocessed; or token ids of texts to translate. No more than a batch of them is held.
        count: their number.
    """
    size, waiting = -(-min(count, BATCH_SIZE) // tower.num_shards) * tower.num_shards, iter(images)
    while batch := list(itertools.islice(waiting, size)):
        yield from np.asarray(tower.extract(np.stack(batch + batch[-1:] * (size - len(batch)))))[: len(batch)]


def answer(predictor: Predictor, features: Float[np.ndarray, " f"], samples: int = 32, seed: int = 0) -> Answer:
    """Predicts the labels of one image, independently of other images.

    Args:
        predictor: built by `label_predictor`.
        features: of the image.
        samples: S, the number of noise samples; 0 disables the noise.
        seed: of the noise.
    """
    seeds = np.array([arguments.whole(seed, "seed", 0, arguments.MAX_SEED)], np.uint32).view(np.int32)
    block = features[None, None], seeds
    trained = predictor.quantity(quantities.log_probabilities, *block)
    if np.isnan(trained).any():
        raise UserError("a probability is not a number; training diverged, use an earlier checkpoint")
    probability = np.exp(predictor.calibrated(trained)[0])
    raw = None if predictor.model.calibration is None else np.exp(trained[0])
    has_pairs = predictor.model.text is not None and predictor.model.has_class_probabilities
    pair = predictor.quantity(quantities.pair_probabilities, block[0])[0] if has_pairs else None
    noise_norm = float(predictor.model(quantities.noise_norm, block[0])[0])
    num_members = predictor.model.num_predictions
    if not samples or not noise_norm:
        members = predictor.member_log_probabilities(*block) if num_members > 1 else None
        return Answer(probability, noise_norm, None, None, raw, pair, _information(members, num_members))
    noisy = dataclasses.replace(predictor, samples=samples)
    members = noisy.member_log_probabilities(*block)
    # The samples show how far noise moves the prediction, so that they have its temperature.
    mean, sampled = (np.exp(log_p[0]) for log_p in (noisy.pooled(members), noisy.calibrated(members)))
    # A closed form is a single result, however many samples are asked for.
    sampled = None if len(sampled) < samples * num_members else sampled
    return Answer(probability, noise_norm, mean, sampled, raw, pair, _information(members, num_members))


def _information(members: Float[np.ndarray, "one sm k"] | None, num_members: int) -> float | None:
    if members is None or num_members == 1:
        return None
    return float(information_of_members(members, num_members)[0])


@dataclasses.dataclass(frozen=True)
class NoiseRank:
    """The rank of an image's noise norm among the images of a set.

    Attributes:
        name: of the set.
        num_images: of the set.
        fraction_below: the fraction of the set's images with a lower noise norm.
    """

    name: str
    num_images: int
    fraction_below: float

    def __str__(self) -> str:
        return f"{self.fraction_below:.0%} of the {self.num_images:,} images of {self.name} have less"


def noise_ranks(noise_norm: float, records: Sequence[Record], step: int) -> list[NoiseRank]:
    """Ranks a noise norm in each set that the same checkpoint was evaluated on; empty where the norm is zero."""
    norms = {
        record.name: record.drawing.arrays["noise_norm"]
        for record in records
        if noise_norm and record.step == step and "noise_norm" in record.drawing.arrays
    }
    return [NoiseRank(name, len(in_set), float((in_set < noise_norm).mean())) for name, in_set in norms.items()]
