"""Gauss-Newton Hessians of the contrastive losses with respect to the embeddings of one side, summed over a batch.

With logits ``v_nm = u_n · k_m / τ + bias``, ``u = g / |g|`` and unit keys k, the Jacobian of ``v_n`` at an embedding g
is ``K J / τ`` with ``J = (I - u uᵀ) / |g|``. The Hessian of the loss with respect to the logits is ``diag p - p
pᵀ`` (softmax), or diagonal with ``s (1 - s)``, ``s = σ(v)`` (sigmoid). So an example adds ``J M_n J / τ²`` with a
weighted covariance M of the keys (Baumann et al. 2024). With ``1 / |g|²`` as part of M, the sum is computed from
products of whole matrices, without a matrix per example::

    Σ_n J_n M_n J_n = Σ_n M_n - Uᵀ C - Cᵀ U + Uᵀ diag(u_n · c_n) U,    c_n = M_n u_n
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def softmax_hessian(
    queries: Float[Array, "b d"],
    keys: Float[Array, "k d"],
    counted: Float[Array, " b"],
    temperature: Float[Array, ""],
    bias: Float[Array, ""] | None = None,
) -> Float[Array, "d d"]:
    """Returns the sum for one direction of the softmax loss, with all keys as candidates.

    Args:
        queries: embeddings of the side of the Hessian, of any norm.
        keys: unit embeddings of the other side.
        counted: 1 for each query that counts, 0 for padding.
        temperature: τ.
        bias: of the logits, which a softmax does not see.
    """
    units, slopes = _units(queries, counted)
    cosines = units @ keys.T
    p = jax.nn.softmax(cosines / temperature, axis=1) * slopes
    return _projected(units, keys, cosines, p * slopes, p @ keys) / temperature**2


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
    units, slopes = _units(queries, counted)
    cosines = units @ keys.T
    s = jax.nn.sigmoid(cosines / temperature + bias)
    return _projected(units, keys, cosines, s * (1 - s) * slopes**2, jnp.zeros_like(units)) / temperature**2


def _units(
    queries: Float[Array, "b d"], counted: Float[Array, " b"]
) -> tuple[Float[Array, "b d"], Float[Array, "b one"]]:
    """Returns unit embeddings and ``1 / |g|``, which is 0 for rows that do not count."""
    norms = jnp.linalg.norm(queries, axis=1, keepdims=True) + 1e-8
    return queries / norms, counted[:, None] / norms


def _projected(
    units: Float[Array, "b d"],
    keys: Float[Array, "k d"],
    cosines: Float[Array, "b k"],
    weights: Float[Array, "b k"],
    means: Float[Array, "b d"],
) -> Float[Array, "d d"]:
    """Returns ``Σ_n J_n M_n J_n`` with ``M_n = Σ_m w_nm k_m k_mᵀ - m_n m_nᵀ``."""
    total = keys.T @ (jnp.sum(weights, axis=0)[:, None] * keys) - means.T @ means
    along = jnp.sum(means * units, axis=1, keepdims=True)
    products = (weights * cosines) @ keys - means * along
    crossed = units.T @ products
    within = units.T @ (jnp.sum(units * products, axis=1, keepdims=True) * units)
    return total - crossed - crossed.T + within
