"""Sums over blocks of examples and means over blocks of samples, in memory that does not grow with either.

Gradients are taken block by block, so that no block's intermediate values outlive it. The functions may close over
differentiated float arrays; random keys, labels and masks must be arguments, ``constants`` or ``context``.
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

# Blocks have equal sizes, so a block may be smaller than requested. Below 1/4 of the requested size the computation
# would be so slow that an error is better.
MAX_BLOCK_SHRINKAGE = 4

# (rows, constants, context) to (scalar to differentiate, tree of sums without a gradient).
BlockFunction: TypeAlias = Callable[[Any, Any, Any], tuple[Float[Array, ""], Any]]


def sum_over_examples(
    function: BlockFunction, rows: Any, constants: Any, examples_per_block: int, context: Any = None
) -> tuple[Float[Array, ""], Any]:
    """Returns the sum of ``function`` over blocks of examples.

    The forward pass computes the gradient together with the value, so that the backward pass recomputes nothing.

    Args:
        function: ``(rows, constants, context)`` of one block to a scalar and a tree of sums without a gradient.
        rows: a tree of float arrays with a leading example axis, differentiated.
        constants: a tree with the same leading axis, not differentiated.
        examples_per_block: maximum number of examples per block on each device.
        context: a tree that every block receives whole, not differentiated.
    """
    if (size := _block_size(rows, examples_per_block)) is None:
        return function(rows, constants, context)
    rows, constants = _split((rows, constants), size)
    # Differentiated arrays that the function closes over become arguments: custom_vjp cannot differentiate closures.
    function, shared = jax.closure_convert(function, *_first((rows, constants)), context)
    return _block_sum(function, shared, rows, constants, context)


def scan_examples(
    function: Callable[[Any, Any], tuple[Any, Any]], carry: Any, rows: Any, examples_per_block: int
) -> tuple[Any, Any]:
    """Scans over blocks of examples like `jax.lax.scan`, and joins the blocks' results; no custom gradient.

    Args:
        function: ``(carry, rows)`` of one block to the next carry and a tree with a leading example axis.
        carry: the initial carry.
        rows: all examples.
        examples_per_block: maximum number of examples per block on each device.
    """
    if (size := _block_size(rows, examples_per_block)) is None:
        return function(carry, rows)
    # Blocks take every n-th example (see `_split`): the swap restores the order.
    carry, results = jax.lax.scan(function, carry, _split(rows, size))
    return carry, jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), results)


def log_mean_over_samples(
    function: Callable[[Any, Any, Int[Array, " t"]], tuple[Float[Array, "n t *rest"], Float[Array, "n t"]]],
    common: Any,
    constants: Any,
    num_samples: int,
    samples_per_block: int,
) -> tuple[Float[Array, "n *rest"], Float[Array, " n"]]:
    """Returns ``log (1/S Σ_s p_s)`` and the mean of a metric over samples, which has no gradient.

    A running log-sum-exp joins the blocks; the backward pass recomputes each block.

    Args:
        function: ``(common, constants, indices of t samples)`` to ``log p`` and the metric of each sample.
        common: a tree of float arrays, differentiated.
        constants: a tree, not differentiated.
        num_samples: S.
        samples_per_block: maximum number of samples per block.
    """
    num_blocks = -(-num_samples // samples_per_block)
    # Equal blocks; samples of the last block beyond S are masked.
    size = -(-num_samples // num_blocks)
    if num_blocks == 1:
        log_p, figure = function(common, constants, jnp.arange(num_samples))
        return jax.nn.logsumexp(log_p, axis=1) - math.log(num_samples), jnp.mean(figure, axis=1)
    function, shared = jax.closure_convert(function, common, constants, jnp.arange(size))
    return _running_log_mean((function, num_samples, num_blocks, size), shared, common, constants)


# A custom gradient, as that of a scan would save the intermediate values of all blocks at the same time.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _block_sum(function: Callable, shared: list, rows: Any, constants: Any, context: Any) -> Any:
    def add(total: Any, block: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(*block, context, *shared)), None

    zeros = _zeros(lambda: function(*_first((rows, constants)), context, *shared))
    return jax.lax.scan(add, zeros, (rows, constants))[0]


def _block_sum_forward(function: Callable, shared: list, rows: Any, constants: Any, context: Any) -> tuple[Any, Any]:
    def value_and_grad(block: Any) -> tuple[Any, Any]:
        rows, constants = block

        def value(shared: list, rows: Any) -> Any:
            return function(rows, constants, context, *shared)

        # A block's gradient is taken here, while its intermediate values exist. The scan retains one sum, and the
        # gradients of the rows.
        return jax.value_and_grad(value, argnums=(0, 1), has_aux=True)(shared, rows)

    def add(total: Any, block: Any) -> tuple[Any, Any]:
        sums, (shared_gradient, row_gradient) = value_and_grad(block)
        # Gradients of shared arrays are summed over blocks; those of rows are stacked, as each row is in one block.
        return jax.tree.map(jnp.add, total, (sums, shared_gradient)), row_gradient

    # Sums start from zeros of the result's shapes, which are traced and not computed.
    sums, (shared_gradient, _) = _zeros(lambda: value_and_grad(_first((rows, constants))))
    total: Any = (sums, shared_gradient)
    (sums, shared_gradient), row_gradient = jax.lax.scan(add, total, (rows, constants))
    return sums, (shared_gradient, row_gradient)


def _block_sum_backward(function: Callable, gradients: Any, cotangent: Any) -> tuple[Any, Any, None, None]:
    # The result is a scalar: its chain rule is a product with the saved gradient.
    shared_gradient, row_gradient = jax.tree.map(lambda gradient: cotangent[0] * gradient, gradients)
    return shared_gradient, row_gradient, None, None


_block_sum.defvjp(_block_sum_forward, _block_sum_backward)


# A custom gradient, as that of a scan would save log p and what led to it for all samples.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _running_log_mean(plan: tuple, shared: list, common: Any, constants: Any) -> Any:
    function, num_samples, num_blocks, size = plan

    def add(running: Any, block: Int[Array, ""]) -> tuple[Any, None]:
        log_sum, total = running
        log_p, metric, is_sample = _block_samples(plan, block, shared, common, constants)
        # Sums stay in the logarithm: probabilities of many classes round to zero in float32.
        log_sum = jnp.logaddexp(log_sum, jax.nn.logsumexp(log_p, axis=1))
        return (log_sum, total + jnp.sum(jnp.where(is_sample[None], metric, 0.0), axis=1)), None

    # Only shapes are needed: `eval_shape` traces the function and computes nothing.
    shapes = jax.eval_shape(lambda: function(common, constants, jnp.arange(size), *shared))
    log_p, metric = (jnp.zeros((shape.shape[0], *shape.shape[2:]), shape.dtype) for shape in shapes)
    (log_sum, total), _ = jax.lax.scan(add, (jnp.full_like(log_p, -jnp.inf), metric), jnp.arange(num_blocks))
    return log_sum - math.log(num_samples), total / num_samples


def _running_log_mean_forward(plan: tuple, shared: list, common: Any, constants: Any) -> tuple[Any, Any]:
    result: Any = _running_log_mean(plan, shared, common, constants)
    return result, (shared, common, constants, result[0])


def _running_log_mean_backward(plan: tuple, residuals: Any, cotangent: Any) -> tuple[Any, Any, None]:
    """Weights every sample by its share of the probability: ``∂ log(1/S Σ p) / ∂ log p_s = p_s / Σ p``."""
    shared, common, constants, log_mean = residuals
    _, num_samples, num_blocks, _ = plan

    def add(total: Any, block: Int[Array, ""]) -> tuple[Any, None]:
        def log_probability(shared: list, common: Any) -> Array:
            return _block_samples(plan, block, shared, common, constants)[0]

        log_p, pull_back = jax.vjp(log_probability, shared, common)
        # At most 1, as log p never exceeds the log of the sum: the exponential cannot overflow.
        share = jnp.exp(log_p - (log_mean + math.log(num_samples))[:, None])
        return jax.tree.map(jnp.add, total, pull_back(cotangent[0][:, None] * share)), None

    zeros = jax.tree.map(jnp.zeros_like, (shared, common))
    shared_gradient, common_gradient = jax.lax.scan(add, zeros, jnp.arange(num_blocks))[0]
    return shared_gradient, common_gradient, None


_running_log_mean.defvjp(_running_log_mean_forward, _running_log_mean_backward)


def _block_samples(plan: tuple, block: Int[Array, ""], shared: list, common: Any, constants: Any) -> Any:
    """Returns log p and the metric of a block's samples, and which of them are among the S."""
    function, num_samples, _, size = plan
    indices = block * size + jnp.arange(size)
    is_sample = indices < num_samples
    log_p, metric = function(common, constants, indices, *shared)
    shape = (1, size, *(1,) * (log_p.ndim - 2))
    return jnp.where(is_sample.reshape(shape), log_p, -jnp.inf), metric, is_sample


def _block_size(rows: Any, examples_per_block: int) -> int | None:
    """Returns the number of examples of a block over all devices, or None if one block holds all examples.

    Raises:
        UserError: the number of examples has no divisor near ``examples_per_block``.
    """
    num_examples = jax.tree.leaves(rows)[0].shape[0]
    devices = sharding.num_automatic_shards()
    if num_examples % devices:
        # `sharding.as_batch` does not split these rows either.
        devices = 1
    per_device = num_examples // devices
    largest = min(per_device, examples_per_block)
    size = largest_divisor(per_device, largest)
    if MAX_BLOCK_SHRINKAGE * size < largest:
        better = devices * (per_device // largest + 1) * largest
        raise UserError(
            f"{per_device} examples per device can only be divided into blocks of {size}, although {largest} fit, "
            f"which is slow; choose a batch size with more divisors, for example {better}"
        )
    return None if size == per_device else devices * size


def _split(tree: Any, size: int) -> Any:
    """Returns ``[blocks size ...]`` for ``[examples ...]``."""
    # A block takes every n-th example, not neighbours: then it has equal parts of every device's rows, and no row
    # moves between devices.
    return jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]).swapaxes(0, 1), tree)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _zeros(function: Callable[[], Any]) -> Any:
    """Returns zeros of the shapes that ``function`` would return."""
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), jax.eval_shape(function))


def largest_divisor(number: int, at_most: int) -> int:
    """Returns the largest divisor of ``number`` that is at most ``at_most``."""
    return next(divisor for divisor in range(min(number, at_most), 0, -1) if number % divisor == 0)
