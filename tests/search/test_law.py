"""The law of one dimension: its optimum, its frontier and its only minimum."""

import math

import numpy as np
import pytest

from lit_het.errors import FieldError
from lit_het.search.law.law import Curve, Law
from scripts.studies.cover_shape_law import S, law
from tests.refusals import assert_refused

T = np.geomspace(1e10, 1e13, 4)


def test_the_law_is_equation_2_of_its_dimensions():
    curve = Curve(log_alpha=math.log(2.0), a=0.5, log_beta=math.log(3.0), b=0.25, log_xi=math.log(5.0), epsilon=0.1)
    value = Law(0.5, {"width": curve}).value("width", 16.0, 100.0)
    assert value == pytest.approx(2 / 4 + (3 * 2 + 5) / 10 + 0.1)
    assert_refused("heads is not a dimension of this law; it has width, depth, mlp", law().value, "heads", 1.0, 1.0)


@pytest.mark.parametrize("dimension", S)
def test_the_optimum_is_the_best_size_grows_with_the_scaling_exponent_and_gives_the_frontier(dimension):
    true = law()
    best = true.optimum(dimension, T)
    for factor in (0.5, 0.99, 1.01, 2.0):
        assert np.all(true.value(dimension, best, T) < true.value(dimension, factor * best, T))
    assert true.scaling_exponent(dimension) == pytest.approx(S[dimension])
    slopes = np.diff(np.log(best)) / np.diff(np.log(T))
    np.testing.assert_allclose(slopes, S[dimension])
    np.testing.assert_allclose(true.frontier(dimension, T), true.value(dimension, best, T))


@pytest.mark.parametrize("dimension", S)
def test_the_law_is_quasiconvex(dimension):
    """App. A.1: between two sizes no value is above both."""
    random, true = np.random.default_rng(0), law()
    one, other = np.exp(random.uniform(0, 12, (2, 1000)))
    share, t = random.uniform(size=1000), np.exp(random.uniform(15, 35, 1000))
    between = true.value(dimension, share * one + (1 - share) * other, t)
    ends = np.maximum(true.value(dimension, one, t), true.value(dimension, other, t))
    assert np.all(between <= ends * (1 + 1e-12))


def test_a_whole_shape_has_the_sum_of_equation_3():
    """α, a, β, b of three dimensions with one ξ and ε∞, as the spokes of a star sweep show them."""
    terms = {"width": (2.0, 0.5, 3e2, 0.4), "depth": (1.0, 0.3, 2e3, 0.2), "mlp": (4.0, 0.6, 1e2, 0.3)}
    centre, c, xi, epsilon = {"width": 2000.0, "depth": 40.0, "mlp": 6000.0}, 0.5, 5e4, 0.1
    spokes = {}
    for name, (alpha, a, beta, b) in terms.items():
        others = [(*terms[j], centre[j]) for j in terms if j != name]
        own_xi = xi + sum(beta_j * x**b_j for _, _, beta_j, b_j, x in others)
        own_epsilon = epsilon + sum(alpha_j * x**-a_j for alpha_j, a_j, _, _, x in others)
        spokes[name] = Curve(math.log(alpha), a, math.log(beta), b, math.log(own_xi), own_epsilon)
    of_star = Law(c, spokes)
    assert of_star.constants(centre) == pytest.approx((xi, epsilon))
    shape = {"width": np.array([500.0, 2000.0]), "depth": np.array([12.0, 30.0]), "mlp": np.array([900.0, 9000.0])}
    t = np.array([1e9, 1e12])
    expected = xi * t**-c + epsilon
    for name, (alpha, a, beta, b) in terms.items():
        expected = expected + alpha * shape[name] ** -a + beta * shape[name] ** b * t**-c
    np.testing.assert_allclose(of_star.whole(shape, t, centre), expected, rtol=1e-12)
    # Where one dimension varies, it is Eq. 2 of this dimension.
    np.testing.assert_allclose(
        of_star.whole({**centre, "mlp": shape["mlp"]}, t, centre), of_star.value("mlp", shape["mlp"], t), rtol=1e-12
    )
    assert_refused("needs all dimensions of the law; depth, mlp is missing", of_star.whole, {"width": 1.0}, 1e9, centre)


def test_dimensions_that_disagree_have_the_mean_of_their_constants():
    curves = {
        name: Curve(math.log(alpha), 1.0, math.log(beta), 1.0, math.log(7.0), epsilon)
        for name, alpha, beta, epsilon in (("width", 10.0, 1.0, 0.5), ("depth", 20.0, 2.0, 2.5))
    }
    centre = {"width": 5.0, "depth": 10.0}
    # ε of the width without the depth's 2, and of the depth without the width's 2; ξ without 20, and without 5.
    assert Law(0.5, curves).constants(centre) == pytest.approx(((-13 + 2) / 2, (-1.5 + 0.5) / 2))
    shape, t = {"width": 2.0, "depth": 4.0}, 100.0
    expected = 10 / 2 + 20 / 4 + (1 * 2 + 2 * 4 - 5.5) / 10 - 0.5
    assert Law(0.5, curves).whole(shape, t, centre) == pytest.approx(expected)


def test_steep_curves_do_not_overflow():
    """The exponents that fit noisy runs best may be in the hundreds."""
    curve = Curve(log_alpha=3000.0, a=400.0, log_beta=-3000.0, b=400.0, log_xi=0.0, epsilon=1.0)
    steep = Law(0.5, {"width": curve})
    best = steep.optimum("width", 1e12)
    assert best == pytest.approx(math.exp((6000 + 0.5 * math.log(1e12)) / 800))
    assert steep.frontier("width", 1e12) == pytest.approx(steep.value("width", best, 1e12))
    assert steep.value("width", 1e5, 1e12) == math.inf


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_parameters_are_refused(value):
    with pytest.raises(FieldError, match=r"Curve: epsilon = .* must be above 0 and finite"):
        Curve(1.0, 1.0, 1.0, 1.0, 1.0, value)
    with pytest.raises(FieldError, match=r"Law: c = .* must be above 0"):
        Law(value, {})
    with pytest.raises(FieldError, match=r"Curve: log_xi = -inf must be finite"):
        Curve(1.0, 1.0, 1.0, 1.0, -math.inf, 1.0)
