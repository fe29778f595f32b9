"""The ring: chunks of keys travel from device to device, so that no device ever holds the keys of all.

After as many steps as there are devices every query has met every key, and each chunk is back on its own device, with
the gradient that it has collected on the way.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lit_het.types import Queries


def num_devices(axes: tuple[str, ...]) -> int:
    """Returns how many devices share the batch."""
    return jax.lax.axis_size(axes) if axes else 1


def rotate(tree: Any, axes: tuple[str, ...]) -> Any:
    """Passes a tree to the next device and receives that of the previous one."""
    if not axes:
        return tree
    n = num_devices(axes)
    # Only neighbours in the mesh exchange chunks, and all links are used at the same time.
    steps = [(i, (i + 1) % n) for i in range(n)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axes, steps), tree)


def sum_over_devices(
    chunk_sum: Callable[..., Float[Array, ""]],
    axes: tuple[str, ...],
    queries: Queries,
    keys: Float[Array, "n d"],
    query_constants: Any,
    key_constants: Any,
) -> Float[Array, ""]:
    """Returns the sum of ``chunk_sum`` over this device's queries and the chunks of keys of all devices.

    Args:
        chunk_sum: ``(queries, keys, query constants, key constants)`` to a scalar.
        axes: mesh axes that split the batch.
        queries: this device's, differentiated.
        keys: this device's, differentiated.
        query_constants: a tree with a row per query, not differentiated.
        key_constants: a tree with a row per key, not differentiated.
    """
    # Differentiated arrays that chunk_sum closes over (τ, bias) become arguments: custom_vjp sees no closures.
    chunk_sum, closed_over = jax.closure_convert(chunk_sum, queries, keys, query_constants, key_constants)
    return _ring_sum((chunk_sum, axes), closed_over, queries, keys, query_constants, key_constants)


# A derivative of its own, as that of the scan would save every chunk of keys: all of them, on every device.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_sum(
    static: tuple, closed_over: list, queries: Queries, keys: Array, query_constants: Any, key_constants: Any
) -> Float[Array, ""]:
    chunk_sum, axes = static

    def step(carry: Any, _: None) -> tuple[Any, None]:
        total, keys, key_constants = carry
        total = total + chunk_sum(queries, keys, query_constants, key_constants, *closed_over)
        return (total, *rotate((keys, key_constants), axes)), None

    start = (jnp.zeros(()), keys, key_constants)
    return jax.lax.scan(step, start, length=num_devices(axes))[0][0]


def _ring_sum_forward(
    static: tuple, closed_over: list, queries: Queries, keys: Array, query_constants: Any, key_constants: Any
) -> tuple[Float[Array, ""], Any]:
    """Takes gradients together with values, so that keys travel one round, not one more for the backward pass."""
    chunk_sum, axes = static

    def step(carry: Any, _: None) -> tuple[Any, None]:
        sums, keys, key_gradient, key_constants = carry

        def value(closed_over: list, queries: Queries, keys: Array) -> Array:
            return chunk_sum(queries, keys, query_constants, key_constants, *closed_over)

        value_and_grad = jax.value_and_grad(value, argnums=(0, 1, 2))
        total, (closed_over_gradient, query_gradient, chunk_gradient) = value_and_grad(closed_over, queries, keys)
        sums = jax.tree.map(jnp.add, sums, (total, closed_over_gradient, query_gradient))
        # The gradient travels with its chunk, and every device adds its part.
        return (sums, *rotate((keys, key_gradient + chunk_gradient, key_constants), axes)), None

    zeros = jax.tree.map(jnp.zeros_like, (jnp.zeros(()), closed_over, queries))
    start = (zeros, keys, jnp.zeros_like(keys), key_constants)
    ((total, *gradients), _, key_gradient, _), _ = jax.lax.scan(step, start, length=num_devices(axes))
    return total, (*gradients, key_gradient)


def _ring_sum_backward(static: tuple, gradients: Any, cotangent: Float[Array, ""]) -> Any:
    return (*jax.tree.map(lambda gradient: cotangent * gradient, gradients), None, None)


_ring_sum.defvjp(_ring_sum_forward, _ring_sum_backward)
