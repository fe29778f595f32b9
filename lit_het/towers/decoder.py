"""The autoregressive text decoder of LiT-decoder and of the original Transformer (Vaswani et al. 2017, Sec. 3.1).

Each block attends to the tokens before its own, then to those of another tower (the source), then has an MLP. The
decoder returns features of every position; a classification head makes logits of the next token from them.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het import sharding
from lit_het.towers.attention import KeysAndValues
from lit_het.towers.decoder_config import DecoderConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.layers import Dropout, DropoutRates
from lit_het.towers.positions import sinusoidal_positions
from lit_het.towers.transformer import REMAT_POLICIES, stack
from lit_het.trees import tree_of_arrays


class Source(NamedTuple):
    """What a decoder attends to.

    Attributes:
        tokens: of another tower.
        present: False marks padding; None for no padding.
    """

    tokens: Float[Array, "b n source"]
    present: Bool[Array, "b n"] | None = None


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class DecoderState:
    """What a decoder needs of the source and of earlier tokens, for all blocks.

    Attributes:
        source: keys and values of the source's tokens.
        present: which of these are not padding; None for all.
        own: keys and values of the tokens so far, by position; None where all tokens are computed at once.
    """

    source: KeysAndValues
    present: Bool[Array, "b n"] | None = None
    own: KeysAndValues | None = None


class DecoderBlock(nnx.Module):
    """Causal attention, attention to the source and an MLP, with residual connections as in `transformer.Block`."""

    def __init__(self, config: EncoderConfig, source_width: int, rngs: nnx.Rngs):
        self.norms_before = config.norm_placement == "before"
        self.attention_norm = config.build_norm(rngs)
        self.attention = config.build_attention(rngs)
        self.source_norm = config.build_norm(rngs)
        self.source_attention = config.build_attention(rngs, source_width)
        self.mlp_norm = config.build_norm(rngs)
        self.mlp = config.build_mlp(rngs)

    def __call__(
        self,
        x: Float[Array, "bn d"],
        state: DecoderState,
        positions: Int[Array, "b n"],
        drop: Dropout,
    ) -> tuple[Float[Array, "bn d"], KeysAndValues | None]:
        """Maps tokens at positions of each text; returns also the keys and values of the tokens so far."""
        own = state.own

        def attend(seen: Float[Array, "bn d"]) -> Float[Array, "bn d"]:
            nonlocal own
            rows = self.attention.keys_and_values(seen, positions.shape[0])
            if own is None:
                return self.attention.attend(seen, rows, causal=True, dropout=drop.of_weights(0))
            own = own.written(rows, positions)
            earlier = jnp.arange(own.keys.shape[1])[None, None] <= positions[:, :, None]
            return self.attention.attend(seen, own, earlier)

        def attend_to_source(seen: Float[Array, "bn d"]) -> Float[Array, "bn d"]:
            # Of several texts of an image, all are queries of its tokens.
            mask = None if state.present is None else state.present[:, None]
            return self.source_attention.attend(seen, state.source, mask, dropout=drop.of_weights(1))

        layers = (attend, self.attention_norm), (attend_to_source, self.source_norm), (self.mlp, self.mlp_norm)
        for number, (layer, norm) in enumerate(layers):
            if self.norms_before:
                x = x + drop(layer(norm(x)), number)
            else:
                x = norm(x + drop(layer(x), number)).astype(x.dtype)
        return x, own


class Decoder(nnx.Module):
    """The decoder of a `DecoderConfig`; parameters of blocks are stacked along a leading axis."""

    def __init__(self, config: DecoderConfig, source_width: int, rngs: nnx.Rngs):
        self.config = config
        encoder = config.encoder
        scale = nnx.initializers.normal(1 / np.sqrt(encoder.width))
        self.tokens = nnx.Embed(config.vocabulary_size, encoder.width, embedding_init=scale, rngs=rngs)
        if config.positions == "learned":
            self.positions = nnx.Param(scale(rngs.params(), (config.length, encoder.width), jnp.float32))

        self.blocks = stack(lambda rngs: DecoderBlock(encoder, source_width, rngs), encoder.depth, rngs)
        if encoder.norm_placement == "before":
            self.norm = encoder.build_norm(rngs)

    def start(
        self,
        source: Float[Array, "b n source"],
        present: Bool[Array, "b n"] | None = None,
        *,
        num_texts: int = 1,
        length: int | None = None,
    ) -> DecoderState:
        """Returns the state before the first token.

        Args:
            source: tokens of another tower.
            present: False marks padding of the source; None for no padding.
            num_texts: t, texts of each source, whose rows are adjacent.
            length: positions to keep keys and values of, where tokens are computed in turn; None to compute all at
                once.
        """
        b, n, width = source.shape
        encoder = self.config.encoder
        flat = source.reshape(b * n, width).astype(encoder.compute_type)
        graph, stacked = nnx.split(self.blocks)

        def of_block(params: Any) -> KeysAndValues:
            return nnx.merge(graph, params).source_attention.keys_and_values(flat, b)

        seen, own = jax.lax.map(of_block, stacked), None
        if length is not None:
            shape = (encoder.depth, b * num_texts, length, *seen.keys.shape[3:])
            own = KeysAndValues(*(jnp.zeros(shape, seen.keys.dtype) for _ in range(2)))
        return DecoderState(seen, present, own)

    def __call__(
        self,
        inputs: Int[Array, "b n"],
        state: DecoderState,
        positions: Int[Array, "b n"] | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[Float[Array, "b n d"], DecoderState]:
        """Returns the features from which the token after each input is predicted, in float32, and the next state.

        Args:
            inputs: token ids.
            state: of `start`, or of the call for the tokens before.
            positions: of the inputs; None for 0 to n - 1.
            key: random key of dropout, in training; None for none.
        """
        (b, n), encoder = inputs.shape, self.config.encoder
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(n), (b, n))
        x = self._embed(inputs, positions).reshape(b * n, encoder.width).astype(encoder.compute_type)
        # The embedding counts as another block.
        x = self._dropout(key, encoder.depth)(x, 0)
        graph, stacked = nnx.split(self.blocks)

        def block(x: Float[Array, "bn d"], of_block: Any) -> tuple[Float[Array, "bn d"], KeysAndValues | None]:
            params, source, own, number = of_block
            drop = self._dropout(key, number)
            seen = DecoderState(source, state.present, own)
            x, own = nnx.merge(graph, params)(sharding.as_batch(x), seen, positions, drop)
            return sharding.as_batch(x), own

        if encoder.remat != "none":
            # As in `Encoder`.
            block = jax.checkpoint(block, policy=REMAT_POLICIES[encoder.remat], prevent_cse=encoder.unrolled)
        of_blocks = stacked, state.source, state.own, jnp.arange(encoder.depth)
        x, own = jax.lax.scan(block, x, of_blocks, unroll=encoder.depth if encoder.unrolled else 1)
        x = self.norm(x) if encoder.norm_placement == "before" else x.astype(jnp.float32)
        return x.reshape(b, n, -1), dataclasses.replace(state, own=own)

    def _embed(self, inputs: Int[Array, "b n"], positions: Int[Array, "b n"]) -> Float[Array, "b n d"]:
        config = self.config
        if config.positions == "learned":
            table = self.positions[...]
        else:
            table = jnp.asarray(sinusoidal_positions(config.length, config.encoder.width))
        scale = np.float32(config.encoder.width**0.5 if config.scaled_embedding else 1)
        return self.tokens(inputs) * scale + table[positions]

    def _dropout(self, key: Key[Array, ""] | None, block: int | Int[Array, ""]) -> Dropout:
        rates = DropoutRates(self.config.dropout, self.config.attention_dropout)
        return Dropout(rates, None if key is None else jax.random.fold_in(key, block))
