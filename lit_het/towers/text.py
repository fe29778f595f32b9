"""The text tower of LiT and SigLIP, a Transformer over token ids without a mask, and CLIP's, with a causal mask.

With masked padding and dropout it is the encoder of the original Transformer (Vaswani et al. 2017, Sec. 3.1).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het import sharding
from lit_het.towers.layers import Dropout, DropoutRates, linear, log_variances
from lit_het.towers.pooling import AttentionPooling
from lit_het.towers.positions import sinusoidal_positions
from lit_het.towers.text_config import TextConfig
from lit_het.towers.transformer import Encoder
from lit_het.types import TowerOutput


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
            self.positions = nnx.Param(scale(rngs.params(), (config.length, width), jnp.float32))
        if config.pooling == "class_token":
            self.class_token = nnx.Param(scale(rngs.params(), (width,), jnp.float32))
        if config.uncertainty_token:
            self.uncertainty_token = nnx.Param(scale(rngs.params(), (width,), jnp.float32))
        self.encoder = Encoder(config.encoder, rngs)
        if config.pooling == "attention":
            self.pooling = AttentionPooling(config.encoder, rngs)
        size = config.embedding_size // (2 if config.uncertainty_token else 1)
        if config.pooling != "none":
            self.projection = linear(width, size, config.encoder.compute_type, rngs)
        if config.uncertainty_token:
            self.uncertainty = log_variances(width if config.uncertainty_from == "token" else size, size, rngs)

    def __call__(self, text: Int[Array, "b l"], key: Key[Array, ""] | None = None) -> TowerOutput:
        """Returns embeddings ``[b d]`` and the encoder's tokens; the key is for dropout and experts, see `ViT`.

        Without pooling the embedding is all tokens, one after the other.
        """
        config = self.config
        scale = np.float32(config.encoder.width**0.5 if config.scaled_embedding else 1)
        tokens = self._with_last_tokens(self.tokens(text) * scale + self._positions()[None])
        # The embedding counts as another block.
        of_embedding = None if key is None else jax.random.fold_in(key, config.encoder.depth)
        rates = DropoutRates(config.dropout, config.attention_dropout)
        tokens = Dropout(rates, of_embedding)(tokens, 0)
        encoded = self.encoder(tokens, key, self._present(text), rates)
        embedding = self._embed(encoded.tokens, text)
        return TowerOutput(embedding, encoded.tokens, encoded.auxiliary_losses, encoded.metrics)

    def _present(self, text: Int[Array, "b l"]) -> Bool[Array, "b _"] | None:
        """Returns which tokens are not padding; None without a mask, as in LiT's code (docs/paper_map.md, 12)."""
        if self.config.padding_token is None:
            return None
        last = (self.config.pooling == "class_token") + self.config.uncertainty_token
        return jnp.pad(text != self.config.padding_token, ((0, 0), (0, last)), constant_values=True)

    def _with_last_tokens(self, tokens: Float[Array, "b l d"]) -> Float[Array, "b _ d"]:
        last = [self.class_token[...]] if self.config.pooling == "class_token" else []
        last += [self.uncertainty_token[...]] if self.config.uncertainty_token else []
        # Behind the text, as with a causal mask they see nothing else.
        rows = [jnp.broadcast_to(x, (tokens.shape[0], 1, len(x))).astype(tokens.dtype) for x in last]
        return jnp.concatenate([tokens, *rows], axis=1)

    def _embed(self, tokens: Float[Array, "b l d"], text: Int[Array, "b _"]) -> Float[Array, "b _"]:
        """Returns the mean, or with an uncertainty token, the last of all tokens, the mean and log σ²."""
        if not self.config.uncertainty_token:
            pooled = self._pool(tokens, text)
            return pooled if self.config.pooling == "none" else self._project(pooled)
        mean = self._project(self._pool(tokens[:, :-1], text))
        log_variance = self.uncertainty(tokens[:, -1] if self.config.uncertainty_from == "token" else mean)
        return jnp.concatenate([mean, sharding.as_batch(log_variance)], axis=1)

    def _project(self, pooled: Float[Array, "b _"]) -> Float[Array, "b d"]:
        projected = sharding.as_batch(self.projection(pooled)).astype(jnp.float32)
        if self.config.layer_input:
            return jnp.concatenate([projected, pooled.astype(jnp.float32)], axis=1)
        return projected

    def _positions(self) -> Float[Array, "l d"]:
        if self.config.positions == "learned":
            return self.positions[...]
        return jnp.asarray(sinusoidal_positions(self.config.length, self.config.encoder.width))

    def _pool(self, tokens: Float[Array, "b l d"], text: Int[Array, "b _"]) -> Float[Array, "b _"]:
        match self.config.pooling:
            case "last" | "class_token":
                # The end token or padding, whichever is last (docs/paper_map.md, 12).
                return tokens[:, -1]
            case "none":
                return tokens.reshape(len(tokens), -1)
            case "first":
                return tokens[:, 0]
            case "mean":
                return tokens.mean(axis=1)
            case "max":
                return tokens.max(axis=1)
            case "attention":
                return self.pooling(tokens)
            case "end_token":
                end = self.config.end_token
                # The first of equal values, as padding may be the end token too.
                position = jnp.argmax(text if end is None else text == end, axis=1)
                return jnp.take_along_axis(tokens, position[:, None, None], axis=1)[:, 0]
