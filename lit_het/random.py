"""Random keys as a pure function of (seed, stream name, step): there is no state, so a resumed run is exact.

Tables in memory, which are trained on in one go, have batches of shuffled rows.
"""

import dataclasses
import zlib
from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Array, Int, Key


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of one step; ``keys("noise")`` is the key of the stream of that name."""

    base: Key[Array, ""]

    def __call__(self, name: str) -> Key[Array, ""]:
        """Returns the key of a stream; other names and other steps have independent keys."""
        # CRC32, as Python's hash of a string differs between processes.
        return jax.random.fold_in(self.base, zlib.crc32(name.encode()))


def keys_at(seed: int, step: int | Int[Array, ""]) -> Keys:
    """Returns the keys of training step ``step`` of the run with this seed."""
    return Keys(jax.random.fold_in(jax.random.key(seed), step))


def shuffled_batches(count: int, batch_size: int, seed: int) -> Iterator[Int[np.ndarray, " b"]]:
    """Yields without end the rows of every batch: every pass is a permutation, which may begin within a batch."""
    random, rows = np.random.default_rng(seed), np.zeros(0, int)
    while True:
        while len(rows) < batch_size:
            rows = np.concatenate([rows, random.permutation(count)])
        yield rows[:batch_size]
        rows = rows[batch_size:]
