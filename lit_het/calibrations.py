"""Fitted temperatures of a model: of all names, and of those that training captions had and had not."""

import dataclasses
import math
from typing import Literal, TypeAlias


def with_error(value: float, error: float) -> str:
    """Returns a value with its standard error: two digits of the error, and as many decimals of the value."""
    decimals = max(0, 1 - math.floor(math.log10(max(error, 1e-9))))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


@dataclasses.dataclass(frozen=True)
class FittedTemperature:
    """A temperature T that was fitted to predictions, which become ``softmax(log p / T)``.

    Attributes:
        temperature: T; above 1 where the model was overconfident.
        standard_error: of T over images.
        nll_before, nll_after: mean negative log-likelihood of the images that T was fitted on, in nats.
    """

    temperature: float
    standard_error: float
    nll_before: float
    nll_after: float

    def __str__(self) -> str:
        return with_error(self.temperature, self.standard_error)


Prior: TypeAlias = Literal["seen", "new"] | float
"""Which right answers a user expects: names of training captions, new ones, or this share of new ones."""

Calibrated: TypeAlias = bool | Prior
"""Whether fitted temperatures are applied; a prior applies them with these right answers, True those of seen names."""


@dataclasses.dataclass(frozen=True)
class FittedNames:
    """The temperature and the offset of predictions among names that training captions had and new ones.

    The logit of a name is ``log p / T``, and ``offset`` more if training captions had it: calibrated stacking of Chao
    et al., "An empirical study and analysis of generalized zero-shot learning for object recognition in the wild", ECCV
    2016, with a temperature.

    Attributes:
        temperature: T, fitted to as many images of new names as of seen ones.
        offset: fitted with it.
        new_per_seen: candidates that were new, for each that training captions had.
        errors: standard errors of both over names.
        alone: the T without offset that fits images of new names best.
    """

    temperature: float
    offset: float
    new_per_seen: float
    errors: tuple[float, float]
    alone: FittedTemperature

    def __str__(self) -> str:
        of_temperature, of_offset = self.errors
        return f"{with_error(self.temperature, of_temperature)}, offset {with_error(self.offset, of_offset)}"


@dataclasses.dataclass(frozen=True)
class NameCalibration:
    """How predictions depend on which names training captions had.

    Attributes:
        rule: what makes a name one of them, see `lit_het.data_pipelines.texts.familiarity`.
        num_seen, num_new: how many captions of the images training had, and how many it had not.
        noiseless: fitted to predictions without noise.
        monte_carlo: fitted to the mean probability over noise samples; None for a head without noise.
    """

    rule: Literal["caption", "words"]
    num_seen: int
    num_new: int
    noiseless: FittedNames
    monte_carlo: FittedNames | None = None


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The temperatures of a model, fitted on images that it was not trained on.

    Attributes:
        data: the shards of the images.
        portion: the part of their samples.
        digest: identifies the samples of the shards.
        num_images: how many images were used.
        num_candidates: among how many captions or classes the model chose.
        num_samples: S of ``monte_carlo``; 0 without noise.
        noiseless: T of predictions without noise.
        monte_carlo: T of the mean probability over S noise samples; None for a head without noise.
        names: how predictions of names that training captions had, and of new ones, differ; None if they do not. The
            temperatures above are then those of images of the former.
        prior: the right answers that are expected.
    """

    data: tuple[str, ...]
    portion: str
    digest: str
    num_images: int
    num_candidates: int
    num_samples: int
    noiseless: FittedTemperature
    monte_carlo: FittedTemperature | None = None
    _: dataclasses.KW_ONLY
    names: NameCalibration | None = None
    prior: Prior = "seen"

    def fitted(self, num_samples: int) -> FittedTemperature:
        """Returns the temperature of predictions with S noise samples; 0 for those without noise."""
        return self.monte_carlo if num_samples and self.monte_carlo is not None else self.noiseless

    def fitted_names(self, num_samples: int) -> FittedNames | None:
        """Returns what `names` has for predictions with S noise samples; None without it."""
        if self.names is None:
            return None
        return self.names.monte_carlo if num_samples and self.names.monte_carlo is not None else self.names.noiseless

    def __str__(self) -> str:
        where = " ".join(self.data) + ("" if self.portion == "0%:100%" else f" ({self.portion})")
        noisy = "" if self.monte_carlo is None else f", mean of {self.num_samples} samples {self.monte_carlo}"
        names = "" if self.names is None else f", by names, {_expected(self.prior)}"
        return f"calibrated on {self.num_images:,} images of {where} (T = {self.noiseless}{noisy}{names})"


def _expected(prior: Prior) -> str:
    """Returns in words which right answers are expected."""
    if isinstance(prior, str):
        return f"{prior} names expected"
    return f"{100 * prior:g} % new names expected"
