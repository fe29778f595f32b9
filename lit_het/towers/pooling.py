"""From the tokens of an encoder to one embedding per example: attention pooling, and the mean without padding."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from lit_het import sharding
from lit_het.towers.encoder_config import EncoderConfig


class AttentionPooling(nnx.Module):
    """A learned probe attends to all tokens, then an MLP with a residual connection (MAP, Zhai et al. 2022)."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs, num_heads: int | None = None):
        self.probe = nnx.Param(nnx.initializers.xavier_uniform()(rngs.params(), (1, config.width), jnp.float32))
        self.attention = config.build_attention(rngs, num_heads=num_heads)
        self.norm = config.build_norm(rngs)
        self.mlp = config.build_mlp(rngs)

    def __call__(self, tokens: Float[Array, "b n d"], present: Bool[Array, "b n"] | None = None) -> Float[Array, "b d"]:
        """Returns one embedding per example, of its present tokens."""
        return self.with_hidden(tokens, present)[0]

    def with_hidden(
        self, tokens: Float[Array, "b n d"], present: Bool[Array, "b n"] | None = None
    ) -> tuple[Float[Array, "b d"], Float[Array, "b h"]]:
        """Returns one embedding per example, and the input of the MLP's last layer."""
        b, n, d = tokens.shape
        # All images have the same learned query.
        probes = jnp.broadcast_to(self.probe[...], (b, d))
        pooled = sharding.as_batch(self.attention(probes, tokens.reshape(b * n, d), b, present))
        hidden = self.mlp.hidden(self.norm(pooled), _by_rows)
        return (pooled + _by_rows(self.mlp.down, hidden)).astype(jnp.float32), hidden.astype(jnp.float32)


def mean_of_present(tokens: Float[Array, "b n d"], present: Bool[Array, "b n"] | None) -> Float[Array, "b d"]:
    """Returns the mean over the tokens that are present, or all with None; zeros of an example without any."""
    if present is None:
        return tokens.mean(axis=1)
    return tokens.sum(axis=1, where=present[:, :, None]) / jnp.maximum(present.sum(axis=1, keepdims=True), 1)


def _by_rows(layer: nnx.Linear, x: Float[Array, "b i"]) -> Float[Array, "b o"]:
    """Applies a layer and keeps the rows split over devices like the batch."""
    # With only one token per example, the compiler would otherwise move the tokens to the shards of the kernel.
    return sharding.as_batch(layer(x))
