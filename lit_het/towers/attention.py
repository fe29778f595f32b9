"""Multi-head attention, of queries to tokens or to keys and values that were computed before."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from lit_het import sharding
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.layers import linear
from lit_het.trees import tree_of_arrays
from lit_het.types import Size


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class KeysAndValues:
    """What queries attend to.

    Attributes:
        keys, values: of each token, by head.
    """

    keys: Float[Array, "*depth b n h e"]
    values: Float[Array, "*depth b n h e"]

    def written(self, rows: "KeysAndValues", positions: Int[Array, "b m"]) -> "KeysAndValues":
        """Returns a copy with other rows at positions of each example."""
        examples = jnp.arange(len(positions))[:, None]
        return KeysAndValues(
            self.keys.at[examples, positions].set(rows.keys), self.values.at[examples, positions].set(rows.values)
        )


class Attention(nnx.Module):
    """Multi-head attention of queries to tokens.

    Dense layers have flat operands ``[b*n d]``, as XLA's CPU backend is slow at gradients of batched products.
    """

    def __init__(self, width: int, num_heads: int, dtype: ComputeType, rngs: nnx.Rngs, source_width: int | None = None):
        self.num_heads = num_heads
        # In this order, which random numbers follow.
        self.query = linear(width, width, dtype, rngs)
        self.key = linear(source_width or width, width, dtype, rngs)
        self.value = linear(source_width or width, width, dtype, rngs)
        self.out = linear(width, width, dtype, rngs)

    def __call__(
        self,
        queries: Float[Array, "bq d"],
        tokens: Float[Array, "bn d"],
        b: Size,
        present: Bool[Array, "b n"] | None = None,
        *,
        causal: bool = False,
    ) -> Float[Array, "bq d"]:
        """Attends to the present tokens of the same example; the rows of each of ``b`` examples are adjacent.

        With ``causal``, query i attends to the tokens 0 to i.
        """
        mask = None if present is None else present[:, None]
        return self.attend(queries, self.keys_and_values(tokens, b), mask, causal=causal)

    def keys_and_values(self, tokens: Float[Array, "bn source"], b: Size) -> KeysAndValues:
        """Returns the keys and values of the tokens of ``b`` examples."""
        return KeysAndValues(self._by_head(self.key(tokens), b), self._by_head(self.value(tokens), b))

    def attend(
        self,
        queries: Float[Array, "bq d"],
        source: KeysAndValues,
        mask: Bool[Array, "b _ n"] | None = None,
        *,
        causal: bool = False,
    ) -> Float[Array, "bq d"]:
        """Attends to keys and values; the queries of an example are adjacent.

        Args:
            queries: their inputs, of each example.
            source: keys and values of the examples.
            mask: which tokens a query may attend to, of every query or one for all; None for all.
            causal: whether query i attends to the tokens 0 to i.
        """
        query = self._by_head(self.query(queries), source.keys.shape[0])
        of_heads = None if mask is None else mask[:, None]
        attended = jax.nn.dot_product_attention(query, source.keys, source.values, mask=of_heads, is_causal=causal)
        return self.out(attended.reshape(queries.shape[0], -1))

    def _by_head(self, projected: Float[Array, "bn d"], b: Size) -> Float[Array, "b n h e"]:
        # The constraint is on the projections, as the kernels of these layers are split along their outputs: see
        # as_batch.
        rows = sharding.as_batch(projected)
        return rows.reshape(b, rows.shape[0] // b, self.num_heads, -1)
