import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from lit_het.eval.metrics.significance import bootstrap_error, estimate, holm, standard_error, welch, welch_tests
from tests.refusals import assert_refused


def test_the_standard_error_is_that_of_the_mean():
    """Values 1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7, standard error sqrt(7 / 3)."""
    found = estimate([1.0, 2.0, 6.0])
    assert found.mean == 3.0
    assert found.error == pytest.approx(math.sqrt(7 / 3))
    assert found.shown(2) == "3.00 ± 1.53"


def test_a_single_seed_and_an_infinite_loss_have_no_error_and_no_warning():
    assert estimate([2.5]).shown(1) == "2.5"
    assert estimate([math.inf, 1.0]).shown(1) == "inf"


def test_welchs_test_of_five_runs_by_hand():
    """One: 1, 2, 3, mean 2, s²/n = 1/3. Other: 5, 9, mean 7, s²/n = 8/2 = 4.

    t = -5 / sqrt(13/3); degrees = (13/3)² / ((1/3)²/2 + 4²/1).
    """
    found = welch([1.0, 2.0, 3.0], [5.0, 9.0])
    degrees = (13 / 3) ** 2 / ((1 / 3) ** 2 / 2 + 16)
    half = stats.t.ppf(0.975, degrees) * math.sqrt(13 / 3)
    assert found.difference == -5
    assert found.statistic == pytest.approx(-5 / math.sqrt(13 / 3))
    assert found.degrees == pytest.approx(degrees)
    assert found.p_value == pytest.approx(2 * stats.t.sf(5 / math.sqrt(13 / 3), degrees))
    assert found.interval == pytest.approx((-5 - half, -5 + half))
    assert found.untested == ""


runs = st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=6).filter(lambda v: np.std(v) > 1e-3)


@settings(max_examples=40, deadline=None)
@given(runs, runs)
def test_the_interval_holds_zero_where_nothing_is_found_and_groups_may_be_swapped(one: list[float], other: list[float]):
    assume(not welch(one, other).untested)
    found, back = welch(one, other), welch(other, one)
    assert (found.interval[0] <= 0 <= found.interval[1]) == (found.p_value >= 0.05)
    assert sum(found.interval) / 2 == pytest.approx(found.difference, abs=1e-6)
    assert found.statistic == pytest.approx(-back.statistic)
    assert found.p_value == pytest.approx(back.p_value)


@pytest.mark.parametrize(
    ("one", "other", "reason", "difference"),
    [
        ([1.0], [2.0, 3.0], "two runs in each group", -1.5),
        ([1.0], [2.0], "two runs in each group", -1.0),
        ([0.1, 0.1, 0.1], [0.4, 0.4], "does not vary", -0.3),
        ([0.1, 0.2, 0.3], [0.3, 0.1, 0.2], "equal", 0.0),
        ([0.3, 0.3 + 1e-13, 0.3], [0.3 + 1e-12, 0.3 + 1e-12], "equal", 0.0),
        ([0.1, 0.2 + 1e-13, 0.3], [0.3, 0.1, 0.2], "equal", 0.0),
        ([0.1, 0.1 + 1e-14, 0.1], [0.4, 0.4 - 1e-14], "does not vary", -0.3),
        ([math.inf, 1.0], [2.0, 3.0], "not finite", math.inf),
        ([math.inf, 1.0], [math.inf, 3.0], "not finite", math.nan),
        ([math.nan, 1.0], [2.0, 3.0], "not finite", math.nan),
    ],
)
def test_groups_without_a_test_give_the_reason_and_no_warning(one, other, reason: str, difference: float):
    found = welch(one, other)
    assert reason in found.untested
    assert np.isnan([found.statistic, found.degrees, found.p_value, *found.interval]).all()
    assert found.difference == pytest.approx(difference, nan_ok=True)


def test_one_group_without_variance_is_tested_against_one_that_varies():
    """The constant group adds nothing: t of three runs against the number 0.3, with two degrees of freedom."""
    found, (_, expected) = welch([0.1, 0.2, 0.4], [0.3, 0.3, 0.3]), stats.ttest_1samp([0.1, 0.2, 0.4], 0.3)
    assert found.p_value == pytest.approx(expected)
    assert found.degrees == pytest.approx(2)


def test_figures_of_runs_are_compared_by_name_and_only_where_all_have_them():
    ours = [{"nll": 1.0, "top1": 0.5, "ece": 0.1}, {"nll": 2.0, "top1": 0.6, "ece": 0.2}]
    theirs = [{"top1": 0.2, "nll": 3.0}, {"top1": 0.3, "nll": 3.5}]
    found = welch_tests(ours, theirs)
    assert list(found) == ["nll", "top1"]
    assert found["top1"] == welch([0.5, 0.6], [0.2, 0.3])


def test_a_comparison_without_runs_or_without_a_common_figure_is_refused():
    assert_refused("at least one run", welch_tests, [{"nll": 1.0}], [])
    assert_refused("at least one run", welch, [], [1.0])
    assert_refused("no figure is in all", welch_tests, [{"nll": 1.0}], [{"ece": 1.0}])


def test_holm_stops_at_the_first_test_that_fails_its_share_of_the_level():
    """Of four tests at 5 % the smallest must be at most 0.0125, the next 0.0167, the next 0.025, the last 0.05."""
    assert holm({"a": 0.0125, "b": 0.016, "c": 0.03, "d": 0.04}) == {"a", "b"}
    assert holm({"a": 0.013, "b": 0.0131}) == {"a", "b"}
    assert holm({"a": 0.026, "b": 0.001}) == {"a", "b"}
    assert holm({"a": 0.013, "b": 0.013, "c": 0.013, "d": 0.013}) == set()
    assert holm({}) == set()


def mean_of(values: np.ndarray):
    """The mean of each draw, from how often it drew each example."""
    return lambda times: times @ values / len(values)


def test_the_bootstrap_finds_the_standard_error_of_a_mean_with_as_many_examples_in_every_draw_as_there_are():
    values = np.random.default_rng(0).normal(size=400)
    assert bootstrap_error(mean_of(values), 400) == pytest.approx(values.std() / 20, rel=0.1)
    assert bootstrap_error(lambda times: times.sum(axis=1).astype(float), 50) == 0
    assert_refused("no valid example", bootstrap_error, mean_of(np.zeros(0)), 0)


def test_the_bootstrap_repeats_with_its_seed_however_draws_are_blocked(monkeypatch):
    values = np.random.default_rng(1).normal(size=30)
    one, same, other = (bootstrap_error(mean_of(values), 30, seed) for seed in (3, 3, 4))
    assert one == same != other
    monkeypatch.setattr("lit_het.eval.metrics.rows.VALUES_PER_BLOCK", 64)
    assert bootstrap_error(mean_of(values), 30, 3) == pytest.approx(one, rel=1e-12)


def test_the_standard_error_of_a_mean_is_that_of_scipy_for_groups_of_one_and_of_repeated_examples_too():
    values = np.random.default_rng(0).normal(size=30)
    expected = pytest.approx(stats.sem(values))
    assert standard_error(values) == expected
    assert standard_error(values, np.arange(30) * 7) == expected
    assert standard_error(np.repeat(values, 5), np.repeat(np.arange(30), 5)) == expected


def test_the_standard_error_over_groups_is_that_of_a_bootstrap_of_whole_groups():
    generator = np.random.default_rng(0)
    groups = generator.integers(120, size=400)
    values = generator.normal(size=120)[groups] + generator.normal(size=400)
    sums, counts = np.bincount(groups, values, 120), np.bincount(groups, minlength=120)
    drawn = generator.integers(120, size=(2000, 120))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    assert standard_error(values, groups) == pytest.approx(means.std(ddof=1), rel=0.08)
    assert standard_error(values, groups) > 1.2 * standard_error(values)


def test_one_example_and_infinite_ones_have_no_standard_error():
    assert np.isnan(standard_error(np.ones(1)))
    assert np.isnan(standard_error(np.ones(3), np.zeros(3, int)))
    assert np.isnan(standard_error(np.array([1.0, np.inf])))
