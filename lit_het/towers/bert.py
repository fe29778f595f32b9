"""BERT (Devlin et al. 2018) as a text tower: words, positions and segments, norms after layers, first token or mean.

RoBERTa (Liu et al. 2019) and XLM-R (Conneau et al. 2020) have the same layers. Their code numbers positions from
``padding_id + 1`` and gives padding the position ``padding_id``; here positions start at 0 and padding is masked.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het import sharding
from lit_het.towers.layers import linear
from lit_het.towers.pooling import mean_of_present
from lit_het.towers.text_config import BertConfig
from lit_het.towers.transformer import Encoder, EncoderOutput
from lit_het.types import TowerOutput


class MaskedText(nnx.Module):
    """A text tower whose tokens do not attend to padding: what is behind its encoder.

    Attributes:
        config: its configuration.
        projection: the dense layer at the very end, of a configuration with ``projection_size``.
    """

    config: Any
    projection: nnx.Linear

    def _output(self, encoded: EncoderOutput, pooled: Float[Array, "b d"]) -> TowerOutput:
        embedding = pooled
        if self.config.projection_size is not None:
            embedding = sharding.as_batch(self.projection(pooled)).astype(jnp.float32)
        if self.config.layer_input:
            embedding = jnp.concatenate([embedding, pooled.astype(jnp.float32)], axis=1)
        return TowerOutput(embedding, encoded.tokens, encoded.auxiliary_losses, encoded.metrics)

    def _pool(self, tokens: Float[Array, "b l d"], present: Bool[Array, "b l"]) -> Float[Array, "b d"]:
        return mean_of_present(tokens, present) if self.config.pooling == "mean" else tokens[:, 0]


class Bert(MaskedText):
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
        self.input_norm = encoder.build_norm(rngs)
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
        present = text != self.config.padding_id
        encoded = self.encoder(self.input_norm(embedded), key, present)
        return self._output(encoded, self._pool(encoded.tokens, present))

    def _pool(self, tokens: Float[Array, "b l d"], present: Bool[Array, "b l"]) -> Float[Array, "b d"]:
        pooled = super()._pool(tokens, present)
        return jnp.tanh(self.pre_logits(pooled).astype(jnp.float32)) if self.config.pooler else pooled
