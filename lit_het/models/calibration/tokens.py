"""Fits the temperature of tokens of a decoder: of each token of given texts, from the true ones before it."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int

from lit_het.calibrations import FittedTemperature
from lit_het.console import Bar
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.errors import UserError
from lit_het.eval.metrics.calibration import correctness, fit, reliability_of_confidence, scaled
from lit_het.models.calibration.split import MOST_IMAGES
from lit_het.models.writer import Writer
from lit_het.types import Batch

_MOST_ENTRIES = 2**28
"""The log-probabilities that are held (1 GiB); of more tokens every second, fourth, ... is kept."""


@dataclasses.dataclass(frozen=True)
class GivenTokens:
    """Tokens of texts, numbered, with predictions of each from those before it.

    Attributes:
        number: among all tokens that were read.
        image: number of the token's image.
        label: the token.
        log_p: log-probabilities of the vocabulary, by the number of noise samples.
    """

    number: Int[np.ndarray, " t"]
    image: Int[np.ndarray, " t"]
    label: Int[np.ndarray, " t"]
    log_p: dict[int, Float[np.ndarray, "t k"]]

    @property
    def num_images(self) -> int:
        """The number of images that have a token."""
        return len(np.unique(self.image))

    def take(self, rows: np.ndarray) -> "GivenTokens":
        """Returns some of the tokens."""
        log_p = {samples: values[rows] for samples, values in self.log_p.items()}
        return GivenTokens(self.number[rows], self.image[rows], self.label[rows], log_p)

    def fit(self, samples: int) -> FittedTemperature:
        """Returns the temperature of tokens with S noise samples, with its standard error over images."""
        return fit(self.log_p[samples], self.label, self.image)

    def calibration_errors(self, samples: int, temperature: float) -> tuple[float, float]:
        """Returns the expected calibration error of the most probable token before and after scaling by T."""
        before = self.log_p[samples]
        found = []
        for log_p in (before, scaled(before, temperature)):
            curve = reliability_of_confidence(np.exp(log_p.max(axis=1)), correctness(log_p, self.label))
            found.append(curve.expected_calibration_error)
        return found[0], found[1]


def read_tokens(writer: Writer, loader: Loader, samples: Sequence[int], name: str) -> GivenTokens:
    """Predicts the tokens of one text of each image; of many tokens some are taken, evenly spread.

    Args:
        writer: the decoder.
        loader: of images with texts, whose tokens to predict are known.
        samples: numbers of noise samples.
        name: of the images, for messages.
    """
    count = min(loader.num_samples, MOST_IMAGES)
    kept, size, stride = list[GivenTokens](), 0, 1
    with Bar(f"reading {name}", count, "samples") as bar:
        for tokens in _predicted(writer, loader.epoch(num_samples=count), samples, bar):
            kept.append(tokens.take(tokens.number % stride == 0))
            size += len(kept[-1].label)
            vocabulary = writer.vocabulary_size * len(samples)
            while size * vocabulary > _MOST_ENTRIES and size > 1:
                stride *= 2
                kept = [one.take(one.number % stride == 0) for one in kept]
                size = sum(len(one.label) for one in kept)
    if not size:
        raise UserError(f"{name} has no image with a text that can be read")
    log_p = {count: np.concatenate([one.log_p[count] for one in kept]) for count in samples}
    number, image, label = (
        np.concatenate([getattr(one, field) for one in kept]) for field in ("number", "image", "label")
    )
    return GivenTokens(number, image, label, log_p)


def _predicted(writer: Writer, batches: Iterator[Batch], samples: Sequence[int], bar: Bar) -> Iterator[GivenTokens]:
    first_token = first_image = 0
    for batch in batches:
        assert batch.text is not None
        assert batch.text_target is not None
        target = batch.text_target & batch.valid[:, None]
        features = np.asarray(writer.features.extract(batch.view))
        log_p = {count: writer.log_probabilities(features, batch.text, count)[target] for count in samples}
        image, _ = np.nonzero(target)
        number = np.arange(len(image)) + first_token
        yield GivenTokens(number, image + first_image, batch.text[target], log_p)
        first_token, first_image = first_token + len(image), first_image + len(target)
        bar.advance(int(batch.valid.sum()))
