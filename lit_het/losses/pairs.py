"""Sums over all pairs of a query and a key, in blocks of queries and with keys from every device.

The functions here return sums over this device's queries; `lit_het.losses.contrastive` adds up the devices. With a ring
the keys, what is known of them and their gradient travel from device to device and are home again after a round.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lit_het import blocks
from lit_het.types import Queries

Form = Literal["dense", "gather", "ring"]

# Stands for minus infinity in logits of invalid pairs: their unused values stay finite.
NEVER = -1e30


@dataclasses.dataclass(frozen=True)
class Side:
    """One modality of this device's examples, in the role of queries or of keys.

    Attributes:
        keys: noiseless embeddings.
        queries: noisy ones, or None if the keys are the queries.
        weight: what an example counts in the mean; 0 if it is not valid.
    """

    keys: Float[Array, "n d"]
    queries: Queries | None
    weight: Float[Array, " n"]

    def as_queries(self) -> Queries:
        """Returns the queries, whether noisy or not."""
        return Queries(self.keys[:, None]) if self.queries is None else self.queries


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How queries meet keys.

    Attributes:
        form: "dense", "gather" or "ring", see `lit_het.losses.contrastive.SoftmaxLoss`.
        axes: names of the devices' axes, none where one device holds all.
        block_size: queries that are scored at a time.
    """

    form: Form
    axes: tuple[str, ...]
    block_size: int

    @property
    def num_devices(self) -> int:
        """Devices that share the batch."""
        return jax.lax.axis_size(self.axes) if self.axes else 1

    def numbers(self, count: int) -> Int[Array, " n"]:
        """Returns the positions of this device's ``count`` examples in the whole batch."""
        return jnp.arange(count) + (jax.lax.axis_index(self.axes) * count if self.axes else 0)

    def examples_per_block(self, queries: Queries) -> int:
        """Returns how many examples make ``block_size`` vectors of logits."""
        return queries.samples.shape[0] if self.form == "dense" else max(1, self.block_size // queries.num_vectors)

    def gather(self, tree: Any) -> Any:
        """Returns a tree of rows with those of all devices."""
        if not self.axes:
            return tree
        return jax.tree.map(lambda x: jax.lax.all_gather(x, self.axes, tiled=True), tree)

    def rotate(self, tree: Any) -> Any:
        """Passes a tree to the next device and receives that of the one before."""
        if not self.axes:
            return tree
        steps = [(i, (i + 1) % self.num_devices) for i in range(self.num_devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axes, steps), tree)


# (queries, keys, τ, bias, exchange) to the sum over this device's queries.
Direction: TypeAlias = Callable[..., Float[Array, ""]]


def softmax(
    queries: Side, keys: Side, temperature: Float[Array, ""], bias: Float[Array, ""], exchange: Exchange
) -> Float[Array, ""]:
    """Returns the sum over one direction's queries of w_n times their loss.

    ``loss_n = -log 1/S Σ_s p_sn`` with ``p_sn = softmax(q_sn · k / τ + bias)_n`` over all valid keys.
    """
    rows = queries.as_queries()
    if exchange.form == "ring":
        statistics = _statistics(rows, queries, keys, temperature, bias, exchange, columns=False)
        return _softmax_of_statistics(rows, queries, keys, temperature, bias, exchange, statistics, both=False)
    # A block holds all keys, hence its own normalisers.
    all_keys, key_weight = exchange.gather((keys.keys, keys.weight))
    numbers = exchange.numbers(keys.weight.shape[0])

    def of_block(rows: Queries, constants: Any, key_weight: Array) -> tuple[Array, None]:
        weight, number = constants
        logits = _logits(rows, all_keys, key_weight > 0, temperature, bias)
        is_partner = number[:, None] == jnp.arange(all_keys.shape[0])[None]
        log_p = _of_partner(logits, is_partner) - jax.nn.logsumexp(logits, axis=-1)
        return -jnp.sum(weight * jax.nn.logmeanexp(log_p, axis=1)), None

    size = exchange.examples_per_block(rows)
    return blocks.sum_over_examples(of_block, rows, (queries.weight, numbers), size, key_weight)[0]


def softmax_both_ways(
    queries: Side, keys: Side, temperature: Float[Array, ""], bias: Float[Array, ""], exchange: Exchange
) -> Float[Array, ""]:
    """Returns half the sum of both directions without noise, whose logits are one matrix and its transpose."""
    rows = queries.as_queries()
    if exchange.form == "dense":
        logits = _logits(rows, keys.keys, keys.weight > 0, temperature, bias)[:, 0]
        of_valid = jnp.where(queries.weight[:, None] > 0, logits, NEVER)
        twice = 2 * jnp.diagonal(logits) - jax.nn.logsumexp(logits, axis=1) - jax.nn.logsumexp(of_valid, axis=0)
        return -jnp.sum(queries.weight * twice) / 2
    statistics = _statistics(rows, queries, keys, temperature, bias, exchange, columns=True)
    return _softmax_of_statistics(rows, queries, keys, temperature, bias, exchange, statistics, both=True)


def sigmoid(
    queries: Side, keys: Side, temperature: Float[Array, ""], bias: Float[Array, ""], exchange: Exchange
) -> Float[Array, ""]:
    """Returns ``Σ_n w_n Σ_i -log 1/S Σ_s σ(z_ni (q_sn · k_i / τ + bias))``."""

    def of_block(rows: Queries, constants: Any, keys: Array, key_constants: Any) -> Float[Array, ""]:
        weight, number = constants
        key_weight, key_number = key_constants
        logits = rows.products(keys) / temperature + bias
        sign = jnp.where(number[:, None] == key_number[None], 1.0, -1.0)
        log_p = jax.nn.log_sigmoid(sign[:, None] * logits)
        terms = math.log(log_p.shape[1]) - jax.nn.logsumexp(log_p, axis=1)
        return jnp.sum(weight * jnp.sum(jnp.where(key_weight[None] > 0, terms, 0.0), axis=1))

    numbers = exchange.numbers(keys.weight.shape[0])
    rows = queries.as_queries()
    return _pair_sum(of_block, rows, (queries.weight, numbers), keys.keys, (keys.weight, numbers), exchange)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Statistics:
    """Normalisers of this device's examples.

    Attributes:
        row: log-sum-exp of a query's logits.
        partner: the logit of a query with its partner.
        column: log-sum-exp of a key's logits, without noise.
    """

    row: Float[Array, "n s"]
    partner: Float[Array, "n s"]
    column: Float[Array, " n"]


def _statistics(
    rows: Queries,
    queries: Side,
    keys: Side,
    temperature: Float[Array, ""],
    bias: Float[Array, ""],
    exchange: Exchange,
    *,
    columns: bool,
) -> _Statistics:
    """Returns the normalisers over all pairs, by running log-sum-exps and without a gradient."""
    rows, key_rows, temperature, bias = jax.lax.stop_gradient((rows, keys.keys, temperature, bias))
    numbers = exchange.numbers(keys.weight.shape[0])

    def of_block(column: Any, block: Any, piece: Any) -> tuple[Any, tuple[Array, Array]]:
        rows, (weight, number) = block
        key_rows, key_weight, key_number = piece
        logits = _logits(rows, key_rows, key_weight > 0, temperature, bias)
        if columns:
            of_valid = jnp.where(weight[:, None, None] > 0, logits, NEVER)
            column = jnp.logaddexp(column, jax.nn.logsumexp(of_valid, axis=(0, 1)))
        partner = _of_partner(logits, number[:, None] == key_number[None])
        return column, (jax.nn.logsumexp(logits, axis=-1), partner)

    def of_piece(piece: Any, column: Array) -> tuple[Array, tuple[Array, Array]]:
        return blocks.scan_examples(
            lambda column, block: of_block(column, block, piece),
            column,
            (rows, (queries.weight, numbers)),
            exchange.examples_per_block(rows),
        )

    piece = (key_rows, keys.weight, numbers)
    if exchange.form != "ring":
        piece = exchange.gather(piece)
        column, (row, partner) = of_piece(piece, jnp.full(piece[1].shape, NEVER))
        if exchange.axes:
            column = jax.nn.logsumexp(jax.lax.all_gather(column, exchange.axes), axis=0)[numbers]
        return _Statistics(row, partner, column)

    def step(carry: Any, _: None) -> tuple[Any, None]:
        piece, column, row, partner = carry
        column, (more, found) = of_piece(piece, column)
        piece, column = exchange.rotate((piece, column))
        return (piece, column, jnp.logaddexp(row, more), partner + found), None

    nothing = jnp.zeros((rows.samples.shape[0], rows.num_samples))
    start = (piece, jnp.full(keys.weight.shape, NEVER), nothing - jnp.inf, nothing)
    (_, column, row, partner), _ = jax.lax.scan(step, start, length=exchange.num_devices)
    return _Statistics(row, partner, column)


def _softmax_of_statistics(
    rows: Queries,
    queries: Side,
    keys: Side,
    temperature: Float[Array, ""],
    bias: Float[Array, ""],
    exchange: Exchange,
    statistics: _Statistics,
    *,
    both: bool,
) -> Float[Array, ""]:
    """Returns the softmax loss for known normalisers: its gradient is a product of logits with what they weigh.

    ``∂ loss / ∂ logit_snm = w_n share_sn (p_snm - [n = m])``, where ``share`` is what sample s has of ``Σ_s p_snn``.
    The other direction adds ``w_m (p'_nm - [n = m])``.
    """
    log_p = statistics.partner - statistics.row
    value = -jnp.sum(queries.weight * jax.nn.logmeanexp(log_p, axis=1))
    if both:
        value = (value + jnp.sum(keys.weight * (statistics.column - statistics.partner[:, 0]))) / 2
    of_sample = queries.weight[:, None] * jax.nn.softmax(log_p, axis=1)

    def of_block(rows: Queries, constants: Any, keys: Array, key_constants: Any) -> Float[Array, ""]:
        weight, number, normaliser = constants
        key_weight, key_number, column = key_constants
        logits = _logits(rows, keys, key_weight > 0, temperature, bias)
        is_partner = number[:, None] == key_number[None]
        slope = weight[:, :, None] * (jnp.exp(logits - normaliser[:, :, None]) - is_partner[:, None])
        if both:
            # An invalid query is not in the column's sum: its logit may be any amount larger.
            log_share = jnp.where(weight[:, :, None] > 0, logits - column[None, None], NEVER)
            other = jnp.exp(log_share) - is_partner[:, None]
            slope = (slope + key_weight[None, None] * other) / 2
        return jnp.sum(jax.lax.stop_gradient(slope) * logits)

    numbers = exchange.numbers(keys.weight.shape[0])
    constants = (of_sample, numbers, statistics.row)
    slopes = _pair_sum(of_block, rows, constants, keys.keys, (keys.weight, numbers, statistics.column), exchange)
    return value + (slopes - jax.lax.stop_gradient(slopes))  # the bracket is 0 and has the gradient


def _logits(
    rows: Queries,
    keys: Float[Array, "m d"],
    valid: Bool[Array, " m"],
    temperature: Float[Array, ""],
    bias: Float[Array, ""],
) -> Float[Array, "n s m"]:
    return jnp.where(valid[None, None], rows.products(keys) / temperature + bias, NEVER)


def _of_partner(logits: Float[Array, "n s m"], is_partner: Bool[Array, "n m"]) -> Float[Array, "n s"]:
    """Returns each query's logit with its partner, 0 where the partner is not among the keys."""
    return jnp.sum(logits, axis=-1, where=is_partner[:, None])


PairFunction: TypeAlias = Callable[[Queries, Any, Float[Array, "m d"], Any], Float[Array, ""]]


def _pair_sum(
    function: PairFunction,
    rows: Queries,
    constants: Any,
    keys: Float[Array, "n d"],
    key_constants: Any,
    exchange: Exchange,
) -> Float[Array, ""]:
    """Returns the sum of ``function(rows, constants, keys, key constants)`` over all pairs."""

    def of_piece(rows: Queries, keys: Array, constants: Any, key_constants: Any) -> Float[Array, ""]:
        return blocks.sum_over_examples(
            lambda rows, constants, key_constants: (function(rows, constants, keys, key_constants), None),
            rows,
            constants,
            exchange.examples_per_block(rows),
            key_constants,
        )[0]

    if exchange.form != "ring":
        keys, key_constants = exchange.gather((keys, key_constants))
        return of_piece(rows, keys, constants, key_constants)
    of_piece, shared = jax.closure_convert(of_piece, rows, keys, constants, key_constants)
    return _ring_sum((of_piece, exchange), shared, rows, keys, constants, key_constants)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_sum(plan: Any, shared: list, rows: Queries, keys: Array, constants: Any, key_constants: Any) -> Array:
    of_piece, exchange = plan

    def step(carry: Any, _: None) -> tuple[Any, None]:
        total, keys, key_constants = carry
        total = total + of_piece(rows, keys, constants, key_constants, *shared)
        return (total, *exchange.rotate((keys, key_constants))), None

    start = (jnp.zeros(()), keys, key_constants)
    return jax.lax.scan(step, start, length=exchange.num_devices)[0][0]


def _ring_sum_forward(
    plan: Any, shared: list, rows: Queries, keys: Array, constants: Any, key_constants: Any
) -> tuple[Array, Any]:
    of_piece, exchange = plan

    def step(carry: Any, _: None) -> tuple[Any, None]:
        sums, keys, of_keys, key_constants = carry

        def value(shared: list, rows: Queries, keys: Array) -> Array:
            return of_piece(rows, keys, constants, key_constants, *shared)

        value, (of_shared, of_rows, of_piece_keys) = jax.value_and_grad(value, argnums=(0, 1, 2))(shared, rows, keys)
        sums = jax.tree.map(jnp.add, sums, (value, of_shared, of_rows))
        return (sums, *exchange.rotate((keys, of_keys + of_piece_keys, key_constants))), None

    zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), shared, rows))
    start = (zeros, keys, jnp.zeros_like(keys), key_constants)
    ((value, *of_shared_and_rows), _, of_keys, _), _ = jax.lax.scan(step, start, length=exchange.num_devices)
    return value, (*of_shared_and_rows, of_keys)


def _ring_sum_backward(plan: Any, gradients: Any, cotangent: Array) -> Any:
    return (*jax.tree.map(lambda gradient: cotangent * gradient, gradients), None, None)


_ring_sum.defvjp(_ring_sum_forward, _ring_sum_backward)
