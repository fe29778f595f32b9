"""Ways to calibrate among seen and new names: what a fit finds, what changes no ranking, and the area of both top-1."""

import dataclasses

import numpy as np
import pytest
from scipy import special

from lit_het.eval.predictions import Predictions
from scripts.studies import study_names
from scripts.studies.study_names import WAYS, Names, fit, scores, seen_against_new

K, SEEN = 12, 8
ENDS = ((0, 1), (0, 0.5), (1, 0), (-1, 1), (-0.5, 0.5))
NAMES = Names(np.arange(K) < SEEN, *(np.linspace(*ends, K) for ends in ENDS))


def predictions(log_p, labels):
    nothing = np.zeros(len(labels))
    return Predictions(np.asarray(log_p, np.float32), np.asarray(labels), np.arange(len(labels)), nothing, nothing)


def drawn(temperature, offset, rows=4000):
    """Predictions, split by whether the label is a seen name, whose labels follow ``softmax(z / T + b seen)``."""
    random = np.random.default_rng(0)
    z = special.log_softmax(3 * random.normal(size=(rows, K)), axis=1)
    p = special.softmax(z / temperature + offset * NAMES.seen, axis=1)
    labels = np.array([random.choice(K, p=row) for row in p])
    is_seen = NAMES.seen[labels]
    return predictions(z[is_seen], labels[is_seen]), predictions(z[~is_seen], labels[~is_seen])


def test_a_temperature_and_an_offset_are_those_that_labels_were_drawn_with():
    known, new = drawn(2.0, -1.5)
    way = WAYS["offset"]
    # Both kinds have the weight that they were drawn with.
    weights = {"known": len(known.labels), "new": len(new.labels)}
    log_t, offset = fit(dataclasses.replace(way, **weights), known, new, NAMES)
    assert np.exp(log_t) == pytest.approx(2.0, rel=0.1)
    assert offset == pytest.approx(-1.5, abs=0.15)


@pytest.mark.parametrize("name", [name for name in WAYS if name.startswith("T ")])
def test_temperatures_change_no_ranking_and_improve_what_they_are_fitted_on(name):
    known, new = drawn(3.0, 0.0, rows=600)
    numbers = fit(WAYS[name], known, new, NAMES)
    losses = []
    for way, found in ((WAYS["raw"], []), (WAYS[name], numbers)):
        of_both = [scores(way, one, NAMES, found) for one in (known, new)]
        order = [np.argsort(one, axis=1) for one in of_both]
        losses.append(
            sum(
                weight * study_names.nll(log_p, one.labels)
                for weight, log_p, one in zip((WAYS[name].known, WAYS[name].new), of_both, (known, new), strict=True)
            )
        )
        for place, one in zip(order, (known, new), strict=True):
            np.testing.assert_array_equal(place, np.argsort(one.log_probabilities, axis=1))
    assert losses[1] < losses[0]


def test_the_area_of_both_accuracies_by_hand():
    """As the offset of seen names rises, (known, new) goes through (0, 1), (.5, 1), (.5, .5), (1, .5) and (1, 0)."""
    names = Names(np.array([True, True, False, False]), *np.zeros((5, 4)))
    known = predictions(np.log([[0.6, 0.1, 0.2, 0.1], [0.1, 0.3, 0.5, 0.1]]), [0, 1])
    new = predictions(np.log([[0.1, 0.1, 0.7, 0.1], [0.5, 0.1, 0.1, 0.3]]), [2, 3])
    assert seen_against_new(known, new, names) == pytest.approx(0.75)
