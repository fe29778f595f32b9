"""Sums over blocks of examples and means over blocks of samples, in memory that does not grow with either.

A gradient is taken block by block, so that no block's intermediate values outlive it. The functions that are summed may
close over arrays of floats, whose gradients are right too; keys, labels and masks are given as ``constants`` or as
``context``.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lit_het import sharding
from lit_het.errors import UserError

# Blocks of equal size may leave so much of their room unused before they count as slow.
MOST_ROOM_LEFT = 4

# (rows, constants) of n examples and the context to a scalar to differentiate and to further sums.
BlockFunction: TypeAlias = Callable[[Any, Any, Any], tuple[Float[Array, ""], Any]]


def sum_over_examples(
    function: BlockFunction, rows: Any, constants: Any, examples_per_block: int, context: Any = None
) -> tuple[Float[Array, ""], Any]:
    """Returns the sum of ``function`` over blocks of examples.

    The gradient is taken together with the value: a block is computed once, not once more going backward.

    Args:
        function: ``(rows, constants, context)`` of some examples to a scalar and to a tree of sums without a gradient.
        rows: a tree of float arrays with a leading example axis, differentiated.
        constants: a tree with the same leading axis, not differentiated.
        examples_per_block: at most so many examples a device at a time.
        context: a tree that every block sees whole, not differentiated.
    """
    if (size := _block_size(rows, examples_per_block)) is None:
        return function(rows, constants, context)
    rows, constants = _split((rows, constants), size)
    function, shared = jax.closure_convert(function, *_first((rows, constants)), context)
    return _block_sum(function, shared, rows, constants, context)


def scan_examples(
    function: Callable[[Any, Any], tuple[Any, Any]], carry: Any, rows: Any, examples_per_block: int
) -> tuple[Any, Any]:
    """Carries something through all examples, block by block, as `jax.lax.scan`; without a gradient of its own.

    Args:
        function: ``(carry, rows)`` to the next carry and to a tree with a leading example axis.
        carry: at the start.
        rows: all examples.
        examples_per_block: at most so many examples a device at a time.
    """
    if (size := _block_size(rows, examples_per_block)) is None:
        return function(carry, rows)
    carry, results = jax.lax.scan(function, carry, _split(rows, size))
    return carry, jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), results)


def log_mean_over_samples(
    function: Callable[[Any, Any, Int[Array, " t"]], tuple[Float[Array, "n t *rest"], Float[Array, "n t"]]],
    common: Any,
    constants: Any,
    num_samples: int,
    samples_per_block: int,
) -> tuple[Float[Array, "n *rest"], Float[Array, " n"]]:
    """Returns ``log (1/S Σ_s p_s)`` and the mean of a second figure, which has no gradient.

    Several blocks are joined by a running log-sum-exp; the backward pass computes each block anew.

    Args:
        function: ``(common, constants, numbers of t samples)`` to ``log p`` and the second figure of each sample.
        common: a tree of float arrays, differentiated.
        constants: a tree, not differentiated.
        num_samples: S.
        samples_per_block: at most so many samples at a time.
    """
    num_blocks = -(-num_samples // samples_per_block)
    size = -(-num_samples // num_blocks)
    if num_blocks == 1:
        log_p, figure = function(common, constants, jnp.arange(num_samples))
        return jax.nn.logsumexp(log_p, axis=1) - math.log(num_samples), jnp.mean(figure, axis=1)
    function, shared = jax.closure_convert(function, common, constants, jnp.arange(size))
    return _running_log_mean((function, num_samples, num_blocks, size), shared, common, constants)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block_sum(function: Callable, shared: list, rows: Any, constants: Any, context: Any) -> Any:
    def add(total: Any, block: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(*block, context, *shared)), None

    zeros = _zeros(lambda: function(*_first((rows, constants)), context, *shared))
    return jax.lax.scan(add, zeros, (rows, constants))[0]


def _block_sum_forward(function: Callable, shared: list, rows: Any, constants: Any, context: Any) -> tuple[Any, Any]:
    def value_and_grad(block: Any) -> tuple[Any, Any]:
        def of(shared: list, rows: Any) -> Any:
            return function(rows, block[1], context, *shared)

        return jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(shared, block[0])

    def add(total: Any, block: Any) -> tuple[Any, Any]:
        sums, (of_shared, of_rows) = value_and_grad(block)
        return jax.tree.map(jnp.add, total, (sums, of_shared)), of_rows

    sums, (of_shared, _) = _zeros(lambda: value_and_grad(_first((rows, constants))))
    total: Any = (sums, of_shared)
    (sums, of_shared), of_rows = jax.lax.scan(add, total, (rows, constants))
    return sums, (of_shared, of_rows)


def _block_sum_backward(function: Callable, gradients: Any, cotangent: Any) -> tuple[Any, Any, None, None]:
    of_shared, of_rows = jax.tree.map(lambda gradient: cotangent[0] * gradient, gradients)
    return of_shared, of_rows, None, None


_block_sum.defvjp(_block_sum_forward, _block_sum_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _running_log_mean(plan: tuple, shared: list, common: Any, constants: Any) -> Any:
    function, num_samples, num_blocks, size = plan

    def add(running: Any, block: Int[Array, ""]) -> tuple[Any, None]:
        log_sum, total = running
        log_p, figure, present = _samples_of_block(plan, block, shared, common, constants)
        log_sum = jnp.logaddexp(log_sum, jax.nn.logsumexp(log_p, axis=1))
        return (log_sum, total + jnp.sum(jnp.where(present[None], figure, 0.0), axis=1)), None

    shapes = jax.eval_shape(lambda: function(common, constants, jnp.arange(size), *shared))
    log_p, figure = (jnp.zeros((shape.shape[0], *shape.shape[2:]), shape.dtype) for shape in shapes)
    (log_sum, total), _ = jax.lax.scan(add, (jnp.full_like(log_p, -jnp.inf), figure), jnp.arange(num_blocks))
    return log_sum - math.log(num_samples), total / num_samples


def _running_log_mean_forward(plan: tuple, shared: list, common: Any, constants: Any) -> tuple[Any, Any]:
    result: Any = _running_log_mean(plan, shared, common, constants)
    return result, (shared, common, constants, result[0])


def _running_log_mean_backward(plan: tuple, residuals: Any, cotangent: Any) -> tuple[Any, Any, None]:
    """Weighs every sample by its share of the probability: ``∂ log(1/S Σ p) / ∂ log p_s = p_s / Σ p``."""
    shared, common, constants, log_mean = residuals
    _, num_samples, num_blocks, _ = plan

    def add(total: Any, block: Int[Array, ""]) -> tuple[Any, None]:
        def log_probability(shared: list, common: Any) -> Array:
            return _samples_of_block(plan, block, shared, common, constants)[0]

        log_p, pull_back = jax.vjp(log_probability, shared, common)
        share = jnp.exp(log_p - (log_mean + math.log(num_samples))[:, None])
        return jax.tree.map(jnp.add, total, pull_back(cotangent[0][:, None] * share)), None

    zeros = jax.tree.map(jnp.zeros_like, (shared, common))
    of_shared, of_common = jax.lax.scan(add, zeros, jnp.arange(num_blocks))[0]
    return of_shared, of_common, None


_running_log_mean.defvjp(_running_log_mean_forward, _running_log_mean_backward)


def _samples_of_block(plan: tuple, block: Int[Array, ""], shared: list, common: Any, constants: Any) -> Any:
    """Returns log p and the figure of a block's samples, and which of them are among the S."""
    function, num_samples, _, size = plan
    numbers = block * size + jnp.arange(size)
    present = numbers < num_samples
    log_p, figure = function(common, constants, numbers, *shared)
    shape = (1, size, *(1,) * (log_p.ndim - 2))
    return jnp.where(present.reshape(shape), log_p, -jnp.inf), figure, present


def _block_size(rows: Any, examples_per_block: int) -> int | None:
    """Returns how many examples of all devices make a block that divides them evenly, or None if all do.

    Raises:
        UserError: a number of examples whose divisors would make far smaller blocks than there is room for.
    """
    num_examples = jax.tree.leaves(rows)[0].shape[0]
    shares = sharding.num_automatic_shares()
    if num_examples % shares:
        shares = 1
    share = num_examples // shares
    room = min(share, examples_per_block)
    size = largest_divisor(share, room)
    if MOST_ROOM_LEFT * size < room:
        raise UserError(
            f"{share} examples on a device can only be computed {size} at a time where there is room for {room}, "
            f"which is slow; take a batch size with more divisors, for example {shares * (share // room + 1) * room}"
        )
    return None if size == share else shares * size


def _split(tree: Any, size: int) -> Any:
    """Returns ``[blocks size ...]``; a block takes examples at equal distances, so that devices keep their own."""
    return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]).swapaxes(0, 1), tree)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _zeros(function: Callable[[], Any]) -> Any:
    """Returns zeros of the shapes that ``function`` would return."""
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), jax.eval_shape(function))


def largest_divisor(number: int, at_most: int) -> int:
    """Returns the largest divisor of a number that is at most so large."""
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)
