"""Gradients of a batch that is too large for its towers: they see parts of it in turn, the loss sees all of it.

First every part's embeddings are computed and nothing else is kept; then, going backward, every part runs once more and
adds its gradient (GradCache, Gao et al. 2021, Sec. 3). A contrastive loss keeps all its negatives.
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


def apply(
    tower: Tower, inputs: Any, key: Key[Array, ""] | None, microbatches: int
) -> tuple[Float[Array, "rows d"], Metrics, Metrics]:
    """Returns a tower's embeddings, auxiliary losses and metrics, of the latter two the means over parts.

    Args:
        tower: may close over parameters, whose gradients are right too.
        inputs: pixels or tokens ``[b ...]``.
        key: randomness; every part has its own.
        microbatches: how many parts, of examples at equal distances, so that devices keep their own.

    Raises:
        UserError: the batch does not divide into so many parts on as many devices.
    """
    if microbatches == 1:
        output = tower(inputs, key)
        return output.embedding, output.auxiliary_losses, output.metrics
    size, shares = len(inputs), sharding.num_automatic_shares()
    if size % (microbatches * shares):
        raise UserError(
            f"a batch of {size} cannot be divided into {microbatches} parts on {shares} devices; "
            "change --task.microbatches or --data.batch-size"
        )

    @jax.checkpoint
    def of_part(part: Any, number: Any) -> tuple[Float[Array, "rows d"], Metrics, Metrics]:
        output = tower(sharding.as_batch(part), None if key is None else jax.random.fold_in(key, number))
        return output.embedding, output.auxiliary_losses, output.metrics

    parts = inputs.reshape(size // microbatches, microbatches, *inputs.shape[1:]).swapaxes(0, 1)
    _, (embedding, *scalars) = jax.lax.scan(
        lambda _, part: (None, of_part(*part)), None, (parts, jnp.arange(microbatches))
    )
    losses, metrics = jax.tree.map(lambda x: jnp.mean(x, axis=0), scalars)
    # An example may have the embeddings of several members, side by side.
    in_order = embedding.reshape(microbatches, size // microbatches, -1, embedding.shape[-1]).swapaxes(0, 1)
    return sharding.as_batch(in_order.reshape(-1, embedding.shape[-1])), losses, metrics
