"""How often the quickstart's models are right, and where they are sure."""

import dataclasses

import numpy as np
import pytest
from scipy import special

from lit_het.apps.quickstart.answers import AS_TRAINED, BOTH, BY_NAMES, KNOWN, NEW, Answers, Held, answers_of
from lit_het.apps.quickstart.evaluation import Models
from lit_het.apps.quickstart.report import answers_section, describe_answers, describe_sure
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
    answers = Answers(predictions(np.log(probabilities), [0, 1, 0, 2]), np.array([2 / 3, 2 / 3, 2 / 3, 2]))
    assert answers.is_sure.tolist() == [True, False, True, True]
    assert answers.right.mean == pytest.approx((2 / 3 + 2) / 4)
    assert answers.sure == pytest.approx((2 / 3 + 2 / 3 + 2) / 4)
    assert answers.right_if_sure.mean == pytest.approx((2 / 3 + 2) / (2 / 3 + 2 / 3 + 2))
    assert answers.figures().keys() == {"right", "sure", "right_if_sure"}
    one = Answers(answers.predictions.take(np.array([1])), np.ones(1))
    assert np.isnan(one.right_if_sure.mean), "no answer is sure"
    assert one.figures()["nll"] == pytest.approx(-np.log(0.3))


def test_answers_are_calibrated_by_what_fits_the_other_half_of_the_names():
    before = held()
    labels, log_p, seen = before.predictions.labels, before.predictions.log_probabilities, before.seen
    first = np.random.default_rng(0).permutation(NUM_NAMES) % 2 == 0
    found = answers_of(before)[BY_NAMES]
    expected = {name: np.empty_like(log_p) for name in (KNOWN, NEW, BOTH)}
    for half in (first[labels], ~first[labels]):
        known, new = ~half & seen[labels], ~half & ~seen[labels]
        expected[KNOWN][half] = special.log_softmax(log_p[half] / fit_temperature(log_p[known], labels[known]), axis=1)
        expected[NEW][half] = special.log_softmax(log_p[half] / fit_temperature(log_p[new], labels[new]), axis=1)
        expected[BOTH][half] = with_offset(log_p[half], seen, fit_names(log_p[~half], labels[~half], seen))
    rows = {KNOWN: seen[labels], NEW: ~seen[labels], BOTH: np.ones(len(labels), bool)}
    for name, chosen in rows.items():
        np.testing.assert_allclose(found[name].predictions.log_probabilities, expected[name][chosen], atol=1e-4)
        assert (found[name].predictions.labels == labels[chosen]).all()


def test_a_name_is_not_measured_by_what_was_fitted_to_it():
    before, other = held(), held(seed=1).predictions.log_probabilities
    labels, log_p = before.predictions.labels, before.predictions.log_probabilities
    second = np.random.default_rng(0).permutation(NUM_NAMES)[labels] % 2 == 1

    def of_second(changed):
        """The answers to images of the second half where some images have other predictions."""
        of = predictions(np.where(changed[:, None], other, log_p), labels)
        return answers_of(dataclasses.replace(before, predictions=of))[BY_NAMES][BOTH].predictions.log_probabilities

    nothing, one = np.zeros_like(second), np.arange(len(labels)) == np.flatnonzero(second)[0]
    as_before = of_second(nothing)
    assert (of_second(~second)[second] != as_before[second]).any(axis=1).all(), "fitted to the first half"
    assert (of_second(one)[second & ~one] == as_before[second & ~one]).all(), "and not to their own"


def test_known_and_new_names_count_the_same_and_the_offset_serves_both():
    found = answers_of(held())
    for of in found.values():
        assert of[BOTH].right.mean == pytest.approx(
            np.mean([of[BOTH].predictions.hits(1)[kind].mean() for kind in np.split(np.arange(1200), [800])])
        )
    assert found[BY_NAMES][BOTH].right.mean > found[AS_TRAINED][BOTH].right.mean + 0.1
    for name in (KNOWN, NEW):
        assert found[BY_NAMES][name].right == found[AS_TRAINED][name].right, "the priors seen and new change no ranking"
        assert found[BY_NAMES][name].figures()["nll"] < found[AS_TRAINED][name].figures()["nll"]


def test_sentences_and_table_say_what_was_counted():
    plain, ours = answers_of(held()), answers_of(held(temperature=1.0))
    run = SavedRun("run", None, {}, [], {})  # pyright: ignore[reportArgumentType]
    models = Models(run, run, (plain, ours))
    known, both = (round(100 * ours[BY_NAMES][name].right.mean) for name in (KNOWN, BOTH))
    said = describe_answers(models, "clean captions")
    assert f"gets {known} of 100 new images of known names right (the deterministic head" in said
    assert f"and {both} of 100 if half of them are of names that training never had (" in said
    sure = describe_sure(models, "clean captions")
    share = plain[AS_TRAINED][NEW].right_if_sure
    assert f"{share.mean:.1%} ± {100 * share.error:.1f}." in sure
    assert str(answers_section({"clean": models}).body[0]).count("<tr") == 1 + 3 + 3 * 4
