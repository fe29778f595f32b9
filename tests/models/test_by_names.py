"""Which images temperatures of seen and of new names are fitted on, and why there may be one for both."""

import numpy as np
import pytest
from scipy import special

from lit_het.data_pipelines.texts.familiarity import Familiarity
from lit_het.eval.metrics.names import fit_names
from lit_het.models.calibration.by_names import OneTemperature, fit_by_names

NUM_SEEN, NUM_NEW, PER_NAME = 120, 110, 3
NAMES = [f"name{number} of thing{number % 7}" for number in range(NUM_SEEN + NUM_NEW)]


def drawn(noise: float = 2.0):
    """Log-probabilities of images of all names, whose labels are often the highest, and the labels."""
    labels = np.repeat(np.arange(len(NAMES)), PER_NAME)
    logits = np.random.default_rng(0).normal(0, noise, (len(labels), len(NAMES)))
    logits[np.arange(len(labels)), labels] += 4
    return special.log_softmax(logits, axis=1).astype(np.float32), labels


def familiar(names) -> Familiarity:
    return Familiarity.of(names, "digest")


def test_kinds_are_those_of_the_training_captions_and_the_rest_is_the_fit_of_names():
    log_p, labels = drawn()
    found, is_seen = fit_by_names(
        {0: log_p, 4: log_p / 2}, labels, [[name] for name in NAMES], familiar(NAMES[:NUM_SEEN])
    )
    seen = np.arange(len(NAMES)) < NUM_SEEN
    np.testing.assert_array_equal(is_seen, seen[labels])
    assert (found.rule, found.num_seen, found.num_new) == ("caption", NUM_SEEN, NUM_NEW)
    assert found.noiseless == fit_names(log_p, labels, seen)
    assert found.monte_carlo == fit_names(log_p / 2, labels, seen)


def test_a_name_of_several_captions_is_seen_if_training_had_one():
    log_p, labels = drawn()
    names = [[f"another {name}", name] for name in NAMES]
    found, _ = fit_by_names({0: log_p}, labels, names, familiar(NAMES[:NUM_SEEN]))
    assert (found.num_seen, found.monte_carlo) == (NUM_SEEN, None)


def test_words_count_where_they_tell_better_what_training_taught():
    # Training pulls towards all names whose words it had, and not only towards whole captions.
    log_p, labels = drawn()
    known_words = np.arange(len(NAMES)) < NUM_SEEN + 60
    logits = log_p - 3 * ~known_words
    training = [*NAMES[:NUM_SEEN], *(f"an image of {name} in the sun" for name in NAMES[NUM_SEEN : NUM_SEEN + 60])]
    log_q = special.log_softmax(logits, axis=1).astype(np.float32)
    found, _ = fit_by_names({0: log_q}, labels, [[name] for name in NAMES], familiar(training))
    assert (found.rule, found.num_seen) == ("words", NUM_SEEN + 60)


@pytest.mark.parametrize(
    ("training", "reason"),
    [
        (["something else"], "nearly all captions differ from those of training"),
        (NAMES, "0 captions of these images were not in training, fewer than 100"),
        (NAMES[: NUM_SEEN + 20], "90 captions of these images were not in training, fewer than 100"),
    ],
)
def test_too_few_images_of_a_kind_leave_one_temperature(training, reason):
    log_p, labels = drawn()
    with pytest.raises(OneTemperature, match=reason):
        fit_by_names({0: log_p}, labels, [[name] for name in NAMES], familiar(training))


def test_images_that_are_all_right_leave_one_temperature():
    log_p, labels = drawn(noise=0.1)
    with pytest.raises(OneTemperature, match="no temperature and offset of seen and new names fit"):
        fit_by_names({0: log_p}, labels, [[name] for name in NAMES], familiar(NAMES[:NUM_SEEN]))
