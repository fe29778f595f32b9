"""Numbers at which sizes overflow, and what every change of bytes is made of."""

import random
from collections.abc import Callable
from typing import TypeAlias

Random: TypeAlias = random.Random

Part: TypeAlias = Callable[[bytes], bytes]
"""Changes a part of a file, which is a file of its own."""

Change: TypeAlias = Callable[[bytes, Part, Random], bytes]

NUMBERS = (
    *(0, 1, 2, 3, 7, 127, 255, 256, 511, 512, 4096, 65535, 65536, 2**24, 2**28, 2**30, 2**31 - 1, 2**31),
    *(2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
)


def number_bytes(random: Random) -> bytes:
    """Returns one of the numbers in 1, 2, 4 or 8 bytes."""
    size = random.choice((1, 2, 4, 8))
    return (random.choice(NUMBERS) % 256**size).to_bytes(size, random.choice(("little", "big")))


def many(content: bytes) -> int:
    """Returns how often something may stand side by side in a small file."""
    return min(10_000, 1 + 10**6 // (len(content) + 1))
