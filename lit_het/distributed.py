"""One program on several processes: how they find one another, and how they join the rows that each has read."""

import ctypes
import hashlib
import os
import re
import signal
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from lit_het.errors import TRY_AGAIN, UserError
from lit_het.sharding import batch_sharding
from lit_het.types import Batch

# Seconds after which the others take a process for dead that is not heard of.
HEARTBEAT_TIMEOUT = 30
# How JAX's errors begin where a collective fails, and codes of those whose cause is the program.
_LOST = re.compile(r"[A-Z_]+: .*(Gloo|NCCL|coordination|barrier|heartbeat)", re.DOTALL | re.IGNORECASE)
_OF_PROGRAM = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
# What JAX raises where processes do not come together.
_NOT_JOINED = (RuntimeError, ValueError, TypeError, KeyError, OSError)

_abort_handler: Any = None


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
    _end_aborts_with(TRY_AGAIN)


def _end_aborts_with(code: int) -> None:
    """Gives an exit code to SIGABRT, by which JAX's own threads end a process that has lost process 0.

    Not by `signal.signal`: its handlers run when the main thread comes to them, and the process ends before.
    """

    def end(_: int) -> None:
        os.write(2, b"lit-het: ended by SIGABRT, as JAX ends those that have lost process 0; start all again\n")
        os._exit(code)

    global _abort_handler  # the C library keeps no reference
    _abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    ctypes.CDLL(None).signal(signal.SIGABRT, _abort_handler)


def is_first() -> bool:
    """Whether this process is the one of several that tells and writes; asks without starting any device."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def fault_of_machines(error: BaseException) -> BaseException | None:
    """Returns the error behind another that tells that another process, a device or the network is gone, if any does.

    What the runtime reports comes as `jax.errors.JaxRuntimeError` from a computation, and as a plain ``ValueError``
    where its result is fetched.
    """
    if not jax.distributed.is_initialized():
        return None
    cause: BaseException | None = error
    while cause is not None:
        is_of_runtime = isinstance(cause, jax.errors.JaxRuntimeError) or bool(_LOST.match(str(cause)))
        if is_of_runtime and not any(code in str(cause) for code in _OF_PROGRAM):
            break
        cause = cause.__cause__ or cause.__context__
    return cause


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
