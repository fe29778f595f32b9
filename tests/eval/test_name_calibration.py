"""Names that training captions had and new ones have temperatures of their own, and an offset between them."""

import dataclasses
import math

import numpy as np
import pytest
from scipy import special

from lit_het.calibrations import Calibration, FittedNames, FittedTemperature, NameCalibration
from lit_het.errors import UserError
from lit_het.eval.metrics import names
from lit_het.eval.metrics.calibration import scaled

TRUE = FittedNames(1.7, -1.5, 1.0, (0.0, 0.0), FittedTemperature(2.0, 0.1, 1.0, 1.0))
NUMBERS = np.array([1 / TRUE.temperature, TRUE.offset])


def slowly(log_p, seen, fitted, share=0.5):
    """The formula of `FittedNames`, one image and one name at a time."""
    found = np.empty(log_p.shape)
    for image, row in enumerate(log_p):
        logits = [
            value / fitted.temperature + (fitted.offset + math.log((1 - share) / share) if is_seen else 0.0)
            for value, is_seen in zip(row, seen, strict=True)
        ]
        found[image] = np.array(logits) - math.log(sum(map(math.exp, logits)))
    return found


def drawn(count, num_names=12, seed=0):
    """Log-probabilities of images, labels that are drawn from the true calibration, and the names of training."""
    random = np.random.default_rng(seed)
    seen = np.arange(num_names) < num_names // 2
    log_p = special.log_softmax(4 * random.normal(size=(count, num_names)), axis=1)
    chances = np.exp(names.with_offset(log_p, seen, TRUE)).astype(np.float64).cumsum(axis=1)
    labels = (random.random((count, 1)) > chances / chances[:, -1:]).sum(axis=1)
    return log_p.astype(np.float32), labels, seen


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_the_offset_and_the_temperature_are_those_of_the_formula(share):
    log_p, _, seen = drawn(20)
    np.testing.assert_allclose(names.with_offset(log_p, seen, TRUE, share), slowly(log_p, seen, TRUE, share), atol=1e-5)


def test_another_share_moves_the_odds_of_new_names_by_bayes_rule():
    log_p, _, seen = drawn(20)
    odds = [
        np.exp(one)[:, ~seen].sum(axis=1) / np.exp(one)[:, seen].sum(axis=1)
        for one in (names.with_offset(log_p, seen, TRUE, share) for share in (0.5, 0.2))
    ]
    np.testing.assert_allclose(odds[1], odds[0] * 0.2 / 0.8, rtol=1e-4)


def test_other_candidates_have_the_prior_of_their_kind_shared_among_them():
    # Every name of a kind is as likely a priori: with the likelihoods of names, Bayes' rule gives the probabilities.
    likelihood = np.exp(np.random.default_rng(0).normal(size=(50, 12)))
    fitted = FittedNames(1.0, math.log(9 / 3), 9 / 3, (0.0, 0.0), TRUE.alone)  # of 9 new and 3 seen names, half each
    for chosen, num_seen in ((slice(0, 12), 3), (slice(1, 6), 2), (slice(2, 12), 1)):
        some = likelihood[:, chosen]
        seen = np.arange(some.shape[1]) < num_seen
        for share in (0.5, 0.1):
            joint = some * np.where(seen, (1 - share) / num_seen, share / (~seen).sum())
            found = names.with_offset(special.log_softmax(np.log(some), axis=1), seen, fitted, share)
            np.testing.assert_allclose(np.exp(found), joint / joint.sum(axis=1, keepdims=True), rtol=1e-4)


def test_a_fit_finds_the_numbers_that_labels_were_drawn_with():
    log_p, labels, seen = drawn(6_000)
    # The true labels have as many images of either kind as the model says, and a fit takes half of each.
    share = (~seen)[labels].mean()
    found = names.fit_names(log_p, labels, seen)
    expected = (TRUE.temperature, TRUE.offset - math.log((1 - share) / share))
    for value, error, true in zip((found.temperature, found.offset), found.errors, expected, strict=True):
        assert 0 < error < 0.2
        assert abs(value - true) < 4 * error


def test_slopes_and_second_derivatives_are_those_of_differences():
    log_p, labels, seen = drawn(50)
    weight = np.random.default_rng(1).random(50)

    def loss(numbers):
        return names._derivatives(log_p, labels, seen, numbers, weight)[0].sum()

    def slope(numbers):
        return names._derivatives(log_p, labels, seen, numbers, weight)[1].sum(axis=0)

    step = 1e-5 * np.eye(2)
    by_differences = [(loss(NUMBERS + one) - loss(NUMBERS - one)) / 2e-5 for one in step]
    np.testing.assert_allclose(slope(NUMBERS), by_differences, rtol=1e-5, atol=1e-7)
    second = [(slope(NUMBERS + one) - slope(NUMBERS - one)) / 2e-5 for one in step]
    np.testing.assert_allclose(
        names._derivatives(log_p, labels, seen, NUMBERS, weight)[2], second, rtol=1e-4, atol=1e-6
    )


def test_the_slow_likelihood_is_lowest_at_the_fit():
    log_p, labels, seen = drawn(300)

    def nll(fitted):
        log_q = slowly(log_p, seen, fitted)[np.arange(300), labels]
        return -(log_q[seen[labels]].mean() + log_q[~seen[labels]].mean()) / 2

    best = names.fit_names(log_p, labels, seen)
    for field in ("temperature", "offset"):
        for step in (-0.02, 0.02):
            assert nll(dataclasses.replace(best, **{field: getattr(best, field) + step})) > nll(best)


def calibration(prior):
    fitted = FittedTemperature(1.2, 0.1, 1.0, 0.9)
    of_names = NameCalibration("caption", 6, 6, TRUE)
    return Calibration(("a.tar",), "0%:100%", "", 100, 12, 0, fitted, names=of_names, prior=prior)


@pytest.mark.parametrize(("prior", "temperature"), [("seen", 1.2), ("new", 2.0)])
def test_seen_and_new_change_the_scale_and_no_ranking(prior, temperature):
    log_p, _, seen = drawn(30)
    found = names.calibrated(calibration(prior), log_p, seen, 0)
    np.testing.assert_array_equal(found, scaled(log_p, temperature))


def test_candidates_of_one_kind_have_its_temperature_whatever_is_expected():
    log_p, _, seen = drawn(30)
    for prior in ("seen", "new", 0.5):
        one = calibration(prior)
        np.testing.assert_array_equal(names.calibrated(one, log_p, np.ones_like(seen), 0), scaled(log_p, 1.2))
        np.testing.assert_array_equal(names.calibrated(one, log_p, np.zeros_like(seen), 0), scaled(log_p, 2.0))
        np.testing.assert_array_equal(names.calibrated(one, log_p, None, 0), scaled(log_p, 1.2))


def test_a_share_of_new_names_moves_the_offset():
    log_p, _, seen = drawn(30)
    np.testing.assert_array_equal(
        names.calibrated(calibration(0.3), log_p, seen, 0), names.with_offset(log_p, seen, TRUE, 0.3)
    )


@pytest.mark.parametrize(
    ("text", "prior"), [("seen", "seen"), ("new", "new"), ("balanced", 0.5), ("0.25", 0.25), ("1e-3", 0.001)]
)
def test_a_prior_is_a_word_or_a_share(text, prior):
    assert names.parse_prior(text) == prior


@pytest.mark.parametrize("text", ["0", "1", "-0.5", "1.5", "nan", "often", ""])
def test_another_prior_is_refused(text):
    with pytest.raises(UserError, match="give seen, new, balanced, or the share of right answers that are new"):
        names.parse_prior(text)


def test_right_answers_that_no_temperature_fits_are_no_fit():
    log_p, _, seen = drawn(200)
    with pytest.raises(names.NoFit):
        names.fit_names(log_p, log_p.argmax(axis=1), seen)


def test_the_curve_of_seen_against_new_is_that_of_all_offsets():
    log_p, labels, seen = drawn(80)
    found = names.seen_against_new(log_p, labels, seen)
    by_offset = []
    for offset in np.linspace(-40, 40, 4_001):
        right = (log_p + offset * seen).argmax(axis=1) == labels
        by_offset.append((right[seen[labels]].mean(), right[~seen[labels]].mean()))
    points = set(zip(found.seen.tolist(), found.new.tolist(), strict=True))
    assert set(by_offset) <= points
    assert (found.seen[0], found.new[-1]) == (0, 0)
    seen_top1, new_top1 = np.array(by_offset).T
    assert found.area == pytest.approx(np.trapezoid(new_top1, seen_top1), abs=0.02)


def test_the_harmonic_mean_is_that_of_hand():
    assert names.harmonic_mean(0.6, 0.3) == pytest.approx(0.4)
    assert names.harmonic_mean(0.0, 0.0) == 0.0
