"""Writes text about images with a trained decoder, and ranks given answers."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from lit_het import sharding
from lit_het.data_pipelines.captions import QUESTION
from lit_het.data_pipelines.tokenizers import SentencePieceTokenizer
from lit_het.errors import UserError
from lit_het.eval.answers import BAND
from lit_het.heads.sampling import in_pairs
from lit_het.runs.opening import Run
from lit_het.tasks.captioning import CaptioningTask
from lit_het.tasks.generation import (
    GenerationConfig,
    Prompt,
    Texts,
    generate,
    text_log_probabilities,
    token_probabilities,
)

# Answers that are ranked at a time.
_ANSWERS = 64


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
    """A trained decoder; programs are compiled once for prompts, answers and numbers of images of similar size.

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
        self._sampling = run.task.config.head.sampling
        # The vocabulary of the decoder may be larger than that of the tokenizer.
        self._allowed = np.arange(run.task.config.decoder.vocabulary_size) < run.tokenizer.vocabulary_size
        if run.tokenizer.padding_id != run.tokenizer.end_id:
            self._allowed[run.tokenizer.padding_id] = False
        self._programs: dict[Any, Any] = {}

    @property
    def caption_prompt(self) -> str:
        """The first prompt of training without a question; empty if there is none."""
        return next((template for template in self._templates if QUESTION not in template), "")

    def question_prompt(self, question: str) -> str:
        """Returns a question in the first prompt of training that has one, or as it is."""
        template = next((template for template in self._templates if QUESTION in template), QUESTION)
        return template.replace(QUESTION, question.strip())

    def room(self, prompt: str) -> int:
        """Returns the most tokens of a text after a prompt, its end included.

        Raises:
            UserError: the prompt leaves no room for a text.
        """
        length = self._tokenizer.length
        room = length - len(self._tokens_of(prompt))
        if room < 2:
            raise UserError(
                f"the prompt {prompt[:100]!r} has {length - room} tokens, too many for the decoder's {length} "
                "positions; shorten it"
            )
        return room

    def write(
        self,
        features: Float[np.ndarray, "n f"],
        prompt: str,
        config: GenerationConfig,
        *,
        samples: int = 0,
        seed: int = 0,
    ) -> list[list[Written]]:
        """Returns the texts of each image, the best first; images do not change each other's texts but by sampling.

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
        # Padded, so that prompts of similar lengths share a program.
        longest = max(len(tokens), min(-(-len(tokens) // 8) * 8, self._tokenizer.length - config.num_tokens))
        rows = np.zeros((len(features), longest), np.int32)
        rows[:, : len(tokens)] = tokens
        key = jax.random.key(seed)
        given = Prompt(jnp.asarray(rows), jnp.full(len(rows), len(tokens), jnp.int32))
        texts = self._run((self._generated, config, samples), features, given, self._allowed, key)
        found = []
        for row in range(len(features)):
            ids = [one[: _length(one, self._tokenizer.end_id)] for one in texts.tokens[row]]
            log_p = [of_text[: len(one)] for one, of_text in zip(ids, texts.log_p[row], strict=True)]
            bands = self._bands(features[row], tokens, ids, samples, key)
            found.append([self._written(*one) for one in zip(ids, log_p, bands, strict=True)])
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
        if not answers or isinstance(answers, str):
            raise UserError("no answers; give a list of at least one")
        if repeated := [answer for answer in dict.fromkeys(answers) if list(answers).count(answer) > 1]:
            raise UserError(f"answer {repeated[0]!r} is repeated; keep one")
        before, length = self._tokens_of(prompt), self._tokenizer.length
        rows = []
        for answer in answers:
            ids = self._tokenizer.pieces(answer)
            if not ids:
                raise UserError(f"answer {answer!r} is empty; leave it out")
            if len(before) + len(ids) + 1 > length:
                raise UserError(
                    f"answer {answer[:100]!r} has {len(ids)} tokens, too many for the decoder's {length} with the "
                    "prompt; shorten it"
                )
            rows.append(np.asarray([*ids, self._tokenizer.end_id]))
        given = features, before, rows, samples, jax.random.key(seed)
        log_p, bands = self._log_p(*given), self._bands(*given)
        found = [self._written(*one) for one in zip(rows, log_p, bands, strict=True)]
        return sorted(found, key=lambda written: -written.log_p)

    def _checked(self, samples: int) -> int:
        """Returns S, 0 for a head without noise."""
        if samples < 0:
            raise UserError(f"samples = {samples} must be at least 0")
        if self._sampling is None or not samples:
            return 0
        in_pairs(self._sampling.antithetic, samples)
        return samples

    def _tokens_of(self, prompt: str) -> Int[np.ndarray, " p"]:
        return np.asarray(self._tokenizer.pieces(prompt), np.int32)

    def _run(self, how: tuple[Any, ...], *arguments: Any) -> Any:
        """Runs a function of fixed settings, which is compiled once for arguments of the same shapes."""
        if how not in self._programs:
            function, *settings = how
            bound = functools.partial(function, *settings)
            self._programs[how] = jax.jit(bound, out_shardings=sharding.replicated(self._mesh))
        with jax.set_mesh(self._mesh):
            return jax.tree.map(np.asarray, self._programs[how](self._params, *arguments))

    def _generated(
        self, config: GenerationConfig, samples: int, params: Any, features: Any, prompt: Prompt, allowed: Any, key: Any
    ) -> Texts:
        return generate(
            self._task,
            params,
            self._task.tokens(features),
            prompt,
            config,
            end_token=self._tokenizer.end_id,
            noise=(key, samples) if samples else None,
            # Apart from those of the noise, whose numbers are those of positions.
            key=jax.random.fold_in(key, self._tokenizer.length),
            allowed=allowed,
        )

    def _log_p(
        self, features: Float[np.ndarray, " f"], before: Any, answers: Sequence[np.ndarray], samples: int, key: Any
    ) -> list[np.ndarray]:
        """Returns the log-probability of each token of each answer."""
        found = []
        # Not of the samples' probabilities, which may round to zero.
        for text, target, count in self._blocks(before, answers):
            log_p = self._run((self._given, samples), features[None], text, target, key)
            found += [log_p[row][target[row]] for row in range(count)]
        return found

    def _bands(
        self, features: Float[np.ndarray, " f"], before: Any, answers: Sequence[np.ndarray], samples: int, key: Any
    ) -> list[tuple[tuple[float, float], ...] | None]:
        """Returns the band of each token of each answer over noise samples."""
        if not samples:
            return [None] * len(answers)
        found = []
        for text, target, count in self._blocks(before, answers):
            ends = np.quantile(self._run((self._sampled, samples), features[None], text, key), BAND, axis=2)
            found += [tuple(zip(*ends[:, row, target[row]].tolist(), strict=True)) for row in range(count)]
        return found

    def _blocks(self, before: Any, answers: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yields prompts with answers behind them, which tokens are of the answers, and how many rows are answers."""
        for start in range(0, len(answers), _ANSWERS):
            some = list(answers[start : start + _ANSWERS])
            # A power of two, so that similar numbers of answers share a program.
            size = 1 << (len(some) - 1).bit_length()
            yield *self._rows(before, [*some, *some[-1:] * (size - len(some))]), len(some)

    def _given(self, samples: int, params: Any, features: Any, text: Any, target: Any, key: Any) -> Any:
        noise = (key, samples) if samples else None
        return text_log_probabilities(self._task, params, self._task.tokens(features), text, target, noise)

    def _sampled(self, samples: int, params: Any, features: Any, text: Any, key: Any) -> Any:
        return token_probabilities(self._task, params, self._task.tokens(features), text, (key, samples))

    def _rows(self, before: Int[np.ndarray, " p"], answers: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Returns prompts with answers behind them, and which tokens are of the answers."""
        text = np.zeros((len(answers), self._tokenizer.length), np.int32)
        target = np.zeros(text.shape, bool)
        for row, ids in enumerate(answers):
            end = len(before) + len(ids)
            text[row, :end], target[row, len(before) : end] = [*before, *ids], True
        return text, target

    def _written(self, ids: np.ndarray, log_p: np.ndarray, bands: Any) -> Written:
        text = self._tokenizer.decode(ids[None].astype(np.int32))[0]
        pieces = tuple(self._tokenizer.piece(int(number)) for number in ids)
        return Written(text, float(log_p.sum()), pieces, tuple(np.exp(log_p).tolist()), bands)


def _length(ids: np.ndarray, end_id: int) -> int:
    """Returns the number of tokens up to the first end token, included; all where there is none."""
    ends = np.flatnonzero(ids == end_id)
    return int(ends[0]) + 1 if len(ends) else len(ids)
