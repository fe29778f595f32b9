"""Evaluates captions that a decoder writes, and its predictions of the tokens of the true ones."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from lit_het.errors import UserError
from lit_het.eval.decoders import ScoredTexts, decoders_of, evaluation_of, least_tokens, writer_of
from lit_het.eval.evaluation import Evaluation
from lit_het.eval.evaluators.retrieval import with_captions
from lit_het.eval.metrics.captions import tokenize
from lit_het.eval.metrics.significance import standard_error
from lit_het.eval.metrics.text_scores import TokenResult, caption_figures
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.texts import GenerationConfig, TextWriter, Written
from lit_het.types import EvaluatedModel


@dataclasses.dataclass(frozen=True)
class Captioning:
    """The evaluator of a `WriteCaptionsConfig`; ``references`` are the true captions of each image of the set."""

    opened: OpenSet
    references: tuple[tuple[str, ...], ...]
    prompt: str | None
    candidates: tuple[str, ...] | None
    generation: GenerationConfig
    samples: int
    seed: int

    def check(self, model: EvaluatedModel) -> None:
        """Checks that the model writes text, and that the prompt leaves room for it."""
        writer = writer_of(model, self.samples)
        most = writer.max_new_tokens(self._prompt(writer))
        if (longest := least_tokens(writer, self.candidates)) > most:
            raise UserError(f"a candidate has {longest} tokens, and the prompt leaves {most}; shorten it")

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Returns `lit_het.eval.metrics.text_scores`, and ``exact_match`` of any of an image's true captions.

        Captions are compared by their tokens (`tokenize`). Metrics with noise have the prefix ``noisy/``.
        """
        writer = writer_of(model, self.samples)
        prompt = self._prompt(writer)
        decoders = decoders_of(writer, self.generation, self.candidates, self.samples, self.seed)
        most = writer.max_new_tokens(prompt)
        written: dict[str, list[Written]] = {part: [] for part in decoders}
        tokens: dict[str, list[TokenResult]] = {part: [] for part in decoders}
        positions: list[int] = []
        for of_batch in self.opened.stream(writer.features):
            features = with_captions(of_batch, self.references)
            captions = [self.references[position] for position in features.positions]
            owner = np.repeat(np.arange(len(captions)), [len(of_image) for of_image in captions])
            texts = [text for of_image in captions for text in of_image]
            for part, decoder in decoders.items():
                of_all = [prompt] * len(captions), [most] * len(captions)
                written[part] += decoder.texts(features.values, *of_all, features.positions)
                tokens[part].append(decoder.predict(features.values, prompt, texts, owner, features.positions))
            positions += features.positions.tolist()
        references = [self._tokenized[position] for position in positions]
        parts = {
            part: _scored(written[part], references, positions, TokenResult.join(tokens[part])) for part in decoders
        }
        titles = [" / ".join(self.references[position]) for position in positions]
        return evaluation_of("captioning", self.opened, positions, titles, parts, writer)

    @functools.cached_property
    def _tokenized(self) -> list[list[str]]:
        # Once for all evaluations of a training, as it takes longer than a comparison.
        return [[tokenize(text) for text in of_image] for of_image in self.references]

    def _prompt(self, writer: TextWriter) -> str:
        return writer.caption_prompt if self.prompt is None else self.prompt


def _scored(
    written: Sequence[Written], references: Sequence[Sequence[str]], positions: Sequence[int], tokens: TokenResult
) -> ScoredTexts:
    texts = [tokenize(text.text) for text in written]
    right = np.array([text in others for text, others in zip(texts, references, strict=True)], np.float64)
    found, errors = {"exact_match": float(right.mean())}, {"exact_match": standard_error(right)}
    for some, their_errors in (caption_figures(texts, references), tokens.figures()):
        found |= some
        errors |= their_errors
    return ScoredTexts.of(written, right, positions, (found, errors), tokens)
