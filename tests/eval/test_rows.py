import pytest

from lit_het.eval.rows import VALUES_PER_BLOCK, row_blocks


@pytest.mark.parametrize("values_per_row", [1, 3, 1000, VALUES_PER_BLOCK, 2 * VALUES_PER_BLOCK])
def test_blocks_cover_all_rows_in_order_and_stay_small(values_per_row: int):
    blocks = list(row_blocks(2500, values_per_row))
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(2500))
    assert all((block.stop - block.start) * values_per_row <= max(VALUES_PER_BLOCK, values_per_row) for block in blocks)


def test_no_rows_give_no_blocks():
    assert list(row_blocks(0, 5)) == []
