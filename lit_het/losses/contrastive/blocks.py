"""Sums over all pairs of this device's queries and the keys of every device, in blocks of queries."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lit_het.losses import blocks
from lit_het.losses.contrastive import ring
from lit_het.losses.contrastive.loss_config import Form
from lit_het.losses.contrastive.pairs import Examples, Pairs
from lit_het.types import Queries

# (block of pairs, data of its queries, data of its keys) to the sum over its pairs.
PairFunction: TypeAlias = Callable[[Pairs, Any, Any], Float[Array, ""]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the pairs of a batch are split over devices and blocks.

    Attributes:
        form: see `lit_het.losses.contrastive.SoftmaxLoss`.
        axes: mesh axes that split the batch; empty where one device holds all rows.
        block_size: vectors of logits that exist at a time on a device.
    """

    form: Form
    axes: tuple[str, ...]
    block_size: int

    def global_index(self, count: int) -> Int[Array, " n"]:
        """Returns the positions of this device's ``count`` examples in the global batch."""
        return jnp.arange(count) + (jax.lax.axis_index(self.axes) * count if self.axes else 0)

    def examples_per_block(self, queries: Queries) -> int:
        """Returns how many examples make ``block_size`` vectors of logits."""
        # Queries may be several vectors each (samples, or a mean and factors), so blocks are counted in vectors of
        # logits.
        return max(1, self.block_size // queries.num_vectors)

    def gather(self, tree: Any) -> Any:
        """Returns the rows of all devices."""
        if not self.axes:
            return tree
        # The gradient of a gather is a reduce-scatter: each device receives the summed gradient of its own keys only.
        return jax.tree.map(lambda x: jax.lax.all_gather(x, self.axes, tiled=True), tree)


def sum_over_pairs(
    function: PairFunction, pairs: Pairs, layout: Layout, query_data: Any = None, key_data: Any = None
) -> Float[Array, ""]:
    """Returns the sum of a function over this device's queries and the keys of all devices.

    Args:
        function: sum over a block of pairs; differentiated with respect to queries, keys, τ and bias.
        pairs: this device's queries and keys.
        layout: with the form "gather" a block holds the keys of all devices, with "ring" those of one.
        query_data: a tree with a row per query, not differentiated.
        key_data: a tree with a row per key, not differentiated.
    """

    def chunk_sum(
        queries: Queries, keys: Float[Array, "m d"], query_constants: Any, key_constants: Any
    ) -> Float[Array, ""]:
        """Returns the sum over the queries and one chunk of keys."""

        def block_sum(queries: Queries, query_constants: Any, key_constants: Any) -> tuple[Float[Array, ""], None]:
            query_examples, query_data = query_constants
            key_examples, key_data = key_constants
            block = pairs.block(queries, query_examples, keys, key_examples)
            return function(block, query_data, key_data), None

        size = layout.examples_per_block(queries)
        return blocks.sum_over_examples(block_sum, queries, query_constants, size, key_constants)[0]

    queries, keys = pairs.queries, pairs.keys
    query_constants: tuple[Examples, Any] = (pairs.query_examples, query_data)
    key_constants: tuple[Examples, Any] = (pairs.key_examples, key_data)
    if layout.form == "ring":
        return ring.sum_over_devices(chunk_sum, layout.axes, queries, keys, query_constants, key_constants)
    keys, key_constants = layout.gather((keys, key_constants))
    return chunk_sum(queries, keys, query_constants, key_constants)
