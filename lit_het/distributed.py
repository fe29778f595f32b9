"""Joins the rows of a batch that the hosts have read, as global arrays or on every host."""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from lit_het.sharding import batch_sharding
from lit_het.types import Batch


def to_global(batch: Batch, mesh: Mesh) -> Batch:
    """Returns the global batch, sharded over the mesh, of which this host holds the rows in ``batch``."""
    return jax.tree.map(lambda rows: split_rows(rows, mesh), batch)


def split_rows(rows: np.ndarray, mesh: Mesh) -> jax.Array:
    """Returns the array of all hosts' rows, split over the mesh."""
    return jax.make_array_from_process_local_data(batch_sharding(mesh), rows)


def rows_of_all(rows: np.ndarray) -> np.ndarray:
    """Returns the rows of all hosts, in their order, on every host."""
    if jax.process_count() == 1:
        return rows
    return np.asarray(multihost_utils.process_allgather(rows, tiled=True))
