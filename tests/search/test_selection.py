"""The shape from which to scale, out of a grid of small models."""

import itertools
import math

from lit_het.search.law.observations import Observation
from lit_het.search.law.selection import frontier_of, select
from tests.refusals import assert_refused

WIDTHS, DEPTHS = (2.0, 4.0, 8.0), (1.0, 2.0, 3.0)


def observed(width, depth, compute, loss):
    return Observation({"width": float(width), "depth": float(depth)}, float(compute), float(loss))


def grid(best=(4.0, 2.0)):
    """A grid whose shape ``best`` is better than its compute explains."""
    runs = []
    for width, depth in itertools.product(WIDTHS, DEPTHS):
        compute = width * depth
        gain = 0.5 if (width, depth) == best else 1.0
        runs.append(observed(width, depth, compute, gain * compute**-0.2))
    return runs


def test_the_frontier_has_the_runs_that_none_of_less_compute_reaches():
    runs = [observed(1, 1, 1, 0.9), observed(2, 1, 2, 0.95), observed(1, 2, 3, 0.5), observed(2, 2, 3, 0.6)]
    assert [(one.compute, one.loss) for one in frontier_of(runs)] == [(1, 0.9), (3, 0.5)]


def test_the_shape_of_the_widest_range_is_chosen_at_its_least_compute():
    found = select(grid())
    assert found.start.shape == {"width": 4.0, "depth": 2.0}
    assert (found.start.compute, found.start.until) == (8.0, 24.0)
    assert found.start.span == 3.0
    assert found.boundary == ()
    assert not found.warning


def test_several_lengths_of_one_shape_are_one_stretch():
    longer = [observed(4.0, 2.0, 16.0, 0.25), observed(4.0, 2.0, 32.0, 0.2)]
    found = select([*grid(), *longer])
    assert found.start.compute == 8.0
    assert [compute for compute, _ in found.start.losses] == [8.0, 16.0, 32.0]
    assert found.start.until == 32.0


def test_a_shape_on_the_boundary_is_a_warning_and_not_chosen_before_one_inside():
    found = select(grid(best=(8.0, 2.0)))
    assert found.start.shape["width"] == 4.0
    outside = select([one for one in grid(best=(8.0, 2.0)) if one.shape["width"] != 4.0])
    assert outside.boundary == ("width",)
    assert "lies on the boundary of the grid in width" in outside.warning


def test_a_shape_that_is_optimal_at_a_point_or_over_a_narrower_range_than_one_on_the_boundary_is_a_warning():
    runs = [observed(2, 1, 1, 0.9), observed(4, 1, 2, 0.5)]
    isolated = select([*runs, observed(8, 1, 2.02, 0.4)])
    assert isolated.start.shape["width"] == 4.0
    assert "optimal only up to 1.01 times its least compute" in isolated.warning
    found = select([*runs, observed(8, 1, 6, 0.4), observed(8, 1, 60, 0.3)])
    assert found.start.shape["width"] == 4.0
    assert "width 8, depth 1, on the boundary of the grid, is optimal over a wider range" in found.warning


def test_nothing_is_smaller_than_1_and_a_dimension_of_one_value_has_no_boundary():
    found = select(grid(best=(4.0, 1.0)))
    assert found.start.shape == {"width": 4.0, "depth": 1.0}
    assert not found.warning
    runs = [observed(width, 1.0, width, loss) for width, loss in ((1.0, 0.9), (2.0, 0.5), (4.0, 0.6))]
    assert select(runs).boundary == ()


def test_seeds_are_averaged_and_runs_without_a_metric_left_out():
    found = select([observed(1, 1, 1, 0.4), observed(1, 1, 1, 0.6), observed(2, 1, 2, math.nan)])
    assert found.start.losses == ((1, 0.5),)
    assert found.excluded == 1
    assert_refused("none of 1 runs of the grid has a finite metric", select, [observed(1, 1, 1, math.nan)])
    assert_refused("different dimensions", select, [observed(1, 1, 1, 0.5), Observation({"width": 1.0}, 1.0, 0.5)])
