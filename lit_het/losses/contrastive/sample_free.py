"""Likelihoods of noisy queries in closed form, without samples; HET-XL Sec. 7 names them as future work.

A query with the mean α and the factors R (rows of V(x) and d(x), so that Σ = RᵀR) has the logits ``u + gᵀ ξ`` with
``u_m = α · k_m / τ``, ``g_m = R k_m / τ`` and standard normals ξ. Each function approximates ``-Σ_n w_n log E[p_n]``
from u and g by a formula of `lit_het.losses.gaussian`, for as many products of keys as r + 2 samples need, and has no
gradient noise.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lit_het.losses import gaussian
from lit_het.losses.contrastive.pairs import Pairs
from lit_het.types import MASKED, EmbeddingSamples, Queries


def delta(pairs: Pairs) -> Float[Array, ""]:
    """Returns the softmax loss to second order in the noise.

    ``log E[p_P] ≈ log p_P + h(Σ_{m ∈ P} t_m |g_m - ḡ|² - Σ_m p_m |g_m - ḡ|²)`` with ``ḡ = Σ_m p_m g_m``, the positives
    P, their probability ``p_P = Σ_{m ∈ P} p_m`` and shares ``t_m = p_m / p_P`` (without duplicates P is the partner and
    t is 1), and h of `gaussian.delta`.
    """
    logits = pairs.masked_logits[:, 0]
    p = jax.nn.softmax(logits, axis=-1)
    spread = gaussian.deviations(p, pairs.factor_logits)
    share = jax.nn.softmax(pairs.of_positives(logits[:, None])[:, 0], axis=-1)
    log_p = pairs.positive_logit(logits[:, None])[:, 0] - jax.nn.logsumexp(logits, axis=-1)
    found = gaussian.delta(log_p, jnp.sum(share * spread, axis=-1), jnp.sum(p * spread, axis=-1))
    return -jnp.sum(pairs.query_examples.weight * found)


def mean_field(pairs: Pairs) -> Float[Array, ""]:
    """Returns the softmax loss of logits that are each divided by ``sqrt(1 + π/8 |g_m|²)`` (Lu et al. 2020)."""
    # Without the bias, which a softmax does not depend on.
    logits = gaussian.probit(pairs.logits[:, 0] - pairs.bias, pairs.factor_logits)
    logits = pairs.masked(logits[:, None])[:, 0]
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    return -jnp.sum(pairs.query_examples.weight * (pairs.positive_logit(logits[:, None])[:, 0] - normalizer))


def pairwise_probit(pairs: Pairs) -> Float[Array, ""]:
    """Returns ``Σ_n w_n log Σ_m exp(-Δ_m / sqrt(1 + π/8 Var Δ_m))``, see `gaussian.pairwise_probit`.

    Positives other than the partner y are left out of the sum: their probabilities have no common pairs that could be
    summed.
    """
    logits, factors = pairs.logits[:, 0], pairs.factor_logits
    of_partner = pairs.partner_logit(logits[:, None])[:, 0]
    scaled = gaussian.pairwise_probit(logits, factors, of_partner, pairs.partner_logit(factors))
    scaled = pairs.masked(scaled[:, None])[:, 0]
    scaled = jnp.where(pairs.is_positive & ~pairs.is_partner, MASKED, scaled)
    return jnp.sum(pairs.query_examples.weight * jax.nn.logsumexp(scaled, axis=-1))


def tilted(pairs: Pairs) -> Float[Array, ""]:
    """Returns an upper bound of the softmax loss, see `gaussian.tilted`; of several positives by Jensen's, too."""
    logits = pairs.masked_logits
    bound = jax.nn.logsumexp(gaussian.tilted(logits[:, 0], pairs.factor_logits), axis=-1)
    return -jnp.sum(pairs.query_examples.weight * (pairs.positive_logit(logits)[:, 0] - bound))


def probit(pairs: Pairs, z: Float[Array, "#n #m"]) -> Float[Array, "n m"]:
    """Returns ``-log E[σ(z u)] ≈ -log σ(z u / sqrt(1 + π/8 |g|²))``, the loss of each pair of the sigmoid loss."""
    return -jax.nn.log_sigmoid(z * gaussian.probit(pairs.logits[:, 0], pairs.factor_logits))


def at_sigma_points(samples: EmbeddingSamples) -> EmbeddingSamples:
    """Returns 2 (r + 1) samples of each query in place of its distribution, see `gaussian.sigma_points`."""

    def drawn(queries: Queries | None) -> Queries | None:
        if queries is None or queries.factors is None:
            return queries
        rank = queries.factors.shape[1]
        normals = gaussian.sigma_points(jnp.zeros((1, rank)), jnp.eye(rank)[None])
        return dataclasses.replace(queries, normals=jnp.broadcast_to(normals, (len(queries.samples), 2 * rank, rank)))

    queries = {name: drawn(getattr(samples, name)) for name in ("image_queries", "text_queries")}
    return dataclasses.replace(samples, **queries)
