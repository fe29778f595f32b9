"""Runs of a star sweep: which dimension varies, and what is refused."""

import dataclasses
import math

import pytest

from lit_het.search.law.observations import Observation, check_spokes, star
from tests.refusals import assert_refused

CENTRE = {"width": 100.0, "depth": 10.0}
NAN = Observation({**CENTRE, "width": 50.0}, 1.0, math.nan)


def sweep(lengths=(1.0, 2.0)):
    """Five sizes of each dimension with some lengths."""
    shapes = [{**CENTRE, name: CENTRE[name] * share} for name in CENTRE for share in (0.1, 0.2, 0.4, 0.6, 0.8)]
    return [Observation(shape, length * 100, 0.5) for shape in shapes for length in lengths]


def test_runs_are_sorted_by_the_dimension_that_varies():
    found = star([*sweep(), Observation(dict(CENTRE), 5e3, 0.4)], CENTRE)
    assert found.dimensions == ("width", "depth")
    assert found.of("width").sum() == found.of("depth").sum() == 10
    assert set(found.x[found.of("depth")]) == {1.0, 2.0, 4.0, 6.0, 8.0}
    assert [one.loss for one in found.at_centre] == [0.4]
    assert found.num_parameters == 13


def test_runs_without_a_finite_metric_above_0_are_left_out_and_counted():
    """An error of 0, of a perfect run, has no relative error."""
    others = [dataclasses.replace(NAN, loss=value) for value in (math.inf, 0.0)]
    found = star([*sweep(), NAN, *others, Observation(CENTRE, 1.0, 0.0)], CENTRE)
    assert (found.excluded, len(found.f), found.at_centre) == (4, 20, ())


@pytest.mark.parametrize(
    ("observations", "message"),
    [
        (sweep((1.0,)), "10 different runs, but the law of 2 dimensions has 13 parameters; train more"),
        ([*sweep((1.0,)), NAN], r"10 different runs \(1 run without a finite metric above 0 left out\), but the law"),
        (sweep((1.0,)) * 3, "10 different runs, but the law"),
        (sweep((1.0, 2.0, 3.0))[:20], "5 different runs of depth, but it has 6 parameters of its own"),
        ([Observation(dict.fromkeys(CENTRE, 5.0), 1.0, 0.5)], "differs from the centre .* in width, depth; vary only"),
        ([Observation({"width": 5.0}, 1.0, 0.5)], "a run has the dimensions width, but the centre has width, depth"),
        ([Observation({**CENTRE, "width": 200.0}, 1.0, 0.5)], "width: the centre 100 must be above all values"),
        ([Observation({**CENTRE, "width": 50.0}, 0.0, 0.5)], "compute 0 and metric 0.5 must be above 0"),
        ([Observation({**CENTRE, "width": 50.0}, 1.0, -0.5)], "compute 1 and metric -0.5 must be above 0"),
    ],
)
def test_unfit_runs_are_refused(observations, message):
    assert_refused(message, star, observations, CENTRE)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"width": [50.0, 100.0]}, "width: the centre 100 must be above all values of its spoke, of which the largest"),
        ({"width": [0.0, 50.0]}, "width: the centre 100 must be above"),
        ({"width": []}, "width: give different values, at least one"),
        ({"width": [5.0, 5.0]}, "width: give different values"),
        ({"heads": [5.0]}, "heads is not a dimension of the centre; it has width, depth"),
    ],
)
def test_spokes_are_checked_before_training(values, message):
    assert_refused(message, check_spokes, CENTRE, values)
