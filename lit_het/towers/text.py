"""The text tower of LiT: a bidirectional Transformer over token ids (no causal mask, padding is ordinary input)."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lit_het import sharding
from lit_het.errors import UserError, require_at_least, require_choice
from lit_het.towers.layers import linear
from lit_het.towers.pooling import AttentionPooling
from lit_het.towers.positions import sinusoidal_positions
from lit_het.towers.transformer import Encoder, EncoderConfig, layers_above
from lit_het.types import Params, TowerOutput

# Parameters of the tower before its encoder.
_INPUTS = ("tokens", "positions")


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """A text Transformer.

    Attributes:
        vocabulary_size: number of token ids.
        length: tokens per text, padding included.
        embedding_size: size of the projected embedding.
        encoder: the stack of blocks.
        weights: pretrained weights, a path or address, see `lit_het.checkpoints.weights`; None for random weights.
        pooling: the last position (the tokenizer's end token or padding), the first one, the mean or the maximum over
            all positions, or attention pooling.
        positions: learned, or fixed sines and cosines (the original Transformer, whose encoder has the activation
            "relu" and norms after layers).

    Raises:
        UserError: a size below 1, an unknown pooling or kind of positions, or an ensemble of experts.
    """

    vocabulary_size: int = 32_000
    length: int = 16
    embedding_size: int = 768
    encoder: EncoderConfig = EncoderConfig()
    weights: str | None = None
    pooling: Literal["last", "first", "mean", "max", "attention"] = "last"
    positions: Literal["learned", "sinusoidal"] = "learned"

    def __post_init__(self) -> None:
        require_at_least(1, self, "vocabulary_size", "length", "embedding_size")
        require_choice(self, "pooling", "positions")
        if self.encoder.num_members > 1:
            raise UserError(
                f"a text tower has one embedding per text: num_members = {self.encoder.num_members} must be 1"
            )

    def build(self, rngs: nnx.Rngs) -> "TextTransformer":
        """Returns the tower with fresh parameters."""
        return TextTransformer(self, rngs)

    def layers_above(self, params: Params) -> Params:
        """Returns the number of layers above each parameter, see `transformer.layers_above`."""
        return layers_above(self.encoder, _INPUTS, params)


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
        if config.positions == "learned":
            self.positions = nnx.Param(scale(rngs.params(), (config.length, width)))
        self.encoder = Encoder(config.encoder, rngs)
        if config.pooling == "attention":
            self.pooling = AttentionPooling(config.encoder, rngs)
        self.projection = linear(width, config.embedding_size, config.encoder.compute_type, rngs)

    def __call__(self, text: Int[Array, "b l"], key: Key[Array, ""] | None = None) -> TowerOutput:
        """Returns embeddings ``[b d]`` and the encoder's tokens; the key is for experts, see `ViT`."""
        # No mask for padding, as in LiT's code: the tower learns to ignore it (docs/paper_map.md, 12).
        encoded = self.encoder(self.tokens(text) + self._positions()[None], key)
        embedding = sharding.as_batch(self.projection(self._pool(encoded.tokens))).astype(jnp.float32)
        return TowerOutput(embedding, encoded.tokens, encoded.auxiliary_losses, encoded.metrics)

    def _positions(self) -> Float[Array, "l d"]:
        if self.config.positions == "learned":
            return self.positions[...]
        return jnp.asarray(sinusoidal_positions(self.config.length, self.config.encoder.width))

    def _pool(self, tokens: Float[Array, "b l d"]) -> Float[Array, "b d"]:
        match self.config.pooling:
            case "last":
                # The end token or padding, whichever is last (docs/paper_map.md, 12).
                return tokens[:, -1]
            case "first":
                return tokens[:, 0]
            case "mean":
                return tokens.mean(axis=1)
            case "max":
                return tokens.max(axis=1)
            case "attention":
                return self.pooling(tokens)
