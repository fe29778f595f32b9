"""How often the quickstart's models are right, and where they are sure."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import special

from lit_het.apps.quickstart import answers
from lit_het.apps.quickstart.answers import (
    AS_TRAINED,
    BOTH,
    CALIBRATED,
    KNOWN,
    NEW,
    Answers,
    HeldOut,
    answers_of,
    calibrated,
)
from lit_het.apps.quickstart.evaluation import Models
from lit_het.apps.quickstart.report import answers_section, describe_answers, describe_calibration
from lit_het.eval.metrics.calibration import fit_temperature
from lit_het.eval.metrics.names import NoFit, fit_names, with_offset
from lit_het.eval.predictions import Predictions
from lit_het.eval.saved_runs import SavedRun

NUM_NAMES, NUM_SEEN = 220, 100


def predictions(log_p, labels):
    nothing = np.zeros(len(labels))
    return Predictions(np.asarray(log_p), np.asarray(labels), np.arange(len(labels)), nothing, nothing)


def held_out(temperature=2.5, seed=0, num_seen=NUM_SEEN):
    """Predictions that are too sure, and that prefer the names of training; labels are drawn without either."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(NUM_NAMES), 6)
    z = random.normal(0, 1, (len(labels), NUM_NAMES))
    z[np.arange(len(labels)), labels] += 4
    seen = np.arange(NUM_NAMES) < num_seen
    found = predictions(special.log_softmax(temperature * (z + 2 * seen), axis=1), labels)
    return HeldOut(*(found.take(np.flatnonzero(kind[labels])) for kind in (seen, ~seen)))


def half_of_names(seen):
    """One half of the names, of either kind."""
    random, first = np.random.default_rng(0), np.zeros(NUM_NAMES, bool)
    for kind in (seen, ~seen):
        first[random.permutation(np.flatnonzero(kind))[::2]] = True
    return first


def test_right_and_sure_answers_are_counted_with_both_kinds_alike():
    # Three images of two known names and two of new ones.
    probabilities = [[0.92, 0.04, 0.03, 0.01], [0.5, 0.3, 0.1, 0.1], [0.95, 0.03, 0.01, 0.01]]
    known = predictions(np.log(probabilities), [0, 1, 1])
    new = predictions(np.log([[0.01, 0.04, 0.9, 0.05], [0.1, 0.1, 0.2, 0.6]]), [2, 3])
    found = Answers.of(known, new)
    assert found.by_kind == pytest.approx((1 / 3, 1.0))
    assert found.right.mean == pytest.approx((1 / 3 + 1) / 2)
    # Hits 1, 0, 0 less their mean, summed by name: 2/3 and -2/3; times 2 / 1 names, over 3 images. New ones are alike.
    assert found.right.error == pytest.approx(math.sqrt(2 * (2 / 3) ** 2 * 2) / 3 / 2)
    assert found.sure == pytest.approx((2 / 3 + 1 / 2) / 2)
    share = (1 / 3 + 1 / 2) / (2 / 3 + 1 / 2)
    assert found.right_if_sure.mean == pytest.approx(share)
    # (hit - share) of sure answers by name, less the mean of the kind: (1 - share) and -share, 1 - share and 0.
    sure = found.sure
    mean = (1 - 2 * share) / 3
    of_known = np.array([1 - share - mean, -share - 2 * mean]) / sure
    of_new = np.array([1 - share, 0]) / sure
    errors = [math.sqrt((of_known**2).sum() * 2) / 3, math.sqrt(((of_new - of_new.mean()) ** 2).sum() * 2) / 2]
    assert found.right_if_sure.error == pytest.approx(math.hypot(*errors) / 2)
    nll = [-np.log([0.92, 0.3, 0.03]).mean(), -np.log([0.9, 0.6]).mean()]
    assert found.nll == pytest.approx(np.mean(nll))
    assert found.figures().keys() == {"right", "right_of_known", "right_of_new", "sure", "right_if_sure", "nll"}
    one = Answers.of(known.take(np.array([1])))
    assert one.figures() == pytest.approx({"right": 0.0, "sure": 0.0, "nll": -np.log(0.3), "ece": 0.5})


def test_predictions_are_calibrated_by_what_fits_the_other_half_of_the_names():
    before = held_out()
    first = half_of_names(before.seen)
    log_p, labels = (
        np.concatenate([getattr(of, field) for of in (before.known, before.new)])
        for field in ("log_probabilities", "labels")
    )
    expected = {name: np.empty_like(log_p) for name in (KNOWN, NEW, BOTH)}
    for half in (first[labels], ~first[labels]):
        for name, kind in ((KNOWN, before.seen), (NEW, ~before.seen)):
            others = ~half & kind[labels]
            temperature = fit_temperature(log_p[others], labels[others])
            expected[name][half] = special.log_softmax(log_p[half] / temperature, axis=1)
        names = fit_names(log_p[~half], labels[~half], before.seen)
        expected[BOTH][half] = with_offset(log_p[half], before.seen, names)
    for name, found in calibrated(before).items():
        np.testing.assert_allclose(found.known.log_probabilities, expected[name][: 6 * NUM_SEEN], atol=1e-4)
        np.testing.assert_allclose(found.new.log_probabilities, expected[name][6 * NUM_SEEN :], atol=1e-4)


def test_a_name_is_not_measured_by_what_was_fitted_to_it():
    before, other = held_out(), held_out(seed=1).known.log_probabilities
    log_p, labels = before.known.log_probabilities, before.known.labels
    second = ~half_of_names(before.seen)[labels]

    def where(changed):
        """Calibrated predictions where some images of known names have other ones."""
        known = predictions(np.where(changed[:, None], other, log_p), labels)
        return calibrated(dataclasses.replace(before, known=known))[BOTH].known.log_probabilities

    nothing, one = np.zeros_like(second), np.arange(len(labels)) == np.flatnonzero(second)[0]
    as_before = where(nothing)
    assert (where(~second)[second] != as_before[second]).any(axis=1).all(), "fitted to the first half"
    assert (where(one)[second & ~one] == as_before[second & ~one]).all(), "and not to their own"


def test_both_kinds_count_the_same_and_the_offset_serves_both():
    before = held_out()
    found = answers_of(before)
    kinds = [of.hits(1).mean() for of in (before.known, before.new)]
    assert found[AS_TRAINED][BOTH].right.mean == pytest.approx(np.mean(kinds))
    assert found[CALIBRATED][BOTH].right.mean > found[AS_TRAINED][BOTH].right.mean + 0.1
    for name in (KNOWN, NEW):
        assert found[CALIBRATED][name].right == found[AS_TRAINED][name].right, "the priors change no ranking"
        assert found[CALIBRATED][name].nll < found[AS_TRAINED][name].nll


def no_fit(*_):
    raise NoFit("nothing")


@pytest.mark.parametrize("why", ["too few new names", "no fit"])
def test_all_have_one_temperature_where_calibrate_would_fit_but_one(why, monkeypatch):
    if why == "no fit":
        monkeypatch.setattr(answers, "fit_names", no_fit)
    before = held_out(num_seen=NUM_NAMES - 99 if why == "too few new names" else NUM_SEEN)
    first = half_of_names(before.seen)
    found = calibrated(before)
    others = [~first[of.labels] for of in (before.known, before.new)]
    log_p, labels = (
        np.concatenate([getattr(of, field)[rows] for of, rows in zip((before.known, before.new), others, strict=True)])
        for field in ("log_probabilities", "labels")
    )
    temperature = fit_temperature(log_p, labels)
    rows = first[before.new.labels]
    expected = special.log_softmax(before.new.log_probabilities[rows] / temperature, axis=1)
    for of in found.values():
        np.testing.assert_allclose(of.new.log_probabilities[rows], expected, atol=1e-4)


def test_sentences_and_table_say_what_was_counted():
    plain, ours = answers_of(held_out()), answers_of(held_out(temperature=1.0))
    run = SavedRun("run", Path(), {}, [], {})
    models = Models(run, run, plain, ours)
    known, both = ours[CALIBRATED][KNOWN], ours[CALIBRATED][BOTH]
    said = describe_answers(models, "clean captions")
    assert f"gets {100 * known.right.mean:.0f} of 100 new images of known names right, the deterministic head " in said
    of_known, of_new = (f"{100 * share:.0f}" for share in both.by_kind)
    assert (
        f"with the prior balanced, {of_known} and {of_new} of known and of new names, the deterministic head " in said
    )
    assert f"of the answers that are 90% sure, {both.right_if_sure.mean:.0%} and " in said
    raw = plain[AS_TRAINED][BOTH]
    shown = f"with clean captions {raw.sure:.1%} ({raw.right_if_sure.mean:.0%} of them right)."
    assert describe_calibration({"clean": models}).endswith(f"are 90% sure: {shown}")
    assert str(answers_section({"clean": models}).body[0]).count("<tr") == 1 + 3 + 3 * 4


def test_where_no_answer_is_sure_the_sentences_say_so():
    unsure = answers_of(held_out(temperature=0.05))
    unsure = {how: unsure[AS_TRAINED] for how in unsure}
    run = SavedRun("run", Path(), {}, [], {})
    models = Models(run, run, unsure, unsure)
    said = describe_answers(models, "clean captions")
    assert "; without a prior, " in said
    assert said.endswith(", and no answer is 90% sure.")
    assert describe_calibration({"clean": models}).endswith("are 90% sure: with clean captions 0.0%.")
