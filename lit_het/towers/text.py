"""The text tower of LiT and SigLIP, a Transformer over token ids without a mask, and CLIP's, with a causal mask.

With masked padding and dropout it is the encoder of the original Transformer (Vaswani et al. 2017, Sec. 3.1).
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het import sharding
from lit_het.errors import FieldError, UserError, require_at_least, require_choice
from lit_het.towers.base import TowerOptions
from lit_het.towers.layers import layer_dropout, linear, log_variances
from lit_het.towers.pooling import AttentionPooling
from lit_het.towers.positions import sinusoidal_positions
from lit_het.towers.transformer import Encoder, EncoderConfig
from lit_het.types import TowerOutput


@dataclasses.dataclass(frozen=True)
class TextConfig(TowerOptions):
    """A text Transformer.

    Attributes:
        vocabulary_size: number of token ids.
        length: tokens per text, padding included.
        embedding_size: size of the projected embedding; with an uncertainty token it holds the mean and log σ².
        encoder: the stack of blocks.
        weights: pretrained weights, a path or address, see `lit_het.weights.formats`; None for random weights.
        pooling: the last position (the tokenizer's end token or padding), the first one, the mean or the maximum over
            all positions, attention pooling, the end token (CLIP), a learned token behind the text (ProLIP), or "none",
            for a decoder that attends to all tokens; ``embedding_size`` is then not used.
        end_token: its id, for the pooling "end_token": the first occurrence is pooled. None for the largest id of each
            text, as CLIP's authors do.
        positions: learned, or fixed sines and cosines (the original Transformer, whose encoder has the activation
            "relu" and norms after layers).
        uncertainty_token: whether one more learned token is encoded behind the text, whose output gives log σ² of the
            embedding (ProLIP's [UNC]); the embedding is then ``[mean, log σ²]``.
        uncertainty_from: what the layer of log σ² reads: that token, or the mean, as in ProLIP's published code.
        layer_input: whether the embedding is followed by the input of its projection, for a posterior of it.
        padding_token: its id, if no token attends to padding; None where the tower learns to ignore it, as in LiT.
        scaled_embedding: whether embeddings of tokens are multiplied by the root of the width (Vaswani et al.).
        dropout: rate at which embeddings, and outputs of layers before they are added, are dropped in training.

    Raises:
        UserError: a size below 1, an unknown choice, an end token that is not pooled or is not in the vocabulary, an
            odd size of mean and log σ², further layers without pooling, a rate outside [0, 1), dropout beside experts,
            or an ensemble of experts.
    """

    vocabulary_size: int = 32_000
    length: int = 16
    embedding_size: int = 768
    encoder: EncoderConfig = EncoderConfig()
    weights: str | None = None
    pooling: Literal["last", "first", "mean", "max", "attention", "end_token", "class_token", "none"] = "last"
    end_token: int | None = None
    positions: Literal["learned", "sinusoidal"] = "learned"
    uncertainty_token: bool = False
    uncertainty_from: Literal["token", "mean"] = "token"
    layer_input: bool = False
    padding_token: int | None = None
    scaled_embedding: bool = False
    dropout: float = 0.0

    first_parameters = ("tokens", "positions", "class_token", "uncertainty_token")

    def __post_init__(self) -> None:
        require_at_least(1, self, "vocabulary_size", "length", "embedding_size")
        require_choice(self, "pooling", "positions", "uncertainty_from")
        if self.end_token is not None and self.pooling != "end_token":
            raise UserError(f"end_token = {self.end_token} needs pooling = 'end_token', not {self.pooling!r}")
        if self.end_token is not None and not 0 <= self.end_token < self.vocabulary_size:
            raise UserError(
                f"end_token = {self.end_token} is not below the vocabulary of {self.vocabulary_size} tokens"
            )
        if self.uncertainty_token and self.embedding_size % 2:
            raise UserError(f"embedding_size = {self.embedding_size} must be even: its second half is log σ²")
        if self.pooling == "none" and (self.uncertainty_token or self.layer_input):
            raise UserError("pooling = 'none' has no embedding; leave out uncertainty_token and layer_input")
        if self.layer_input and self.last_layer is None:
            raise FieldError(self, "layer_input", "True needs uncertainty_token = False")
        if not 0 <= self.dropout < 1:
            raise FieldError(self, "dropout", f"{self.dropout} is not in [0, 1)")
        if self.dropout and self.encoder.experts is not None:
            raise FieldError(self, "dropout", f"{self.dropout} must be 0 beside experts, which have their own")
        if self.encoder.num_members > 1:
            raise UserError(
                f"a text tower has one embedding per text: num_members = {self.encoder.num_members} must be 1"
            )

    @property
    def last_layer(self) -> str | None:
        """Path of the parameters of the projection; None without one, or where log σ² follows it."""
        return None if self.uncertainty_token or self.pooling == "none" else "projection"

    @property
    def pools_tokens(self) -> bool:
        """Whether its tokens can be read beside an embedding."""
        return self.pooling != "none"

    def file_options(self) -> dict[str, Any]:
        """Returns its length too, and a pooling that a file may not record."""
        pooling = {} if self.pooling == "attention" else {"text_pooling": self.pooling}
        return {**super().file_options(), "text_length": self.length, **pooling}

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
        tokens = layer_dropout(config.dropout, of_embedding)(tokens, 0)
        encoded = self.encoder(tokens, key, self._present(text), config.dropout)
        embedding = self._embed(encoded.tokens, text)
        return TowerOutput(embedding, encoded.tokens, encoded.auxiliary_losses, encoded.metrics)

    def _present(self, text: Int[Array, "b l"]) -> Bool[Array, "b _"] | None:
        """Returns which tokens are no padding; None without a mask, as in LiT's code (docs/paper_map.md, 12)."""
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
