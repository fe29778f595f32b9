"""Writes text about images with a trained decoder, ranks given answers, and predicts the tokens of given texts."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Int

from lit_het.data_pipelines.captions import QUESTION
from lit_het.data_pipelines.tokenizers import SentencePieceTokenizer
from lit_het.errors import UserError
from lit_het.eval.answers import BAND
from lit_het.heads.sampling import in_pairs
from lit_het.tasks.generation import (
    Predicted,
    Prompt,
    Texts,
    WritingTask,
    generate,
    text_log_probabilities,
    token_predictions,
    token_probabilities,
)
from lit_het.texts import GenerationConfig, TokenPredictions, Written
from lit_het.types import ImageFeatures, Params

# Answers that are ranked at a time.
_ANSWERS = 64


# Computes a function of parameters, rows that the devices share, and arguments that each device has. The first argument
# identifies the function, which is compiled once; the result is in NumPy.
Call = Callable[..., Any]


def writable_tokens(vocabulary_size: int, tokenizer: SentencePieceTokenizer) -> Bool[np.ndarray, " k"]:
    """Returns which tokens of a decoder may be written: those of its tokenizer, which may be fewer, but no padding."""
    allowed = np.arange(vocabulary_size) < tokenizer.vocabulary_size
    if tokenizer.padding_id != tokenizer.end_id:
        allowed[tokenizer.padding_id] = False
    return allowed


class Writer:
    """A trained decoder, see `lit_het.texts.TextWriter`.

    Programs are compiled once for prompts, answers and numbers of images of similar size.

    Args:
        task: of the decoder.
        params: its parameters.
        features: the tokens of its images, or the ids of texts to translate.
        tokenizer: of its texts.
        prompts: templates of training.
        call: runs a program.
    """

    def __init__(
        self,
        task: WritingTask,
        params: Params,
        features: ImageFeatures,
        tokenizer: SentencePieceTokenizer,
        prompts: Sequence[str],
        call: Call,
    ):
        self.features = features
        self._task, self._params, self._tokenizer, self._templates = task, params, tokenizer, prompts
        self._call, self._sampling = call, task.config.head.sampling
        self._allowed = writable_tokens(task.config.decoder.vocabulary_size, tokenizer)

    @property
    def caption_prompt(self) -> str:
        """The first prompt of training without a question; empty if there is none."""
        return next((template for template in self._templates if QUESTION not in template), "")

    def question_prompt(self, question: str) -> str:
        """Returns a question in the first prompt of training that has one, or as it is."""
        template = next((template for template in self._templates if QUESTION in template), QUESTION)
        return template.replace(QUESTION, question.strip())

    def max_new_tokens(self, prompt: str) -> int:
        """Returns the most tokens of a text after a prompt, its end included.

        Raises:
            UserError: the prompt leaves no room for a text.
        """
        length = self._tokenizer.length
        most = length - len(self._tokens_of(prompt))
        if most < 2:
            raise UserError(
                f"the prompt {prompt[:100]!r} has {length - most} tokens, too many for the decoder's {length} "
                "positions; shorten it"
            )
        return most

    def check_samples(self, samples: int) -> int:
        """Returns S, 0 for a head without noise, see `lit_het.texts.TextWriter`."""
        if samples < 0:
            raise UserError(f"samples = {samples} must be at least 0")
        if self._sampling is None or not samples:
            return 0
        in_pairs(self._sampling.antithetic, samples)
        return samples

    def write(
        self,
        features: Float[np.ndarray, "n f"],
        prompts: Sequence[str],
        config: GenerationConfig,
        *,
        samples: int = 0,
        seed: int = 0,
        bands: bool = True,
    ) -> list[list[Written]]:
        """Returns the texts of each image, the best first, see `lit_het.texts.TextWriter`."""
        samples, key = self.check_samples(samples), jax.random.key(seed)
        before = [self._tokens_of(prompt) for prompt in prompts]
        lengths = np.array([len(tokens) for tokens in before], np.int32)
        # Padded, so that prompts of similar lengths share a program.
        most = max(lengths)
        longest = max(most, min(-(-most // 8) * 8, self._tokenizer.length - config.num_tokens))
        tokens = np.zeros((len(features), longest), np.int32)
        for row, of_image in zip(tokens, before, strict=True):
            row[: len(of_image)] = of_image
        program = functools.partial(_generated, self._task, config, self._tokenizer.end_id, samples)
        texts = self._run(program, (features, Prompt(jnp.asarray(tokens), jnp.asarray(lengths))), self._allowed, key)
        found = []
        for row in range(len(features)):
            ids = [one[: _length(one, self._tokenizer.end_id)] for one in texts.tokens[row]]
            log_p = [of_text[: len(one)] for one, of_text in zip(ids, texts.log_p[row], strict=True)]
            of_tokens = self._bands(features[row], before[row], ids, samples if bands else 0, key)
            found.append([self._written(*one) for one in zip(ids, log_p, of_tokens, strict=True)])
        return found

    def rank(
        self,
        features: Float[np.ndarray, " f"],
        prompt: str,
        answers: Sequence[str],
        *,
        samples: int = 0,
        seed: int = 0,
        bands: bool = True,
    ) -> list[Written]:
        """Returns given answers about an image, the most probable first, see `lit_het.texts.TextWriter`."""
        samples = self.check_samples(samples)
        if not answers or isinstance(answers, str):
            raise UserError("no answers; give a list of at least one")
        if repeated := [answer for answer in dict.fromkeys(answers) if list(answers).count(answer) > 1]:
            raise UserError(f"answer {repeated[0][:100]!r} is repeated; keep one")
        before, length = self._tokens_of(prompt), self._tokenizer.length
        rows = []
        for answer in answers:
            ids = self._tokenizer.pieces(answer)
            if not ids:
                raise UserError(f"answer {answer[:100]!r} is empty; leave it out")
            if len(before) + len(ids) + 1 > length:
                raise UserError(
                    f"answer {answer[:100]!r} has {len(ids)} tokens, too many for the decoder's {length} with the "
                    "prompt; shorten it"
                )
            rows.append(np.asarray([*ids, self._tokenizer.end_id]))
        key = jax.random.key(seed)
        log_p = self._log_p(features, before, rows, samples, key)
        of_tokens = self._bands(features, before, rows, samples if bands else 0, key)
        found = [self._written(*one) for one in zip(rows, log_p, of_tokens, strict=True)]
        return sorted(found, key=lambda written: -written.log_p)

    def predict(
        self,
        features: Float[np.ndarray, "n f"],
        prompts: Sequence[str],
        texts: Sequence[str],
        *,
        samples: int = 0,
        seed: int = 0,
    ) -> TokenPredictions:
        """Predicts the tokens of one given text of each image, see `lit_het.texts.TextWriter`."""
        tokens, counted = self._tokenizer.prompted(list(prompts), list(texts))
        program = functools.partial(_predicted, self._task, self.check_samples(samples))
        found = self._run(program, (features, tokens), jax.random.key(seed))
        return TokenPredictions(np.where(counted, found.log_p, 0.0), np.exp(found.best), found.is_top, counted)

    def _tokens_of(self, prompt: str) -> Int[np.ndarray, " p"]:
        return np.asarray(self._tokenizer.pieces(prompt), np.int32)

    def _run(self, program: functools.partial[Any], rows: Any, *shared: Any) -> Any:
        return self._call((program.func, *program.args[1:]), program, self._params, rows, *shared)

    def _log_p(
        self, features: Float[np.ndarray, " f"], before: Any, answers: Sequence[np.ndarray], samples: int, key: Any
    ) -> list[np.ndarray]:
        """Returns the log-probability of each token of each answer."""
        found = []
        # Not of the samples' probabilities, which may round to zero.
        for text, target, count in self._blocks(before, answers):
            program = functools.partial(_given, self._task, samples)
            log_p = self._run(program, (text, target), features[None], key)
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
            program = functools.partial(_sampled, self._task, samples)
            ends = np.quantile(self._run(program, text, features[None], key), BAND, axis=2)
            found += [tuple(zip(*ends[:, row, target[row]].tolist(), strict=True)) for row in range(count)]
        return found

    def _blocks(self, before: Any, answers: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yields prompts with answers behind them, which tokens are of the answers, and how many rows are answers."""
        for start in range(0, len(answers), _ANSWERS):
            some = list(answers[start : start + _ANSWERS])
            # A power of two, so that similar numbers of answers share a program.
            size = 1 << (len(some) - 1).bit_length()
            yield *self._rows(before, [*some, *some[-1:] * (size - len(some))]), len(some)

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


# Programs of a decoder. They hold no parameters: those of other steps of a training share them.


def _generated(
    task: WritingTask,
    config: GenerationConfig,
    end_token: int,
    samples: int,
    params: Params,
    rows: Any,
    allowed: Any,
    key: Any,
) -> Texts:
    features, prompt = rows
    return generate(
        task,
        params,
        task.source(params, features),
        prompt,
        config,
        end_token=end_token,
        noise=(key, samples) if samples else None,
        # Apart from those of the noise, whose numbers are those of positions.
        key=jax.random.fold_in(key, task.config.decoder.length),
        allowed=allowed,
    )


def _given(task: WritingTask, samples: int, params: Params, rows: Any, features: Any, key: Any) -> jax.Array:
    noise = (key, samples) if samples else None
    text, target = rows
    return text_log_probabilities(task, params, task.source(params, features), text, target, noise)


def _sampled(task: WritingTask, samples: int, params: Params, text: Any, features: Any, key: Any) -> jax.Array:
    return token_probabilities(task, params, task.source(params, features), text, (key, samples))


def _predicted(task: WritingTask, samples: int, params: Params, rows: Any, key: Any) -> Predicted:
    features, text = rows
    return token_predictions(task, params, task.source(params, features), text, (key, samples) if samples else None)
