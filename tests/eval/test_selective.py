"""Risk-coverage curves and the areas under them."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het.eval.metrics.selective import aurc, aurc_standard_errors, excess_aurc, risk_coverage_curve
from tests.refusals import assert_refused


def plain_area(order, loss: np.ndarray) -> float:
    """The mean over i of the mean loss of the first i examples, by two loops."""
    area = 0.0
    for count in range(1, len(order) + 1):
        area += sum(loss[example] for example in order[:count]) / count
    return float(area) / len(order)


def plain_aurc(confidence: np.ndarray, loss: np.ndarray) -> float:
    """The mean area over all orders of descending confidence."""
    orders = [
        order
        for order in itertools.permutations(range(len(loss)))
        if all(confidence[one] >= confidence[other] for one, other in itertools.pairwise(order))
    ]
    return float(np.mean([plain_area(order, loss) for order in orders]))


def test_the_curve_of_four_examples_is_computed_by_hand():
    confidence, loss = np.array([0.6, 0.9, 0.7, 0.8]), np.array([1.0, 0.0, 0.0, 1.0])
    assert risk_coverage_curve(confidence, loss).tolist() == pytest.approx([0, 1 / 2, 1 / 3, 2 / 4])
    assert aurc(confidence, loss) == pytest.approx((0 + 1 / 2 + 1 / 3 + 1 / 2) / 4)
    # The best order has both errors last: risks 0, 0, 1/3, 1/2.
    assert excess_aurc(confidence, loss) == pytest.approx((1 / 2) / 4)


def test_equal_confidences_have_the_same_risk_at_every_coverage():
    loss = np.array([1.0, 0.0, 0.0, 1.0, 0.0])
    np.testing.assert_allclose(risk_coverage_curve(np.full(5, 0.2), loss), np.full(5, 0.4))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_areas_are_means_over_all_orders_of_tied_examples(seed: int):
    generator = np.random.default_rng(seed)
    confidence, loss = generator.integers(3, size=6) / 3, generator.choice([0.0, 0.5, 1.0], 6)
    assert aurc(confidence, loss) == pytest.approx(plain_aurc(confidence, loss))
    best = min(plain_area(order, loss) for order in itertools.permutations(range(6)))
    assert excess_aurc(confidence, loss) == pytest.approx(plain_aurc(confidence, loss) - best, abs=1e-12)


def test_the_best_order_has_no_excess_and_a_random_one_has_the_risk_as_its_area():
    generator = np.random.default_rng(0)
    loss = (generator.uniform(size=20_000) < 0.3).astype(float)
    assert excess_aurc(1 - loss, loss) == pytest.approx(0)
    assert aurc(generator.uniform(size=loss.size), loss) == pytest.approx(0.3, abs=0.02)
    # Geifman, Uziel and El-Yaniv 2019: the best area is close to r + (1 - r) ln(1 - r).
    assert aurc(-loss, loss) == pytest.approx(0.3 + 0.7 * math.log(0.7), abs=0.005)


def test_standard_errors_are_the_spread_of_areas_over_sets():
    def areas(seed: int) -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.default_rng(seed)
        confidence = generator.integers(1, 11, size=300) / 10
        return confidence, (generator.uniform(size=300) > confidence).astype(float)

    spread = np.std([(aurc(*areas(seed)), excess_aurc(*areas(seed))) for seed in range(300)], axis=0, ddof=1)
    errors = np.mean([aurc_standard_errors(*areas(seed)) for seed in range(5)], axis=0)
    np.testing.assert_allclose(errors, spread, rtol=0.15)


def test_confidences_that_are_missing_or_no_numbers_are_refused():
    for call in (aurc, excess_aurc, risk_coverage_curve, aurc_standard_errors):
        assert_refused("no valid example to score", call, np.zeros(0), np.zeros(0))
        assert_refused("a confidence is not a number", call, np.array([0.5, np.nan]), np.zeros(2))
