"""Programs of several processes: how they connect, and how they exchange rows and errors."""

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

# Seconds without a heartbeat after which a process counts as dead.
HEARTBEAT_TIMEOUT = 30
# How messages of JAX begin where a collective fails, and codes of errors that the program itself has caused.
_LOST = re.compile(r"[A-Z_]+: .*(Gloo|NCCL|coordination|barrier|heartbeat)", re.DOTALL | re.IGNORECASE)
_OF_PROGRAM = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
# What `jax.distributed.initialize` raises where processes cannot connect.
_NOT_JOINED = (RuntimeError, ValueError, TypeError, KeyError, OSError)

_abort_handler: Any = None


def join(place: str = "", *, stops_together: bool = True) -> None:
    """Connects this process to the others that share every batch. Call it before any computation.

    Args:
        place: ``HOST:PORT,I/N``: the address of process 0, the index of this process and the number of processes. If
            empty, JAX detects them on a TPU slice, Slurm, Kubernetes or MPI.
        stops_together: whether JAX takes SIGTERM and tells all processes when they ask, see
            `lit_het.training.preemption`. Where nobody asks, a signal would be lost: without it a process ends by
            itself, and the others find that they have lost it.
    """
    found = re.fullmatch(r"(\S+:\d+),(\d+)/(\d+)", place)
    if place and (found is None or int(found[2]) >= int(found[3]) or not 0 < int(found[1].split(":")[-1]) < 2**16):
        raise UserError(
            f"--distributed {place} is malformed; the first of two processes is HOST:PORT,0/2, the second HOST:PORT,1/2"
        )
    jax.config.update("jax_enable_preemption_service", stops_together)
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
    """Sets the exit code for SIGABRT, with which JAX's threads end a process that has lost process 0."""
    # A handler of `signal.signal` runs in the main thread, which the abort does not wait for; a handler in C runs at
    # once.

    def end(_: int) -> None:
        os.write(2, b"lit-het: ended by SIGABRT: JAX lost the connection to process 0; restart all processes\n")
        os._exit(code)

    # The C library holds no reference to the handler: without a global one Python would free it.
    global _abort_handler
    _abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    ctypes.CDLL(None).signal(signal.SIGABRT, _abort_handler)


def is_main_process() -> bool:
    """Returns whether this is process 0, the only one that prints messages and writes the run's files."""
    # `jax.process_index` would start the devices of a program that has only one process.
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def lost_process_error(error: BaseException) -> BaseException | None:
    """Returns the error in a chain of causes that reports the loss of a process, a device or the network, or None."""
    # JAX raises JaxRuntimeError from a computation, but a plain ValueError where its result is fetched.
    if not jax.distributed.is_initialized():
        return None
    cause: BaseException | None = error
    # JAX's error may be the cause of another one, for example of Orbax's.
    while cause is not None:
        is_of_runtime = isinstance(cause, jax.errors.JaxRuntimeError) or bool(_LOST.match(str(cause)))
        if is_of_runtime and not any(code in str(cause) for code in _OF_PROGRAM):
            break
        cause = cause.__cause__ or cause.__context__
    return cause


def leave(code: int) -> None:
    """Ends this process at once if there are several."""
    # A normal exit would wait for the others, which wait for this process in a collective.
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        os._exit(code)


def to_global(batch: Batch, mesh: Mesh) -> Batch:
    """Returns the global batch, sharded over the mesh; ``batch`` has this host's rows."""
    return jax.tree.map(lambda rows: split_rows(rows, mesh), batch)


def wait_for_all(name: str) -> None:
    """Waits until every process has called this function with the same name."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def any_process(here: bool) -> bool:
    """Returns whether the condition is true on at least one process; all processes must call this."""
    return bool(gather_rows(np.array([here])).any())


def check_same(text: str, what: str) -> None:
    """Checks that a text is the same on all processes, all of which must call this."""
    # Only 32 bytes are exchanged, whatever the length of the text.
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    if not np.array_equal(digest, gather_rows(digest[None])[0]):
        raise UserError(
            f"{what} of process {jax.process_index()} differs from that of process 0; start all processes with the same"
        )


def split_rows(rows: np.ndarray, mesh: Mesh) -> jax.Array:
    """Returns the array of all hosts' rows, split over the mesh."""
    # Each host gives only its own rows; no host ever holds the global batch.
    return jax.make_array_from_process_local_data(batch_sharding(mesh), rows)


def gather_rows(rows: np.ndarray) -> np.ndarray:
    """Returns the rows of all hosts, in their order, on every host."""
    if jax.process_count() == 1:
        return rows
    return np.asarray(multihost_utils.process_allgather(rows, tiled=True))
