"""Likelihoods of noisy queries in closed form, without samples; HET-XL Sec. 7 names them as future work.

A query with the mean α and the factors R (rows of V(x) and d(x), so that Σ = RᵀR) has the logits ``u + gᵀ ξ`` with
``u_m = α · k_m / τ``, ``g_m = R k_m / τ`` and standard normals ξ. Each function approximates ``-Σ_n w_n log E[p_n]``
from u and g, for as many products of keys as r + 2 samples need, and has no gradient noise.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lit_het.losses.contrastive.pairs import MASKED, Pairs

# E[σ(u + s ξ)] ≈ σ(u / sqrt(1 + π/8 s²)): the logistic function as a probit with the slope that agrees at 0
# (MacKay 1992, "The evidence framework applied to classification networks").
PROBIT = math.pi / 8


def delta(pairs: Pairs) -> Float[Array, ""]:
    """Returns the softmax loss to second order in the noise.

    ``log E[p_P] ≈ log p_P + h(Σ_{m ∈ P} t_m |g_m - ḡ|² - Σ_m p_m |g_m - ḡ|²)`` with ``ḡ = Σ_m p_m g_m``, the positives
    P, their probability ``p_P = Σ_{m ∈ P} p_m`` and shares ``t_m = p_m / p_P`` (without duplicates P is the partner and
    t is 1), where h(x) = x / 2 to first order. For x > 0 it is ``log(1 + x / 2)``, from E[p_P] ≈ p_P (1 + x / 2), but
    at most -log p_P, as E[p_P] is at most 1: x / 2 itself would reward unlimited noise wherever residuals exceed the
    model's own variance. (A smooth bound that is felt earlier lets noise take the place of learning: nothing is learned
    from a query whose loss is near 0.)
    """
    logits, factors = pairs.masked_logits[:, 0], pairs.factor_logits
    p = jax.nn.softmax(logits, axis=-1)
    mean = jnp.einsum("nm,nrm->nr", p, factors)
    variance = jnp.einsum("nm,nrm->n", p, factors**2) - jnp.sum(mean**2, axis=1)
    share = jax.nn.softmax(pairs.of_positives(logits[:, None])[:, 0], axis=-1)
    residual = jnp.einsum("nm,nrm->n", share, (factors - mean[:, :, None]) ** 2)
    x = residual - variance
    log_p = pairs.positive_logit(logits[:, None])[:, 0] - jax.nn.logsumexp(logits, axis=-1)
    # The logarithm of the other branch's values could be NaN, and then its gradient would be.
    gain = jnp.minimum(jnp.log1p(jnp.maximum(x, 0.0) / 2), -log_p)
    change = jnp.where(x > 0, gain, x / 2)
    return -jnp.sum(pairs.query_examples.weight * (log_p + change))


def mean_field(pairs: Pairs) -> Float[Array, ""]:
    """Returns the softmax loss of logits that are each divided by ``sqrt(1 + π/8 |g_m|²)`` (Lu et al. 2020)."""
    # Without the bias, which a softmax does not depend on.
    logits = (pairs.logits[:, 0] - pairs.bias) / jnp.sqrt(1 + PROBIT * jnp.sum(pairs.factor_logits**2, axis=1))
    logits = pairs.masked(logits[:, None])[:, 0]
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    return -jnp.sum(pairs.query_examples.weight * (pairs.positive_logit(logits[:, None])[:, 0] - normalizer))


def pairwise_probit(pairs: Pairs) -> Float[Array, ""]:
    """Returns ``Σ_n w_n log Σ_m exp(-Δ_m / sqrt(1 + π/8 Var Δ_m))`` with ``Δ_m = u_y - u_m``.

    ``1 / p_y = Σ_m exp(-Δ_m)``, so every pair (y, m) is a binary classification with its own probit approximation, and
    noise that logits share, as ``Var Δ_m = |g_y - g_m|²``, has no effect. It is the probit approximation for two
    classes; for more it is not normalised over y, and does not agree with the expectation to second order. Positives
    other than the partner y are left out of the sum: their probabilities have no common pairs that could be summed.
    """
    logits, factors = pairs.logits[:, 0], pairs.factor_logits
    difference = pairs.partner_logit(logits[:, None]) - logits
    variance = jnp.sum((pairs.partner_logit(factors)[:, :, None] - factors) ** 2, axis=1)
    scaled = pairs.masked((-difference / jnp.sqrt(1 + PROBIT * variance))[:, None])[:, 0]
    scaled = jnp.where(pairs.is_positive & ~pairs.is_partner, MASKED, scaled)
    return jnp.sum(pairs.query_examples.weight * jax.nn.logsumexp(scaled, axis=-1))


def probit(pairs: Pairs, z: Float[Array, "#n #m"]) -> Float[Array, "n m"]:
    """Returns ``-log E[σ(z u)] ≈ -log σ(z u / sqrt(1 + π/8 |g|²))``, the loss of each pair of the sigmoid loss."""
    scale = jnp.sqrt(1 + PROBIT * jnp.sum(pairs.factor_logits**2, axis=1))
    return -jax.nn.log_sigmoid(z * (pairs.logits[:, 0] / scale))
