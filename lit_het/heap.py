"""The heap of a process that computes keeps what is freed: to map it anew at every step costs up to a fifth of it."""

import ctypes
import os

KEEPS = "LIT_HET_KEEPS_HEAP"
"""The variable of the environment that turns it off, by 0."""

# Of glibc's malloc.h. -1 disables trimming; without mmap large arrays lie in the heap, too.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4
_OPTIONS = {_MMAP_MAX: 0, _TRIM_THRESHOLD: -1, _TOP_PAD: 64 * 2**20}


def keep() -> bool:
    """Makes glibc keep freed memory, and returns whether it does: not with another C library, or if it is turned off.

    The variables ``MALLOC_*`` do the same, but are read before Python starts.
    """
    if os.environ.get(KEEPS) == "0":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return all(mallopt(option, value) == 1 for option, value in _OPTIONS.items())
