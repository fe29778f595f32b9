"""One program on several processes: how they find one another, and how they join the rows that each has read."""

import hashlib
import os
import re

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from lit_het.errors import UserError
from lit_het.sharding import batch_sharding
from lit_het.types import Batch

# Seconds after which the others take a process for dead that is not heard of.
HEARTBEAT_TIMEOUT = 30
# What JAX raises where processes do not come together.
_NOT_JOINED = (RuntimeError, ValueError, TypeError, KeyError, OSError)


def join(place: str = "") -> None:
    """Makes this process one of several that share every batch; before any computation.

    Args:
        place: ``HOST:PORT,I/N``: the address of process 0, this process's number from 0, and how many there are. If
            empty, a TPU slice, Slurm, Kubernetes or MPI tells.

    Raises:
        UserError: ``place`` is none, nothing tells, or the others do not come.
    """
    found = re.fullmatch(r"(\S+:\d+),(\d+)/(\d+)", place)
    if place and (found is None or int(found[2]) >= int(found[3]) or not 0 < int(found[1].split(":")[-1]) < 2**16):
        raise UserError(
            f"--distributed {place} names no process; the first of two is HOST:PORT,0/2 and the second HOST:PORT,1/2"
        )
    address, number, count = (found[1], int(found[2]), int(found[3])) if found else (None, None, None)
    try:
        jax.distributed.initialize(address, count, number, heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT)
    except _NOT_JOINED as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"no other processes found ({reason}); name them with --distributed HOST:PORT,I/N, or leave it out"
        ) from error


def is_first() -> bool:
    """Whether this process is the one of several that tells and writes; asks without starting any device."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def is_fault_of_machines(error: BaseException) -> bool:
    """Whether an error tells that another process, a device or the network is gone, not that the program is wrong."""
    of_program = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError) and jax.distributed.is_initialized()
    return is_of_jax and not any(code in str(error) for code in of_program)


def leave(code: int) -> None:
    """Ends this process at once if there are several: they wait for it in a collective, and it would wait for them."""
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        os._exit(code)


def to_global(batch: Batch, mesh: Mesh) -> Batch:
    """Returns the global batch, sharded over the mesh, of which this host holds the rows in ``batch``."""
    return jax.tree.map(lambda rows: split_rows(rows, mesh), batch)


def wait_for_all(name: str) -> None:
    """Returns when every process has come to the place with this name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def anywhere(here: bool) -> bool:
    """Returns whether something is so on one of the processes, which all ask."""
    return bool(rows_of_all(np.array([here])).any())


def check_same(text: str, what: str) -> None:
    """Refuses what should be, and is not, the same on all processes; returns when all have come here.

    Raises:
        UserError: it differs from that of process 0.
    """
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    if not np.array_equal(digest, rows_of_all(digest[None])[0]):
        raise UserError(f"{what} of process {jax.process_index()} differs from that of process 0; give all the same")


def split_rows(rows: np.ndarray, mesh: Mesh) -> jax.Array:
    """Returns the array of all hosts' rows, split over the mesh."""
    return jax.make_array_from_process_local_data(batch_sharding(mesh), rows)


def rows_of_all(rows: np.ndarray) -> np.ndarray:
    """Returns the rows of all hosts, in their order, on every host."""
    if jax.process_count() == 1:
        return rows
    return np.asarray(multihost_utils.process_allgather(rows, tiled=True))
