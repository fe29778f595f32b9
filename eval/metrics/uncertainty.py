"""How sure a method is: predictions of one or several models, and scores that should be higher where they are wrong."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy
from jaxtyping import Float, UInt8

from lit_het.console import Bar
from lit_het.errors import UserError
from lit_het.eval.features import Features
from lit_het.eval.metrics.ensembles import mean_prediction
from lit_het.eval.metrics.out_of_distribution import entropy_score, max_probability_score
from lit_het.eval.metrics.rows import row_blocks
from lit_het.eval.predictions import Predictions, Predictor, member_blocks, num_members, predict
from lit_het.eval.selection import divergence_from_mean
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.types import ImageFeatures

# Pixels by which the views of test-time augmentation are moved, as a part of the image's side.
_SHIFT = 1 / 16
_SHIFTS = ((0, 0), (0, 1), (0, -1), (1, 0), (-1, 0))


@dataclasses.dataclass(frozen=True)
class Member:
    """One model of a method.

    Attributes:
        predictor: the model and its class names; its noise samples are used where the head has noise.
        tower: features of images, of the model itself or of another view.
    """

    predictor: Predictor
    tower: ImageFeatures

    def quiet(self) -> Predictor:
        """Returns the predictor without noise."""
        return dataclasses.replace(self.predictor, samples=0)


@dataclasses.dataclass(frozen=True)
class Method:
    """One or several models that answer together, by the mean of their probabilities."""

    members: Sequence[Member]

    @property
    def is_random(self) -> bool:
        """Whether there is more than one answer to an image: of noise samples, several models or members (e3)."""
        answered = sum(num_members(member.predictor.model, member.predictor.samples) for member in self.members)
        return answered > 1 or self.has_noise

    @property
    def has_noise(self) -> bool:
        """Whether noise samples are drawn."""
        return any(member.predictor.samples for member in self.members)


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a method says of the images of a set.

    Attributes:
        quiet: predictions without noise.
        sampled: the mean over noise samples; None for heads without noise.
        scores: by name; the higher, the less sure.
    """

    quiet: Predictions
    sampled: Predictions | None
    scores: Mapping[str, Float[np.ndarray, " n"]]


def answers(
    method: Method, opened: OpenSet, matched: Callable[[Features], Features], most: int | None = None
) -> Answers:
    """Returns the answers to the images of a set.

    The scores are ``max_probability`` and ``entropy`` of the prediction (of the sampled one where there is one),
    ``noise_norm`` where the head has noise, and ``mutual_information`` of samples or models (`lit_het.eval.selection`).

    Args:
        method: the method.
        opened: the set.
        matched: gives features labels that index the predicted classes, or `Features.unlabelled`.
        most: at most so many images, evenly spread; None for all.
    """
    features = [matched(rows) for rows in opened.features_of([member.tower for member in method.members])]
    features = features if most is None else [rows.spread(most) for rows in features]
    each = [predict(member.quiet(), rows) for member, rows in zip(method.members, features, strict=True)]
    quiet = dataclasses.replace(
        each[0],
        log_probabilities=mean_prediction(np.stack([one.log_probabilities for one in each], axis=1)),
        # The logits of an ensemble are the logarithms of its mean probabilities.
        log_normalizer=each[0].log_normalizer if len(each) == 1 else np.zeros_like(each[0].log_normalizer),
        noise_norm=np.mean([one.noise_norm for one in each], axis=0),
    )
    scores: dict[str, np.ndarray] = {}
    pooled = None
    if method.is_random:
        pairs = list(zip([member.predictor for member in method.members], features, strict=True))
        log_p, information = sampled(pairs, opened.config.name)
        if information is not None:
            scores["mutual_information"] = information
        if method.has_noise:
            pooled = dataclasses.replace(quiet, log_probabilities=log_p)
    best = quiet if pooled is None else pooled
    scores["max_probability"] = max_probability_score(best.log_probabilities)
    scores["entropy"] = entropy_score(best.log_probabilities)
    if quiet.noise_norm.any():
        scores["noise_norm"] = quiet.noise_norm
    return Answers(quiet, pooled, scores)


def sampled(
    pairs: Sequence[tuple[Predictor, Features]], name: str
) -> tuple[Float[np.ndarray, "n k"], Float[np.ndarray, " n"] | None]:
    """Returns the log of the mean probability, and the mutual information, over all samples of all models.

    Every model weighs the same, whatever its number of samples or members. Where there is a single one in all, as of a
    head in closed form, there is no mutual information.

    Args:
        pairs: predictors, each with the features of the same images.
        name: of the set, for the progress bar.
    """
    # One seed for all blocks: samples of weights are the same for all images.
    streams = [member_blocks(predictor, rows, seed=0) for predictor, rows in pairs]
    found, information = [], []
    with Bar(f"sampling {name}", len(pairs[0][1].labels), "images") as bar:
        for blocks in zip(*streams, strict=True):
            members = np.concatenate([block for block, _ in blocks], axis=1)
            weights = np.concatenate([np.full(block.shape[1], 1 / block.shape[1]) for block, _ in blocks])
            found.append(mean_prediction(members, weights))
            if members.shape[1] > 1:
                information.append(divergence_from_mean(members, found[-1], weights))
            bar.advance(len(members))
    return np.concatenate(found), np.concatenate(information) if information else None


def neighbour_distance(values: Float[np.ndarray, "n f"], training: Float[np.ndarray, "t f"]) -> Float[np.ndarray, " n"]:
    """Returns one minus the cosine to the nearest training image, by embeddings of the image tower.

    Sun et al., "Out-of-distribution detection with deep nearest neighbors", ICML 2022, with k = 1.
    """
    rows, others = (x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-8) for x in (values, training))
    found = np.empty(len(rows), np.float32)
    for block in row_blocks(len(rows), len(others)):
        found[block] = 1 - (rows[block] @ others.T).max(axis=1)
    return found


def severity_correlation(by_severity: Sequence[Float[np.ndarray, " n"]]) -> tuple[float, bool]:
    """Returns Spearman's rank correlation of a score with the severity, and whether its mean rises at every step.

    The correlation of a score that is the same for all images is 0.

    Args:
        by_severity: the scores of the clean images, then those at each severity, ascending.
    """
    together = np.concatenate(by_severity)
    if not np.ptp(together):
        return 0.0, False
    severity = np.concatenate([np.full(len(scores), number) for number, scores in enumerate(by_severity)])
    means = [float(scores.mean()) for scores in by_severity]
    ranks = scipy.stats.rankdata(severity), scipy.stats.rankdata(together)
    return float(np.corrcoef(*ranks)[0, 1]), bool(np.all(np.diff(means) > 0))


def views(tower: ImageFeatures) -> list[ImageFeatures]:
    """Returns the tower on five views of every image: as it is, and moved by 1/16 of its side in four directions."""

    def view_of(down: int, right: int) -> ImageFeatures:
        if not down and not right:
            return tower

        def extract(view: np.ndarray):
            if view.ndim != 4:
                raise UserError(
                    "test-time augmentation needs square images, not stored embeddings or patches; leave out "
                    "--data.embeddings, or --baselines"
                )
            return tower.extract(shifted(view, down, right))

        return dataclasses.replace(tower, extract=extract, tower=f"{tower.tower} moved by {down}, {right}")

    return [view_of(*shift) for shift in _SHIFTS]


def shifted(images: UInt8[np.ndarray, "b h w c"], down: int, right: int) -> UInt8[np.ndarray, "b h w c"]:
    """Returns images moved by 1/16 of their sides (at least a pixel); pixels at the border are repeated."""
    height, width = images.shape[1:3]
    rows = np.clip(np.arange(height) - down * max(1, round(_SHIFT * height)), 0, height - 1)
    columns = np.clip(np.arange(width) - right * max(1, round(_SHIFT * width)), 0, width - 1)
    return images[:, rows][:, :, columns]
