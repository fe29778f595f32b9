"""What a model says of single images: the probability of each label, and how far the head's noise scatters it."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, UInt8

from lit_het.errors import UserError
from lit_het.eval.evaluation import Record
from lit_het.eval.predictions import SupervisedPredictor, ZeroShotPredictor
from lit_het.eval.prompts import BARE_TEMPLATE
from lit_het.eval.recognition import embed_names
from lit_het.types import Encoder, EvaluatedModel, ImageFeatures

# Of the noise samples of a probability, those between these quantiles are its band.
BAND = (0.05, 0.95)
_IMAGES_AT_A_TIME = 32
_AXIS_ENDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)

Chooser: TypeAlias = ZeroShotPredictor | SupervisedPredictor


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model says of one image.

    Attributes:
        probability: of each label, without noise.
        noise_norm: ``sqrt(tr Σ(x))``; 0 for a deterministic head.
        noisy: the mean over noise samples; None without noise.
        samples: what each noise sample says; None without noise.
    """

    probability: Float[np.ndarray, " k"]
    noise_norm: float
    noisy: Float[np.ndarray, " k"] | None = None
    samples: Float[np.ndarray, "s k"] | None = None

    @property
    def band(self) -> Float[np.ndarray, "two k"] | None:
        """The `BAND` of each label over noise samples, lower ends first."""
        return None if self.samples is None else np.quantile(self.samples, BAND, axis=0).astype(np.float32)

    @property
    def scale(self) -> float:
        """The end of an axis that shows all of it: a round probability."""
        highest = float(max(self.probability.max(), 0 if self.samples is None else self.samples.max()))
        return next((end for end in _AXIS_ENDS if highest <= end), 1.0)

    @property
    def order(self) -> list[int]:
        """The labels by falling probability without noise."""
        return np.argsort(-self.probability, kind="stable").tolist()


def split_labels(text: str) -> tuple[str, ...]:
    """Returns the labels that somebody wrote: one a line or, on a single line, between commas."""
    lines = text.strip().split("\n")
    return tuple(filter(None, (part.strip() for part in (lines if len(lines) > 1 else text.split(",")))))


def check_choice(labels: Sequence[str]) -> None:
    """Demands two labels or more, all different.

    Raises:
        UserError: there are fewer, or one stands twice.
    """
    if not labels:
        raise UserError("no labels to choose from; give two or more")
    if len(labels) == 1:
        raise UserError(f"{labels[0]!r} is the only label, whose probability is always 1; give two or more")
    repeated = [label for label in dict.fromkeys(labels) if labels.count(label) > 1]
    if repeated:
        raise UserError(f"label {repeated[0]!r} stands twice; keep one")


def chooser(model: EvaluatedModel, labels: Sequence[str], templates: Sequence[str] = BARE_TEMPLATE) -> Chooser:
    """Returns what chooses between labels; for a classifier they are the names of its classes, in their order.

    Raises:
        UserError: as `check_choice`, a template without ``{c}``, or a classifier of another number of classes.
    """
    check_choice(labels)
    if isinstance(model, Encoder):
        return ZeroShotPredictor(model, embed_names(model, labels, templates))
    if len(labels) != model.num_classes:
        raise UserError(
            f"a classifier chooses between the {model.num_classes} classes that it was trained on, and there are "
            f"{len(labels)} labels; give the names of its classes, in their order"
        )
    return SupervisedPredictor(model)


def features_of(
    tower: ImageFeatures, images: Sequence[UInt8[np.ndarray, "h w c"]]
) -> Iterator[Float[np.ndarray, " f"]]:
    """Yields what the image tower makes of each image; all its batches have one shape."""
    size = -(-min(len(images), _IMAGES_AT_A_TIME) // tower.num_shares) * tower.num_shares
    for start in range(0, len(images), max(1, size)):
        block = list(images[start : start + size])
        yield from np.asarray(tower.extract(np.stack(block + block[-1:] * (size - len(block)))))[: len(block)]


def answer(chooser: Chooser, features: Float[np.ndarray, " f"], samples: int = 32, seed: int = 0) -> Answer:
    """Returns what a model says of one image, which does not depend on images beside it.

    Args:
        chooser: see `chooser`.
        features: of the image.
        samples: S, noise samples; 0 leaves the noise out.
        seed: of the noise.

    Raises:
        UserError: a probability is not a number.
    """
    block = features[None, None], np.array([seed], np.int32)
    found = chooser(*block)
    probability, noise_norm = np.exp(found.log_probabilities[0]), float(found.noise_norm[0])
    if np.isnan(probability).any():
        raise UserError("a probability is not a number; training diverged, use an earlier checkpoint")
    if not samples or not noise_norm:
        return Answer(probability, noise_norm)
    of_samples = np.exp(dataclasses.replace(chooser, samples=samples).members(*block)[0])
    return Answer(probability, noise_norm, of_samples.mean(axis=0), of_samples)


@dataclasses.dataclass(frozen=True)
class NoiseRank:
    """How the noise norm of an image compares with those of a set.

    Attributes:
        name: of the set.
        num_images: of the set.
        fraction_below: of the set's images have less noise.
    """

    name: str
    num_images: int
    fraction_below: float

    def __str__(self) -> str:
        return f"{self.fraction_below:.0%} of the {self.num_images:,} images of {self.name} have less"


def noise_ranks(noise_norm: float, records: Sequence[Record], step: int) -> list[NoiseRank]:
    """Compares a noise norm with the sets that the same checkpoint was evaluated on; no noise compares with nothing."""
    norms = {
        record.name: record.drawing.arrays["noise_norm"]
        for record in records
        if noise_norm and record.step == step and "noise_norm" in record.drawing.arrays
    }
    return [NoiseRank(name, len(of_set), float((of_set < noise_norm).mean())) for name, of_set in norms.items()]
