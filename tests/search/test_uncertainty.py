"""Intervals of exponents: they contain the true values, and say where runs determine nothing."""

import dataclasses

import jaxtyping
import numpy as np
import pytest
from scipy import stats

from lit_het.search.law import fitting
from lit_het.search.law.fitting import ROUGH, fit, search
from lit_het.search.law.residuals import Residuals
from lit_het.search.law.uncertainty import bootstrap, exponents, profile
from scripts.studies import cover_shape_law
from scripts.studies.cover_shape_law import C, S, law, simulate
from tests.refusals import assert_refused


@pytest.fixture(scope="module")
def found():
    """Exponents of one sweep with a noise of 0.3 %, with intervals that the truth hardly ever leaves."""
    return exponents(fit(simulate(law(), 0.003, 0)), level=0.99, resamples=20)


@pytest.mark.slow
def test_exponents_are_recovered_within_their_intervals(found):
    assert found.c.covers(C)
    for name, value in S.items():
        assert found.s[name].is_identified
        assert found.s[name].covers(value)
        low, high = found.s[name].bootstrap
        assert low < found.s[name].value < high
        assert found.a[name].value + found.b[name].value == pytest.approx(found.c.value / found.s[name].value)


@pytest.fixture
def types_are_not_checked(monkeypatch):
    """Three fifths of the time; other tests call the same functions with their shapes checked."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.slow
@pytest.mark.usefixtures("types_are_not_checked")
def test_intervals_of_90_percent_contain_the_truth_in_85_to_95_percent_of_160_sweeps(monkeypatch):
    """Of other sweeps than docs/shape_law.md reports; the standard error of a share is 2.4 %."""
    # All starts end in the same minimum at this noise.
    monkeypatch.setattr(fitting, "_STARTS_OF_C", (0.4,))
    fits = [fit(simulate(law(), 0.01, seed)) for seed in range(1000, 1160)]
    statistics = np.array([_statistics(one) for one in fits])
    for level, least, most in ((0.9, 0.85, 0.95), (0.5, 0.4, 0.6)):
        shares = np.mean(statistics < stats.f.ppf(level, 1, fits[0].degrees), axis=0)
        assert shares.min() >= least
        assert shares.max() <= most


@pytest.mark.parametrize("index", [0, 1, 3, 5])
def test_a_profile_interval_has_the_values_whose_statistic_is_below_the_quantile(found, index):
    """So that the coverage of c and of every s is that of the statistics above."""
    ends, _ = profile(found.fit, index, 0.9)
    for end in ends:
        # Ends are found to 0.2 % of themselves.
        assert _statistic(found.fit, index, end) == pytest.approx(stats.f.ppf(0.9, 1, found.fit.degrees), rel=0.1)


def _statistics(one):
    """Returns the statistics of the true c and scaling exponents in a fit."""
    return [_statistic(one, index, value) for index, value in zip((0, 1, 3, 5), (C, *S.values()), strict=True)]


def _statistic(one, index, value):
    """Returns by how much the squared error grows if an exponent is fixed, in estimated variances of a run."""
    start = one.parameters.copy()
    start[index] = np.log(value)
    _, error = search(Residuals(one.star), start, index, ROUGH)
    return (error / one.squared_error - 1) * one.degrees


def test_a_higher_level_is_a_wider_interval(found):
    (low, high), _ = profile(found.fit, 1, 0.5)
    assert low is not None
    assert high is not None
    assert low < found.s["width"].value < high
    assert not any(found.s["width"].covers(value) for value in (low / 1.5, high * 1.5))
    assert all(found.s["width"].covers(value) for value in (low, high))


def test_the_interval_is_narrow_where_the_noise_is_small():
    tight = exponents(fit(simulate(law(), 1e-5, 0)), resamples=0)
    # Ends are found to 0.2 % of themselves.
    assert tight.s["width"].profile == pytest.approx((S["width"], S["width"]), rel=0.005)


@pytest.mark.slow
@pytest.mark.usefixtures("types_are_not_checked")
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_noisy_runs_have_intervals_though_their_best_curves_are_steep(seed):
    found = exponents(fit(simulate(law(), 0.1, seed)), resamples=8)
    for one in (found.c, *found.s.values()):
        assert np.isfinite(np.array(one.bootstrap, np.float64)).all()


def test_resamples_are_repeatable_and_differ_by_seed(found):
    one, again, other = (bootstrap(found.fit, 3, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one["s", "width"], again["s", "width"])
    assert not np.array_equal(one["s", "width"], other["s", "width"])


@pytest.mark.slow
@pytest.mark.usefixtures("types_are_not_checked")
def test_a_metric_that_no_shape_changes_identifies_no_scaling_exponent():
    star = simulate(law(), 0.0, 0)
    noise = 1 + 0.01 * np.random.default_rng(0).standard_normal(len(star.f))
    flat = dataclasses.replace(star, f=(0.3 + 4e5 * star.t**-0.65) * noise)
    found = exponents(fit(flat), resamples=0)
    for name in S:
        assert not found.s[name].is_identified, name
        assert "the best fit has" in found.s[name].reason or "about as well with s =" in found.s[name].reason
        assert None in (found.s[name].profile or ())


def test_one_length_of_training_does_not_identify_the_scaling_exponents():
    star = simulate(law(), 0.01, 0)
    # The same compute everywhere: t^-c is a constant.
    found = exponents(fit(dataclasses.replace(star, t=np.full_like(star.t, 1e11))), resamples=0)
    assert not found.c.is_identified
    assert found.c.reason == "the runs fit about as well with c = 0.02 and 5"
    assert not any(one.is_identified for one in found.s.values())


@pytest.mark.parametrize(("arguments", "message"), [({"level": 1.0}, "level 1 must"), ({"resamples": -1}, "-1 resamp")])
def test_wrong_arguments_are_refused(found, arguments, message):
    assert_refused(message, exponents, found.fit, **arguments)


@pytest.mark.slow
def test_the_script_prints_the_coverage(capsys):
    assert cover_shape_law.main(["--draws", "1", "--resamples", "4"]) == 0
    assert "s width: profile" in capsys.readouterr().out
