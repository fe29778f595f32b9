"""Reports reads of shards that take long, and ends the process when one never returns."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from lit_het.console import message
from lit_het.errors import TRY_AGAIN

# Seconds between two checks of all reads.
_INTERVAL = 1.0
# By thread: the address that it reads, and when the read began.
_reads: dict[int, tuple[str, float]] = {}


@contextlib.contextmanager
def reading(address: str) -> Iterator[None]:
    """Registers that this thread waits for a read of an address."""
    thread = threading.get_ident()
    # Without a lock: each thread writes only its own entry, and single operations of a dict are atomic.
    _reads[thread] = address, time.monotonic()
    try:
        yield
    finally:
        _reads.pop(thread, None)


@contextlib.contextmanager
def watched(slow: float, stuck: float) -> Iterator[None]:
    """Watches the threads that are `reading`.

    Args:
        slow: seconds after which a read is reported; each further report comes after twice as many seconds.
        stuck: seconds after which the process ends with exit code 75, so that a scheduler restarts it.
    """
    is_over = threading.Event()
    thread = threading.Thread(target=_watch, args=(slow, stuck, is_over), name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _watch(slow: float, stuck: float, is_over: threading.Event) -> None:
    next_report: dict[tuple[str, float], float] = {}
    while not is_over.wait(min(_INTERVAL, slow / 2)):
        waiting = sorted(set(_reads.copy().values()), key=lambda read: read[1])
        next_report = {read: seconds for read, seconds in next_report.items() if read in waiting}
        for address, since in waiting:
            seconds = time.monotonic() - since
            if seconds >= next_report.get((address, since), slow):
                next_report[address, since] = 2 * seconds
                message(f"still waiting for {address} after {seconds:.0f} s", on_all_processes=True)
            if seconds >= stuck:
                way_out = "continue with --resume, or wait longer with --data.stuck-read-seconds"
                message(f"no data from {address} in {seconds:.0f} s: the run ends; {way_out}", on_all_processes=True)
                # Python cannot interrupt a thread that blocks in a system call: only the process can end.
                os._exit(TRY_AGAIN)
