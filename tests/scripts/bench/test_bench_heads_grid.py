"""Maps of what heads cost: which cells fit is known before anything runs, and times are predicted."""

import argparse
import json
import math

import pytest
from rich.console import Console

from scripts.bench import bench_heads_grid as grid


@pytest.mark.slow
def test_cells_that_do_not_fit_are_not_run_and_maps_are_drawn(tmp_path):
    options = argparse.Namespace(
        # In which blocks fit; what needs four times as much is not compiled.
        **{"features": 8, "classes": 300, "factors": 3, "block_size": 16, "memory_gib": 150_000 / 2**30},
        **{"grid_batches": [16], "samples": [64], "rounds": 1, "seconds": 5.0, "output": tmp_path},
    )
    grid.map_costs(options, grid.Report(Console(quiet=True), "heads"))
    cells = {
        (c["form"], c["batch"], c["samples"]): c
        for c in json.loads((tmp_path / "bench_heads_grid.json").read_text())["grid"]
    }
    assert len(cells) == len(grid.FORMS)
    assert {cell["fit"] for cell in cells.values()} == {"fits", "may not fit", "does not fit"}
    assert all(bool(cell["seconds"]) == (cell["fit"] == "fits") for cell in cells.values())
    assert cells["HET-XL", 16, 64]["fit"] == "does not fit"
    assert cells["HET-XL, blocks", 16, 64]["fit"] == "fits", "blocks need no more memory for more samples"
    # Wᵀ φ and its gradients, with the products of the scales of the noise.
    assert cells["HET-XL", 16, 64]["gflop"] == pytest.approx(
        2e-9 * 16 * (3 * 2 * 8 * 8 + 64 * (2 * 3 * 8 + 3 * 8 * 300))
    )
    assert len(list(tmp_path.glob("bench_heads_grid_*.png"))) == 3


def test_times_are_predicted_by_a_line_over_samples_and_in_proportion_to_the_batch():
    def cell(batch, samples, *seconds):
        return grid.Cell("HET", batch, samples, 1.0, 0, seconds=list(seconds))

    timed = [cell(4, 1, 1.0), cell(4, 11, 2.0)]
    assert grid._predicted(cell(4, 21), timed) == pytest.approx(3.0)
    assert grid._predicted(cell(8, 11), timed) == pytest.approx(4.0)
    assert grid._predicted(cell(4, 8), timed[:1]) == pytest.approx(8.0)
    assert grid._predicted(cell(4, 1), []) == 0.0
    assert grid._predicted(cell(8, 4), [cell(4, 4)]) == math.inf
