"""Greedy selection of the members of an ensemble, by hand and against a plain loop over all classes."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from lit_het.eval.hyper_ensembles import LEAST_FALL, select_members
from tests.refusals import assert_refused

# Probabilities of the true class of two images.
GOOD, OTHER, BAD = (0.9, 0.3), (0.2, 0.9), (0.01, 0.01)


def test_a_model_may_be_picked_twice_for_its_weight_by_hand():
    """Alone .9 x .3 = .27 is best; the mean of both has .55 x .6 = .33, and 2 to 1 has 2/3 x 1/2 = 1/3.

    3 to 1 has .725 x .45 = .32625 and 2 to 2 again .33, so that no further pick lowers the loss.
    """
    found = select_members(np.log([BAD, OTHER, GOOD]), 3)
    assert found.picks == (2, 1, 2)
    assert found.nll == pytest.approx([-np.log(0.27) / 2, -np.log(0.33) / 2, np.log(3) / 2])
    assert found.weights == {2: 2, 1: 1}


def test_the_selection_ends_with_the_asked_number_of_different_models_or_where_none_helps():
    assert select_members(np.log([GOOD, OTHER, BAD]), 2).picks == (0, 1)
    assert select_members(np.log([GOOD, OTHER, BAD]), 1).picks == (0,)
    assert select_members(np.log([(0.5, 0.5), (0.6, 0.6), (0.6, 0.5)]), 3).picks == (1,)
    assert select_members(np.log([GOOD, GOOD]), 2).picks == (0,), "of equal models the first"


def plain_selection(log_probabilities: np.ndarray, labels: np.ndarray, size: int) -> tuple[list[int], list[float]]:
    """Scores the mean of all classes' probabilities of every candidate ensemble, model by model."""
    probabilities = np.exp(log_probabilities)

    def loss(picks: list[int]) -> float:
        return -float(np.mean(np.log(probabilities[picks].mean(axis=0)[np.arange(len(labels)), labels])))

    picks, losses = [], [np.inf]
    while len(set(picks)) < size:
        best = min(range(len(probabilities)), key=lambda model: loss([*picks, model]))
        if loss([*picks, best]) >= losses[-1] - LEAST_FALL:
            break
        picks.append(best)
        losses.append(loss(picks))
    return picks, losses[1:]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 6))
def test_the_selection_agrees_with_a_plain_loop_over_the_predictions_of_all_classes(seed, models, size):
    generator = np.random.default_rng(seed)
    log_probabilities = special.log_softmax(generator.normal(size=(models, 20, 4)) * 2, axis=2)
    labels = generator.integers(4, size=20)
    of_labels = log_probabilities[:, np.arange(20), labels]
    found = select_members(of_labels, min(size, models))
    picks, losses = plain_selection(log_probabilities, labels, min(size, models))
    assert list(found.picks) == picks
    assert found.nll == pytest.approx(losses)
    assert all(before > after for before, after in itertools.pairwise(found.nll))


def test_the_selection_by_hand_is_the_best_of_all_ensembles_of_up_to_four_picks():
    probabilities = np.array([BAD, OTHER, GOOD])
    losses = {
        picks: -np.log(probabilities[list(picks)].mean(axis=0)).mean()
        for count in (1, 2, 3, 4)
        for picks in itertools.combinations_with_replacement(range(3), count)
    }
    found = select_members(np.log(probabilities), 3)
    assert min(losses, key=losses.__getitem__) == tuple(sorted(found.picks))
    assert found.nll[-1] == pytest.approx(min(losses.values()))


def test_impossible_labels_are_infinite_losses_and_not_a_number_is_refused():
    certain = np.array([[-np.inf, 0.0], [0.0, -np.inf], [-np.inf, -np.inf]])
    found = select_members(certain, 3)
    assert set(found.picks) == {0, 1}
    assert found.nll == pytest.approx([np.inf, np.log(2)])
    for wrong in (np.full((2, 3), np.nan), np.zeros((2, 0))):
        assert_refused("no probabilities to select by", select_members, wrong, 2)
