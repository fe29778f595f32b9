"""Scaling of a small shape to a budget, rounding, and budgets in hours."""

import math

import pytest

from lit_het.search.law.scaling import PUBLISHED_EXPONENTS, gflop, rounded, scale
from tests.refusals import assert_refused

MULTIPLES = {"width": 16, "mlp": 16}
# The optimal small shape of Sec. 3.
START_SHAPE = {"width": 608.0, "depth": 10.0, "mlp": 928.0}
# Sec. 4.2: of captions and questions.
OF_DECODERS = {"width": 0.25, "depth": 0.49, "mlp": 0.62}
# GFLOP of a forward pass at 224 pixels with patches of 14: lit-het's count of matrix products, docs/shape_law.md.
START, B14 = 15.508144128, 46.750236672
T0 = 600e6 * START
SO400M = {"width": 1152, "depth": 27, "mlp": 4304}
SO150M = {"width": 880, "depth": 18, "mlp": 2320}


def test_every_dimension_grows_by_its_exponent_and_its_share():
    found = scale({"width": 100.0, "depth": 8.0}, 1e3, 1e6, {"width": 0.2, "depth": 0.6}, {})
    assert found.factor == pytest.approx(1e3)
    assert found.exact["width"] == pytest.approx(100 * 1e3 ** (0.2 / 2))
    assert found.exact["depth"] == pytest.approx(8 * 1e3 ** (0.6 / 2))
    # The start is its own shape at its compute, and dimensions without an exponent stay.
    assert scale(START_SHAPE, T0, T0, PUBLISHED_EXPONENTS, MULTIPLES).shape == START_SHAPE
    found = scale({"width": 100.0, "heads": 4.0}, 1.0, 1e6, {"width": 0.5}, {})
    assert found.shape == {"width": 100_000, "heads": 4}


@pytest.mark.parametrize(
    ("budget", "exponents", "shape"),
    [
        (9e12, PUBLISHED_EXPONENTS, {"width": 1008, "depth": 28, "mlp": 3664}),  # published: 1152, 27, 4304
        (9e12, OF_DECODERS, {"width": 1072, "depth": 31, "mlp": 3840}),
        (4e9 * B14, PUBLISHED_EXPONENTS, {"width": 752, "depth": 16, "mlp": 1696}),  # published: 880, 18, 2320
        (4e9 * B14, OF_DECODERS, {"width": 784, "depth": 16, "mlp": 1728}),
    ],
)
def test_published_exponents_and_start_give_nearly_the_published_shapes(budget, exponents, shape):
    """Not to the last digit: the compute of the start is not published (docs/shape_law.md)."""
    assert scale(START_SHAPE, T0, budget, exponents, MULTIPLES).shape == shape
    assert PUBLISHED_EXPONENTS == {"width": 0.22, "depth": 0.45, "mlp": 0.6}


@pytest.mark.parametrize(("growth", "expected"), [(0.0, 2.27), (6.874, 2.41)])
def test_ten_times_the_compute_multiplies_the_parameters_by_about_2_5(growth, expected):
    """Sec. 4.1 II."""

    def parameters(budget):
        width, depth, mlp = scale(START_SHAPE, 1.0, budget, PUBLISHED_EXPONENTS, {}).exact.values()
        return depth * (4 * width**2 + 2 * width * mlp)

    assert parameters(10 * math.exp(growth)) / parameters(math.exp(growth)) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(
    ("published", "expected", "growth"), [(SO400M, (8.71, 6.62, 7.67), 7.67), (SO150M, (5.04, 3.92, 4.58), 4.51)]
)
def test_published_shapes_imply_different_growths_of_compute(published, expected, growth):
    found = [
        3 * math.log(published[name] / START_SHAPE[name]) / exponent for name, exponent in PUBLISHED_EXPONENTS.items()
    ]
    assert found == pytest.approx(expected, abs=0.005)
    # A smaller compute of the start gives the published shapes within a fifth.
    shape = scale(START_SHAPE, 1.0, math.exp(growth), PUBLISHED_EXPONENTS, MULTIPLES).shape
    assert shape == pytest.approx(published, rel=0.19)


@pytest.mark.parametrize(
    ("value", "multiple", "expected"), [(1151.0, 16, 1152), (27.5, 1, 28), (0.2, 1, 1), (3.0, 16, 16), (24.0, 16, 32)]
)
def test_sizes_are_rounded_to_the_nearest_multiple(value, multiple, expected):
    assert rounded(value, multiple) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((START_SHAPE, 1e9, 1e8, PUBLISHED_EXPONENTS, {}), "budget 1e[+]08 GFLOP is below 1e[+]09, the compute of"),
        ((START_SHAPE, 1e9, math.nan, PUBLISHED_EXPONENTS, {}), "budget nan must be above 0 and finite"),
        ((START_SHAPE, 1e9, 1e12, {"heads": 1.0}, {}), "heads is not a dimension of the start; it has width, depth,"),
        ((START_SHAPE, 1e9, 1e12, {"width": -1.0}, {}), "width -1 must be above 0"),
        (({"width": 608.0}, 1e-300, 1e300, {"width": 0.2}, {}), "a size of inf is too large"),
        (({"width": 608.0}, 1.0, 1e12, {"width": 5000.0}, {}), "a size of inf is too large"),
        (({"width": 608.0}, 1.0, 1e12, {"width": 1.0}, {}), "a size of 6.08e[+]14 is too large, above 2147483647"),
    ],
)
def test_impossible_budgets_and_dimensions_are_refused(arguments, message):
    assert_refused(message, scale, *arguments)


def test_budgets_in_hours_need_a_rate():
    assert gflop(9e12) == 9e12
    assert gflop(10.0, "TPU-hours", 2e8) == 2e9
    assert_refused("a budget in GPU-hours needs the GFLOP of one hour", gflop, 10.0, "GPU-hours")
    assert_refused("a budget in GFLOP needs no GFLOP per hour", gflop, 10.0, "GFLOP", 2e8)
    assert_refused("unknown unit 'days'", gflop, 10.0, "days")
    assert_refused("budget -1 must be above 0", gflop, -1.0)


def test_dimensions_may_have_other_weights():
    """SoViT Sec. 3, "Scaling": any w_k with a sum of 1."""
    exponents, weights = {"width": 0.2, "depth": 0.6}, {"width": 0.75, "depth": 0.25}
    start = {"width": 100.0, "depth": 8.0, "mlp": 5.0}
    found = scale(start, 1e3, 1e6, exponents, {}, weights)
    assert found.exact == pytest.approx({"width": 100 * 1e3**0.15, "depth": 8 * 1e3**0.15, "mlp": 5.0})
    equal = dict.fromkeys(PUBLISHED_EXPONENTS, 1 / 3)
    assert scale(START_SHAPE, T0, 9e12, PUBLISHED_EXPONENTS, MULTIPLES, equal).shape == (
        scale(START_SHAPE, T0, 9e12, PUBLISHED_EXPONENTS, MULTIPLES).shape
    )
    # Those with which docs/shape_law.md explains the published SoViT-400m, and the compute of its start.
    of_400m = {"width": 0.38, "depth": 0.29, "mlp": 0.33}
    near = scale(START_SHAPE, 4.2e9, 9e12, PUBLISHED_EXPONENTS, MULTIPLES, of_400m).exact
    assert near == pytest.approx(SO400M, rel=0.02)
    for wrong in ({"width": 1.0}, {"width": 0.5, "depth": 0.6}, {"width": 1.5, "depth": -0.5}):
        message = "weights: give one of at least 0 for each of width, depth, with a sum of 1"
        assert_refused(message, scale, start, 1e3, 1e6, exponents, {}, wrong)
