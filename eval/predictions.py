"""What a model says of every picture of a set: log-probabilities of all classes, from which all figures follow.

Ties are counted fairly: where several classes share the probability of the true one, each figure is its expectation
over a random order of those classes. A collapsed model, or two classes with one name, thus score chance.
"""

import dataclasses
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from scipy import special

from eval.calibration import ReliabilityCurve, check_labels, reliability_of_confidence
from eval.ensembles import mean_prediction
from eval.sets import Features
from lit_het.errors import UserError
from lit_het.types import Classifier, Encoder

NUM_TOP = 5


@runtime_checkable
class Predictor(Protocol):
    """From features of pictures to what a model says of them."""

    @property
    def num_classes(self) -> int:
        """The number of classes, k."""
        ...

    def __call__(self, features: Float[np.ndarray, "b f"], seed: int) -> Float[np.ndarray, "b m k"]:
        """Returns log-probabilities of m members of an ensemble, or noise samples; ``seed`` is that of the noise."""
        ...

    def log_normalizer(self, features: Float[np.ndarray, "b f"]) -> Float[np.ndarray, " b"]:
        """Returns ``log Σ exp`` of the logits without noise."""
        ...

    def noise_norm(self, features: Float[np.ndarray, "b f"]) -> Float[np.ndarray, " b"]:
        """Returns ``sqrt(tr Σ(x))``."""
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

    def __call__(self, features: Float[np.ndarray, "b f"], seed: int) -> Float[np.ndarray, "b m k"]:
        """Returns log-probabilities of every noise sample, or of one prediction without noise."""
        if self.samples:
            queries = self.encoder.image_samples(features, self.samples, seed)
        else:
            queries = self.encoder.image(features)[:, None]
        return special.log_softmax(self._logits(queries), axis=2).astype(np.float32)

    def log_normalizer(self, features: Float[np.ndarray, "b f"]) -> Float[np.ndarray, " b"]:
        """Returns ``log Σ exp(cosine / τ)`` without noise."""
        return np.asarray(special.logsumexp(self._logits(self.encoder.image(features)), axis=1), np.float32)

    def noise_norm(self, features: Float[np.ndarray, "b f"]) -> Float[np.ndarray, " b"]:
        """Returns ``sqrt(tr Σ(x))`` of the pictures."""
        return self.encoder.image_noise_norm(features)

    def _logits(self, queries: Float[np.ndarray, "*rows d"]) -> Float[np.ndarray, "*rows k"]:
        return (queries @ self.class_embeddings.T).astype(np.float64) / self.encoder.temperature


@dataclasses.dataclass(frozen=True)
class SupervisedPredictor:
    """A classifier among the classes that it was trained on.

    Attributes:
        classifier: the model.
        noise: whether probabilities are averaged over the head's evaluation samples, as in training's papers.
    """

    classifier: Classifier
    noise: bool = True

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.classifier.num_classes

    def __call__(self, features: Float[np.ndarray, "b f"], seed: int) -> Float[np.ndarray, "b m k"]:
        """Returns log-probabilities of every member.

        A sigmoid loss trains the probability of each class by itself; they are divided by their sum.
        """
        of_members = self.classifier.log_probabilities(features, seed if self.noise else None)
        return special.log_softmax(of_members.astype(np.float64), axis=2).astype(np.float32)

    def log_normalizer(self, features: Float[np.ndarray, "b f"]) -> Float[np.ndarray, " b"]:
        """Returns ``log Σ exp`` of the logits without noise, mean over members."""
        return self.classifier.log_normalizer(features)

    def noise_norm(self, features: Float[np.ndarray, "b f"]) -> Float[np.ndarray, " b"]:
        """Returns ``sqrt(tr Σ(x))``, mean over members."""
        return self.classifier.noise_norm(features)


@dataclasses.dataclass(frozen=True)
class Predictions:
    """What a model says of each picture.

    Attributes:
        log_probabilities: of every class.
        labels: the true class, or a vector of ones and zeros.
        positions: of the pictures in their set.
        log_normalizer: ``log Σ exp`` of the logits without noise; minus the energy.
        noise_norm: ``sqrt(tr Σ(x))``.
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
        """The best class of each picture; of tied ones, the first."""
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
        """Returns those of some pictures."""
        fields = (field.name for field in dataclasses.fields(self))
        return Predictions(**{name: getattr(self, name)[rows] for name in fields})


def predict(predictor: Predictor, features: Features, block_size: int = 256) -> Predictions:
    """Runs a head on the features of a set; members of an ensemble, and noise samples, are averaged as probabilities.

    Raises:
        UserError: a label outside the classes.
    """
    if features.labels.ndim == 1:
        check_labels(features.labels, predictor.num_classes)
    num_pictures = len(features.values)
    log_probabilities = np.empty((num_pictures, predictor.num_classes), np.float32)
    log_normalizer, noise_norm = np.empty(num_pictures, np.float32), np.empty(num_pictures, np.float32)
    for rows, padded, seed in _blocks(features.values, block_size):
        count = rows.stop - rows.start
        log_probabilities[rows] = mean_prediction(predictor(padded, seed)[:count])
        log_normalizer[rows] = predictor.log_normalizer(padded)[:count]
        noise_norm[rows] = predictor.noise_norm(padded)[:count]
    if np.isnan(log_probabilities).any():
        raise UserError("a probability is not a number; training diverged, use an earlier checkpoint")
    return Predictions(log_probabilities, features.labels, features.positions, log_normalizer, noise_norm)


def member_blocks(
    predictor: Predictor, features: Features, block_size: int = 256
) -> Iterator[Float[np.ndarray, "b m k"]]:
    """Yields the log-probabilities of all members, for blocks of pictures; the noise is that of `predict`."""
    for rows, padded, seed in _blocks(features.values, block_size):
        yield predictor(padded, seed)[: rows.stop - rows.start]


def _blocks(values: Float[np.ndarray, "n f"], size: int) -> Iterator[tuple[slice, Float[np.ndarray, "b f"], int]]:
    """Yields rows of one static shape, the last padded with zeros, and a seed for each block."""
    for number, start in enumerate(range(0, len(values), size)):
        rows = slice(start, min(start + size, len(values)))
        padded = np.zeros((size, values.shape[1]), values.dtype)
        padded[: rows.stop - start] = values[rows]
        yield rows, padded, number


def embed_images(encoder: Encoder, values: Float[np.ndarray, "n f"], block_size: int = 256) -> Float[np.ndarray, "n d"]:
    """Returns the unit embeddings of pictures with these features."""
    return np.concatenate([encoder.image(padded)[: r.stop - r.start] for r, padded, _ in _blocks(values, block_size)])


def highest(scores: Float[np.ndarray, "q n"], count: int) -> Int[np.ndarray, "q top"]:
    """Returns the indices of the ``count`` highest scores of each row (or all, if fewer), falling."""
    count = min(count, scores.shape[1])
    best = np.sort(np.argpartition(-scores, count - 1, axis=1)[:, :count], axis=1)
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1)
