"""A student's similarities of images and texts beside a teacher's (TinyCLIP, Wu et al. 2023)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lit_het import sharding
from lit_het.losses import blocks
from lit_het.losses.contrastive.blocks import Layout
from lit_het.types import MASKED

VECTORS_PER_BLOCK = 1024
"""Rows of similarities on a device that exist at the same time."""


def relation_divergence(
    student: tuple[Float[Array, "b d"], Float[Array, "b d"]],
    teacher: tuple[Float[Array, "b t"], Float[Array, "b t"]],
    temperatures: tuple[Float[Array, ""], Float[Array, ""] | float],
    weight: Float[Array, " b"],
) -> Float[Array, ""]:
    """Returns ``1/2 Σ_n w_n (KL(p_n || q_n) + KL(p'_n || q'_n))``, of images to texts and of texts to images.

    The probabilities of the keys m of a query n are ``q_n = softmax_m(a_n · b_m / τ)`` for the student and p_n, by its
    own embeddings and temperature, for the teacher; p' and q' are those of the other direction. The divergence is the
    cross-entropy of TinyCLIP and open_clip less the entropy of p, which has no gradient.

    Every device compares blocks of its own queries with the keys of all devices, so that memory is linear in the batch.

    Args:
        student: keys of images and of texts.
        teacher: the same; without a gradient.
        temperatures: τ of the student, and of the teacher.
        weight: share w of each pair, 0 for rows that are neither queries nor keys.
    """
    teacher = jax.lax.stop_gradient(teacher)

    def device_sum(rows: Any, temperatures: Any, axes: tuple[str, ...]) -> Float[Array, ""]:
        (image, text), (teacher_image, teacher_text), weight = rows
        layout = Layout("gather", axes, VECTORS_PER_BLOCK)
        to_texts = _direction((image, teacher_image), (text, teacher_text), temperatures, weight, layout)
        to_images = _direction((text, teacher_text), (image, teacher_image), temperatures, weight, layout)
        return (to_texts + to_images) / 2

    shared = tuple(map(jnp.float32, temperatures))
    return jnp.sum(sharding.map_shards(device_sum, (student, teacher, weight), shared))


def _direction(queries: Any, keys: Any, temperatures: Any, weight: Float[Array, " b"], layout: Layout) -> Any:
    """Returns ``Σ_n w_n KL(p_n || q_n)`` of this device's queries, each argument of student and teacher."""
    (keys, teacher_keys), key_weight = layout.gather((keys, weight))
    temperature, teacher_temperature = temperatures

    def block_sum(queries: Float[Array, "n d"], constants: Any, context: Any) -> tuple[Float[Array, ""], None]:
        (teacher_queries, weight), (teacher_keys, is_key) = constants, context

        def log_softmax(logits: Float[Array, "n m"]) -> Float[Array, "n m"]:
            return jax.nn.log_softmax(jnp.where(is_key[None], logits, MASKED))

        log_p = log_softmax(teacher_queries @ teacher_keys.T / teacher_temperature)
        log_q = log_softmax(queries @ keys.T / temperature)
        return weight @ jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=1), None

    constants, context = (queries[1], weight), (teacher_keys, key_weight > 0)
    return blocks.sum_over_examples(block_sum, queries[0], constants, layout.block_size, context)[0]
