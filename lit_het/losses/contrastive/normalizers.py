"""The softmax loss in two passes: first the normalizers of all logits, then their gradient, both in blocks.

A block of a ring does not hold all keys, so it cannot normalize its rows; no block holds all queries, so none can
normalize columns, which a matrix of logits that serves both directions needs.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lit_het import blocks
from lit_het.losses.contrastive import ring
from lit_het.losses.contrastive.blocks import Layout, sum_over_pairs
from lit_het.losses.contrastive.pairs import MASKED, Examples, Pairs
from lit_het.types import Queries


@dataclasses.dataclass(frozen=True)
class Normalizers:
    """Log-sum-exps of the logits of this device's examples.

    Attributes:
        row: over the keys of all devices, for each query.
        column: over the queries of all devices, for each key; of use without noise only.
        partner: the logit of each query with its partner.
    """

    row: Float[Array, "n s"]
    column: Float[Array, " n"]
    partner: Float[Array, "n s"]


def softmax(pairs: Pairs, layout: Layout, *, symmetric: bool) -> Float[Array, ""]:
    """Returns `dense.softmax`, or `dense.symmetric_softmax` of queries without noise.

    With ``p_snm = softmax_m(logits_sn)`` the gradient is ``∂ loss / ∂ logit_snm = w_n r_sn (p_snm - [n = m])``, where
    the responsibility ``r_sn = p_snn / Σ_s p_snn`` is the share of sample s. The other direction, normalized over
    columns to p', adds ``w_m (p'_nm - [n = m])``.
    """
    found = _normalizers(pairs, layout, columns=symmetric)
    query_weight = pairs.query_examples.weight
    log_p = found.partner - found.row
    value = -jnp.sum(query_weight * jax.nn.logmeanexp(log_p, axis=1))
    if symmetric:
        value = (value + jnp.sum(pairs.key_examples.weight * (found.column - found.partner[:, 0]))) / 2

    def block_sum(block: Pairs, query_data: Any, column: Float[Array, " m"]) -> Float[Array, ""]:
        """Returns the sum of logits times the loss's slopes, whose gradient is that of the loss."""
        responsibility, row = query_data
        logits, is_partner = block.masked_logits, block.is_partner
        # At most 1 for every key, since ``row`` is the log-sum-exp of this row: the exponential cannot overflow.
        slope = responsibility[:, :, None] * (jnp.exp(logits - row[:, :, None]) - is_partner[:, None])
        if symmetric:
            # An invalid query is not part of the column's sum: exp of its logit might overflow.
            is_query = block.query_examples.weight[:, None, None] > 0
            log_p = jnp.where(is_query, logits - column[None, None], MASKED)
            other_slope = jnp.exp(log_p) - is_partner[:, None]
            slope = (slope + block.key_examples.weight[None, None] * other_slope) / 2
        return jnp.sum(jax.lax.stop_gradient(slope) * logits)

    # p_snn / Σ_s p_snn is a softmax over samples of log p: no probability is formed that could round to zero.
    responsibility = query_weight[:, None] * jax.nn.softmax(log_p, axis=1)
    slopes = sum_over_pairs(block_sum, pairs, layout, (responsibility, found.row), found.column)
    # The value comes from the normalizers: the bracket is exactly 0 and has only the gradient. A sum of slopes times
    # logits would lose the digits of a small loss.
    return value + (slopes - jax.lax.stop_gradient(slopes))


def _normalizers(pairs: Pairs, layout: Layout, *, columns: bool) -> Normalizers:
    """Returns the normalizers over all pairs, by running log-sum-exps and without a gradient."""
    # `softmax` has the gradient in closed form; without this, the scans would save all logits for one of their own.
    pairs = jax.lax.stop_gradient(pairs)

    def scan_chunk(chunk: tuple[Array, Examples], column: Array) -> tuple[Array, tuple[Array, Array]]:
        """Adds one chunk of keys: returns its columns, and the rows and partners of all queries within it."""
        keys, key_examples = chunk

        def scan_block(column: Array, rows: tuple[Queries, Examples]) -> tuple[Array, tuple[Array, Array]]:
            queries, query_examples = rows
            block = Pairs(queries, query_examples, keys, key_examples, pairs.temperature, pairs.bias)
            logits = block.masked_logits
            if columns:
                of_valid_queries = jnp.where(query_examples.weight[:, None, None] > 0, logits, MASKED)
                column = jnp.logaddexp(column, jax.nn.logsumexp(of_valid_queries, axis=(0, 1)))
            return column, (jax.nn.logsumexp(logits, axis=-1), block.partner_logit(logits))

        rows = (pairs.queries, pairs.query_examples)
        return blocks.scan_examples(scan_block, column, rows, layout.examples_per_block(pairs.queries))

    chunk = (pairs.keys, pairs.key_examples)
    if layout.form != "ring":
        chunk = layout.gather(chunk)
        column, (row, partner) = scan_chunk(chunk, jnp.full(chunk[1].weight.shape, MASKED))
        if layout.axes:
            # Each device has summed the columns of all keys over its own queries only.
            column = jax.nn.logsumexp(jax.lax.all_gather(column, layout.axes), axis=0)[pairs.key_examples.index]
        return Normalizers(row, column, partner)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        chunk, column, row, partner = carry
        column, (chunk_row, chunk_partner) = scan_chunk(chunk, column)
        # Columns belong to keys and travel with them; rows belong to queries and stay.
        chunk, column = ring.rotate((chunk, column), layout.axes)
        return (chunk, column, jnp.logaddexp(row, chunk_row), partner + chunk_partner), None

    # log-sum-exps start from the logarithm of an empty sum; partners, which only one chunk has, from 0.
    zeros = jnp.zeros((pairs.queries.samples.shape[0], pairs.queries.num_samples))
    start = (chunk, jnp.full(pairs.key_examples.weight.shape, MASKED), zeros - jnp.inf, zeros)
    (_, column, row, partner), _ = jax.lax.scan(step, start, length=ring.num_devices(layout.axes))
    return Normalizers(row, column, partner)
