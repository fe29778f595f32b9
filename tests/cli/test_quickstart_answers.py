"""How often the quickstart's models are right, and where they are sure."""

from pathlib import Path

import numpy as np
import pytest
from scipy import special

from lit_het.apps.quickstart.answers import (
    AS_TRAINED,
    BOTH,
    BY_NAMES,
    KNOWN,
    NEW,
    Answers,
    Held,
    answers_of,
    calibrated_by_names,
)
from lit_het.apps.quickstart.evaluation import Models
from lit_het.apps.quickstart.report import answers_section, describe_answers, describe_calibration
from lit_het.eval.metrics.calibration import fit_temperature
from lit_het.eval.metrics.names import fit_names, with_offset
from lit_het.eval.predictions import Predictions
from lit_het.eval.saved_runs import SavedRun

NUM_NAMES, NUM_SEEN = 120, 80


def predictions(log_p, labels):
    nothing = np.zeros(len(labels))
    return Predictions(np.asarray(log_p), np.asarray(labels), np.arange(len(labels)), nothing, nothing)


def held(temperature=2.5, seed=0):
    """Predictions that are too sure, and that prefer the names of training; labels are drawn without either."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(NUM_NAMES), 10)
    z = random.normal(0, 1, (len(labels), NUM_NAMES))
    z[np.arange(len(labels)), labels] += 4
    seen = np.arange(NUM_NAMES) < NUM_SEEN
    return Held(predictions(special.log_softmax(temperature * (z + 2 * seen), axis=1), labels), seen)


def test_right_and_sure_answers_are_counted_with_their_weights():
    # Three images of known names and one of a new one, which counts as much as those three.
    probabilities = [[0.92, 0.04, 0.04], [0.5, 0.3, 0.2], [0.05, 0.94, 0.01], [0.01, 0.09, 0.9]]
    some = predictions(np.log(probabilities), [0, 1, 0, 2])
    found = Answers.of(some, np.array([2 / 3, 2 / 3, 2 / 3, 2]))
    assert found.right.mean == pytest.approx((2 / 3 + 2) / 4)
    assert found.sure == pytest.approx((2 / 3 + 2 / 3 + 2) / 4)
    assert found.right_if_sure.mean == pytest.approx((2 / 3 + 2) / (2 / 3 + 2 / 3 + 2))
    assert found.nll == pytest.approx(-(2 / 3 * np.log([0.92, 0.3, 0.05]).sum() + 2 * np.log(0.9)) / 4)
    assert found.figures().keys() == {"right", "sure", "right_if_sure", "nll"}
    one = Answers.of(some.take(np.array([1])))
    assert one.figures() == pytest.approx({"right": 0.0, "sure": 0.0, "nll": -np.log(0.3), "ece": 0.5})


def test_predictions_are_calibrated_by_what_fits_the_other_half_of_the_names():
    before = held()
    labels, log_p, seen = before.predictions.labels, before.predictions.log_probabilities, before.seen
    first = np.random.default_rng(0).permutation(NUM_NAMES) % 2 == 0
    expected = {name: np.empty_like(log_p) for name in (KNOWN, NEW, BOTH)}
    for half in (first[labels], ~first[labels]):
        for name, kind in ((KNOWN, seen), (NEW, ~seen)):
            others = ~half & kind[labels]
            temperature = fit_temperature(log_p[others], labels[others])
            expected[name][half] = special.log_softmax(log_p[half] / temperature, axis=1)
        expected[BOTH][half] = with_offset(log_p[half], seen, fit_names(log_p[~half], labels[~half], seen))
    for name, found in calibrated_by_names(before).items():
        np.testing.assert_allclose(found, expected[name], atol=1e-4)


def test_a_name_is_not_measured_by_what_was_fitted_to_it():
    before, other = held(), held(seed=1).predictions.log_probabilities
    labels, log_p = before.predictions.labels, before.predictions.log_probabilities
    second = np.random.default_rng(0).permutation(NUM_NAMES)[labels] % 2 == 1

    def where(changed):
        """Calibrated predictions where some images have other ones."""
        return calibrated_by_names(Held(predictions(np.where(changed[:, None], other, log_p), labels), before.seen))[
            BOTH
        ]

    nothing, one = np.zeros_like(second), np.arange(len(labels)) == np.flatnonzero(second)[0]
    as_before = where(nothing)
    assert (where(~second)[second] != as_before[second]).any(axis=1).all(), "fitted to the first half"
    assert (where(one)[second & ~one] == as_before[second & ~one]).all(), "and not to their own"


def test_known_and_new_names_count_the_same_and_the_offset_serves_both():
    before = held()
    found, predicted = answers_of(before), before.predictions
    kinds = [predicted.hits(1)[kind[predicted.labels]].mean() for kind in (before.seen, ~before.seen)]
    assert found[AS_TRAINED][BOTH].right.mean == pytest.approx(np.mean(kinds))
    assert found[BY_NAMES][BOTH].right.mean > found[AS_TRAINED][BOTH].right.mean + 0.1
    for name in (KNOWN, NEW):
        assert found[BY_NAMES][name].right == found[AS_TRAINED][name].right, "the priors seen and new change no ranking"
        assert found[BY_NAMES][name].nll < found[AS_TRAINED][name].nll


def test_sentences_and_table_say_what_was_counted():
    plain, ours = answers_of(held()), answers_of(held(temperature=1.0))
    run = SavedRun("run", Path(), {}, [], {})
    models = Models(run, run, (plain, ours))
    known, both = (round(100 * ours[BY_NAMES][name].right.mean) for name in (KNOWN, BOTH))
    sure = ours[BY_NAMES][BOTH].right_if_sure.mean
    said = describe_answers(models, "clean captions")
    assert f"gets {known} of 100 new images right, the deterministic head " in said
    assert f"where half of them are of new names, {both} and " in said
    assert f"of the answers that are 90% sure {sure:.0%} and " in said
    raw = plain[AS_TRAINED][BOTH]
    said = describe_calibration({"clean": models})
    assert said.endswith(f"90% sure: with clean captions {raw.sure:.1%} ({raw.right_if_sure.mean:.0%} right).")
    unsure = Models(run, run, (answers_of(held(temperature=0.05)), ours))
    assert describe_calibration({"clean": unsure}).endswith("with clean captions 0.0% (none right).")
    assert str(answers_section({"clean": models}).body[0]).count("<tr") == 1 + 3 + 3 * 4
