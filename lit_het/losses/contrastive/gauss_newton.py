"""Gauss-Newton Hessians of the contrastive losses with respect to the embeddings of one side, summed over a batch.

With logits ``u_nm = g_n · k_m / (|g_n| τ) + bias`` and unit keys k, the Jacobian of ``u_n`` at a unit embedding g is
``K J / τ`` with ``J = I - g gᵀ``. The Hessian of the loss with respect to the logits is ``diag p - p pᵀ`` (softmax), or
diagonal with ``s (1 - s)``, ``s = σ(u)`` (sigmoid). So an example adds ``J M_n J / τ²`` with a weighted covariance M of
the keys (BayesVLM). The sum is computed from products of whole matrices, without a matrix per example::

    Σ_n J_n M_n J_n = Σ_n M_n - Gᵀ C - Cᵀ G + Gᵀ diag(g_n · c_n) G,    c_n = M_n g_n
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def softmax_hessian(
    queries: Float[Array, "b d"],
    keys: Float[Array, "k d"],
    counted: Float[Array, " b"],
    temperature: Float[Array, ""],
) -> Float[Array, "d d"]:
    """Returns the sum for one direction of the softmax loss, with all keys as candidates.

    Args:
        queries: unit embeddings of the side of the Hessian.
        keys: unit embeddings of the other side.
        counted: 1 for each query that counts, 0 for padding.
        temperature: τ.
    """
    cosines = queries @ keys.T
    p = jax.nn.softmax(cosines / temperature, axis=1) * counted[:, None]
    return _projected(queries, keys, cosines, p, p @ keys) / temperature**2


def sigmoid_hessian(
    queries: Float[Array, "b d"],
    keys: Float[Array, "k d"],
    counted: Float[Array, " b"],
    temperature: Float[Array, ""],
    bias: Float[Array, ""],
) -> Float[Array, "d d"]:
    """Returns the sum for the sigmoid loss over all pairs of a query and a key; arguments as `softmax_hessian`.

    ``s (1 - s)`` is the same for positive and for negative pairs.
    """
    cosines = queries @ keys.T
    s = jax.nn.sigmoid(cosines / temperature + bias)
    weights = s * (1 - s) * counted[:, None]
    return _projected(queries, keys, cosines, weights, jnp.zeros_like(queries)) / temperature**2


def _projected(
    queries: Float[Array, "b d"],
    keys: Float[Array, "k d"],
    cosines: Float[Array, "b k"],
    weights: Float[Array, "b k"],
    means: Float[Array, "b d"],
) -> Float[Array, "d d"]:
    """Returns ``Σ_n J_n M_n J_n`` with ``M_n = Σ_m w_nm k_m k_mᵀ - m_n m_nᵀ``."""
    total = keys.T @ (jnp.sum(weights, axis=0)[:, None] * keys) - means.T @ means
    along = jnp.sum(means * queries, axis=1, keepdims=True)
    products = (weights * cosines) @ keys - means * along
    crossed = queries.T @ products
    within = queries.T @ (jnp.sum(queries * products, axis=1, keepdims=True) * queries)
    return total - crossed - crossed.T + within
