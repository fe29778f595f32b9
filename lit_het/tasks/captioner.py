"""A text decoder on the tokens of a tower, and its loss: of a model of its own, or beside a contrastive loss."""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from lit_het import blocks, sharding
from lit_het.errors import FieldError, UserError
from lit_het.heads.base import ClassificationHead
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.heads.het_xl import HetXLClassifier, HetXLConfig
from lit_het.heads.logits import TiedLogits
from lit_het.losses.base import masked_mean
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.random import Keys
from lit_het.tasks.base import layers_above_towers
from lit_het.towers.decoder import Decoder, DecoderConfig, Source
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch, LogitSamples, Metrics, Params

START_TOKEN = 0
"""The input from which the first token of a text is predicted: padding, as in T5 and big_vision."""

# 256 MiB in float32.
_LOGITS_PER_BLOCK = 2**26
_LEAST_TOKENS_PER_BLOCK = 128

TokenHeadConfig = DeterministicConfig | HetXLConfig
"""Heads that map features of a decoder to logits of the next token."""


@dataclasses.dataclass(frozen=True)
class CaptionerConfig:
    """A text decoder that learns to write captions beside a contrastive loss (CoCa; SigLIP 2, Sec. 2.2).

    Attributes:
        decoder: the text decoder.
        head: maps the decoder's features to a distribution of logits of the next token.
        loss: of the next token.
        weight: of that loss: 1 in SigLIP 2, 2 in CoCa.

    Raises:
        UserError: a weight that is not positive, or tied logits that do not fit the head.
    """

    decoder: DecoderConfig = DecoderConfig()
    head: TokenHeadConfig = DeterministicConfig()
    loss: SoftmaxCrossEntropy = SoftmaxCrossEntropy()
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise FieldError(self, "weight", f"{self.weight} must be above 0; task.captioner None leaves the loss out")
        check_tied(self.decoder, self.head, "task.captioner")

    def check(self, tower: ViTConfig | ResNetConfig, microbatches: int) -> None:
        """Checks that an image tower has tokens to attend to, apart from its pooled embedding.

        Raises:
            UserError: it has none, or those of several parts of a batch.
        """
        pools_tokens = isinstance(tower, ViTConfig) and tower.pooling != "none"
        if not pools_tokens or tower.num_members > 1 or tower.uncertainty_token:
            raise UserError(
                "task.captioner attends to the tokens of an image: it needs a ViT with a pooling, without ensembles of "
                "experts and uncertainty_token"
            )
        if microbatches > 1:
            raise UserError("task.captioner needs the tokens of a whole batch; set task.microbatches to 1")

    def layers_above(self, params: Params) -> Params:
        """Returns the number of layers above each parameter, see `transformer.layers_above`."""
        return layers_above_towers({"decoder": self.decoder}, params)


class Captioner(nnx.Module):
    """The decoder and the head of a `CaptionerConfig`."""

    head: ClassificationHead

    def __init__(self, config: CaptionerConfig, source_width: int, rngs: nnx.Rngs):
        self.decoder = config.decoder.build(source_width, rngs)
        self.head = build_head(config.decoder, config.head, self.decoder, rngs)


def build_head(config: DecoderConfig, head: TokenHeadConfig, decoder: Decoder, rngs: nnx.Rngs) -> ClassificationHead:
    """Returns the head of a decoder with fresh parameters, whose kernel may be the embedding of tokens."""
    built = head.build(config.encoder.width, config.vocabulary_size, rngs)
    if config.tied_output:
        built.logits = TiedLogits(decoder.tokens.embedding, built.logits.bias)
    return built


def check_tied(decoder: DecoderConfig, head: TokenHeadConfig, field: str) -> None:
    """Checks that tied logits fit the head of a field.

    Raises:
        UserError: the head starts with a kernel of zeros.
    """
    if decoder.tied_output and head.zero_kernel:
        raise UserError(f"{field}.decoder.tied_output has no kernel to be zero; set {field}.head.zero_kernel to False")


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
    if isinstance(head, HetXLClassifier):
        metrics["token_noise_norm"] = masked_mean(head.noise_norm(samples.features), counted.reshape(-1))
    return result.loss, metrics


def in_blocks(samples: LogitSamples, vocabulary_size: int) -> LogitSamples:
    """Returns samples whose logits without noise are computed in blocks of tokens; those with noise have blocks."""
    shards, tokens = sharding.num_automatic_shards(), len(samples.features)
    if samples.keys is not None or tokens % shards:
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


def shifted(text: Int[Array, "b l"]) -> Int[Array, "b l"]:
    """Returns the inputs from which each token of a text is predicted: the tokens before it."""
    return jnp.pad(text[:, :-1], ((0, 0), (1, 0)), constant_values=START_TOKEN)
