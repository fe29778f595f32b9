"""Writes text about images with a trained decoder, ranks given answers, and predicts the tokens of given texts."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int, Key, Real

from lit_het import arguments
from lit_het.calibrations import Calibration
from lit_het.data_pipelines.texts.captions_config import QUESTION
from lit_het.data_pipelines.texts.tokenizers import SentencePieceTokenizer
from lit_het.errors import UserError
from lit_het.eval.answers import BAND
from lit_het.heads.sampling import in_pairs
from lit_het.tasks.generation import WORST, Prompt, Texts, generate
from lit_het.tasks.given_texts import (
    Predicted,
    text_log_probabilities,
    token_log_probabilities,
    token_predictions,
    token_probabilities,
)
from lit_het.tasks.writing import WritingTask
from lit_het.texts import GenerationConfig, SourceTexts, TokenPredictions, Written
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
        features: what reads the tokens of its images, or the ids of texts to translate.
        tokenizer: of its texts.
        prompts: templates of training.
        call: runs a program.
        calibration: fitted temperatures of tokens; None as trained.
    """

    def __init__(
        self,
        task: WritingTask,
        params: Params,
        features: ImageFeatures | SourceTexts,
        tokenizer: SentencePieceTokenizer,
        prompts: Sequence[str],
        call: Call,
        calibration: Calibration | None = None,
    ):
        self.features, self.calibration = features, calibration
        self._task, self._params, self._tokenizer, self._templates = task, params, tokenizer, prompts
        self._call, self._sampling = call, task.config.head.sampling
        self._allowed = writable_tokens(task.config.decoder.vocabulary_size, tokenizer)

    @property
    def vocabulary_size(self) -> int:
        """k, the number of token ids of the decoder."""
        return self._task.config.decoder.vocabulary_size

    @property
    def caption_prompt(self) -> str:
        """The first prompt of training without a question; empty if there is none."""
        return next((template for template in self._templates if QUESTION not in template), "")

    def question_prompt(self, question: str) -> str:
        """Returns a question in the first prompt of training that has one, or as it is."""
        template = next((template for template in self._templates if QUESTION in template), QUESTION)
        return template.replace(QUESTION, question.strip())

    def max_new_tokens(self, prompt: str) -> int:
        """Returns the most tokens of a text after a prompt, its end included."""
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
        arguments.whole(samples, "samples", 0, arguments.MAX_SAMPLES)
        if self._sampling is None or not samples:
            return 0
        in_pairs(self._sampling.antithetic, samples)
        return samples

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
        """Returns the texts of each image, the best first, see `lit_het.texts.TextWriter`."""
        samples, key = self.check_samples(samples), _key(seed)
        numbers = range(len(features)) if numbers is None else numbers
        before = [self._tokens_of(prompt) for prompt in prompts]
        lengths = np.array([len(tokens) for tokens in before], np.int32)
        # Padded, so that prompts of similar lengths share a program.
        most = max(lengths)
        longest = max(most, min(-(-most // 8) * 8, self._tokenizer.length - config.num_tokens))
        tokens = np.zeros((len(features), longest), np.int32)
        for row, of_image in zip(tokens, before, strict=True):
            row[: len(of_image)] = of_image
        program = functools.partial(_generated, self._task, config, self._tokenizer.end_id, samples)
        rows = features, Prompt(tokens, lengths), np.asarray(numbers, np.uint32)
        texts = self._run(program, rows, self._allowed, key, self._fitted(samples))
        found = []
        for row in range(len(features)):
            # Beams beyond the number of texts that can be written are not texts.
            are_texts = texts.score[row] > WORST / 2
            ids = [one[: _length(one, self._tokenizer.end_id)] for one in texts.tokens[row][are_texts]]
            log_p = [of_text[: len(one)] for one, of_text in zip(ids, texts.log_p[row][are_texts], strict=True)]
            of_tokens = self._bands(features[row], before[row], ids, samples if bands else 0, key)
            found.append([self._written(*one) for one in zip(ids, log_p, of_tokens, strict=True)])
        return found

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
        """Returns given answers about an image, the most probable first, see `lit_het.texts.TextWriter`."""
        samples, key = self.check_samples(samples), _key(seed)
        before, most, rows = self._tokens_of(prompt), self.max_new_tokens(prompt), self._answers(answers)
        if too_long := [answer for answer, ids in zip(answers, rows, strict=True) if len(ids) > most]:
            raise UserError(
                f"answer {too_long[0][:100]!r} has more than the {most - 1} tokens that the prompt leaves; shorten it"
            )
        log_p = self._log_p(features, before, rows, samples, key)
        of_tokens = self._bands(features, before, rows, samples if bands else 0, key)
        found = [self._written(*one) for one in zip(rows, log_p, of_tokens, strict=True)]
        return sorted(found, key=lambda written: -written.log_p)

    def predict(
        self,
        features: Real[np.ndarray, "n f"],
        prompts: Sequence[str],
        texts: Sequence[str],
        *,
        samples: int = 0,
        seed: int = 0,
    ) -> TokenPredictions:
        """Predicts the tokens of one given text of each image, see `lit_het.texts.TextWriter`."""
        tokens, counted = self._tokenizer.prompted(list(prompts), list(texts))
        program = functools.partial(_predicted, self._task, self.check_samples(samples))
        found = self._run(program, (features, tokens), _key(seed), self._fitted(samples))
        return TokenPredictions(np.where(counted, found.log_p, 0.0), np.exp(found.best), found.is_top, counted)

    def check_answers(self, answers: Sequence[str]) -> int:
        """Returns the tokens of the longest of given answers, see `lit_het.texts.TextWriter`."""
        return max(map(len, self._answers(answers)))

    def _answers(self, answers: Sequence[str]) -> list[Int[np.ndarray, " a"]]:
        """Returns the tokens of given answers, with their ends."""
        if not answers or isinstance(answers, str):
            raise UserError("no answers; give a list of at least one")
        found: dict[tuple[int, ...], str] = {}
        for answer in answers:
            ids = (*self._tokenizer.pieces(answer), self._tokenizer.end_id)
            if len(ids) == 1:
                raise UserError(f"answer {answer[:100]!r} is empty; leave it out")
            if ids in found:
                same = "is repeated" if answer == found[ids] else f"has the tokens of {found[ids][:100]!r}"
                raise UserError(f"answer {answer[:100]!r} {same}; keep one")
            found[ids] = answer
        return [np.asarray(ids) for ids in found]

    def log_probabilities(
        self, features: Real[np.ndarray, "n f"], text: Int[np.ndarray, "n l"], samples: int = 0
    ) -> Float[np.ndarray, "n l k"]:
        """Returns the log-probabilities of the whole vocabulary at each token of one text of each image, as trained.

        Args:
            features: of the images.
            text: prompts and texts.
            samples: S, the noise samples that probabilities are averaged over; 0 for none.
        """
        program = functools.partial(_all, self._task, self.check_samples(samples))
        return self._run(program, (features, text), jax.random.key(0))

    def _fitted(self, samples: int) -> np.float32 | None:
        """Returns T of probabilities with S noise samples; None as trained."""
        return None if self.calibration is None else np.float32(self.calibration.fitted(samples).temperature)

    def _tokens_of(self, prompt: str) -> Int[np.ndarray, " p"]:
        return np.asarray(self._tokenizer.pieces(prompt), np.int32)

    def _run(self, program: functools.partial[Any], rows: Any, *shared: Any) -> Any:
        return self._call((program.func, *program.args[1:]), program, self._params, rows, *shared)

    def _log_p(
        self, features: Real[np.ndarray, " f"], before: Any, answers: Sequence[np.ndarray], samples: int, key: Any
    ) -> list[np.ndarray]:
        """Returns the log-probability of each token of each answer."""
        found = []
        # Not of the samples' probabilities, which may round to zero.
        for text, target, count in self._blocks(before, answers):
            program = functools.partial(_given, self._task, samples)
            log_p = self._run(program, (text, target), features[None], key, self._fitted(samples))
            found += [log_p[row][target[row]] for row in range(count)]
        return found

    def _bands(
        self, features: Real[np.ndarray, " f"], before: Any, answers: Sequence[np.ndarray], samples: int, key: Any
    ) -> list[tuple[tuple[float, float], ...] | None]:
        """Returns the band of each token of each answer over noise samples."""
        if not samples:
            return [None] * len(answers)
        found = []
        for text, target, count in self._blocks(before, answers):
            program = functools.partial(_sampled, self._task, samples)
            sampled = self._run(program, text, features[None], key, self._fitted(samples))
            ends = np.quantile(sampled, BAND, axis=2)
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


def _key(seed: int) -> Key[jax.Array, ""]:
    return jax.random.key(arguments.whole(seed, "seed", 0, arguments.MAX_SEED))


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
    fitted: Any,
) -> Texts:
    features, prompt, numbers = rows
    # Apart from those of the noise, whose numbers are those of positions.
    of_sampling = jax.random.fold_in(key, task.config.decoder.length)
    return generate(
        task,
        params,
        task.source(params, features),
        prompt,
        config,
        end_token=end_token,
        noise=(key, samples) if samples else None,
        keys=jax.vmap(lambda number: jax.random.fold_in(of_sampling, number))(numbers),
        allowed=allowed,
        fitted=fitted,
    )


def _given(
    task: WritingTask, samples: int, params: Params, rows: Any, features: Any, key: Any, fitted: Any
) -> jax.Array:
    noise = (key, samples) if samples else None
    text, target = rows
    return text_log_probabilities(task, params, task.source(params, features), text, target, noise, fitted)


def _sampled(
    task: WritingTask, samples: int, params: Params, text: Any, features: Any, key: Any, fitted: Any
) -> jax.Array:
    return token_probabilities(task, params, task.source(params, features), text, (key, samples), fitted)


def _predicted(task: WritingTask, samples: int, params: Params, rows: Any, key: Any, fitted: Any) -> Predicted:
    (features, text), noise = rows, (key, samples) if samples else None
    return token_predictions(task, params, task.source(params, features), text, noise, fitted)


def _all(task: WritingTask, samples: int, params: Params, rows: Any, key: Any) -> jax.Array:
    (features, text), noise = rows, (key, samples) if samples else None
    return token_log_probabilities(task, params, task.source(params, features), text, noise)
