"""The loss of the next token, of models that write text, also beside another loss."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lit_het import sharding
from lit_het.heads.base import ClassificationHead
from lit_het.heads.classification_config import TokenHeadConfig
from lit_het.heads.logits import TiedLogits
from lit_het.heads.noise_config import logits_at_once
from lit_het.losses import blocks
from lit_het.losses.base import masked_mean
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.random import Keys
from lit_het.towers.decoder import Decoder, Source
from lit_het.towers.decoder_config import START_TOKEN, DecoderConfig
from lit_het.types import Batch, LogitSamples, Metrics

# 256 MiB in float32.
_LOGITS_PER_BLOCK = 2**26
_LEAST_TOKENS_PER_BLOCK = 128


def build_head(config: DecoderConfig, head: TokenHeadConfig, decoder: Decoder, rngs: nnx.Rngs) -> ClassificationHead:
    """Returns the head of a decoder with fresh parameters, whose kernel may be the embedding of tokens."""
    built = head.build(config.encoder.width, config.vocabulary_size, rngs)
    if config.tied_output:
        built.logits = TiedLogits(decoder.tokens.embedding, built.logits.bias)
    return built


def token_loss(
    decoder: Decoder,
    head: ClassificationHead,
    loss: SoftmaxCrossEntropy,
    source: Source,
    batch: Batch,
    keys: Keys,
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the mean loss of the tokens that are to be predicted, and metrics.

    Args:
        decoder: the decoder.
        head: its head.
        loss: of a token.
        source: tokens of the images, or of the texts to translate.
        batch: of texts; which of their tokens are to be predicted is known.
        keys: random keys of dropout and noise.
    """
    assert batch.text is not None
    assert batch.text_target is not None
    # As a row that cannot be read may hold anything, see `contrastive._finite`.
    tokens = jnp.where(batch.valid[:, None, None], source.tokens, 1.0)
    features, _ = decoder(shifted(batch.text), decoder.start(tokens, source.present), key=keys("dropout"))
    counted = batch.text_target & batch.valid[:, None]
    weight = None if batch.weight is None else jnp.broadcast_to(batch.weight[:, None], counted.shape).reshape(-1)
    samples = in_blocks(head(features.reshape(-1, features.shape[-1]), keys("noise")), decoder.config.vocabulary_size)
    result = loss(samples, batch.text.reshape(-1), counted.reshape(-1), weight)
    metrics = {"top1": result.top1, "temperature": head.temperature(), "tokens": jnp.sum(counted)}
    if head.covariance is not None:
        metrics["token_noise_norm"] = masked_mean(head.noise_norm(samples.features), counted.reshape(-1))
    return result.loss, metrics


def in_blocks(samples: LogitSamples, vocabulary_size: int) -> LogitSamples:
    """Returns samples whose logits without noise are computed in blocks of tokens; those with noise have blocks."""
    shards, tokens = sharding.num_automatic_shards(), len(samples.features)
    if samples.keys is not None or samples.num_factors or tokens % shards:
        return samples
    return dataclasses.replace(samples, examples_per_block=tokens_per_block(tokens // shards, vocabulary_size))


def tokens_per_block(num_tokens: int, vocabulary_size: int) -> int:
    """Returns the number of tokens on a device whose logits exist at the same time.

    Those of a whole batch would be the largest array of all: 4 GiB for 64 texts of 64 tokens and a vocabulary of
    256,000.
    """
    most = max(_LOGITS_PER_BLOCK // vocabulary_size, _LEAST_TOKENS_PER_BLOCK)
    size = blocks.largest_divisor(num_tokens, most)
    # Small blocks would be slow: a batch without a divisor near the limit is one block.
    return num_tokens if size < _LEAST_TOKENS_PER_BLOCK else size


def token_logits_at_once(decoder: DecoderConfig, head: TokenHeadConfig, rows: int) -> int:
    """Returns how many numbers a block of logits holds on a device with so many texts."""
    tokens, size = rows * decoder.length, decoder.vocabulary_size
    return logits_at_once(head.sampling, tokens if head.sampling else tokens_per_block(tokens, size), size)


def shifted(text: Int[Array, "b l"]) -> Int[Array, "b l"]:
    """Returns the inputs from which each token of a text is predicted: the tokens before it."""
    return jnp.pad(text[:, :-1], ((0, 0), (1, 0)), constant_values=START_TOKEN)
