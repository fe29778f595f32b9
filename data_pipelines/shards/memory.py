"""A memory budget that threads share: a thread that needs more than is free waits."""

import contextlib
import os
import threading
from collections.abc import Iterator


class MemoryBudget:
    """Limits how many bytes the threads of a process reserve together.

    Args:
        total: capacity in bytes.
    """

    def __init__(self, total: int):
        self._total, self._reserved = total, 0
        self._turn, self._change = threading.Lock(), threading.Condition()

    @contextlib.contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Waits until ``size`` bytes are free, reserves them, and releases them at the end.

        Args:
            size: bytes; more than the capacity reserves all of it.
        """
        size = min(size, self._total)
        # First come, first served: otherwise many small requests would starve a large one.
        with self._turn, self._change:
            while self._reserved + size > self._total:
                self._change.wait()
            self._reserved += size
        try:
            yield
        finally:
            with self._change:
                self._reserved -= size
                self._change.notify()


# 128 MiB per processor: a photograph of 12 million pixels takes that much.
DECODING = MemoryBudget(max(2**30, 2**27 * (os.cpu_count() or 1)))
"""The memory in which all threads together decode images: 128 MiB per processor, at least 1 GiB."""
