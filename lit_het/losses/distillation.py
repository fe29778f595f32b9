"""The loss of self-distillation: a student predicts a teacher's distribution over prototypes (DINO, iBOT)."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lit_het import sharding
from lit_het.losses import blocks
from lit_het.types import Metrics

VECTORS_PER_BLOCK = 1024
"""Vectors on a device whose logits exist at the same time."""


def prototype_cross_entropy(
    student: Float[Array, "b v d"],
    teacher: Float[Array, "b t d"],
    student_prototypes: Float[Array, "d k"],
    teacher_prototypes: Float[Array, "d k"],
    weight: Float[Array, " b"],
    *,
    student_temperature: float,
    teacher_temperature: float,
) -> tuple[Float[Array, ""], Metrics]:
    """Returns ``-Σ_b w_b mean_v Σ_k p_k log q_k`` (DINO, Eq. 1 to 3), and metrics that show a collapse.

    The probabilities are ``q = softmax(s W_s / τ_s)`` and ``p = softmax((t W_t - c) / τ_t)``; the centre c is the mean
    of the teacher's logits ``t W_t`` over this batch.

    Args:
        student: unit vectors of v views or patches of each image.
        teacher: unit vectors of one view, or of the same v; without a gradient.
        student_prototypes: unit columns W_s.
        teacher_prototypes: unit columns W_t, without a gradient.
        weight: share w of each image, 0 for rows to ignore.
        student_temperature: τ_s.
        teacher_temperature: τ_t.
    """
    teacher, teacher_prototypes = jax.lax.stop_gradient((teacher, teacher_prototypes))
    # The mean of the logits is the logits of the mean. Without a valid row the sum is 0.
    centre = (weight / jnp.maximum(jnp.sum(weight), 1e-30)) @ teacher.mean(axis=1) @ teacher_prototypes

    def block_loss(
        student: Float[Array, "n v d"],
        constants: tuple[Float[Array, "n t d"], Float[Array, " n"]],
        context: tuple[Float[Array, "d k"], Float[Array, " k"]],
        student_prototypes: Float[Array, "d k"],
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Float[Array, " k"]]]:
        (teacher, weight), (teacher_prototypes, centre) = constants, context
        log_p = jax.nn.log_softmax((_products(teacher, teacher_prototypes) - centre[None, None]) / teacher_temperature)
        p, logits = jnp.exp(log_p), _products(student, student_prototypes) / student_temperature
        # As Σ p = 1, -Σ p log q = log Σ exp(logits) - Σ p logits.
        values = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(p * logits, axis=-1)
        entropy = -jnp.sum(p * log_p, axis=-1)
        mean_p = weight @ p.mean(axis=1)
        return weight @ values.mean(axis=1), (weight @ entropy.mean(axis=1), mean_p)

    def device_loss(rows: Any, shared: Any, _: tuple[str, ...]) -> Any:
        (student, *constants), (student_prototypes, *context) = rows, shared
        examples = max(1, VECTORS_PER_BLOCK // max(student.shape[1], teacher.shape[1]))
        block = functools.partial(block_loss, student_prototypes=student_prototypes)
        return blocks.sum_over_examples(block, student, tuple(constants), examples, tuple(context))

    # A map over devices outside the loop over blocks: the prototypes' gradient is summed over devices once.
    shared = (student_prototypes, teacher_prototypes, centre)
    by_device = sharding.map_shards(device_loss, (student, teacher, weight), shared)
    loss, (entropy, mean_p) = jax.tree.map(lambda x: jnp.sum(x, axis=0), by_device)
    spread = -jnp.sum(jax.scipy.special.xlogy(mean_p, mean_p))
    return loss, {"teacher_entropy": entropy, "prototype_entropy": spread}


def _products(vectors: Float[Array, "n v d"], prototypes: Float[Array, "d k"]) -> Float[Array, "n v k"]:
    # Flattened, as XLA's CPU backend is slow at products with two leading dimensions.
    n, v, d = vectors.shape
    return (vectors.reshape(n * v, d) @ prototypes).reshape(n, v, -1)
