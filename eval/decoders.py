"""Decoders as evaluators use them: texts about the images of a set, without noise and with it."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import scipy
from jaxtyping import Float, Int, Real

from lit_het.data_pipelines.shards import storage
from lit_het.errors import UserError
from lit_het.eval.drawings import TextPart, draw_texts
from lit_het.eval.evaluation import Evaluation, of_part
from lit_het.eval.metrics.text_scores import Figures, TokenResult, confidence_figures
from lit_het.eval.predictions import samples_of
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.texts import GenerationConfig, TextWriter, Written
from lit_het.types import EvaluatedModel

PLAIN, NOISY = "", "noisy"
# Texts of each device at a time.
_TEXTS = 32

NO_TEXT = Written("", -math.inf, (), ())
"""What is written behind a prompt that leaves no room; it is never right, and its confidence is 0."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A writer with fixed settings. It writes equal numbers of texts at a time, so that programs are compiled once.

    Attributes:
        writer: the trained decoder.
        generation: how texts are written.
        candidates: texts to choose among in place of writing; None to write.
        least_tokens: see `least_tokens`.
        samples: S, the noise samples of each token; 0 for none.
        seed: of the noise and of sampling.
        size: texts at a time.
    """

    writer: TextWriter
    generation: GenerationConfig
    candidates: tuple[str, ...] | None
    least_tokens: int
    samples: int
    seed: int
    size: int

    def texts(
        self,
        features: Real[np.ndarray, "n f"],
        prompts: Sequence[str],
        max_new_tokens: Sequence[int],
        numbers: Int[np.ndarray, " n"],
    ) -> list[Written]:
        """Returns the best text about each image, or its most probable candidate; an empty one where none fits.

        Args:
            features: of the images.
            prompts: of the texts.
            max_new_tokens: the tokens that fit behind each prompt.
            numbers: of the texts in the set; sampling depends on them.
        """
        found: list[Written] = [NO_TEXT] * len(prompts)
        fits = np.array(max_new_tokens) >= self.least_tokens
        if self.candidates is not None:
            for row in map(int, np.flatnonzero(fits)):
                found[row] = self._chosen(self.candidates, features[row], prompts[row])
            return found
        # Those with equal limits at a time: a long prompt must not shorten the texts behind others.
        limits = np.minimum(max_new_tokens, self.generation.num_tokens)
        for limit in map(int, np.unique(limits[fits])):
            rows = np.flatnonzero(limits == limit)
            texts = self._written(features[rows], [prompts[int(row)] for row in rows], limit, numbers[rows])
            for row, text in zip(map(int, rows), texts, strict=True):
                found[row] = text
        return found

    def predict(
        self,
        features: Real[np.ndarray, "n f"],
        prompt: str,
        texts: Sequence[str],
        owner: Int[np.ndarray, " t"],
        positions: Int[np.ndarray, " n"],
    ) -> TokenResult:
        """Returns predictions of the tokens of texts.

        Args:
            features: of the images.
            prompt: what the texts follow.
            texts: of the images.
            owner: the image of each text.
            positions: of the images in the set.
        """
        found = []
        for rows, count in self._blocks(len(texts)):
            some, image = [texts[int(row)] for row in rows], owner[rows]
            predicted = self.writer.predict(
                features[image], [prompt] * len(rows), some, samples=self.samples, seed=self.seed
            )
            found.append(TokenResult.of(predicted.first(count), positions[image[:count]]))
        return TokenResult.join(found)

    def _written(
        self, features: Real[np.ndarray, "n f"], prompts: Sequence[str], limit: int, numbers: Int[np.ndarray, " n"]
    ) -> list[Written]:
        """Returns the best text of at most so many tokens about each image."""
        found: list[Written] = []
        for rows, count in self._blocks(len(prompts)):
            some, generation = [prompts[int(row)] for row in rows], self.generation.within(limit)
            how = {"samples": self.samples, "seed": self.seed, "bands": False}
            texts = self.writer.write(features[rows], some, generation, numbers=numbers[rows].tolist(), **how)
            found += [of_image[0] for of_image in texts[:count]]
        return found

    def _chosen(self, candidates: tuple[str, ...], features: Real[np.ndarray, " f"], prompt: str) -> Written:
        """Returns the most probable candidate, with its share of the probability of all."""
        ranked = self.writer.rank(features, prompt, candidates, samples=self.samples, seed=self.seed, bands=False)
        shares = scipy.special.log_softmax([text.log_p for text in ranked])
        return dataclasses.replace(ranked[0], log_p=float(shares[0]))

    def _blocks(self, count: int) -> Iterator[tuple[Int[np.ndarray, " size"], int]]:
        """Yields rows, of which the first so many count; the others fill the block."""
        for start in range(0, count, self.size):
            yield np.minimum(np.arange(start, start + self.size), count - 1), min(self.size, count - start)


@dataclasses.dataclass(frozen=True)
class ScoredTexts:
    """The metrics of the texts about a set, and what is drawn of them."""

    figures: Figures
    drawn: TextPart

    @classmethod
    def of(
        cls,
        written: Sequence[Written],
        right: Float[np.ndarray, " n"],
        positions: Sequence[int],
        figures: Figures,
        tokens: TokenResult | None = None,
    ) -> "ScoredTexts":
        """Adds those of confidence, which is the probability of the whole text.

        Args:
            written: the texts.
            right: how right each is, 0 to 1.
            positions: of the images of the texts in the set.
            figures: other metrics.
            tokens: predictions of the tokens of true texts.
        """
        confidence = np.array([text.probability for text in written])
        of_confidence = confidence_figures(confidence, right, np.array(positions))
        found, errors = (one | other for one, other in zip(figures, of_confidence, strict=True))
        return cls((found, errors), TextPart(written, confidence, right, tokens))


def writer_of(model: EvaluatedModel, samples: int) -> TextWriter:
    """Returns the decoder of a model."""
    if model.writer is None:
        raise UserError("the model writes no text; take a run with a decoder, see docs/decoder.md")
    model.writer.check_samples(samples)
    return model.writer


def decoders_of(
    writer: TextWriter,
    generation: GenerationConfig,
    candidates: tuple[str, ...] | None,
    samples: int,
    seed: int,
) -> dict[str, Decoder]:
    """Returns the decoder without noise, and with S samples of a head that has noise the one with noise.

    Args:
        writer: the trained decoder.
        generation: how texts are written.
        candidates: texts to choose among, or None.
        samples: S.
        seed: of the noise and of sampling.
    """
    least, size = least_tokens(writer, candidates), _TEXTS * writer.features.num_shards
    found = {PLAIN: Decoder(writer, generation, candidates, least, 0, seed, size)}
    if writer.check_samples(samples_of(writer, samples)):
        found[NOISY] = Decoder(writer, generation, candidates, least, samples, seed, size)
    return found


def least_tokens(writer: TextWriter, candidates: tuple[str, ...] | None) -> int:
    """Returns how many tokens must fit behind a prompt: of the longest candidate, or a token and the end of a text."""
    return 2 if candidates is None else writer.check_answers(candidates)


def evaluation_of(
    kind: str,
    opened: OpenSet,
    positions: Sequence[int],
    titles: Sequence[str],
    parts: Mapping[str, ScoredTexts],
    writer: TextWriter,
) -> Evaluation:
    """Returns the metrics of all parts, with the names of parts as prefixes.

    Args:
        kind: of the evaluation.
        opened: the set.
        positions: of the image of each text in the set.
        titles: what is shown above each text.
        parts: by name.
        writer: the decoder.
    """
    found, errors = {}, {}
    for part, scored in parts.items():
        for into, values in zip((found, errors), scored.figures, strict=True):
            into.update(of_part(part, values))
    drawn = {part or "plain": scored.drawn for part, scored in parts.items()}
    return Evaluation(
        kind,
        opened.config.name,
        found,
        errors,
        draw=lambda: draw_texts(drawn, titles, np.array(positions), opened),
        calibrated=str(writer.calibration or ""),
    )


def read_candidates(path: Path) -> tuple[str, ...]:
    """Returns the texts in a file, one per line."""
    found = storage.read_lines(str(path))
    if len(set(found)) < max(len(found), 2):
        raise UserError(f"{path}: list two texts or more, each once")
    return found
