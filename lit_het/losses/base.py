"""Means over the valid rows of a batch."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_mean(values: Float[Array, " b"], valid: Bool[Array, " b"]) -> Float[Array, ""]:
    """Returns the mean over valid examples, 0 without any."""
    # `where`, as the value of an invalid row may be NaN, which a weight of 0 would not remove.
    return jnp.sum(values * weights(valid), where=valid)


def weights(valid: Bool[Array, " b"]) -> Float[Array, " b"]:
    """Returns the weight of each example in the mean over valid examples; 0 for invalid ones."""
    # At least 1: a batch without valid examples has the loss 0, not NaN.
    return valid / jnp.maximum(jnp.sum(valid), 1)
