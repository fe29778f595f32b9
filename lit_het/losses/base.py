"""What every loss does with invalid rows."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_mean(values: Float[Array, " b"], valid: Bool[Array, " b"]) -> Float[Array, ""]:
    """Returns the mean over valid examples; 0 if there is none."""
    return jnp.sum(values * weights(valid), where=valid)


def weights(valid: Bool[Array, " b"]) -> Float[Array, " b"]:
    """Returns what each example counts in a mean over valid ones."""
    return valid / jnp.maximum(jnp.sum(valid), 1)
