"""Rows that are held out of every batch: the last k of every n rows.

Groups are as small as possible, so that they do not cross devices: what is held out is the same on any number of them,
and no row moves between two.
"""

import math

import jax
from jaxtyping import Shaped

from lit_het import sharding
from lit_het.errors import UserError
from lit_het.types import Batch


def group(batch_size: int, fraction: float) -> tuple[int, int]:
    """Returns the rows of a group, and how many of them, its last ones, are held out.

    Args:
        batch_size: rows over all hosts.
        fraction: of the rows, rounded to whole ones.
    """
    held_out = round(fraction * batch_size)
    if not 0 < held_out < batch_size:
        raise UserError(
            f"{100 * fraction:g} % of a batch of {batch_size} are {held_out} rows, and some must be held out and some "
            "trained on; change task.temperature_gradient.held_out or --data.batch-size"
        )
    groups = math.gcd(batch_size, held_out)
    return batch_size // groups, held_out // groups


def split(batch: Batch, fraction: float) -> tuple[Batch, Batch]:
    """Returns the rows of a batch to train on, and the held-out ones."""
    rows = len(batch.valid)
    size, held_out = group(rows, fraction)
    devices = sharding.num_automatic_shards()
    if rows // size % devices:
        raise UserError(
            f"{held_out} of {size} rows cannot be held out on each of {devices} devices that share a batch of {rows}; "
            f"use a --data.batch-size that is a multiple of {size * devices}"
        )

    def part(of_group: slice) -> Batch:
        def rows_of(array: Shaped[jax.Array, "b *rest"]) -> Shaped[jax.Array, "part *rest"]:
            chosen = array.reshape(-1, size, *array.shape[1:])[:, of_group]
            return sharding.as_batch(chosen.reshape(-1, *array.shape[1:]))

        return jax.tree.map(rows_of, batch)

    return part(slice(size - held_out)), part(slice(size - held_out, None))
