"""The text tower of LiT: a bidirectional Transformer over token ids (no causal mask, padding is ordinary input)."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from lit_het.towers.pooling import AttentionPooling
from lit_het.towers.transformer import Encoder, EncoderConfig, linear
from lit_het.types import TowerOutput


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """A text Transformer.

    Attributes:
        vocabulary_size: number of token ids.
        length: tokens per text, padding included.
        embedding_size: size of the projected embedding.
        encoder: the stack of blocks.
        pooling: the last position whatever it holds (the tokenizer's sticky end token or padding), the mean
            of all positions, or attention pooling.
    """

    vocabulary_size: int = 32_000
    length: int = 16
    embedding_size: int = 768
    encoder: EncoderConfig = EncoderConfig()
    pooling: Literal["last", "mean", "attention"] = "last"

    def build(self, rngs: nnx.Rngs) -> "TextTransformer":
        """Returns the tower with fresh parameters."""
        return TextTransformer(self, rngs)


class TextTransformer(nnx.Module):
    """The tower of a `TextConfig`."""

    def __init__(self, config: TextConfig, rngs: nnx.Rngs):
        self.config = config
        width = config.encoder.width
        scale = nnx.initializers.normal(1 / np.sqrt(width))
        self.tokens = nnx.Embed(
            config.vocabulary_size,
            width,
            dtype=jnp.dtype(config.encoder.compute_type),
            embedding_init=scale,
            rngs=rngs,
        )
        self.positions = nnx.Param(scale(rngs.params(), (config.length, width)))
        self.encoder = Encoder(config.encoder, rngs)
        if config.pooling == "attention":
            self.pooling = AttentionPooling(config.encoder, rngs)
        self.projection = linear(width, config.embedding_size, config.encoder.compute_type, rngs)

    def __call__(self, text: Int[Array, "b l"]) -> TowerOutput:
        """Returns embeddings ``[b d]`` and the encoder's tokens."""
        tokens = self.encoder(self.tokens(text) + self.positions[...][None])
        embedding = self.projection(self._pool(tokens)).astype(jnp.float32)
        return TowerOutput(embedding, tokens, auxiliary_losses={})

    def _pool(self, tokens: Float[Array, "b l d"]) -> Float[Array, "b d"]:
        match self.config.pooling:
            case "last":
                return tokens[:, -1]
            case "mean":
                return tokens.mean(axis=1)
            case "attention":
                return self.pooling(tokens)
