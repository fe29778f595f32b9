"""Classification losses on noise samples: minus the log of the mean probability (HET-XL Eq. 2, Sec. 2.1).

Logits are computed in blocks of examples and samples only (`lit_het.losses.blocks`). An example may have the
predictions of several members (e3 App. C.1); its loss is their mean loss, or the loss of their mean prediction.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lit_het import sharding
from lit_het.errors import UserError
from lit_het.losses import blocks, sample_free
from lit_het.losses.base import weights
from lit_het.losses.classification_config import SigmoidCrossEntropy as SigmoidCrossEntropy
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.mixtures import LabelMixture
from lit_het.types import LogitSamples


@dataclasses.dataclass(frozen=True)
class LossAndTop1:
    """The output of a classification loss.

    Attributes:
        loss: weighted mean over valid examples of ``-log p(y|x)``; differentiable.
        top1: fraction of noise samples of valid examples whose most probable class is correct: the class of the largest
            weight of a mixture, or any class with a target above 1/2.
    """

    loss: Float[Array, ""]
    top1: Float[Array, ""]


Counted: TypeAlias = tuple[Bool[Array, " b"] | None, Float[Array, " b"] | None]
"""Which examples count, and their weights in the loss; None for all, and for equal ones."""


def softmax_cross_entropy(
    loss: SoftmaxCrossEntropy,
    samples: LogitSamples,
    label: Int[Array, "b *m"] | LabelMixture,
    counted: Counted,
    joint: bool,
) -> LossAndTop1:
    """Computes a `SoftmaxCrossEntropy`."""
    smoothing = loss.label_smoothing
    if samples.of_labels is not None:
        if isinstance(label, LabelMixture) or smoothing or samples.num_members > 1:
            raise UserError(
                "a softmax of few classes trains one prediction of one label, without smoothing; give class indices, "
                "or take DenseLogits"
            )
        examples = samples.examples_per_block
        samples = dataclasses.replace(samples.of_labels(label), examples_per_block=examples)
        label = jnp.zeros_like(label)

    def picked(values: Float[Array, "n t k"], target: LabelMixture) -> Float[Array, "n t _"]:
        def of_label(label: Int[Array, " n"]) -> Float[Array, "n t"]:
            # Not an index: XLA fuses the comparison and the sum, and their gradient is not a scatter.
            is_label = jnp.arange(values.shape[-1])[None] == label[:, None]
            return jnp.sum(values, axis=-1, where=is_label[:, None])

        of_labels = jnp.stack([of_label(label) for label in target.label.T], axis=-1)
        # Of every class, as the probabilities of each are averaged over samples before the logarithm.
        return jnp.concatenate([of_labels, values], axis=-1) if smoothing else of_labels

    def log_probabilities(
        logits: Float[Array, "n t k"], target: LabelMixture
    ) -> tuple[Float[Array, "n t _"], Float[Array, "n t"]]:
        # Only the logits of the labels are divided by the normalizer: p of all classes would be another array of
        # their size.
        found = picked(logits, target)
        log_p = found - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return log_p, (found[:, :, 0] >= jnp.max(logits, axis=-1)).astype(jnp.float32)

    def cross_entropy(log_p: Float[Array, "n _"], target: LabelMixture) -> Float[Array, " n"]:
        of_labels, of_classes = jnp.split(log_p, [target.label.shape[-1]], axis=-1)
        found = -jnp.sum(target.weight * of_labels, axis=-1)
        if not smoothing:
            return found
        return (1 - smoothing) * found - smoothing * of_classes.mean(axis=-1)

    if not isinstance(label, LabelMixture):
        label = LabelMixture(label[..., None], jnp.ones((*label.shape, 1)))
    expected = log_probabilities
    if _is_sample_free(loss, samples):
        expected = sample_free.softmax(loss.likelihood, log_probabilities, picked)
    return _mean(samples, label, counted, expected, cross_entropy, joint)


def sigmoid_cross_entropy(
    loss: SigmoidCrossEntropy, samples: LogitSamples, target: Float[Array, "b *m k"], counted: Counted, joint: bool
) -> LossAndTop1:
    """Computes a `SigmoidCrossEntropy`."""

    def log_probabilities(
        logits: Float[Array, "n t k"], target: Float[Array, "n k"]
    ) -> tuple[Float[Array, "n t two k"], Float[Array, "n t"]]:
        best = jnp.max(logits, axis=-1)
        # With several true classes, any of them at the top counts as correct.
        best_true = jnp.max(jnp.where(target[:, None] > 0.5, logits, -jnp.inf), axis=-1)
        # Both probabilities are averaged over samples: 1 - exp(log mean p) would lose the digits of a small 1 - p.
        log_p = jnp.stack([jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)], axis=2)
        return log_p, (best_true >= best).astype(jnp.float32)

    def cross_entropy(log_p: Float[Array, "n two k"], target: Float[Array, "n k"]) -> Float[Array, " n"]:
        return -jnp.sum(target * log_p[:, 0] + (1 - target) * log_p[:, 1], axis=-1)

    expected = log_probabilities
    if _is_sample_free(loss, samples):
        expected = sample_free.sigmoid(loss.likelihood, log_probabilities)
    return _mean(samples, target, counted, expected, cross_entropy, joint)


def softened_divergence(
    loss: SoftmaxCrossEntropy | SigmoidCrossEntropy,
    samples: LogitSamples,
    teacher: Float[Array, "b k"],
    counted: Counted,
    temperature: float,
) -> LossAndTop1:
    """Returns ``T² Σ_c p_c log(p_c / q_c)``, averaged (Hinton et al. 2015, Sec. 2), and the agreement of best classes.

    The probabilities are p = softmax(t / T) of the teacher's logits and q = 1/S Σ_s softmax(u_s / T); with a sigmoid
    loss those of each class and of its absence, σ(±t / T) and 1/S Σ_s σ(±u_s / T), and the sum is over both.

    Args:
        loss: by which the student is trained.
        samples: of the student's logits, with one prediction of each example.
        teacher: logits t, without a gradient.
        counted: see `Counted`.
        temperature: T.
    """

    def softened(logits: Float[Array, "*rows k"]) -> Float[Array, "*rows _"]:
        if loss.has_class_probabilities:
            logits = logits / temperature
            return jnp.concatenate([jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)], axis=-1)
        # Shifted first: the quotient of large logits is rounded by more than their differences.
        shift = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        return jax.nn.log_softmax((logits - shift) / temperature)

    def log_probabilities(
        logits: Float[Array, "n t k"], teacher: Float[Array, "n k"]
    ) -> tuple[Float[Array, "n t _"], Float[Array, "n t"]]:
        best, theirs = jnp.argmax(logits, axis=-1), jnp.argmax(teacher, axis=-1)
        return softened(logits), (best == theirs[:, None]).astype(jnp.float32)

    def divergence(log_q: Float[Array, "n _"], teacher: Float[Array, "n k"]) -> Float[Array, " n"]:
        log_p = softened(teacher)
        return temperature**2 * jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)

    return _mean(samples, jax.lax.stop_gradient(teacher), counted, log_probabilities, divergence, joint=False)


def mean_log_probabilities(
    samples: LogitSamples, activation: Callable[[Float[Array, "n t k"]], Float[Array, "n t _"]]
) -> Float[Array, "bm _"]:
    """Returns ``log 1/S Σ_s σ(u_s)``, for evaluation; finite even where probabilities round to zero.

    Several members of an example have adjacent rows.

    Args:
        samples: samples of the logits.
        activation: logits to log-probabilities, over the last axis.
    """
    m = samples.num_members

    def block(_: None, rows: Any) -> tuple[None, Float[Array, "n m _"]]:
        features, keys = rows

        def log_probabilities(common: Any, keys: Any, indices: Int[Array, " t"]) -> tuple[Array, Array]:
            logits = samples.logits(common, keys, indices)
            n, t, _ = logits.shape
            return activation(logits.reshape(n, t * m, -1)).reshape(n, t, m, -1), jnp.zeros((n, t))

        return None, _log_mean_over_samples(log_probabilities, samples, features, keys)[0]

    rows = (samples.features, samples.keys)
    by_member = blocks.scan_examples(block, None, rows, samples.examples_per_block)[1]
    return by_member.reshape(-1, by_member.shape[-1])


def label_log_probabilities(samples: LogitSamples, label: Int[Array, " b"]) -> Float[Array, " b"]:
    """Returns ``log 1/S Σ_s softmax(u_s)[y]`` of the class y of each example.

    Args:
        samples: samples of the logits, with one prediction of each example.
        label: class of each example.
    """

    def block(_: None, rows: Any) -> tuple[None, Float[Array, " n"]]:
        features, *constants = rows

        def log_probabilities(common: Any, constants: Any, indices: Int[Array, " t"]) -> tuple[Array, Array]:
            keys, label = constants
            logits = samples.logits(common, keys, indices)
            of_label = jnp.take_along_axis(logits, label[:, None, None], axis=-1)[:, :, 0]
            return of_label - jax.nn.logsumexp(logits, axis=-1), jnp.zeros(logits.shape[:2])

        return None, _log_mean_over_samples(log_probabilities, samples, features, tuple(constants))[0]

    rows = (samples.features, samples.keys, label)
    return blocks.scan_examples(block, None, rows, samples.examples_per_block)[1]


def _is_sample_free(loss: SoftmaxCrossEntropy | SigmoidCrossEntropy, samples: LogitSamples) -> bool:
    """Returns whether a likelihood needs no samples, and the head gave what it does need."""
    needs_none = loss.likelihood != "samples"
    if needs_none != (samples.num_factors > 0):
        raise UserError(
            f"{type(loss).__name__}: likelihood = {loss.likelihood!r} does not fit what the head returns: likelihoods "
            "without samples need a head with noise and sampling.num_samples = 0, and 'samples' at least 1"
        )
    return needs_none


def _mean(
    samples: LogitSamples,
    target: Any,
    counted: Counted,
    log_probabilities: Callable[[Array, Any], tuple[Array, Array]],
    loss: Callable[[Array, Any], Float[Array, " n"]],
    joint: bool,
) -> LossAndTop1:
    """Returns the mean of a loss over valid examples.

    Args:
        samples: samples of the logits.
        target: a tree with a leading example axis, and a second axis of members where there are several.
        counted: see `Counted`.
        log_probabilities: (logits of t samples, targets) to log-probabilities and to 1 for every correct sample.
        loss: (log mean probabilities, targets) to the loss of every example.
        joint: see `SoftmaxCrossEntropy`.
    """
    m = samples.num_members
    if m > 1:
        log_probabilities, loss = _of_members(m, log_probabilities, loss, joint)

    def block_loss(features: Any, constants: Any, _: None) -> tuple[Array, Array]:
        keys, target, share, of_loss = constants
        of_loss = share if of_loss is None else of_loss

        def function(common: Any, constants: Any, indices: Int[Array, " t"]) -> tuple[Array, Array]:
            keys, target = constants
            return log_probabilities(samples.logits(common, keys, indices), target)

        log_p, correct = _log_mean_over_samples(function, samples, features, (keys, target))
        # The loss of an invalid row may be NaN, which a weight of 0 would not remove.
        losses = jnp.where(share > 0, loss(log_p, target), 0.0)
        return jnp.sum(of_loss * losses), jnp.sum(share * correct)

    def device_loss(rows: Any, _: None, __: tuple[str, ...]) -> Float[Array, " two"]:
        features, *constants = rows
        return jnp.stack(blocks.sum_over_examples(block_loss, features, constants, samples.examples_per_block))

    valid, weight = counted
    valid = jnp.ones(len(jax.tree.leaves(samples.features)[0]), bool) if valid is None else valid
    # A map over devices outside the loop over blocks: parameter gradients are summed over devices once, not per block.
    rows = (samples.features, samples.keys, target, weights(valid), None if weight is None else weights(valid, weight))
    return LossAndTop1(*jnp.sum(sharding.map_shards(device_loss, rows, None), axis=0))


def _of_members(
    m: int,
    log_probabilities: Callable[[Array, Any], tuple[Array, Array]],
    loss: Callable[[Array, Any], Float[Array, " n"]],
    joint: bool,
) -> tuple[Callable[[Array, Any], tuple[Array, Array]], Callable[[Array, Any], Float[Array, " n"]]]:
    """Returns the functions of `_mean` for logits ``[n t m*k]`` and targets ``[n m ...]``."""

    def of_all(logits: Float[Array, "n t mk"], target: Any) -> tuple[Float[Array, "n t *rest"], Float[Array, "n t"]]:
        by_member = logits.reshape(*logits.shape[:2], m, -1)
        log_p, correct = jax.vmap(log_probabilities, (2, 1), 2)(by_member, target)
        return jax.nn.logmeanexp(log_p, axis=2) if joint else log_p, correct.mean(axis=2)

    def mean_loss(log_p: Float[Array, "n m *rest"], target: Any) -> Float[Array, " n"]:
        return jax.vmap(loss, 1, 1)(log_p, target).mean(axis=1)

    def loss_of_mean(log_p: Float[Array, "n *rest"], target: Any) -> Float[Array, " n"]:
        # All members have the same target.
        return loss(log_p, jax.tree.map(lambda x: x[:, 0], target))

    return of_all, loss_of_mean if joint else mean_loss


def _log_mean_over_samples(function: Any, samples: LogitSamples, features: Any, constants: Any) -> tuple[Array, Array]:
    return blocks.log_mean_over_samples(
        function, samples.prepare(features), constants, samples.num_samples, samples.samples_per_block
    )
