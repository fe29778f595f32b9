"""Contrastive losses over one batch, both directions, with noisy queries and noiseless keys (HET-XL Sec. 5.2).

Rows that are not valid are neither queries nor keys.
"""

import dataclasses
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from lit_het.losses.base import log_mean_probability, masked_mean
from lit_het.types import EmbeddingSamples


@dataclasses.dataclass(frozen=True)
class SoftmaxLoss:
    """``-log p`` of the right partner among the batch, half the sum of both directions.

    ``p(b_n|a_n) = 1/S Σ_s softmax_i(β_i · (α_n + ε_s(a_n)) / τ)_n``, and with α and β exchanged for ``p(a_n|b_n)``.
    """

    def __call__(self, samples: EmbeddingSamples, valid: Bool[Array, " b"]) -> Float[Array, ""]:
        """Returns the mean loss over valid rows."""

        def direction(queries: Float[Array, "s b d"], keys: Float[Array, "b d"]) -> Float[Array, ""]:
            logits = _logits(queries, keys, samples)
            logits = jnp.where(valid[None, None, :], logits, -jnp.inf)
            # An invalid row keeps its own partner, so that its unused loss and gradient stay finite.
            logits = jnp.where(jnp.eye(keys.shape[0], dtype=bool)[None] & ~valid[None, None, :], 0.0, logits)
            of_partner = jnp.diagonal(jax.nn.log_softmax(logits), axis1=1, axis2=2)
            return masked_mean(-log_mean_probability(of_partner), valid)

        return (direction(samples.image_queries, samples.text) + direction(samples.text_queries, samples.image)) / 2


@dataclasses.dataclass(frozen=True)
class SigmoidLoss:
    """``-log σ(z_ij (logit_ij + bias))``, z = 1 for partners and -1 otherwise (SigLIP; SoViT Table 7).

    Each query's terms are summed over keys and averaged over queries; with noise σ is averaged over samples.
    The loss is half the sum of both directions, which agree when there is no noise.
    """

    def __call__(self, samples: EmbeddingSamples, valid: Bool[Array, " b"]) -> Float[Array, ""]:
        """Returns the mean loss over valid rows."""

        def direction(queries: Float[Array, "s b d"], keys: Float[Array, "b d"]) -> Float[Array, ""]:
            logits = _logits(queries, keys, samples)
            sign = 2.0 * jnp.eye(keys.shape[0]) - 1.0
            terms = -log_mean_probability(jax.nn.log_sigmoid(sign[None] * logits))
            return masked_mean(jnp.sum(jnp.where(valid[None, :], terms, 0.0), axis=1), valid)

        return (direction(samples.image_queries, samples.text) + direction(samples.text_queries, samples.image)) / 2


ContrastiveLoss: TypeAlias = SoftmaxLoss | SigmoidLoss


def _logits(
    queries: Float[Array, "s b d"], keys: Float[Array, "b d"], samples: EmbeddingSamples
) -> Float[Array, "s b b"]:
    logits = jnp.einsum("sqd,kd->sqk", queries, keys) / samples.temperature
    return logits if samples.bias is None else logits + samples.bias
