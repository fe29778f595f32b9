"""The contrastive losses as the papers write them, on whole matrices of logits.

Every function returns a sum over queries, weighted so that it is the mean over valid examples. The forms "gather" and
"ring" return the same values and gradients without a matrix of the whole batch: they call these functions on blocks
where a block has all that a formula needs, and `normalizers` where it has not.
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lit_het.losses.contrastive.pairs import Examples, Pairs
from lit_het.types import MASKED

# (pairs, z) to -log E[σ(z u)] of the logit u of each pair, over the noise.
PairLoss: TypeAlias = Callable[[Pairs, Float[Array, "#n #m"]], Float[Array, "n m"]]


def softmax(pairs: Pairs) -> Float[Array, ""]:
    """Returns ``-Σ_n w_n log (1/S Σ_s Σ_{m ∈ P(n)} p_snm)``, one direction of the softmax loss (HET-XL Eq. 6 and 8).

    ``p_snm = softmax_m(q_ns · k_m / τ + bias)`` is the probability of key m among all valid keys. P(n) are the
    positives of query n: its partner and, where duplicates count as positives, all keys with its image or its text.
    Their probabilities are summed inside the logarithm as in MIL-NCE (Miech et al. 2020, Eq. 1): any of them is a right
    answer, so the sum is the probability of being right, and a batch of exact copies has the loss of one copy of each.

    With label smoothing α the target is uniform over the M valid keys for a share of α (Szegedy et al. 2016, Sec. 7):
    ``-Σ_n w_n ((1 - α) log (1/S Σ_s Σ_{m ∈ P(n)} p_snm) + α/(S M) Σ_sm log p_snm)``. It is of queries without noise,
    which are several where an image has members (`lit_het.losses.contrastive.loss.softmax_loss`).
    """
    return -jnp.sum(pairs.query_examples.weight * _log_likelihood(pairs, pairs.masked_logits))


def symmetric_softmax(pairs: Pairs) -> Float[Array, ""]:
    """Returns half the sum of both directions of the softmax loss without noise.

    Both directions have one matrix of logits: rows are normalized for one of them, columns for the other. The members
    of an image are samples of it as a query, and as keys its positives: both take the mean of what they predict.
    """
    weight = pairs.query_examples.weight
    logits = pairs.masked_logits
    # Columns are sums over queries, so invalid queries are masked too. In rows they only need the weight 0.
    of_valid_queries = jnp.where(weight[:, None, None] > 0, logits, MASKED)
    normalizer = jax.nn.logsumexp(of_valid_queries, axis=(0, 1))
    column = pairs.positive_logit(of_valid_queries, axis=(0, 1)) - normalizer
    if pairs.smoothing:
        log_p = jnp.mean(of_valid_queries, axis=1) - normalizer[None]
        column = pairs.smoothed(column, _mean_of_valid(log_p.T, pairs.query_examples))
    return -jnp.sum(weight * (_log_likelihood(pairs, logits) + column)) / 2


def _log_likelihood(pairs: Pairs, logits: Float[Array, "n s m"]) -> Float[Array, " n"]:
    """Returns what `softmax` sums over queries, from masked logits."""
    # log p as a difference of logarithms, and then the log of the mean over samples: exp(log p) may round to zero in
    # float32.
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    found = jax.nn.logmeanexp(pairs.positive_logit(logits) - normalizer, axis=1)
    if not pairs.smoothing:
        return found
    log_p = jnp.mean(logits - normalizer[:, :, None], axis=1)
    return pairs.smoothed(found, _mean_of_valid(log_p, pairs.key_examples))


def _mean_of_valid(values: Float[Array, "n m"], examples: Examples) -> Float[Array, " n"]:
    """Returns the mean over the examples that are valid; 0 if none is."""
    is_valid = examples.weight > 0
    return jnp.sum(values, axis=1, where=is_valid[None]) / jnp.maximum(jnp.sum(is_valid), 1)


def sigmoid(pairs: Pairs, pair_loss: PairLoss) -> Float[Array, ""]:
    """Returns ``Σ_n w_n Σ_m -log (1/S Σ_s σ(z_nm (q_ns · k_m / τ + bias)))``, z = 1 for positives and -1 otherwise.

    Without noise and duplicates this is SigLIP Eq. 1 (also SoViT Table 7). Each pair is a classification of its own, so
    every positive has the label 1. A mixed image has the label y of each text: the loss is then ``Σ_n w_n Σ_m
    -(y_nm log p_nm + (1 - y_nm) log (1 - p_nm))`` (PCME++ Sec. 2.4). With label smoothing α every y is
    ``(1 - α) y + α/2``.
    """
    return jnp.sum(pairs.query_examples.weight * jnp.sum(_binary_losses(pairs, pair_loss), axis=1))


def symmetric_sigmoid(pairs: Pairs, pair_loss: PairLoss) -> Float[Array, ""]:
    """Returns half the sum of both directions of the sigmoid loss without noise, ``Σ_nm (w_n + w_m) / 2 l_nm``.

    Both directions have one matrix of losses l, and with equal weights they are `sigmoid`, which is cheaper.
    """
    query, key = pairs.query_examples.weight[:, None], pairs.key_examples.weight[None]
    # In this form equal weights give exactly `sigmoid`. Only valid queries are counted as keys of the other direction.
    difference = jnp.where(query > 0, key - query, 0.0) / 2
    return sigmoid(pairs, pair_loss) + jnp.sum(difference * _binary_losses(pairs, pair_loss))


def log_loss(pairs: Pairs, z: Float[Array, "#n #m"]) -> Float[Array, "n m"]:
    """Returns ``-log (1/S Σ_s σ(z_nm u_snm))``."""
    # log σ(-x) instead of log(1 - σ(x)), which is -inf where σ(x) rounds to 1.
    log_p = jax.nn.log_sigmoid(z[:, None] * pairs.logits)
    return math.log(log_p.shape[1]) - jax.nn.logsumexp(log_p, axis=1)


def of_label(label: Float[Array, "n m"], right: Float[Array, "n m"], wrong: Float[Array, "n m"]) -> Float[Array, "n m"]:
    """Returns ``y (-log p) + (1 - y) (-log (1 - p))`` from the losses of the labels 1 and 0."""
    return label * right + (1 - label) * wrong


def _binary_losses(pairs: Pairs, pair_loss: PairLoss) -> Float[Array, "n m"]:
    """Returns the loss of each pair, 0 where the key is invalid."""
    if pairs.mixed is None and not pairs.smoothing:
        losses = pair_loss(pairs, jnp.where(pairs.is_positive, 1.0, -1.0))
    else:
        one = jnp.ones((1, 1))
        losses = of_label(pairs.label, pair_loss(pairs, one), pair_loss(pairs, -one))
    return jnp.where(pairs.key_examples.weight[None] > 0, losses, 0.0)
