"""Rows of a large array a block at a time, so that float64 copies of it never exist whole."""

from collections.abc import Iterator

# Eight megabytes of float64: several temporaries of this size stay in a processor's cache and cost no memory.
VALUES_PER_BLOCK = 2**20


def row_blocks(num_rows: int, values_per_row: int) -> Iterator[slice]:
    """Slices that cover ``num_rows`` rows in order, each of at most `VALUES_PER_BLOCK` values or of one row."""
    size = max(1, VALUES_PER_BLOCK // max(1, values_per_row))
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))
