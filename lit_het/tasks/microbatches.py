"""Microbatches: towers process a batch in parts, to save memory, while the loss sees the whole batch.

The forward pass saves only the embeddings of each part; the backward pass recomputes each part and adds its gradient
(GradCache, Gao et al. 2021, Sec. 3). A contrastive loss has all its negatives.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from lit_het import sharding
from lit_het.errors import UserError
from lit_het.types import Metrics, TowerOutput

Tower: TypeAlias = Callable[[Any, Key[Array, ""] | None], TowerOutput]


def apply(tower: Tower, inputs: Any, key: Key[Array, ""] | None, microbatches: int) -> TowerOutput:
    """Returns a tower's output, with the means of its auxiliary losses and metrics over microbatches.

    Of several microbatches only embeddings are kept, and no tokens.

    Args:
        tower: may close over parameters, which are differentiated.
        inputs: pixels or tokens ``[b ...]``.
        key: random key, or None; every part has its own.
        microbatches: number of parts.
    """
    if microbatches == 1:
        return tower(inputs, key)
    size, shares = len(inputs), sharding.num_automatic_shards()
    if size % (microbatches * shares):
        raise UserError(
            f"a batch of {size} cannot be divided into {microbatches} parts on {shares} devices; "
            "change --task.microbatches or --data.batch-size"
        )

    # Recomputed in the backward pass: only embeddings are saved.
    @jax.checkpoint
    def apply_part(part: Any, number: Any) -> tuple[Float[Array, "rows d"], Metrics, Metrics]:
        output = tower(sharding.as_batch(part), None if key is None else jax.random.fold_in(key, number))
        return output.embedding, output.auxiliary_losses, output.metrics

    # A part takes every n-th example, not neighbours: then it has equal parts of every device's rows, and no row moves
    # between devices.
    parts = inputs.reshape(size // microbatches, microbatches, *inputs.shape[1:]).swapaxes(0, 1)
    _, (embedding, *scalars) = jax.lax.scan(
        lambda _, part: (None, apply_part(*part)), None, (parts, jnp.arange(microbatches))
    )
    losses, metrics = jax.tree.map(lambda x: jnp.mean(x, axis=0), scalars)
    # An example may have embeddings of several ensemble members, in adjacent rows.
    in_order = embedding.reshape(microbatches, size // microbatches, -1, embedding.shape[-1]).swapaxes(0, 1)
    embedding = sharding.as_batch(in_order.reshape(-1, embedding.shape[-1]))
    return TowerOutput(embedding, jnp.zeros((0, 0, 0)), losses, metrics)
