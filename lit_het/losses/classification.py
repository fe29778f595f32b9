"""Classification losses on noise samples: minus the log of the mean probability (HET-XL Eq. 2, Sec. 2.1)."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from lit_het.losses.base import log_mean_probability


def softmax_cross_entropy(logits: Float[Array, "s b k"], label: Int[Array, " b"]) -> Float[Array, " b"]:
    """Returns ``-log (1/S Σ_s softmax(u_s)[y])`` per example."""
    of_label = jnp.take_along_axis(jax.nn.log_softmax(logits), label[None, :, None], axis=-1)[..., 0]
    return -log_mean_probability(of_label)


def sigmoid_cross_entropy(logits: Float[Array, "s b k"], target: Float[Array, "b k"]) -> Float[Array, " b"]:
    """Returns the binary cross-entropy of the mean probabilities ``1/S Σ_s σ(u_s)``, summed over classes."""
    log_yes = log_mean_probability(jax.nn.log_sigmoid(logits))
    log_no = log_mean_probability(jax.nn.log_sigmoid(-logits))
    return -jnp.sum(target * log_yes + (1 - target) * log_no, axis=-1)
