"""The encoder of T5 (Raffel et al. 2020, Sec. 2.1) as a text tower: a learned bias for each distance of two tokens."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Key

from lit_het.towers.bert import MaskedText
from lit_het.towers.layers import linear
from lit_het.towers.text_config import T5Config
from lit_het.towers.transformer import Encoder
from lit_het.types import TowerOutput


class T5(MaskedText):
    """The tower of a `T5Config`.

    T5 divides no logits by the root of a head's size; here its kernels of queries are larger by that factor.
    """

    def __init__(self, config: T5Config, rngs: nnx.Rngs):
        self.config = config
        encoder = config.encoder
        self.tokens = nnx.Embed(
            config.vocabulary_size, encoder.width, embedding_init=nnx.initializers.normal(1.0), rngs=rngs
        )
        init = nnx.initializers.normal(encoder.width**-0.5)
        self.distances = nnx.Param(init(rngs.params(), (config.num_buckets, encoder.num_heads), jnp.float32))
        self.encoder = Encoder(encoder, rngs)
        if config.projection_size is not None:
            self.projection = linear(encoder.width, config.projection_size, encoder.compute_type, rngs)

    def __call__(self, text: Int[Array, "b l"], key: Key[Array, ""] | None = None) -> TowerOutput:
        """Returns embeddings ``[b d]`` and the encoder's tokens; the key is not used."""
        present = text != self.config.padding_id
        buckets = distance_buckets(self.config.length, self.config.num_buckets, self.config.max_distance)
        # All blocks have the bias of the first one.
        bias = self.distances[...][buckets].transpose(2, 0, 1)
        encoded = self.encoder(self.tokens(text), key, present, bias=bias)
        return self._output(encoded, self._pool(encoded.tokens, present))


def distance_buckets(length: int, number: int, most: int) -> Int[np.ndarray, "queries keys"]:
    """Returns the bucket of the distance from each token to each: half of all for keys behind the query.

    Of the others, half have one distance each, and logarithms of larger ones, below ``most``, have equal buckets.
    """
    distance = np.arange(length)[None] - np.arange(length)[:, None]
    half = number // 2
    exact = half // 2
    # In float32, as the authors: the edges of buckets would be others in float64.
    ratio = np.log(np.maximum(np.abs(distance), 1).astype(np.float32) / np.float32(exact)) / np.float32(
        np.log(most / exact)
    )
    far = np.minimum(exact + (ratio * np.float32(half - exact)).astype(np.int32), half - 1)
    return half * (distance > 0) + np.where(np.abs(distance) < exact, np.abs(distance), far)
