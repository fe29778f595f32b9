"""Joins the parts of a batch that the hosts have read into global arrays."""

import jax
from jax.sharding import Mesh

from lit_het.sharding import batch_sharding
from lit_het.types import Batch


def to_global(batch: Batch, mesh: Mesh) -> Batch:
    """Returns the global batch, sharded over the mesh, of which this host holds the rows in ``batch``."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda rows: jax.make_array_from_process_local_data(sharding, rows), batch)
