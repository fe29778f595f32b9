"""The fit of the law: known parameters are found again, and derivatives are right."""

import dataclasses
import math

import numpy as np
import pytest

from lit_het.search.law.fitting import fit, search
from lit_het.search.law.residuals import LEAST_SHARE, Residuals
from scripts.studies.cover_shape_law import C, S, law, simulate


@pytest.fixture(scope="module")
def exact():
    """A sweep without noise."""
    return simulate(law(), 0.0, 0)


def parameters(c, s, ratios):
    logs = [part for pair in zip(s, ratios, strict=True) for part in map(math.log, pair)]
    return np.array([math.log(c), *logs])


POINTS = [
    parameters(C, S.values(), (1.1, 0.9, 1.0)),
    parameters(0.3, (0.1, 1.0, 0.3), (0.2, 5.0, 1.0)),
    parameters(1.5, (0.5, 0.2, 2.0), (3.0, 0.5, 0.1)),
]


def test_parameters_are_found_again_without_noise(exact):
    found, true = fit(exact).law, law()
    assert found.c == pytest.approx(C, rel=1e-4)
    for name, curve in true.curves.items():
        assert dataclasses.astuple(found.curves[name]) == pytest.approx(dataclasses.astuple(curve), rel=5e-3)
        assert found.scaling_exponent(name) == pytest.approx(S[name], rel=1e-3)


@pytest.mark.parametrize("point", POINTS)
def test_derivatives_are_those_of_finite_differences(point):
    residuals, step = Residuals(simulate(law(), 0.01, 1)), 1e-6
    moved = [residuals.values(point + step * unit) - residuals.values(point - step * unit) for unit in np.eye(7)]
    np.testing.assert_allclose(residuals.jacobian(point), np.stack(moved, 1) / (2 * step), atol=1e-8)


def test_the_error_is_relative_and_units_of_size_and_compute_change_nothing_but_units():
    """A tenfold metric has the same exponents and errors; absolute errors would grow."""
    star = simulate(law(), 0.01, 2)
    one, tenfold = fit(star), fit(dataclasses.replace(star, f=10 * star.f))
    assert tenfold.squared_error == pytest.approx(one.squared_error, rel=1e-6)
    assert one.squared_error == pytest.approx(np.sum((one.predictions() / star.f - 1) ** 2), rel=1e-9)
    other = fit(dataclasses.replace(star, t=1e6 * star.t, x=star.x / 1e3))
    for moved in (tenfold, other):
        np.testing.assert_allclose(moved.parameters, one.parameters, atol=1e-3)
    for name in S:
        assert other.law.optimum(name, 1e18) == pytest.approx(one.law.optimum(name, 1e12) / 1e3, rel=1e-3)


def test_no_other_start_is_better_and_a_fixed_parameter_stays():
    star = simulate(law(), 0.01, 3)
    found = fit(star)
    for point in POINTS:
        assert search(Residuals(star), point)[1] >= found.squared_error * (1 - 1e-6)
    moved, error = search(Residuals(star), POINTS[1], fixed=1)
    assert moved[1] == POINTS[1][1]
    assert error > 0


def test_the_noise_is_estimated():
    errors = [fit(simulate(law(), 0.01, seed)).relative_error for seed in range(10)]
    assert np.mean(errors) == pytest.approx(0.01, rel=0.1)


def test_counts_are_repeated_runs():
    star = simulate(law(), 0.01, 4)
    counts = np.random.default_rng(0).integers(0, 3, len(star.f)).astype(float)
    repeated = np.repeat(np.arange(len(star.f)), counts.astype(int))
    fields = {name: getattr(star, name)[repeated] for name in ("dimension", "x", "t", "f")}
    counted, listed = Residuals(star, counts), Residuals(dataclasses.replace(star, **fields))
    assert np.sum(counted.values(POINTS[0]) ** 2) == pytest.approx(np.sum(listed.values(POINTS[0]) ** 2), rel=1e-6)


def test_all_parameters_are_above_zero_where_a_term_is_missing(exact):
    constant = dataclasses.replace(exact, f=np.full_like(exact.f, 0.3))
    residuals = Residuals(constant)
    found = fit(constant)
    assert found.relative_error < 10 * LEAST_SHARE
    assert {"α", "β"} & set(residuals.at_bound(0, found.parameters))
