"""Predictions for a set of images: log-probabilities of all classes, from which all metrics are computed.

Where classes tie with the true class, each metric is its expectation over random orders of the tied classes. A
collapsed model, or two classes with the same name, thus score chance.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float, Int

from lit_het import arguments
from lit_het.console import Bar, message
from lit_het.errors import UserError
from lit_het.eval.features import Features
from lit_het.eval.metrics.calibration import ReliabilityCurve, check_labels, reliability_of_confidence
from lit_het.eval.metrics.classes import merge_candidates
from lit_het.eval.metrics.ensembles import mean_prediction
from lit_het.eval.metrics.names import calibrated
from lit_het.tasks import quantities
from lit_het.tasks.quantities import Quantity
from lit_het.texts import TextWriter
from lit_het.types import EvaluatedModel

NUM_TOP = 5
BLOCK_SIZE = 256


@dataclasses.dataclass(frozen=True)
class Predictor:
    """A model with the classes to choose among, and a number of noise samples.

    Attributes:
        model: the model.
        num_classes: k.
        class_embeddings: unit embeddings of the candidates of an image-text model; None for a classifier.
        samples: S; 0 leaves the noise out.
        groups: the candidates that count as each class; None if every candidate is a class.
        seen: the classes whose names training captions had; None if that is unknown.
        as_trained: whether predictions are not calibrated, also if the model is.
    """

    model: EvaluatedModel
    num_classes: int
    class_embeddings: Float[np.ndarray, "candidates d"] | None = None
    samples: int = 0
    groups: tuple[tuple[int, ...], ...] | None = None
    seen: Bool[np.ndarray, " k"] | None = None
    as_trained: bool = False

    @property
    def new_names(self) -> str:
        """How many names training captions did not have, in words; empty if that is unknown."""
        if self.seen is None:
            return ""
        return f"{(~self.seen).sum():,} of {len(self.seen):,} names were not in the training captions"

    @property
    def probabilities(self) -> Quantity:
        """The quantity that predictions are made of: their log-probabilities, or with groups those of members.

        Each member is renormalised over the allowed candidates before the mean over members.
        """
        return quantities.log_probabilities if self.groups is None else quantities.member_log_probabilities

    def quantity(
        self, quantity: Quantity, blocks: Float[np.ndarray, "n b f"], seeds: Int[np.ndarray, " n"] | None = None
    ) -> np.ndarray:
        """Computes a quantity of `lit_het.tasks.quantities` over the candidates, for one block of images per device."""
        # Without seeds there is no noise, and S is left out: another S would compile the same program again.
        samples = 0 if seeds is None else self.samples
        return self.model(quantity, blocks, seeds=seeds, num_samples=samples, classes=self.class_embeddings)

    def log_probabilities(
        self, blocks: Float[np.ndarray, "n b f"], seeds: Int[np.ndarray, " n"]
    ) -> Float[np.ndarray, "rows k"]:
        """Returns the log of the mean probability over ensemble members and noise samples, calibrated."""
        if self.groups is None:
            return self.calibrated(self.quantity(self.probabilities, blocks, seeds))
        return self.pooled(self.member_log_probabilities(blocks, seeds))

    def member_log_probabilities(
        self, blocks: Float[np.ndarray, "n b f"], seeds: Int[np.ndarray, " n"]
    ) -> Float[np.ndarray, "rows m k"]:
        """Returns the log-probabilities of each of m ensemble members or noise samples, as trained."""
        found = self.quantity(quantities.member_log_probabilities, blocks, seeds)
        return found if self.groups is None else merge_candidates(found, self.groups)

    def pooled(self, members: Float[np.ndarray, "rows m k"]) -> Float[np.ndarray, "rows k"]:
        """Returns the model's prediction from those of its members: the log of their mean probability, calibrated.

        "Pool, then calibrate": the temperature was fitted to the mean, and is not that of a member, see
        `lit_het.eval.metrics.calibration.fit_temperature`.
        """
        return self.calibrated(mean_prediction(members))

    def calibrated(self, log_probabilities: Float[np.ndarray, "*rows k"]) -> Float[np.ndarray, "*rows k"]:
        """Returns log-probabilities scaled by the model's fitted temperatures, or as they are if it has none."""
        if self.model.calibration is None or self.as_trained:
            return log_probabilities
        rows = log_probabilities.reshape(-1, self.num_classes)
        return calibrated(self.model.calibration, rows, self.seen, self.samples).reshape(log_probabilities.shape)

    def scores(self, blocks: Float[np.ndarray, "n b f"]) -> Float[np.ndarray, "rows k"]:
        """Returns the score of each class without noise, independent of the other classes."""
        found = self.quantity(quantities.scores, blocks)
        if self.groups is None:
            return found
        return np.stack([np.logaddexp.reduce(found[:, list(group)], axis=1) for group in self.groups], axis=1)


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Predictions for a set of images.

    Attributes:
        log_probabilities: of every class.
        labels: true classes, or vectors of zeros and ones.
        positions: indices of the images in their set.
        log_normalizer, noise_norm: see `lit_het.tasks.quantities`.
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
        """The most probable class of each image; in a tie, the first."""
        return self.log_probabilities.argmax(axis=1)

    @property
    def confidence(self) -> Float[np.ndarray, " n"]:
        """The probability of the most probable class."""
        return np.exp(self.log_probabilities.max(axis=1))

    @property
    def label_log_p(self) -> Float[np.ndarray, " n"]:
        """The log-probability of the true class, in nats."""
        return np.take_along_axis(self.log_probabilities, self.labels[:, None], axis=1)[:, 0]

    def ranks(self) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Returns how many classes are more probable than the true class, and how many tie with it, itself included."""
        true = self.label_log_p[:, None]
        above = (self.log_probabilities > true).sum(axis=1)
        return above, (self.log_probabilities == true).sum(axis=1)

    def hits(self, count: int) -> Float[np.ndarray, " n"]:
        """Returns the probability that the true class is in the top ``count``, over random orders of tied classes."""
        above, tied = self.ranks()
        return np.clip((count - above) / tied, 0.0, 1.0)

    def top(self, count: int = NUM_TOP) -> tuple[Int[np.ndarray, "n top"], Float[np.ndarray, "n top"]]:
        """Returns the top classes (all, if fewer), most probable first, and their probabilities."""
        best = highest(self.log_probabilities, count)
        return best, np.exp(np.take_along_axis(self.log_probabilities, best, axis=1))

    def reliability(self, bins: int = 15) -> ReliabilityCurve:
        """Returns the reliability curve of the most probable class."""
        return reliability_of_confidence(self.confidence, self.hits(1), bins)

    def take(self, rows: np.ndarray) -> "Predictions":
        """Returns the predictions for the given rows."""
        fields = (field.name for field in dataclasses.fields(self))
        return Predictions(**{name: getattr(self, name)[rows] for name in fields})


def samples_of(model: EvaluatedModel | TextWriter, asked: int | None, default: int = 32) -> int:
    """Returns the number of noise samples that are asked for; None takes the one that the temperature was fitted for.

    Without a fitted temperature None takes the default. Warns if the temperature was fitted for another number.
    """
    fitted = model.calibration.num_samples if model.calibration is not None else 0
    samples = fitted or default if asked is None else arguments.whole(asked, "samples", 0, arguments.MAX_SAMPLES)
    model.check_samples(samples)
    if samples and fitted not in (0, samples):
        message(
            f"the temperature of the mean was fitted for {fitted} noise samples and is applied to {samples}: give "
            f"--samples {fitted}, or run lit-het calibrate with --samples {samples}"
        )
    return samples


def num_members(model: EvaluatedModel, samples: int) -> int:
    """Returns how many predictions of a model its answer is the mean of: S noise samples, of every member (e3)."""
    return model.num_predictions * (max(1, samples) if model.has_noise else 1)


def predict(predictor: Predictor, features: Features, block_size: int = BLOCK_SIZE) -> Predictions:
    """Predicts a whole set from its features; probabilities are averaged over ensemble members and noise samples.

    Args:
        predictor: the model and its classes.
        features: of the set.
        block_size: images per block. Every block has its own noise seed, so the number of devices changes no result.
    """
    if features.labels.ndim == 1:
        check_labels(features.labels, predictor.num_classes)
    found = []
    with Bar("predicting", len(features.values), "images") as bar:
        for rows, blocks, seeds in _blocks(features.values, block_size, predictor.model.features.num_shards):
            log_p = predictor.log_probabilities(blocks, seeds)
            log_normalizer = predictor.quantity(quantities.log_normalizer, blocks)
            # Of the model: the norm does not depend on classes, so that their embeddings stay where they are.
            found.append((log_p, log_normalizer, predictor.model(quantities.noise_norm, blocks)))
            bar.advance(len(rows))
    # Only the last blocks are padded, so slicing removes all padding.
    columns = zip(*found, strict=True)
    log_p, log_normalizer, noise_norm = (np.concatenate(parts)[: len(features.values)] for parts in columns)
    if np.isnan(log_p).any():
        raise UserError("a probability is not a number; training diverged, use an earlier checkpoint")
    return Predictions(log_p, features.labels, features.positions, log_normalizer, noise_norm)


def log_probabilities(
    predictor: Predictor, features: Features, block_size: int = BLOCK_SIZE
) -> Float[np.ndarray, "n k"]:
    """Returns the log-probabilities that `predict` has, alone."""
    batches = _blocks(features.values, block_size, predictor.model.features.num_shards)
    return np.concatenate([predictor.log_probabilities(blocks, seeds)[: len(rows)] for rows, blocks, seeds in batches])


def member_blocks(
    predictor: Predictor, features: Features, block_size: int = BLOCK_SIZE, *, seed: int | None = None
) -> Iterator[tuple[Float[np.ndarray, "b m k"], Int[np.ndarray, " b"]]]:
    """Yields the log-probabilities of all members, as trained, and the labels, for batches of images.

    Args:
        predictor: the model and its classes.
        features: of the set.
        block_size: images per block.
        seed: of all blocks, so that samples of weights are the same in all; None for one per block.
    """
    for rows, blocks, seeds in _blocks(features.values, block_size, predictor.model.features.num_shards):
        seeds = seeds if seed is None else np.full_like(seeds, seed)
        yield predictor.member_log_probabilities(blocks, seeds)[: len(rows)], features.labels[rows]


def class_scores(predictor: Predictor, features: Features, block_size: int = BLOCK_SIZE) -> Float[np.ndarray, "n k"]:
    """Returns scores that do not depend on other classes, to rank the images of multi-label sets."""
    batches = _blocks(features.values, block_size, predictor.model.features.num_shards)
    return np.concatenate([predictor.scores(blocks)[: len(rows)] for rows, blocks, _ in batches])


def class_log_probabilities(
    predictor: Predictor, features: Features, *, joint: bool = False, block_size: int = BLOCK_SIZE
) -> Float[np.ndarray, "n *m two k"]:
    """Returns the log-probability of each class and of its absence, by each of m ensemble members or noise samples.

    As trained, and independent of other classes: for models with a sigmoid loss. ``joint`` ones ``[n two k]`` are of
    the mean probabilities over members and samples.
    """
    quantity = quantities.class_log_probabilities if joint else quantities.member_class_log_probabilities
    return np.concatenate([of_block for of_block, _ in _class_blocks(predictor, features, quantity, block_size)])


def sigmoid_nll(predictor: Predictor, features: Features, block_size: int = BLOCK_SIZE) -> Float[np.ndarray, " n"]:
    """Returns the sigmoid loss of each image with one label: ``-log p_y - Σ_{k≠y} log(1 - p_k)``, in nats.

    As trained, summed over classes: the NLL of HET-XL's tables (Sec. 6.2). For models with a sigmoid loss.
    """
    found = []
    for of_block, labels in _class_blocks(predictor, features, quantities.class_log_probabilities, block_size):
        present, absent = of_block.astype(np.float64).swapaxes(0, 1)
        of_label = np.take_along_axis(absent - present, labels[:, None], axis=1)[:, 0]
        found.append(of_label - absent.sum(axis=1))
    return np.concatenate(found)


def _class_blocks(
    predictor: Predictor, features: Features, quantity: Quantity, block_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields a quantity of the classes, and labels, for batches of images."""
    with Bar("predicting", len(features.values), "images") as bar:
        for rows, blocks, seeds in _blocks(features.values, block_size, predictor.model.features.num_shards):
            yield predictor.quantity(quantity, blocks, seeds)[: len(rows)], features.labels[rows]
            bar.advance(len(rows))


def _blocks(
    values: Float[np.ndarray, "n f"], size: int, num_shards: int = 1
) -> Iterator[tuple[Int[np.ndarray, " rows"], Float[np.ndarray, "shards b f"], Int[np.ndarray, " shards"]]]:
    """Yields row indices, a zero-padded block of features per device, and a seed per block.

    Shapes are static, so that JAX compiles once.
    """
    batch_size = size * num_shards
    for number, start in enumerate(range(0, len(values), batch_size)):
        rows = np.arange(start, min(start + batch_size, len(values)))
        padded = np.zeros((batch_size, values.shape[1]), values.dtype)
        padded[: len(rows)] = values[rows]
        seeds = number * num_shards + np.arange(num_shards, dtype=np.int32)
        yield rows, padded.reshape(num_shards, size, -1), seeds


def image_quantity(
    model: EvaluatedModel,
    quantity: Quantity,
    values: Float[np.ndarray, "n f"],
    block_size: int = BLOCK_SIZE,
    num_shards: int = 1,
) -> np.ndarray:
    """Returns a quantity that depends neither on classes nor on noise, from the features of images."""
    # By default one block at a time, which every device computes whole: eigenvalues (of the noise spectrum) in a
    # program that is sharded over virtual CPU devices were observed to wait for one another without end.
    blocks = _blocks(values, block_size, num_shards)
    return np.concatenate([model(quantity, of_devices)[: len(rows)] for rows, of_devices, _ in blocks])


def highest(scores: Float[np.ndarray, "q n"], count: int) -> Int[np.ndarray, "q top"]:
    """Returns the indices of the ``count`` highest scores of each row (or all, if fewer), in descending order."""
    count = min(count, scores.shape[1])
    best = np.sort(np.argpartition(-scores, count - 1, axis=1)[:, :count], axis=1)
    order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1)
