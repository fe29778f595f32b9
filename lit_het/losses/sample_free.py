"""Losses of classes for Gaussian logits, without samples: the forms of `lit_het.losses.gaussian` by their names.

Rows ``[n 1+r k]`` are the mean of the logits and its factors, as heads return them for S = 0.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from lit_het.losses import gaussian
from lit_het.mixtures import LabelMixture
from lit_het.types import LogitSamples

LogProbabilities: TypeAlias = Callable[[Float[Array, "n t k"], Any], tuple[Array, Float[Array, "n t"]]]
"""(Logits of t samples, targets) to log-probabilities ``[n t ...]`` and to 1 for every correct sample."""

PREDICTED = ("mean_field", "probit", "unscented")
"""Likelihoods of which logits are a part, so that they also predict; others are only of a label."""


def softmax(
    likelihood: str,
    of_logits: LogProbabilities,
    picked: Callable[[Float[Array, "n t k"], LabelMixture], Float[Array, "n t _"]],
) -> LogProbabilities:
    """Returns log-probabilities ``[n 1 _]`` of the softmax of rows.

    Args:
        likelihood: name of the form.
        of_logits: the same of samples.
        picked: values of every class to those that the loss needs.
    """
    if likelihood in PREDICTED:
        return _of_logits(likelihood, of_logits)

    def of_rows(rows: Float[Array, "n rows k"], target: LabelMixture) -> tuple[Array, Float[Array, "n one"]]:
        mean, factors = rows[:, 0], rows[:, 1:]
        # Which class is best, the mean says.
        _, correct = of_logits(mean[:, None], target)
        match likelihood:
            case "delta":
                of_class = jax.nn.log_softmax(mean)
                spread = gaussian.deviations(jnp.exp(of_class), factors)
                variance = jnp.sum(jnp.exp(of_class) * spread, axis=-1, keepdims=True)
                found = picked(gaussian.delta(of_class, spread, variance)[:, None], target)
            case "tilted":
                bound = jax.nn.logsumexp(gaussian.tilted(mean, factors), axis=-1)
                found = picked(mean[:, None], target) - bound[:, None, None]
            case _:
                of_labels = zip(picked(mean[:, None], target)[:, 0].T, picked(factors, target).T, strict=True)
                scaled = [gaussian.pairwise_probit(mean, factors, one, other.T) for one, other in of_labels]
                found = jnp.stack([-jax.nn.logsumexp(one, axis=-1) for one in scaled], axis=-1)[:, None]
        return found, correct

    return of_rows


def sigmoid(likelihood: str, of_logits: LogProbabilities) -> LogProbabilities:
    """Returns log-probabilities ``[n 1 ...]`` of each class, see `softmax`."""
    return _of_logits(likelihood, of_logits)


def predictions(likelihood: str, samples: LogitSamples) -> LogitSamples:
    """Returns the logits that predict without samples: those of the mean field or probit, or the sigma points.

    Args:
        likelihood: one of `PREDICTED`.
        samples: mean and factors of the logits.
    """

    def logits(common: Any, keys: Key[Array, "n *m"] | None, indices: Int[Array, " t"]) -> Float[Array, "n t k"]:
        return _logits(likelihood, samples.logits(common, keys, jnp.arange(1)))[:, indices]

    count = 2 * samples.num_factors if likelihood == "unscented" else 1
    return dataclasses.replace(samples, logits=logits, num_samples=count, samples_per_block=count, num_factors=0)


def _of_logits(likelihood: str, of_logits: LogProbabilities) -> LogProbabilities:
    def of_rows(rows: Float[Array, "n rows k"], target: Any) -> tuple[Array, Float[Array, "n one"]]:
        log_p, correct = of_logits(_logits(likelihood, rows), target)
        return jax.nn.logmeanexp(log_p, axis=1, keepdims=True), jnp.mean(correct, axis=1, keepdims=True)

    return of_rows


def _logits(likelihood: str, rows: Float[Array, "n rows k"]) -> Float[Array, "n t k"]:
    mean, factors = rows[:, 0], rows[:, 1:]
    if likelihood == "unscented":
        return gaussian.sigma_points(mean, factors)
    return gaussian.probit(mean, factors)[:, None]
