"""Memory that threads share: who needs much at a time waits for others to give some back."""

import contextlib
import os
import threading
from collections.abc import Iterator


class MemoryBudget:
    """So many bytes for all threads of a process together.

    Args:
        total: bytes.
    """

    def __init__(self, total: int):
        self._total, self._held = total, 0
        self._turn, self._change = threading.Lock(), threading.Condition()

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Waits for a piece of the memory, and gives it back at the end; a piece larger than all is all of it."""
        size = min(size, self._total)
        # First come, first served: else many small pieces would keep a large one waiting for ever.
        with self._turn, self._change:
            while self._held + size > self._total:
                self._change.wait()
            self._held += size
        try:
            yield
        finally:
            with self._change:
                self._held -= size
                self._change.notify()


# As much as a photograph of 12 million pixels takes, for each processor.
DECODING = MemoryBudget(max(2**30, 2**27 * (os.cpu_count() or 1)))
"""What all threads together decode images in: 128 MiB for each processor, 1 GiB at least."""
