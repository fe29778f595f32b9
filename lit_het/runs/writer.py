"""Writes text about images with a trained decoder, and ranks given answers; programs are compiled once."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from lit_het import sharding
from lit_het.data_pipelines.tokenizers import SentencePieceTokenizer
from lit_het.errors import UserError
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import in_pairs
from lit_het.runs.opening import Run
from lit_het.tasks.captioning import CaptioningTask
from lit_het.tasks.generation import (
    GenerationConfig,
    Prompt,
    generate,
    text_log_probabilities,
    token_probabilities,
)

# The band of a probability lies between these quantiles of its noise samples, as in `lit_het.eval.answers`.
_BAND = (0.05, 0.95)
_QUESTION = "{question}"


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


class Writer:
    """A trained decoder.

    Args:
        run: of a captioning task.
        mesh: the devices.

    Raises:
        UserError: the run is no decoder.
    """

    def __init__(self, run: Run, mesh: Mesh):
        if not isinstance(run.task, CaptioningTask):
            raise UserError(f"{run.run_dir} is no decoder: it writes no text; train one, see docs/decoder.md")
        assert isinstance(run.tokenizer, SentencePieceTokenizer), "checked in training"
        self._task, self._tokenizer, self._mesh = run.task, run.tokenizer, mesh
        self._params = jax.device_put(run.params, sharding.tree_shardings(run.params, mesh))
        self._templates = [place.prompt or "" for place in run.config.data.texts]
        self.length = run.tokenizer.length
        self.has_noise = isinstance(run.task.config.head, HetXLConfig)

    def room(self, prompt: str) -> int:
        """Returns the most tokens of a text after a prompt, its end included.

        Raises:
            UserError: the prompt leaves no room for a text.
        """
        room = self.length - len(self._tokens_of(prompt))
        if room < 2:
            raise UserError(
                f"the prompt {prompt[:100]!r} has {self.length - room} tokens, too many for the decoder's "
                f"{self.length} positions; shorten it"
            )
        return room

    @property
    def caption_prompt(self) -> str:
        """The first prompt of training without a question; empty if there is none."""
        return next((template for template in self._templates if _QUESTION not in template), "")

    def question_prompt(self, question: str) -> str:
        """Returns a question in the first prompt of training that has one, or as it is."""
        template = next((template for template in self._templates if _QUESTION in template), _QUESTION)
        return template.replace(_QUESTION, question.strip())

    def write(
        self,
        features: Float[np.ndarray, "n f"],
        prompt: str,
        config: GenerationConfig,
        *,
        samples: int = 0,
        seed: int = 0,
    ) -> list[list[Written]]:
        """Returns the texts of each image, the best first.

        Args:
            features: of the images.
            prompt: what the texts begin with.
            config: how tokens are chosen.
            samples: S, the noise samples that probabilities are averaged over; 0 for none.
            seed: of the noise and of sampling.

        Raises:
            UserError: the prompt and the text do not fit the decoder, or S is odd where noise comes in pairs.
        """
        samples = self._checked(samples)
        tokens = self._tokens_of(prompt)
        rows = np.repeat(tokens[None], len(features), axis=0)
        noise, key = jax.random.split(jax.random.key(seed))
        texts = self._run(self._generated(config, samples), features, rows, noise, key)
        found = []
        for row in range(len(features)):
            of_image = list(zip(texts.tokens[row], texts.log_p[row], strict=True))
            bands = self._bands(features[row], tokens, [ids for ids, _ in of_image], samples, noise)
            found.append([self._written(ids, log_p, band) for (ids, log_p), band in zip(of_image, bands, strict=True)])
        return found

    def rank(
        self, features: Float[np.ndarray, " f"], prompt: str, answers: Sequence[str], *, samples: int = 0, seed: int = 0
    ) -> list[Written]:
        """Returns given answers about an image, the most probable first.

        Args:
            features: of the image.
            prompt: what the answers follow.
            answers: at least one, all different.
            samples: see `write`.
            seed: of the noise.

        Raises:
            UserError: answers are missing or repeated, or too long for the decoder.
        """
        samples = self._checked(samples)
        if not answers:
            raise UserError("no answers; give at least one")
        if repeated := [answer for answer in dict.fromkeys(answers) if answers.count(answer) > 1]:
            raise UserError(f"answer {repeated[0]!r} is repeated; keep one")
        before = self._tokens_of(prompt)
        rows = []
        for answer in answers:
            ids = self._tokenizer.pieces(answer)
            if not ids:
                raise UserError(f"answer {answer!r} is empty; leave it out")
            if len(before) + len(ids) + 1 > self._tokenizer.length:
                raise UserError(
                    f"answer {answer[:100]!r} has {len(ids)} tokens, too many for the decoder's "
                    f"{self._tokenizer.length} with the prompt; shorten it"
                )
            rows.append(np.asarray([*ids, self._tokenizer.end_id]))
        noise = jax.random.key(seed)
        log_p = self._token_log_p(features, before, rows, samples, noise)
        bands = self._bands(features, before, rows, samples, noise)
        found = [self._written(*one) for one in zip(rows, log_p, bands, strict=True)]
        return sorted(found, key=lambda written: -written.log_p)

    def _checked(self, samples: int) -> int:
        if samples and self.has_noise:
            assert isinstance(self._task.config.head, HetXLConfig)
            in_pairs(self._task.config.head.sampling.antithetic, samples)
        return samples if self.has_noise else 0

    def _tokens_of(self, prompt: str) -> Int[np.ndarray, " p"]:
        return np.asarray(self._tokenizer.pieces(prompt), np.int32)

    @functools.lru_cache(maxsize=8)  # noqa: B019 - a writer lives as long as its programs
    def _generated(self, config: GenerationConfig, samples: int) -> Any:
        def run(params: Any, features: Any, prompts: Any, noise: Any, key: Any) -> Any:
            source = self._task.tokens(features)
            prompt = Prompt(prompts, jax.numpy.full(len(prompts), prompts.shape[1], jax.numpy.int32))
            how = None if not samples else (noise, samples)
            end = self._tokenizer.end_id
            return generate(self._task, params, source, prompt, config, end_token=end, noise=how, key=key)

        return jax.jit(run, out_shardings=sharding.replicated(self._mesh))

    def _run(self, program: Any, *arguments: Any) -> Any:
        with jax.set_mesh(self._mesh):
            return jax.tree.map(np.asarray, program(self._params, *arguments))

    def _rows(self, before: Int[np.ndarray, " p"], answers: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns prompts with answers behind them, and which tokens are of the answers."""
        text = np.zeros((len(answers), self._tokenizer.length), np.int32)
        target = np.zeros(text.shape, bool)
        for row, ids in enumerate(answers):
            end = len(before) + len(ids)
            text[row, :end], target[row, len(before) : end] = [*before, *ids], True
        return text, target

    def _token_log_p(
        self, features: Float[np.ndarray, " f"], before: Any, answers: Sequence[np.ndarray], samples: int, noise: Any
    ) -> Iterator[Float[np.ndarray, " l"]]:
        text, target = self._rows(before, answers)
        found = self._run(self._ranked(samples), features[None], text, target, noise)
        return (row[of_answer] for row, of_answer in zip(found, target, strict=True))

    @functools.lru_cache(maxsize=8)  # noqa: B019 - as above
    def _ranked(self, samples: int) -> Any:
        def run(params: Any, features: Any, text: Any, target: Any, noise: Any) -> Any:
            how = None if not samples else (noise, samples)
            return text_log_probabilities(self._task, params, self._task.tokens(features), text, target, how)

        return jax.jit(run, out_shardings=sharding.replicated(self._mesh))

    def _bands(
        self, features: Float[np.ndarray, " f"], before: Any, answers: Sequence[np.ndarray], samples: int, noise: Any
    ) -> list[tuple[tuple[float, float], ...] | None]:
        if not samples:
            return [None] * len(answers)
        answers = [ids[: _length(ids, self._tokenizer.end_id)] for ids in answers]
        text, target = self._rows(before, answers)
        found = self._run(self._sampled(samples), features[None], text, noise)
        low, high = np.quantile(found, _BAND, axis=2)
        return [
            tuple(zip(low[row][of_answer].tolist(), high[row][of_answer].tolist(), strict=True))
            for row, of_answer in enumerate(target)
        ]

    @functools.lru_cache(maxsize=8)  # noqa: B019 - as above
    def _sampled(self, samples: int) -> Any:
        def run(params: Any, features: Any, text: Any, noise: Any) -> Any:
            return token_probabilities(self._task, params, self._task.tokens(features), text, noise, samples)

        return jax.jit(run, out_shardings=sharding.replicated(self._mesh))

    def _written(self, ids: np.ndarray, log_p: np.ndarray, bands: Any) -> Written:
        length = _length(ids, self._tokenizer.end_id)
        ids, log_p = ids[:length], log_p[:length]
        text = self._tokenizer.decode(ids[None].astype(np.int32))[0]
        pieces = tuple(self._tokenizer.piece(int(number)) for number in ids)
        return Written(text, float(log_p.sum()), pieces, tuple(np.exp(log_p).tolist()), bands)


def _length(ids: np.ndarray, end_id: int) -> int:
    """Returns the number of tokens up to the first end token, included; all where there is none."""
    ends = np.flatnonzero(ids == end_id)
    return int(ends[0]) + 1 if len(ends) else len(ids)
