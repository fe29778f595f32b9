"""Says which shard a read waits for, again and again, and ends a run whose read never comes back."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator

from lit_het.console import say
from lit_het.errors import TRY_AGAIN

# Seconds between two looks.
_INTERVAL = 1.0
_reads: dict[int, tuple[str, float]] = {}  # by thread: address, and since when


@contextlib.contextmanager
def reading(address: str) -> Iterator[None]:
    """Marks this thread as waiting for an address."""
    thread = threading.get_ident()
    _reads[thread] = address, time.monotonic()
    try:
        yield
    finally:
        _reads.pop(thread, None)


@contextlib.contextmanager
def watched(slow: float, stuck: float) -> Iterator[None]:
    """Watches all threads that are `reading`.

    Args:
        slow: seconds after which a read is told; then after twice as many, and so on.
        stuck: seconds after which the process ends with exit code 75, so that it is started again.
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
    told: dict[tuple[str, float], float] = {}
    while not is_over.wait(min(_INTERVAL, slow / 2)):
        waiting = sorted(set(_reads.copy().values()), key=lambda read: read[1])
        told = {read: seconds for read, seconds in told.items() if read in waiting}
        for address, since in waiting:
            seconds = time.monotonic() - since
            if seconds >= told.get((address, since), slow):
                told[address, since] = 2 * seconds
                say(f"still waiting for {address} after {seconds:.0f} s", by_all=True)
            if seconds >= stuck:
                way_out = "--resume goes on, --data.stuck-read-seconds waits longer"
                say(f"nothing came from {address} in {seconds:.0f} s: the run ends; {way_out}", by_all=True)
                os._exit(TRY_AGAIN)  # the thread that waits cannot be ended
