"""Probabilities of the tokens of given texts: of captions, answers and translations."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het.losses import blocks
from lit_het.losses.classification import label_log_probabilities, mean_log_probabilities
from lit_het.objectives.tokens import in_blocks, shifted
from lit_het.tasks.writing import WritingTask
from lit_het.towers.decoder import Source
from lit_het.types import LogitSamples, Params


def next_tokens(
    task: WritingTask,
    params: Params,
    source: Source,
    text: Int[Array, "bt l"],
    noise: tuple[Key[Array, ""], int] | None = None,
) -> LogitSamples:
    """Returns samples of the logits of every token of texts, given the tokens before it.

    Args:
        task: of the model.
        params: its parameters.
        source: tokens of the images, or of the texts to translate.
        text: t texts of each source, adjacent.
        noise: random key and S; None for one sample without noise.

    Returns:
        Rows are the l tokens of each text.
    """
    model, (key, num_samples) = task.model(params), noise or (None, None)
    state = model.decoder.start(*source, num_texts=len(text) // len(source.tokens))
    features, _ = model.decoder(shifted(text), state)
    samples = in_blocks(
        model.head(features.reshape(-1, features.shape[-1]), key, num_samples), task.config.decoder.vocabulary_size
    )
    return at_positions(samples, key, jnp.tile(jnp.arange(text.shape[1]), len(text)))


def at_positions(samples: LogitSamples, key: Key[Array, ""] | None, position: Int[Array, " rows"]) -> LogitSamples:
    """Returns samples whose noise depends only on the position of the token in its text.

    So neither other images, nor the beam that a token belongs to, nor the length of a prompt's padding change it, and
    texts that are written and texts that are given have the same probabilities.
    """
    if key is None:
        return samples
    return dataclasses.replace(samples, keys=jax.vmap(lambda number: jax.random.fold_in(key, number))(position))


def text_log_probabilities(
    task: WritingTask,
    params: Params,
    source: Source,
    text: Int[Array, "bt l"],
    target: Bool[Array, "bt l"],
    noise: tuple[Key[Array, ""], int] | None = None,
    fitted: Float[Array, ""] | None = None,
) -> Float[Array, "bt l"]:
    """Returns the log-probability of each token of given texts, given the tokens before; 0 for those of the prompt.

    The sum ranks answers to a question; its exponential, of the mean over tokens, is the inverse perplexity.

    Arguments are those of `token_predictions`, and ``target``: which tokens are of the answer.
    """
    if fitted is not None:
        return jnp.where(target, token_predictions(task, params, source, text, noise, fitted).log_p, 0.0)
    samples = next_tokens(task, params, source, text, noise)
    return jnp.where(target, label_log_probabilities(samples, text.reshape(-1)).reshape(text.shape), 0.0)


class Predicted(NamedTuple):
    """Predictions of each token of texts.

    Attributes:
        log_p: log-probability of the token.
        best: that of the most probable token.
        is_top: whether these are the same.
    """

    log_p: Float[Array, "bt l"]
    best: Float[Array, "bt l"]
    is_top: Bool[Array, "bt l"]


def token_predictions(
    task: WritingTask,
    params: Params,
    source: Source,
    text: Int[Array, "bt l"],
    noise: tuple[Key[Array, ""], int] | None = None,
    fitted: Float[Array, ""] | None = None,
) -> Predicted:
    """Returns the predictions of all tokens of given texts from the tokens before them.

    Args:
        task: of the model.
        params: its parameters.
        source: tokens of the images, or of the texts to translate.
        text: prompts and texts, t for each image, adjacent.
        noise: random key and S, as in `generate`; None for no noise.
        fitted: T, as in `generate`.
    """

    def predicted(some: LogitSamples, token: Int[Array, " n"]) -> Predicted:
        log_p = mean_log_p(some, fitted)
        of_token = jnp.take_along_axis(log_p, token[:, None], axis=1)[:, 0]
        return Predicted(of_token, log_p.max(axis=1), jnp.argmax(log_p, axis=1) == token)

    return _by_token(next_tokens(task, params, source, text, noise), text, predicted)


def token_log_probabilities(
    task: WritingTask,
    params: Params,
    source: Source,
    text: Int[Array, "bt l"],
    noise: tuple[Key[Array, ""], int] | None = None,
) -> Float[Array, "bt l k"]:
    """Returns the log-probabilities of the whole vocabulary at each token of given texts, from the tokens before it.

    Arguments as of `token_predictions`; they are as trained.
    """
    samples = next_tokens(task, params, source, text, noise)
    return _by_token(samples, text, lambda some, _: mean_log_p(some, None))


def token_probabilities(
    task: WritingTask,
    params: Params,
    source: Source,
    text: Int[Array, "bt l"],
    noise: tuple[Key[Array, ""], int] | None = None,
    fitted: Float[Array, ""] | None = None,
) -> Float[Array, "bt l s"]:
    """Returns the probability of each token of given texts in each noise sample, given the tokens before.

    Their mean is the probability with which `generate` writes the token; with T, which is fitted to the mean, roughly.
    Arguments are those of `token_predictions`.
    """

    def probabilities(some: LogitSamples, token: Int[Array, " n"]) -> Float[Array, "n s"]:
        logits = some.logits(some.prepare(some.features), some.keys, jnp.arange(some.num_samples))
        p = jax.nn.softmax(logits if fitted is None else logits / fitted)
        return jnp.take_along_axis(p, token[:, None, None], axis=2)[:, :, 0]

    return _by_token(next_tokens(task, params, source, text, noise), text, probabilities)


def _by_token(samples: LogitSamples, text: Int[Array, "bt l"], of_block: Callable[[LogitSamples, Array], Any]) -> Any:
    """Returns a function of the logits of each token and of the token, for all tokens of texts."""

    # In blocks of tokens: the logits of the whole vocabulary, or of all samples, for all of them may not fit.
    def block(_: None, rows: Any) -> tuple[None, Any]:
        features, keys, token = rows
        return None, of_block(dataclasses.replace(samples, features=features, keys=keys), token)

    rows = (samples.features, samples.keys, text.reshape(-1))
    _, found = blocks.scan_examples(block, None, rows, samples.examples_per_block)
    return jax.tree.map(lambda x: x.reshape(*text.shape, *x.shape[1:]), found)


def mean_log_p(samples: LogitSamples, fitted: Float[Array, ""] | None) -> Float[Array, "rows k"]:
    """Returns the log of the mean probability over samples, which T scales: first the mean, as T was fitted to it."""
    log_p = mean_log_probabilities(samples, jax.nn.log_softmax)
    return log_p if fitted is None else jax.nn.log_softmax(log_p / fitted)
