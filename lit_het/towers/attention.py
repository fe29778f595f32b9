"""Multi-head attention, of queries to tokens or to keys and values that were computed before."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from lit_het import sharding
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.layers import WeightDropout, linear
from lit_het.towers.rotary import Rotation
from lit_het.trees import tree_of_arrays
from lit_het.types import Size

# Logits are float32: those of a whole batch leave the memory of a TPU's core, or the caches of a CPU, for every
# operation of the softmax. 16 MiB of them stay on the chip where XLA compiles for v5e and v6e; 32 do not.
_LOGITS_AT_ONCE = 16 * 2**20
# With fewer keys the products of a group are small, and the logits are no larger than queries, keys and values.
_FEW_KEYS = 128


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

    def __init__(
        self,
        width: int,
        num_heads: int,
        dtype: ComputeType,
        rngs: nnx.Rngs,
        source_width: int | None = None,
        head_size: int | None = None,
    ):
        self.num_heads = num_heads
        inner = width if head_size is None else num_heads * head_size
        # In this order, which random numbers follow.
        self.query = linear(width, inner, dtype, rngs)
        self.key = linear(source_width or width, inner, dtype, rngs)
        self.value = linear(source_width or width, inner, dtype, rngs)
        self.out = linear(inner, width, dtype, rngs)

    def __call__(
        self,
        queries: Float[Array, "bq d"],
        tokens: Float[Array, "bn d"],
        b: Size,
        present: Bool[Array, "b n"] | None = None,
        *,
        causal: bool = False,
        rotation: Rotation | None = None,
        bias: Float[Array, "#h q n"] | None = None,
        dropout: WeightDropout | None = None,
    ) -> Float[Array, "bq d"]:
        """Attends to the present tokens of the same example; the rows of each of ``b`` examples are adjacent.

        With ``causal``, query i attends to the tokens 0 to i. A rotation turns queries and keys, a bias is added to the
        logits of all examples, and weights are dropped.
        """
        mask = None if present is None else present[:, None]
        source = self.keys_and_values(tokens, b, rotation)
        return self.attend(queries, source, mask, causal=causal, rotation=rotation, bias=bias, dropout=dropout)

    def keys_and_values(
        self, tokens: Float[Array, "bn source"], b: Size, rotation: Rotation | None = None
    ) -> KeysAndValues:
        """Returns the keys, turned by their positions, and the values of the tokens of ``b`` examples."""
        keys = self._by_head(self.key(tokens), b)
        return KeysAndValues(keys if rotation is None else rotation(keys), self._by_head(self.value(tokens), b))

    def attend(
        self,
        queries: Float[Array, "bq d"],
        source: KeysAndValues,
        mask: Bool[Array, "b _ n"] | None = None,
        *,
        causal: bool = False,
        rotation: Rotation | None = None,
        bias: Float[Array, "#h q n"] | None = None,
        dropout: WeightDropout | None = None,
    ) -> Float[Array, "bq d"]:
        """Attends to keys and values; the queries of an example are adjacent.

        Args:
            queries: their inputs, of each example.
            source: keys and values of the examples.
            mask: which tokens a query may attend to, of every query or one for all; None for all.
            causal: whether query i attends to the tokens 0 to i.
            rotation: turns the queries by their positions, see `lit_het.towers.rotary`; None for none.
            bias: added to the logits of every example; None for none.
            dropout: of the weights; None for none.
        """
        query = self._by_head(self.query(queries), source.keys.shape[0])
        query = query if rotation is None else rotation(query)
        if dropout is None:
            found = _attended(query, source, mask, causal, bias)
        else:
            found = _attended_with_dropout(query, source, mask, causal, bias, dropout)
        return self.out(found.reshape(queries.shape[0], -1))

    def _by_head(self, projected: Float[Array, "bn d"], b: Size) -> Float[Array, "b n h e"]:
        # The constraint is on the projections, as the kernels of these layers are split along their outputs: see
        # as_batch.
        rows = sharding.as_batch(projected)
        return rows.reshape(b, rows.shape[0] // b, self.num_heads, -1)


def _attended(
    query: Float[Array, "b q h e"],
    source: KeysAndValues,
    mask: Bool[Array, "b _ n"] | None,
    causal: bool,
    bias: Float[Array, "#h q n"] | None = None,
) -> Float[Array, "b q h e"]:
    """Returns softmax(q kᵀ / √e + bias) v of every head, a few examples or heads at a time (Vaswani et al. 2017).

    The backward pass computes the logits of a group again: none are saved.
    """
    b, n, h, e = source.keys.shape
    groups = _num_groups(query, n)
    if groups == 1:
        return _attended_at_once(query, source.keys, source.values, mask, causal, None if bias is None else bias[None])
    # A row has all heads of an example or, where those are several groups, the heads of one group.
    parts = max(1, groups * sharding.num_automatic_shards() // b)
    rows, heads = b * parts // groups, h // parts
    biases = of_row = None
    if bias is not None:
        biases = jnp.broadcast_to(bias, (h, *bias.shape[1:])).reshape(parts, heads, *bias.shape[1:])
        of_row = jnp.tile(jnp.arange(parts), b)

    def of_group(group: tuple[Array, Array, Array, Array | None, Array | None]) -> Float[Array, "tokens d"]:
        # Heads are split here: split before, TPUs would pad each to a whole register in HBM.
        query, keys, values = (x.reshape(rows, -1, heads, e) for x in group[:3])
        bias = None if biases is None else biases[group[4]]
        return _attended_at_once(query, keys, values, group[3], causal, bias).reshape(-1, heads * e)

    def flat(x: Float[Array, "b tokens h e"]) -> Float[Array, "rows_and_tokens d"]:
        return x.reshape(b, -1, parts, heads * e).swapaxes(1, 2).reshape(-1, heads * e)

    if mask is not None:
        mask = jnp.repeat(mask, parts, axis=0)
    found = sharding.map_groups(of_group, (*map(flat, (query, source.keys, source.values)), mask, of_row), groups)
    return found.reshape(b, parts, -1, heads * e).swapaxes(1, 2).reshape(query.shape)


def _attended_at_once(
    query: Array, keys: Array, values: Array, mask: Array | None, causal: bool, bias: Array | None
) -> Array:
    of_heads = None if mask is None else mask[:, None]
    return jax.nn.dot_product_attention(query, keys, values, bias, of_heads, is_causal=causal)


def _attended_with_dropout(
    query: Float[Array, "b q h e"],
    source: KeysAndValues,
    mask: Bool[Array, "b _ n"] | None,
    causal: bool,
    bias: Float[Array, "#h q n"] | None,
    dropout: WeightDropout,
) -> Float[Array, "b q h e"]:
    """Returns what `_attended` does with weights that are dropped: in float32, and saved for the backward pass."""
    if causal:
        earlier = jnp.tril(jnp.ones((1, query.shape[1], source.keys.shape[1]), bool))
        mask = earlier if mask is None else mask & earlier
    found = nnx.dot_product_attention(
        query,
        source.keys,
        source.values,
        None if bias is None else bias[None],
        None if mask is None else mask[:, None],
        broadcast_dropout=False,  # or all heads and examples would drop the same weights
        dropout_rng=dropout.key,
        dropout_rate=dropout.rate,
        dtype=jnp.float32,
    )
    return found.astype(query.dtype)


def _num_groups(query: Float[Array, "b q h e"], num_keys: int) -> int:
    """Returns how many equal groups, of examples or of the heads of one example, attend one after the other."""
    rows, left = divmod(query.shape[0], sharding.num_automatic_shards())
    # GPUs have caches of other sizes and need more work at once; they were not measured.
    if left or num_keys < _FEW_KEYS or jax.default_backend() == "gpu":
        return 1
    _, q, h, _ = query.shape
    largest = max(1, _LOGITS_AT_ONCE // (q * num_keys * jnp.dtype(jnp.float32).itemsize))
    heads = range(min(largest, rows * h), 0, -1)
    return next((rows * h // n for n in heads if (rows * h) % n == 0 and (n % h == 0 or h % n == 0)), 1)
