"""BERT (Devlin et al. 2018) as a text tower: words, positions and segments, norms after layers, first token."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lit_het import sharding
from lit_het.errors import FieldError, UserError, require_at_least
from lit_het.towers.base import TowerOptions
from lit_het.towers.layers import layer_norm, linear
from lit_het.towers.transformer import Encoder, EncoderConfig
from lit_het.types import TowerOutput


@dataclasses.dataclass(frozen=True)
class BertConfig(TowerOptions):
    """A BERT text tower.

    Attributes:
        vocabulary_size: number of token ids.
        length: tokens per text, padding included.
        projection_size: size of the dense layer at the very end; None for none (BERT as published).
        encoder: the stack of blocks, with norms after layers.
        weights: pretrained weights, a path or address, see `lit_het.weights.formats`; None for random weights.
        num_segments: number of segment embeddings; all texts here are segment 0.
        padding_id: token id of padding, which is masked in attention.
        pooler: whether the first token goes through BERT's dense layer with tanh before the projection (not in LiT).
        layer_input: whether the embedding is followed by the input of the projection, for a posterior of it.

    Raises:
        UserError: a size below 1, norms before layers, or ``layer_input`` without a projection.
    """

    vocabulary_size: int = 30_522
    length: int = 16
    projection_size: int | None = 768
    encoder: EncoderConfig = EncoderConfig(norm_placement="after", activation="gelu", norm_epsilon=1e-12)
    weights: str | None = None
    num_segments: int = 2
    padding_id: int = 0
    pooler: bool = False
    layer_input: bool = False

    first_parameters = ("tokens", "positions", "segments", "input_norm")

    def __post_init__(self) -> None:
        require_at_least(1, self, "vocabulary_size", "length", "num_segments")
        if self.projection_size is not None:
            require_at_least(1, self, "projection_size")
        if self.encoder.norm_placement != "after" or self.encoder.num_members > 1:
            raise UserError("a BERT tower needs encoder.norm_placement = 'after', and no ensemble of experts")
        if self.layer_input and self.last_layer is None:
            raise FieldError(self, "layer_input", "True needs a projection_size")

    @property
    def embedding_size(self) -> int:
        """Size of the embedding."""
        return self.projection_size or self.encoder.width

    @property
    def last_layer(self) -> str | None:
        """Path of the parameters of the projection; None without one."""
        return None if self.projection_size is None else "projection"

    def file_options(self) -> dict[str, Any]:
        """Returns its length too."""
        return {**super().file_options(), "text_length": self.length}

    def build(self, rngs: nnx.Rngs) -> "Bert":
        """Returns the tower with fresh parameters."""
        return Bert(self, rngs)


class Bert(nnx.Module):
    """The tower of a `BertConfig`."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs):
        self.config = config
        encoder = config.encoder
        init = nnx.initializers.truncated_normal(0.02)

        def embedding(number: int) -> nnx.Embed:
            return nnx.Embed(number, encoder.width, embedding_init=init, rngs=rngs)

        self.tokens = embedding(config.vocabulary_size)
        self.positions = nnx.Param(init(rngs.params(), (config.length, encoder.width), jnp.float32))
        self.segments = embedding(config.num_segments)
        self.input_norm = layer_norm(encoder.width, encoder.norm_epsilon, rngs)
        self.encoder = Encoder(encoder, rngs)
        if config.pooler:
            self.pre_logits = linear(encoder.width, encoder.width, encoder.compute_type, rngs)
        if config.projection_size is not None:
            self.projection = linear(encoder.width, config.projection_size, encoder.compute_type, rngs)

    def __call__(
        self, text: Int[Array, "b l"], key: Key[Array, ""] | None = None, segment: Int[Array, "b l"] | None = None
    ) -> TowerOutput:
        """Returns embeddings ``[b d]`` and the encoder's tokens.

        Args:
            text: token ids.
            key: random key of training, for experts.
            segment: segment of each token; None for 0.
        """
        segments = self.segments(jnp.zeros_like(text) if segment is None else segment)
        embedded = self.tokens(text) + self.positions[...][None] + segments
        # Unlike LiT's own text tower, BERT was trained with masked padding.
        encoded = self.encoder(self.input_norm(embedded), key, text != self.config.padding_id)
        pooled = embedding = self._pool(encoded.tokens)
        if self.config.projection_size is not None:
            embedding = sharding.as_batch(self.projection(pooled)).astype(jnp.float32)
        if self.config.layer_input:
            embedding = jnp.concatenate([embedding, pooled.astype(jnp.float32)], axis=1)
        return TowerOutput(embedding, encoded.tokens, encoded.auxiliary_losses, encoded.metrics)

    def _pool(self, tokens: Float[Array, "b l d"]) -> Float[Array, "b d"]:
        first = tokens[:, 0]
        return jnp.tanh(self.pre_logits(first).astype(jnp.float32)) if self.config.pooler else first
