"""What every loss does with noise samples and with invalid rows."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def log_mean_probability(log_probabilities: Float[Array, "s *rest"]) -> Float[Array, "*rest"]:
    """Returns ``log (1/S Σ_s p_s)`` from the logs of the samples' probabilities (HET-XL Sec. 2.1)."""
    return jax.nn.logsumexp(log_probabilities, axis=0) - math.log(log_probabilities.shape[0])


def masked_mean(values: Float[Array, " b"], valid: Bool[Array, " b"]) -> Float[Array, ""]:
    """Returns the mean over valid examples; 0 if there is none."""
    return jnp.sum(jnp.where(valid, values, 0.0)) / jnp.maximum(jnp.sum(valid), 1)
