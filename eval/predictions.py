"""What a model says of every image of a set: log-probabilities of all classes, from which all figures follow.

Ties are counted fairly: where several classes share the probability of the true one, each figure is its expectation
over a random order of those classes. A collapsed model, or two classes with one name, thus score chance.
"""

import dataclasses
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Float, Int

from lit_het.console import Bar
from lit_het.errors import UserError
from lit_het.eval.calibration import ReliabilityCurve, check_labels, reliability_of_confidence
from lit_het.eval.sets import Features
from lit_het.types import Classifier, Encoder, HeadOutput

NUM_TOP = 5
BLOCK_SIZE = 256


@runtime_checkable
class Predictor(Protocol):
    """From features of images to what a model says of them."""

    @property
    def num_classes(self) -> int:
        """The number of classes, k."""
        ...

    @property
    def num_shares(self) -> int:
        """The number of devices."""
        ...

    def __call__(self, blocks: Float[np.ndarray, "n b f"], seeds: Int[np.ndarray, " n"]) -> HeadOutput:
        """Returns what the head says of blocks of images, one or as many as devices; seeds are the noise's."""
        ...

    def members(
        self, blocks: Float[np.ndarray, "n b f"], seeds: Int[np.ndarray, " n"]
    ) -> Float[np.ndarray, "rows m k"]:
        """Returns the log-probabilities of m members of an ensemble, or noise samples."""
        ...

    def alone(self, blocks: Float[np.ndarray, "n b f"]) -> Float[np.ndarray, "rows k"]:
        """Returns what is said of each class by itself, whatever the others are, without noise."""
        ...


@dataclasses.dataclass(frozen=True)
class ZeroShotPredictor:
    """An image-text model among given names: ``softmax(cosine / τ)``, of S noise samples where there are some.

    With noise it is ``1/S Σ_s softmax((α + ε_s) · β / τ)`` (HET-XL App. M).

    Attributes:
        encoder: the model.
        class_embeddings: unit embeddings of the names.
        samples: S; 0 leaves the noise out.
    """

    encoder: Encoder
    class_embeddings: Float[np.ndarray, "k d"]
    samples: int = 0

    @property
    def num_classes(self) -> int:
        """The number of names."""
        return len(self.class_embeddings)

    @property
    def num_shares(self) -> int:
        """The number of devices."""
        return self.encoder.features.num_shares

    def __call__(self, blocks: Float[np.ndarray, "n b f"], seeds: Int[np.ndarray, " n"]) -> HeadOutput:
        """Returns the mean over noise samples, or what is said without noise."""
        return self.encoder.choose(blocks, seeds, self.samples, self.class_embeddings)

    def members(
        self, blocks: Float[np.ndarray, "n b f"], seeds: Int[np.ndarray, " n"]
    ) -> Float[np.ndarray, "rows m k"]:
        """Returns log-probabilities of every noise sample, or of one prediction without noise."""
        return self.encoder.members(blocks, seeds, self.samples, self.class_embeddings)

    def alone(self, blocks: Float[np.ndarray, "n b f"]) -> Float[np.ndarray, "rows k"]:
        """Returns ``cosine / τ`` without noise."""
        return self.encoder.alone(blocks, self.class_embeddings)


@dataclasses.dataclass(frozen=True)
class SupervisedPredictor:
    """A classifier among the classes that it was trained on.

    Attributes:
        classifier: the model.
        samples: S, noise samples of each image; 0 leaves the noise out.
    """

    classifier: Classifier
    samples: int = 0

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.classifier.num_classes

    @property
    def num_shares(self) -> int:
        """The number of devices."""
        return self.classifier.features.num_shares

    def __call__(self, blocks: Float[np.ndarray, "n b f"], seeds: Int[np.ndarray, " n"]) -> HeadOutput:
        """Returns the mean over members and noise samples."""
        return self.classifier.choose(blocks, seeds, self.samples)

    def members(
        self, blocks: Float[np.ndarray, "n b f"], seeds: Int[np.ndarray, " n"]
    ) -> Float[np.ndarray, "rows m k"]:
        """Returns log-probabilities of every member, or of every noise sample of every member."""
        return self.classifier.members(blocks, seeds, self.samples)

    def alone(self, blocks: Float[np.ndarray, "n b f"]) -> Float[np.ndarray, "rows k"]:
        """Returns logits, or of a sigmoid log-probabilities, without noise."""
        return self.classifier.alone(blocks)


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a model says of each image.

    Attributes:
        log_probabilities: of every class.
        labels: the true class, or a vector of ones and zeros.
        positions: of the images in their set.
        log_normalizer, noise_norm: see `lit_het.types.HeadOutput`.
    """

    log_probabilities: Float[np.ndarray, "n k"]
    labels: Int[np.ndarray, " n"] | Float[np.ndarray, "n k"]
    positions: Int[np.ndarray, " n"]
    log_normalizer: Float[np.ndarray, " n"]
    noise_norm: Float[np.ndarray, " n"]

    @property
    def num_classes(self) -> int:
        """The number of classes, k."""
        return self.log_probabilities.shape[1]

    @property
    def predicted(self) -> Int[np.ndarray, " n"]:
        """The best class of each image; of tied ones, the first."""
        return self.log_probabilities.argmax(axis=1)

    @property
    def confidence(self) -> Float[np.ndarray, " n"]:
        """The probability of the best class."""
        return np.exp(self.log_probabilities.max(axis=1))

    @property
    def of_label(self) -> Float[np.ndarray, " n"]:
        """The log-probability of the true class, in nats."""
        return np.take_along_axis(self.log_probabilities, self.labels[:, None], axis=1)[:, 0]

    def ranks(self) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Returns how many classes are more probable than the true one, and how many exactly as probable, with it."""
        of_label = self.of_label[:, None]
        above = (self.log_probabilities > of_label).sum(axis=1)
        return above, (self.log_probabilities == of_label).sum(axis=1)

    def hits(self, count: int) -> Float[np.ndarray, " n"]:
        """Returns the probability that the true class is among the best ``count``, over random orders of tied ones."""
        above, tied = self.ranks()
        return np.clip((count - above) / tied, 0.0, 1.0)

    def top(self, count: int = NUM_TOP) -> tuple[Int[np.ndarray, "n top"], Float[np.ndarray, "n top"]]:
        """Returns the best classes (all, if fewer), falling, and their probabilities."""
        best = highest(self.log_probabilities, count)
        return best, np.exp(np.take_along_axis(self.log_probabilities, best, axis=1))

    def reliability(self, bins: int = 15) -> ReliabilityCurve:
        """Returns the reliability curve of the best class."""
        return reliability_of_confidence(self.confidence, self.hits(1), bins)

    def take(self, rows: np.ndarray) -> "Predictions":
        """Returns those of some images."""
        fields = (field.name for field in dataclasses.fields(self))
        return Predictions(**{name: getattr(self, name)[rows] for name in fields})


def predict(predictor: Predictor, features: Features, block_size: int = BLOCK_SIZE) -> Predictions:
    """Runs a head on the features of a set; members of an ensemble, and noise samples, are averaged as probabilities.

    Args:
        predictor: the head and the classes.
        features: of the set.
        block_size: images of each device at a time, which has a seed of its own: their number changes no result.

    Raises:
        UserError: a label outside the classes.
    """
    if features.labels.ndim == 1:
        check_labels(features.labels, predictor.num_classes)
    found = []
    with Bar("predicting", len(features.values), "images") as bar:
        for rows, blocks, seeds in _blocks(features.values, block_size, predictor.num_shares):
            found.append(predictor(blocks, seeds))
            bar.advance(len(rows))
    # Padding comes last.
    output = jax.tree.map(lambda *parts: np.concatenate(parts)[: len(features.values)], *found)
    if np.isnan(output.log_probabilities).any():
        raise UserError("a probability is not a number; training diverged, use an earlier checkpoint")
    return Predictions(labels=features.labels, positions=features.positions, **vars(output))


def member_blocks(
    predictor: Predictor, features: Features, block_size: int = BLOCK_SIZE
) -> Iterator[tuple[Float[np.ndarray, "b m k"], Int[np.ndarray, " b"]]]:
    """Yields the log-probabilities of all members for blocks of images, and labels."""
    for rows, blocks, seeds in _blocks(features.values, block_size, predictor.num_shares):
        yield predictor.members(blocks, seeds)[: len(rows)], features.labels[rows]


def scores_alone(predictor: Predictor, features: Features, block_size: int = BLOCK_SIZE) -> Float[np.ndarray, "n k"]:
    """Returns what is said of each class by itself: scores by which images may be ranked, where they have several."""
    parts = _blocks(features.values, block_size, predictor.num_shares)
    return np.concatenate([predictor.alone(blocks)[: len(rows)] for rows, blocks, _ in parts])


def _blocks(
    values: Float[np.ndarray, "n f"], size: int, num_shares: int = 1
) -> Iterator[tuple[Int[np.ndarray, " rows"], Float[np.ndarray, "shares b f"], Int[np.ndarray, " shares"]]]:
    """Yields rows in a block for each device, of one static shape, the last padded with zeros, and seeds of blocks."""
    of_all = size * num_shares
    for number, start in enumerate(range(0, len(values), of_all)):
        rows = np.arange(start, min(start + of_all, len(values)))
        padded = np.zeros((of_all, values.shape[1]), values.dtype)
        padded[: len(rows)] = values[rows]
        seeds = number * num_shares + np.arange(num_shares, dtype=np.int32)
        yield rows, padded.reshape(num_shares, size, -1), seeds


def embed_images(
    encoder: Encoder, values: Float[np.ndarray, "n f"], block_size: int = BLOCK_SIZE
) -> Float[np.ndarray, "n d"]:
    """Returns the unit embeddings of images with these features."""
    return np.concatenate([encoder.image(block)[: len(rows)] for rows, (block,), _ in _blocks(values, block_size)])


def highest(scores: Float[np.ndarray, "q n"], count: int) -> Int[np.ndarray, "q top"]:
    """Returns the indices of the ``count`` highest scores of each row (or all, if fewer), falling."""
    count = min(count, scores.shape[1])
    best = np.sort(np.argpartition(-scores, count - 1, axis=1)[:, :count], axis=1)
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1)
