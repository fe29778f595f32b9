"""Means over the valid rows of a batch."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# Of a valid row in a mean; losses of 1e10 are still negligible beside it.
_LEAST_WEIGHT = 1e-30


def masked_mean(values: Float[Array, " b"], valid: Bool[Array, " b"]) -> Float[Array, ""]:
    """Returns the mean over valid examples, 0 without any."""
    # `where`, as the value of an invalid row may be NaN, which a weight of 0 would not remove.
    return jnp.sum(values * weights(valid), where=valid)


def finite(embedding: Float[Array, "b d"], valid: Bool[Array, " b"]) -> Float[Array, "b d"]:
    """Returns embeddings with ones in invalid rows, where NaN would make gradients NaN even with a weight of 0."""
    return jnp.where(valid[:, None], embedding, 1.0)


def weights(valid: Bool[Array, " b"], weight: Float[Array, " b"] | None = None) -> Float[Array, " b"]:
    """Returns the share of each example in the mean over valid examples: above 0 for these, and 0 for others.

    With weights w it is ``w / Σ w`` over valid examples: a weighted mean, as scikit-learn and big_vision compute it.
    Divided by their number, as in Keras, the loss would be smaller wherever a batch has many small weights.

    Args:
        valid: which examples count.
        weight: at least 0; None for equal weights.
    """
    if weight is None:
        # At least 1: a batch without valid examples has the loss 0, not NaN.
        return valid / jnp.maximum(jnp.sum(valid), 1)
    total = jnp.sum(weight, where=valid)
    # Never 0 for a valid example: it stays a key of the others, where contrastive losses leave out those of weight 0.
    return jnp.where(valid, jnp.maximum(weight / jnp.where(total > 0, total, 1.0), _LEAST_WEIGHT), 0.0)
