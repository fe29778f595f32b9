"""Probabilities of Gaussian logits in closed form: what HET-XL Sec. 7 and App. A name in place of samples.

Logits ``u + gᵀ ξ`` have the mean u ``[n m]`` and the factors g ``[n r m]`` of their covariance, for standard normals ξ:
no function needs a matrix of classes by classes. Losses of classes (`lit_het.losses.sample_free`) and of pairs
(`lit_het.losses.contrastive.sample_free`) call these.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# E[σ(u + s ξ)] ≈ σ(u / sqrt(1 + π/8 s²)): the logistic function as a probit with the slope that agrees at 0
# (MacKay 1992, "The evidence framework applied to classification networks").
PROBIT = math.pi / 8


def probit(mean: Float[Array, "n m"], factors: Float[Array, "n r m"]) -> Float[Array, "n m"]:
    """Returns ``u_m / sqrt(1 + π/8 |g_m|²)``: mean field (Lu et al. 2020) in a softmax, probit in a sigmoid."""
    return mean / jnp.sqrt(1 + PROBIT * jnp.sum(factors**2, axis=1))


def deviations(share: Float[Array, "n m"], factors: Float[Array, "n r m"]) -> Float[Array, "n m"]:
    """Returns ``|g_m - ḡ|²`` with ``ḡ = Σ_m a_m g_m`` for shares a that sum to 1."""
    centre = jnp.einsum("nm,nrm->nr", share, factors)
    return jnp.sum((factors - centre[:, :, None]) ** 2, axis=1)


def delta(
    log_p: Float[Array, "n *m"], residual: Float[Array, "n *m"], variance: Float[Array, "n *_"]
) -> Float[Array, "n *m"]:
    """Returns ``log E[p] ≈ log p + h(residual - variance)``, to second order in the noise.

    h(x) = x / 2 to first order. For x > 0 it is ``log(1 + x / 2)``, from E[p] ≈ p (1 + x / 2), but at most -log p, as
    E[p] is at most 1: x / 2 itself would reward unlimited noise wherever residuals exceed the model's own variance. (A
    smooth bound that is felt earlier lets noise take the place of learning: nothing is learned from what has a loss
    near 0.)

    Args:
        log_p: of the mean logits.
        residual: the variance along ``e_y - p``.
        variance: the model's own, the mean of `deviations` by p.
    """
    x = residual - variance
    # The logarithm of the other branch's values could be NaN, and then its gradient would be.
    gain = jnp.minimum(jnp.log1p(jnp.maximum(x, 0.0) / 2), -log_p)
    return log_p + jnp.where(x > 0, gain, x / 2)


def pairwise_probit(
    mean: Float[Array, "n m"],
    factors: Float[Array, "n r m"],
    of_label: Float[Array, " n"],
    factors_of_label: Float[Array, "n r"],
) -> Float[Array, "n m"]:
    """Returns ``-Δ_m / sqrt(1 + π/8 Var Δ_m)`` with ``Δ_m = u_y - u_m``, whose sum of exponentials is near 1 / E[p_y].

    ``1 / p_y = Σ_m exp(-Δ_m)``, so every pair (y, m) is a binary classification with its own probit approximation, and
    noise that logits share, as ``Var Δ_m = |g_y - g_m|²``, has no effect. It is the probit approximation for two
    classes; for more it is not normalised over y, and does not agree with the expectation to second order.
    """
    variance = jnp.sum((factors_of_label[:, :, None] - factors) ** 2, axis=1)
    return (mean - of_label[:, None]) / jnp.sqrt(1 + PROBIT * variance)


def tilted(mean: Float[Array, "n m"], factors: Float[Array, "n r m"]) -> Float[Array, "n m"]:
    """Returns ``u_m + |g_m - ḡ|² / 2``, whose log-sum-exp is at least that of the noisy logits in expectation.

    By Jensen's inequality, for any ḡ, ``E[log Σ exp(u_m + g_m ξ)] = E[log Σ exp(u_m + (g_m - ḡ) ξ)]`` is at most the
    logarithm of the sum's expectation: the tilted bound (Knowles & Minka 2011, Sec. 3), with ḡ of the softmax of u, for
    which it is exact to second order. So ``-log E[p_y] ≤ -E[log p_y] ≤ logsumexp(tilted) - u_y``.
    """
    return mean + deviations(jax.nn.softmax(mean, axis=-1), factors) / 2


def sigma_points(mean: Float[Array, "n k"], factors: Float[Array, "n r k"]) -> Float[Array, "n two_r k"]:
    """Returns ``u ± sqrt(r) g_i``, points of equal weights with the mean and the covariance of the logits.

    The unscented transform (Wan & van der Merwe 2000) with α = 1 and κ = 0, where the centre has no weight, and none
    is negative: a mean of probabilities stays a probability.
    """
    spread = math.sqrt(factors.shape[1]) * factors
    return jnp.concatenate([mean[:, None] + spread, mean[:, None] - spread], axis=1)
