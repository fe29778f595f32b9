import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sklearn.metrics import roc_auc_score

from lit_het.eval.metrics import ambiguity
from tests.refusals import assert_refused


def test_equal_keys_form_a_group_and_a_lone_key_none():
    assert ambiguity.groups_of(["A", "b", "A", "c", "d", "c"]).tolist() == [0, -1, 0, 1, -1, 1]
    assert ambiguity.groups_of([]).tolist() == []


def test_errors_within_a_group_are_counted_by_hand():
    groups = np.array([0, 0, 0, 1, 1, -1, -1])
    labels = np.array([0, 0, 3, 5, 6, 1])
    predictions = np.array([0, 2, 4, 6, 5, 3])
    errors = ambiguity.errors_within_groups(predictions, labels, groups)
    # Wrong: 0→2 and 3→4 within a group; 5→6, 6→5 (no group) and 1→3 (another group) not.
    assert (errors.errors, errors.within) == (5, 2)
    assert errors.share == pytest.approx(0.4)
    assert errors.chance == pytest.approx(np.mean([2 / 6, 1 / 6, 0, 0, 2 / 6]))


def test_random_errors_fall_within_groups_as_often_as_chance_says():
    generator = np.random.default_rng(0)
    groups = ambiguity.groups_of(generator.integers(12, size=40).tolist())
    labels = generator.integers(40, size=40_000)
    errors = ambiguity.errors_within_groups(generator.integers(40, size=40_000), labels, groups)
    assert errors.share == pytest.approx(errors.chance, abs=0.01)


def test_a_model_without_errors_has_no_share():
    errors = ambiguity.errors_within_groups(np.array([0, 1]), np.array([0, 1]), np.array([0, 0]))
    assert errors.errors == 0
    assert np.isnan([errors.share, errors.chance]).all()
    outside = np.array([0]), np.array([2]), np.array([0, 0])
    assert_refused("label 2 lies outside", ambiguity.errors_within_groups, *outside)


def test_a_rank_test_of_five_values_is_computed_by_hand():
    # Of the six pairs the first group wins (3 > 1), (3 > 2), (5 > 1), (5 > 2), (5 > 4): U = 5.
    test = ambiguity.rank_test(np.array([3.0, 5.0]), np.array([1.0, 2.0, 4.0]))
    assert test.statistic == 5
    assert test.auc == pytest.approx(5 / 6)
    # Of the ten ways to choose two ranks of five, two give U = 5 or more: p = 2 * 2 / 10.
    assert test.p_value == pytest.approx(0.4)
    assert (test.first_median, test.second_median) == (4, 2)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_the_rank_test_agrees_with_scipy_and_its_effect_size_with_the_area_under_the_roc(seed: int, ties: bool):
    generator = np.random.default_rng(seed)
    first, second = generator.normal(0.5, size=30), generator.normal(size=50)
    if ties:
        first, second = first.round(), second.round()
    test = ambiguity.rank_test(first, second)
    reference = stats.mannwhitneyu(first, second)
    assert (test.statistic, test.p_value) == (reference.statistic, reference.pvalue)
    truth = np.repeat([1, 0], [30, 50])
    assert test.auc == pytest.approx(roc_auc_score(truth, np.concatenate([first, second])))
    assert ambiguity.rank_test(second, first).auc == pytest.approx(1 - test.auc)


def test_a_rank_test_of_a_deterministic_head_shows_no_difference_and_needs_finite_values_in_both_groups():
    test = ambiguity.rank_test(np.zeros(4), np.zeros(9))
    assert (test.auc, test.p_value, test.statistic) == (0.5, 1.0, 18.0)
    assert_refused("got 0 and 2", ambiguity.rank_test, np.zeros(0), np.zeros(2))
    assert_refused("not finite", ambiguity.rank_test, np.array([np.nan]), np.zeros(2))


def test_several_images_of_one_character_count_once_and_must_agree_on_whether_it_is_ambiguous():
    values = np.array([1.0, 3.0, 10.0, 20.0, 5.0])
    characters = np.array([7, 7, 2, 2, 9])
    distinct, means = ambiguity.means_by_unit(values, characters)
    assert (distinct.tolist(), means.tolist()) == ([2, 7, 9], [15, 2, 5])
    ambiguous, unambiguous = ambiguity.split_by_ambiguity(values, np.isin(characters, [2, 9]), characters)
    assert (ambiguous.tolist(), unambiguous.tolist()) == ([15, 5], [2])
    different = np.array([1, 0, 0, 0, 0], bool)
    message = "unit 7 is ambiguous in some images only"
    assert_refused(message, ambiguity.split_by_ambiguity, values, different, characters)


def test_repeating_every_image_does_not_make_a_test_more_certain():
    generator = np.random.default_rng(0)
    values, units = generator.normal(size=40), np.arange(40)
    once = ambiguity.rank_test(*ambiguity.split_by_ambiguity(values, units < 15, units))
    many = ambiguity.rank_test(
        *ambiguity.split_by_ambiguity(np.tile(values, 10), np.tile(units < 15, 10), np.tile(units, 10))
    )
    assert many.p_value == pytest.approx(once.p_value)
