"""What decoders write, and how: types that models, evaluators and commands exchange."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Real

from lit_het.errors import FieldError, UserError, require_at_least

_MOST_PENALTY = 8
# Beams of an image whose keys and values are cached at once.
_MOST_TEXTS = 4096
_LEAST_TEMPERATURE = 1e-3


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """How text is written.

    Attributes:
        num_tokens: most tokens of a text, its end token included.
        num_texts: texts of each image: samples, or the best of as many beams.
        temperature: of sampling; 0 takes the most probable token (greedy), or searches with beams.
        top_k: sampling chooses among as many tokens, the most probable; None for all.
        top_p: sampling chooses among the most probable tokens of this total probability, at least one (Holtzman et al.
            2020, nucleus sampling).
        length_penalty: α of beam search, which compares ``log p / ((5 + length) / 6)^α`` (Wu et al. 2016, Eq. 14).
    """

    num_tokens: int = 32
    num_texts: int = 1
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    length_penalty: float = 0.6

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_tokens", "num_texts")
        if self.num_texts > _MOST_TEXTS:
            raise FieldError(
                self, "num_texts", f"{self.num_texts} is more than {_MOST_TEXTS}, which are searched at once"
            )
        # Powers and quotients beyond these would not be numbers in float32.
        if not 0 <= self.length_penalty <= _MOST_PENALTY:
            raise FieldError(self, "length_penalty", f"{self.length_penalty} is not in [0, {_MOST_PENALTY}]")
        if self.temperature and not _LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise FieldError(self, "temperature", f"{self.temperature} is neither 0 nor at least {_LEAST_TEMPERATURE}")
        if self.top_k is not None:
            require_at_least(1, self, "top_k")
        if not 0 < self.top_p <= 1:
            raise FieldError(self, "top_p", f"{self.top_p} is not in (0, 1]")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise UserError("top_k and top_p are of sampling; set a temperature above 0, or leave them out")

    def within(self, most: int) -> "GenerationConfig":
        """Returns the choices for texts of at most so many tokens."""
        return dataclasses.replace(self, num_tokens=min(self.num_tokens, most))


@dataclasses.dataclass(frozen=True)
class Written:
    """A text about an image.

    Attributes:
        text: as written.
        log_p: log-probability of the whole text and its end.
        tokens: the pieces of the text; the last one may be the end token, which is empty.
        probabilities: of each token given those before.
        bands: 5-95 % of the noise samples of each of these probabilities; None without noise.
    """

    text: str
    log_p: float
    tokens: tuple[str, ...]
    probabilities: tuple[float, ...]
    bands: tuple[tuple[float, float], ...] | None = None

    @property
    def probability(self) -> float:
        """Of the whole text and its end."""
        return math.exp(self.log_p)


@dataclasses.dataclass(frozen=True)
class TokenPredictions:
    """Predictions of each token of given texts from the tokens before it; prompts are left out.

    Attributes:
        log_p: log-probability of each token, 0 outside of the texts.
        confidence: the largest probability of any token.
        is_top: whether the token is the most probable one.
        counted: which tokens are of the texts, their ends included.
    """

    log_p: Float[np.ndarray, "n l"]
    confidence: Float[np.ndarray, "n l"]
    is_top: Bool[np.ndarray, "n l"]
    counted: Bool[np.ndarray, "n l"]

    def first(self, count: int) -> "TokenPredictions":
        """Returns the predictions of the first texts."""
        return TokenPredictions(*(getattr(self, field.name)[:count] for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class SourceTexts:
    """Texts that a decoder reads, as evaluators see them: token ids, which its programs encode.

    Attributes:
        extract: this process's rows of `lit_het.types.Batch.source` to those of all processes ``[b n]``.
        num_shards: as of `lit_het.types.ImageFeatures`.
        tower: equal for equal encoders.
    """

    extract: Callable[[np.ndarray], np.ndarray]
    num_shards: int
    tower: str


@runtime_checkable
class TextWriter(Protocol):
    """A trained decoder, as evaluators see it: `lit_het.models.writer.Writer`."""

    @property
    def features(self) -> Any:
        """What it reads: an `lit_het.types.ImageFeatures`, or `SourceTexts`."""
        ...

    @property
    def calibration(self) -> Any:
        """The fitted temperatures of tokens, a `lit_het.types.Calibration`; None as trained."""
        ...

    @property
    def caption_prompt(self) -> str:
        """The first prompt of training without a question; empty if there is none."""
        ...

    def question_prompt(self, question: str) -> str:
        """Returns a question in the first prompt of training that has one, or as it is."""
        ...

    def max_new_tokens(self, prompt: str) -> int:
        """Returns the most tokens of a text after a prompt, its end included."""
        ...

    def check_samples(self, samples: int) -> int:
        """Returns S, or 0 for a head without noise."""
        ...

    def write(
        self,
        features: Real[np.ndarray, "n f"],
        prompts: Sequence[str],
        config: GenerationConfig,
        *,
        samples: int = 0,
        seed: int = 0,
        numbers: Sequence[int] | None = None,
        bands: bool = True,
    ) -> list[list[Written]]:
        """Returns the texts of each image, the best first; images do not change each other's texts.

        Args:
            features: of the images; token ids where texts are read.
            prompts: what the texts of each image begin with.
            config: how tokens are chosen; fewer texts are returned where there are not as many.
            samples: S, the noise samples that probabilities are averaged over; 0 for none.
            seed: of the noise and of sampling.
            numbers: of the images; sampling depends on them and on the seed. None counts from 0.
            bands: whether to compute the bands of tokens.
        """
        ...

    def check_answers(self, answers: Sequence[str]) -> int:
        """Returns the tokens of the longest of given answers, its end included."""
        ...

    def rank(
        self,
        features: Real[np.ndarray, " f"],
        prompt: str,
        answers: Sequence[str],
        *,
        samples: int = 0,
        seed: int = 0,
        bands: bool = True,
    ) -> list[Written]:
        """Returns given answers about an image, the most probable first.

        Args:
            features: of the image.
            prompt: what the answers follow.
            answers: at least one, all with different tokens.
            samples: see `write`.
            seed: of the noise.
            bands: see `write`.
        """
        ...

    def predict(
        self,
        features: Real[np.ndarray, "n f"],
        prompts: Sequence[str],
        texts: Sequence[str],
        *,
        samples: int = 0,
        seed: int = 0,
    ) -> TokenPredictions:
        """Predicts the tokens of one given text of each image; longer texts are cut as in training.

        Args:
            features: of the images.
            prompts: what the texts follow.
            texts: of the images.
            samples: see `write`.
            seed: of the noise.
        """
        ...
