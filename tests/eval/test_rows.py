import pytest

from lit_het.eval.metrics.rows import VALUES_PER_BLOCK, row_blocks


@pytest.mark.parametrize("values_per_row", [1, 3, 1000, VALUES_PER_BLOCK, 2 * VALUES_PER_BLOCK])
@pytest.mark.parametrize("count", [0, 2500])
def test_blocks_cover_all_rows_in_order_and_stay_small(count: int, values_per_row: int):
    blocks = list(row_blocks(count, values_per_row))
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(count))
    sizes = [(block.stop - block.start) * values_per_row for block in blocks]
    assert all(0 < size <= max(VALUES_PER_BLOCK, values_per_row) for size in sizes)
