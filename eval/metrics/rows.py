"""Blocks of rows of a large array, so that no float64 copy of the whole array is needed."""

from collections.abc import Iterator

# 8 MiB of float64: temporaries of this size fit in the cache of a processor.
VALUES_PER_BLOCK = 2**20


def row_blocks(num_rows: int, values_per_row: int) -> Iterator[slice]:
    """Yields slices that cover ``num_rows`` rows in order, each of at most `VALUES_PER_BLOCK` values or of one row."""
    size = max(1, VALUES_PER_BLOCK // max(1, values_per_row))
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))
