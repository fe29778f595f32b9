"""Writes text with a decoder, token by token: greedily, by sampling or by beam search."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het.errors import UserError
from lit_het.objectives.tokens import shifted
from lit_het.tasks.base import AnyTask
from lit_het.tasks.given_texts import at_positions, mean_log_p
from lit_het.texts import GenerationConfig
from lit_het.towers.decoder import DecoderState, Source
from lit_het.trees import tree_of_arrays
from lit_het.types import Params

WORST = -1e30
"""Log-probability of what must not be chosen; finite, as differences of infinities are not numbers."""


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts of each image, the best first.

    Attributes:
        tokens: ids; the end token and then padding (0) fill the rest.
        log_p: log-probability of each token given those before; 0 after the end.
        score: total log-probability of the text; of beam search divided by the length penalty.
    """

    tokens: Int[Array, "b t n"]
    log_p: Float[Array, "b t n"]
    score: Float[Array, "b t"]


class Prompt(NamedTuple):
    """What texts begin with; the decoder does not write it.

    Attributes:
        tokens: ids, padded at the end.
        length: of the ids that count.
    """

    tokens: Int[Array | np.ndarray, "b p"]
    length: Int[Array | np.ndarray, " b"]


def generate(
    task: AnyTask,
    params: Params,
    source: Source,
    prompt: Prompt,
    config: GenerationConfig,
    *,
    end_token: int,
    noise: tuple[Key[Array, ""], int] | None = None,
    keys: Key[Array, " b"] | None = None,
    allowed: Bool[Array, " k"] | None = None,
    fitted: Float[Array, ""] | None = None,
) -> Texts:
    """Returns texts of images.

    Args:
        task: of a model with a decoder and a head.
        params: its parameters.
        source: tokens of the images, or of the texts to translate.
        prompt: of each image.
        config: how to choose tokens.
        end_token: ends a text.
        noise: random key and S, to average the probabilities of each token over noise samples; None for no noise.
        keys: random key of each image for sampling; each of its texts draws its own numbers.
        allowed: tokens that may be written; None for all.
        fitted: T of ``lit-het calibrate``, which scales all probabilities; None as trained.
    """
    length = prompt.tokens.shape[1] + config.num_tokens
    if length > task.config.decoder.length:
        raise UserError(
            f"a prompt of {prompt.tokens.shape[1]} tokens and {config.num_tokens} tokens of text need more than the "
            f"decoder's {task.config.decoder.length} positions; shorten the prompt, or write fewer tokens"
        )
    if config.temperature and keys is None:
        raise UserError("sampling needs random keys; give them, or set temperature to 0")
    writer = _Writer(task.model(params), config, end_token, noise, allowed, fitted)
    started = writer.start(source, prompt)
    if config.temperature == 0 and config.num_texts > 1:
        return _beam_search(writer, *started)
    return _one_by_one(writer, *started, keys)


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Predicts the next token of every text; the model has a decoder and a head."""

    model: Any
    config: GenerationConfig
    end_token: int
    noise: tuple[Key[Array, ""], int] | None
    allowed: Bool[Array, " k"] | None
    fitted: Float[Array, ""] | None

    def start(self, source: Source, prompt: Prompt) -> tuple[DecoderState, Float[Array, "bt k"], Int[Array, " bt"]]:
        """Returns the state after the prompts, log-probabilities of the first tokens, and their positions."""
        t, decoder = self.config.num_texts, self.model.decoder
        tokens, positions = (jnp.repeat(x, t, axis=0) for x in prompt)
        length = tokens.shape[1] + self.config.num_tokens
        state = decoder.start(*source, num_texts=t, length=length)
        # One more column, so that the input after a whole prompt is its last token.
        features, state = decoder(shifted(jnp.pad(tokens, ((0, 0), (0, 1)))), state)
        last = jnp.take_along_axis(features, positions[:, None, None], axis=1)[:, 0]
        return state, self._log_p(last, positions), positions

    def next(
        self, state: DecoderState, token: Int[Array, " rows"], position: Int[Array, " rows"]
    ) -> tuple[DecoderState, Float[Array, "rows k"]]:
        """Returns the state after a token of each text, and log-probabilities of the one at ``position``."""
        features, state = self.model.decoder(token[:, None], state, position[:, None])
        return state, self._log_p(features[:, 0], position)

    def _log_p(self, features: Float[Array, "rows d"], position: Int[Array, " rows"]) -> Float[Array, "rows k"]:
        if self.noise is None:
            samples = self.model.head(features, None)
        else:
            key, num_samples = self.noise
            samples = at_positions(self.model.head(features, key, num_samples), key, position)
        log_p = mean_log_p(samples, self.fitted)
        return log_p if self.allowed is None else jnp.where(self.allowed[None], log_p, WORST)


def _one_by_one(
    writer: _Writer,
    state: DecoderState,
    log_p: Float[Array, "rows k"],
    position: Int[Array, " rows"],
    of_images: Key[Array, " b"] | None,
) -> Texts:
    """Writes texts that do not depend on one another, greedily or by sampling."""
    (rows, n), t = (len(log_p), writer.config.num_tokens), writer.config.num_texts
    keys = None
    if of_images is not None and writer.config.temperature:
        keys = jax.vmap(lambda key: jax.random.split(key, t))(of_images).reshape(-1)

    def is_unfinished(carry: Any) -> Bool[Array, ""]:
        step, *_, done, _, _ = carry
        return (step < n) & ~jnp.all(done)

    def write(carry: Any) -> Any:
        step, state, log_p, done, tokens, found = carry
        token = jnp.where(done, 0, _chosen(log_p, writer.config, keys, step))
        of_token = jnp.take_along_axis(log_p, token[:, None], axis=1)[:, 0]
        tokens = tokens.at[:, step].set(token)
        found = found.at[:, step].set(jnp.where(done, 0.0, of_token))
        done = done | (token == writer.end_token)
        state, log_p = writer.next(state, token, position + step + 1)
        return step + 1, state, log_p, done, tokens, found

    empty = jnp.zeros((rows, n), jnp.int32), jnp.zeros((rows, n))
    carry = jnp.zeros((), jnp.int32), state, log_p, jnp.zeros(rows, bool), *empty
    *_, tokens, found = jax.lax.while_loop(is_unfinished, write, carry)
    by_image = tokens.reshape(-1, t, n), found.reshape(-1, t, n)
    texts = Texts(*by_image, by_image[1].sum(axis=2))
    return jax.tree.map(lambda x: _rows_of(x, jnp.argsort(-texts.score, axis=1)), texts)


def _chosen(
    log_p: Float[Array, "rows k"], config: GenerationConfig, keys: Key[Array, " rows"] | None, step: Int[Array, ""]
) -> Int[Array, " rows"]:
    """Returns the next token of each text: the most probable, or one that is drawn."""
    if keys is None:
        return jnp.argmax(log_p, axis=1).astype(jnp.int32)
    log_p = jax.nn.log_softmax(log_p / config.temperature)
    if config.top_k is not None:
        kept, _ = jax.lax.top_k(log_p, min(config.top_k, log_p.shape[1]))
        log_p = jnp.where(log_p < kept[:, -1:], WORST, log_p)
    if config.top_p < 1:
        order = jnp.argsort(-log_p, axis=1)
        p = jnp.take_along_axis(jax.nn.softmax(log_p), order, axis=1)
        # A token is kept if those before it have less than the total: at least one is.
        is_kept = jnp.cumsum(p, axis=1) - p < config.top_p
        log_p = jnp.where(jnp.take_along_axis(is_kept, jnp.argsort(order, axis=1), axis=1), log_p, WORST)
    draw = jax.vmap(lambda key, row: jax.random.categorical(jax.random.fold_in(key, step), row))
    return draw(keys, log_p).astype(jnp.int32)


def _beam_search(
    writer: _Writer, state: DecoderState, log_p: Float[Array, "rows k"], position: Int[Array, " rows"]
) -> Texts:
    """Returns the best finished texts; those that are cut at the most tokens compete with them."""
    n, t, k = writer.config.num_tokens, writer.config.num_texts, log_p.shape[1]
    b = len(log_p) // t
    empty = jnp.zeros((b, t, n), jnp.int32), jnp.zeros((b, t, n))
    # The score of beams that go on is their log-probability. At first all of an image are equal: one is enough.
    alive = Texts(*empty, jnp.full((b, t), WORST).at[:, 0].set(0.0))
    best = Texts(*empty, jnp.full((b, t), WORST))

    def penalized(total: Float[Array, "b _"], length: int | Int[Array, ""]) -> Float[Array, "b _"]:
        return total / ((5 + length) / 6) ** writer.config.length_penalty

    def is_unfinished(carry: Any) -> Bool[Array, ""]:
        step, _, _, alive, best = carry
        # A total only falls, and no penalty divides it by more than that of the most tokens.
        may_improve = penalized(alive.score.max(axis=1, keepdims=True), n) > best.score.min(axis=1, keepdims=True)
        return (step < n) & jnp.any(may_improve)

    def search(carry: Any) -> Any:
        step, state, log_p, alive, best = carry
        totals = (alive.score[:, :, None] + log_p.reshape(b, t, k)).reshape(b, t * k)
        # Of 2t candidates at most t end here: t remain to be continued.
        total, index = jax.lax.top_k(totals, min(2 * t, t * k))
        parent, token = index // k, (index % k).astype(jnp.int32)
        of_token = jnp.take_along_axis(log_p.reshape(b, t * k), index, axis=1)
        candidates = Texts(
            _rows_of(alive.tokens, parent).at[:, :, step].set(token),
            _rows_of(alive.log_p, parent).at[:, :, step].set(of_token),
            total,
        )
        is_last = (token == writer.end_token) | (step + 1 == n)
        score = jnp.where(is_last, penalized(total, step + 1), WORST)
        best = _best(best, dataclasses.replace(candidates, score=score), t)
        _, kept = jax.lax.top_k(jnp.where(is_last, 2 * WORST, total), t)
        alive = jax.tree.map(lambda x: _rows_of(x, kept), candidates)
        alive = dataclasses.replace(alive, score=jnp.where(_rows_of(is_last, kept), WORST, alive.score))
        # The keys and values of a beam are those of its parent.
        rows = (jnp.arange(b)[:, None] * t + _rows_of(parent, kept)).reshape(-1)
        state = dataclasses.replace(state, own=jax.tree.map(lambda x: x[:, rows], state.own))
        last = alive.tokens[:, :, step].reshape(-1)
        state, log_p = writer.next(state, last, position + step + 1)
        return step + 1, state, log_p, alive, best

    *_, best = jax.lax.while_loop(is_unfinished, search, (jnp.zeros((), jnp.int32), state, log_p, alive, best))
    return best


def _best(one: Texts, other: Texts, count: int) -> Texts:
    both = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), one, other)
    _, kept = jax.lax.top_k(both.score, count)
    return jax.tree.map(lambda x: _rows_of(x, kept), both)


def _rows_of(x: Any, index: Int[Array, "b t"]) -> Any:
    """Returns the numbered rows of each image."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), axis=1)
