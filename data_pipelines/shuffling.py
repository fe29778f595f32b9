"""The order of training on a table in memory."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Int


def shuffled_batches(count: int, batch_size: int, seed: int) -> Iterator[Int[np.ndarray, " b"]]:
    """Yields without end the rows of every batch: every pass is a permutation, which may begin within a batch."""
    random, rows = np.random.default_rng(seed), np.zeros(0, int)
    while True:
        while len(rows) < batch_size:
            rows = np.concatenate([rows, random.permutation(count)])
        yield rows[:batch_size]
        rows = rows[batch_size:]
