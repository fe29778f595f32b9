"""The softmax loss in two passes: first the normalizers of all logits, then their gradient, both in blocks.

A block of a ring does not hold all keys, so it cannot normalize its rows; no block holds all queries, so none can
normalize columns, which a matrix of logits that serves both directions needs.
"""

import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lit_het.losses import blocks
from lit_het.losses.contrastive import ring
from lit_het.losses.contrastive.blocks import Layout, sum_over_pairs
from lit_het.losses.contrastive.pairs import Examples, Pairs
from lit_het.types import MASKED, Queries

# Log-sum-exps over all pairs, and over the positives.
_Sums: TypeAlias = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class Normalizers:
    """Log-sum-exps of the logits of this device's examples, each over all pairs and over the positives among them.

    Attributes:
        row, row_positive: over the keys of all devices, for each query.
        column, column_positive: over the queries of all devices, for each key; of use without noise only.
    """

    row: Float[Array, "n s"]
    row_positive: Float[Array, "n s"]
    column: Float[Array, " m"]
    column_positive: Float[Array, " m"]


@dataclasses.dataclass(frozen=True)
class _Uniform:
    """What the uniform part of the targets needs of this device's examples.

    Attributes:
        row: mean over all valid keys and samples of log p_snm.
        column: mean over all valid queries of log p'_nm, for each key.
        per_key, per_query: one divided by the number of valid keys, and of vectors of valid queries.
    """

    row: Float[Array, " n"]
    column: Float[Array, " m"]
    per_key: Float[Array, ""]
    per_query: Float[Array, ""]


def softmax(pairs: Pairs, layout: Layout, *, symmetric: bool) -> Float[Array, ""]:
    """Returns `dense.softmax`, or `dense.symmetric_softmax` of queries without noise.

    With ``p_snm = softmax_m(logits_sn)``, ``p_sn = Σ_{m ∈ P(n)} p_snm`` and ``t_snm = [m ∈ P(n)] p_snm / p_sn``, which
    without duplicates is ``[n = m]``, the gradient is ``∂ loss / ∂ logit_snm = w_n r_sn (p_snm - t_snm)``, where the
    responsibility ``r_sn = p_sn / Σ_s p_sn`` is the share of sample s. The other direction, normalized over columns to
    p' and t', adds ``w_m (p'_nm - t'_nm)``.

    With label smoothing α these have the factor ``1 - α``. The uniform part adds ``α/S w_n (p_snm - 1/M)`` for M keys,
    and ``α w_m (p'_nm - 1/N)`` for N queries.
    """
    found = _normalizers(pairs, layout, columns=symmetric)
    query_weight, key_weight = pairs.query_examples.weight, pairs.key_examples.weight
    log_p = found.row_positive - found.row
    row, column = jax.nn.logmeanexp(log_p, axis=1), found.column_positive - found.column
    uniform = _uniform(pairs, layout, found) if pairs.smoothing else None
    if uniform is not None:
        row, column = pairs.smoothed(row, uniform.row), pairs.smoothed(column, uniform.column)
    value = -jnp.sum(query_weight * row)
    if symmetric:
        value = (value - jnp.sum(key_weight * column)) / 2

    def block_sum(block: Pairs, query_data: Any, key_data: Any) -> Float[Array, ""]:
        """Returns the sum of logits times the loss's slopes, whose gradient is that of the loss."""
        logits = block.masked_logits
        slope = _row_slopes(block, logits, uniform, *query_data)
        if symmetric:
            slope = (slope + _column_slopes(block, logits, uniform, *key_data)) / 2
        return jnp.sum(jax.lax.stop_gradient(slope) * logits)

    # p_sn / Σ_s p_sn is a softmax over samples of log p: no probability is formed that could round to zero.
    responsibility = query_weight[:, None] * jax.nn.softmax(log_p, axis=1)
    query_data = responsibility, found.row, found.row_positive
    slopes = sum_over_pairs(block_sum, pairs, layout, query_data, (found.column, found.column_positive))
    # The value comes from the normalizers: the bracket is exactly 0 and has only the gradient. A sum of slopes times
    # logits would lose the digits of a small loss.
    return value + (slopes - jax.lax.stop_gradient(slopes))


def _row_slopes(
    block: Pairs,
    logits: Float[Array, "n s m"],
    uniform: _Uniform | None,
    responsibility: Float[Array, "n s"],
    row: Float[Array, "n s"],
    row_positive: Float[Array, "n s"],
) -> Float[Array, "n s m"]:
    # Each is at most 1, since it is divided by a sum that contains it: the exponentials cannot overflow.
    p = jnp.exp(logits - row[:, :, None])
    t = block.positive_share(logits - row_positive[:, :, None])
    slope = responsibility[:, :, None] * (p - t)
    if uniform is None:
        return slope
    is_key = block.key_examples.weight[None, None] > 0
    weight = block.query_examples.weight[:, None, None] / row.shape[1]
    return block.smoothed(slope, weight * (p - jnp.where(is_key, uniform.per_key, 0.0)))


def _column_slopes(
    block: Pairs,
    logits: Float[Array, "n s m"],
    uniform: _Uniform | None,
    column: Float[Array, " m"],
    column_positive: Float[Array, " m"],
) -> Float[Array, "n s m"]:
    # An invalid query is not part of the column's sum: exp of its logit might overflow.
    is_query = block.query_examples.weight[:, None, None] > 0
    p = jnp.exp(jnp.where(is_query, logits - column[None, None], MASKED))
    t = block.positive_share(jnp.where(is_query, logits - column_positive[None, None], MASKED))
    if uniform is not None:
        t = block.smoothed(t, jnp.where(is_query, uniform.per_query, 0.0))
    return block.key_examples.weight[None, None] * (p - t)


def _uniform(pairs: Pairs, layout: Layout, found: Normalizers) -> _Uniform:
    """Returns what the uniform part of the targets needs, without a gradient."""
    pairs = jax.lax.stop_gradient(pairs)
    is_query, is_key = pairs.query_examples.weight > 0, pairs.key_examples.weight > 0
    vectors = pairs.queries.samples  # without noise these are the queries
    sums = (
        jnp.sum(pairs.keys, axis=0, where=is_key[:, None]),
        jnp.sum(vectors, axis=(0, 1), where=is_query[:, None, None]),
        jnp.sum(is_key),
        jnp.sum(is_query) * vectors.shape[1],
    )
    key_sum, query_sum, num_keys, num_vectors = jax.lax.psum(sums, layout.axes) if layout.axes else sums
    per_key, per_query = 1 / jnp.maximum(num_keys, 1), 1 / jnp.maximum(num_vectors, 1)
    # Means of logits are logits with the mean of all keys, and of all queries.
    of_mean_key = pairs.queries.products((key_sum * per_key)[None])[:, :, 0]
    row = jnp.mean(of_mean_key / pairs.temperature + pairs.bias - found.row, axis=1)
    column = pairs.keys @ (query_sum * per_query) / pairs.temperature + pairs.bias - found.column
    return _Uniform(row, column, per_key, per_query)


def _normalizers(pairs: Pairs, layout: Layout, *, columns: bool) -> Normalizers:
    """Returns the normalizers over all pairs, by running log-sum-exps and without a gradient."""
    # `softmax` has the gradient in closed form; without this, the scans would save all logits for one of their own.
    pairs = jax.lax.stop_gradient(pairs)

    def scan_chunk(chunk: tuple[Array, Examples], column: _Sums) -> tuple[_Sums, _Sums]:
        """Adds one chunk of keys: returns its columns, and the rows of all queries within it."""
        keys, key_examples = chunk

        def scan_block(column: _Sums, rows: tuple[Queries, Examples]) -> tuple[_Sums, _Sums]:
            queries, query_examples = rows
            block = pairs.block(queries, query_examples, keys, key_examples)
            logits = block.masked_logits
            if columns:
                of_valid_queries = jnp.where(query_examples.weight[:, None, None] > 0, logits, MASKED)
                of_block = jax.nn.logsumexp(of_valid_queries, axis=(0, 1))
                column = _log_add(column, (of_block, block.positive_logit(of_valid_queries, axis=(0, 1))))
            return column, (jax.nn.logsumexp(logits, axis=-1), block.positive_logit(logits))

        rows = (pairs.queries, pairs.query_examples)
        return blocks.scan_examples(scan_block, column, rows, layout.examples_per_block(pairs.queries))

    def nothing(shape: tuple[int, ...]) -> _Sums:
        """Returns the logarithms of empty sums."""
        return jnp.full(shape, MASKED), jnp.full(shape, MASKED)

    chunk = (pairs.keys, pairs.key_examples)
    if layout.form != "ring":
        chunk = layout.gather(chunk)
        column, row = scan_chunk(chunk, nothing(chunk[1].weight.shape))
        if layout.axes:
            # Each device has summed the columns of all keys over its own queries only.
            gathered = jax.tree.map(lambda x: jax.lax.all_gather(x, layout.axes), column)
            column = jax.tree.map(lambda x: jax.nn.logsumexp(x, axis=0)[pairs.key_examples.index], gathered)
        return Normalizers(*row, *column)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        chunk, column, row = carry
        column, chunk_row = scan_chunk(chunk, column)
        # Columns belong to keys and travel with them; rows belong to queries and stay.
        chunk, column = ring.rotate((chunk, column), layout.axes)
        return (chunk, column, _log_add(row, chunk_row)), None

    rows = (pairs.queries.samples.shape[0], pairs.queries.num_samples)
    start = (chunk, nothing(pairs.key_examples.weight.shape), nothing(rows))
    (_, column, row), _ = jax.lax.scan(step, start, length=ring.num_devices(layout.axes))
    return Normalizers(*row, *column)


def _log_add(one: _Sums, other: _Sums) -> _Sums:
    return jnp.logaddexp(one[0], other[0]), jnp.logaddexp(one[1], other[1])
