"""ModernBERT (Warner et al. 2024, Sec. 2.1) as a text tower: rotary positions, and blocks that see neighbours only."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lit_het.towers.bert import MaskedText
from lit_het.towers.layers import linear
from lit_het.towers.rotary import Rotation, line_angles
from lit_het.towers.text_config import ModernBertConfig
from lit_het.towers.transformer import Encoder
from lit_het.types import TowerOutput

# What is added to the logits of tokens outside of a window: the exponential of any sum with it is 0.
_HIDDEN = -1e9


class ModernBert(MaskedText):
    """The tower of a `ModernBertConfig`."""

    def __init__(self, config: ModernBertConfig, rngs: nnx.Rngs):
        self.config = config
        encoder = config.encoder
        init = nnx.initializers.truncated_normal(0.02)
        self.tokens = nnx.Embed(config.vocabulary_size, encoder.width, embedding_init=init, rngs=rngs)
        self.input_norm = encoder.build_norm(rngs)
        self.encoder = Encoder(encoder, rngs)
        if config.projection_size is not None:
            self.projection = linear(encoder.width, config.projection_size, encoder.compute_type, rngs)

    def __call__(self, text: Int[Array, "b l"], key: Key[Array, ""] | None = None) -> TowerOutput:
        """Returns embeddings ``[b d]`` and the encoder's tokens; the key is not used."""
        config, present = self.config, text != self.config.padding_id
        # Of blocks that see all tokens, and of those that see neighbours.
        positions, planes = np.arange(config.length), config.encoder.size_of_head // 2
        angles = [line_angles(positions, base, planes)[None] for base in (config.global_base, config.local_base)]
        rotation = Rotation(jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles)))
        is_local = [int(number % config.global_every > 0) for number in range(config.encoder.depth)]
        bias = jnp.asarray(windows(config.length, config.window))
        tokens = self.input_norm(self.tokens(text))
        encoded = self.encoder(tokens, key, present, rotation=rotation, bias=bias, kinds=is_local)
        return self._output(encoded, self._pool(encoded.tokens, present))


def windows(length: int, window: int) -> Float[np.ndarray, "2 1 n n"]:
    """Returns what is added to logits: nothing, and in a window, which hides tokens more than half of it away."""
    distance = np.abs(np.arange(length)[None] - np.arange(length)[:, None])
    return np.where([distance < 0, distance > window // 2], _HIDDEN, 0).astype(np.float32)[:, None]
