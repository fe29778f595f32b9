import math

import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.eval.metrics.gains import difficulty, gains_of, improvement, loss_curve, mean_gains
from lit_het.eval.metrics.significance import Estimate
from lit_het.eval.pareto import Cost, Point
from tests.refusals import assert_refused

SIZES = ("S/32", "B/32", "L/32", "L/16", "H/14")
GFLOP = (24.01, 77.97, 271.83, 1151.71, 3033.60)  # of ViT, Table 20
# NLL on ImageNet: Tables 25 (e3 with K = 1, M = 2) and 27 (V-MoE with K = 1, ViT).
NLL = {
    "ViT": (0.907, 0.688, 0.556, 0.473, 0.426),
    "e3": (0.818, 0.622, 0.535, 0.448, 0.408),
    "V-MoE": (0.834, 0.642, 0.559, 0.464, 0.426),
}
TABLE_10 = {  # per cent: normalised, not normalised
    "e3": ((0.02, 0.09, 0.24, 2.35, 4.27), (9.82, 9.53, 3.76, 5.38, 4.27)),
    "V-MoE": ((0.01, 0.06, -0.04, 0.89, 0.02), (7.98, 6.62, -0.60, 2.05, 0.02)),
}
# NLL on ImageNet-C, -A and -V2: Tables 25 (e3 with K = 1, M = 2 and V-MoE with K = 2) and 26 (2, 2 and 4).
SHIFTED = {
    "S/32": ((2.169, 6.419, 1.437), (2.162, 6.227, 1.437), (2.112, 6.283, 1.408), (2.133, 6.142, 1.417)),
    "B/32": ((1.532, 5.080, 1.143), (1.562, 5.032, 1.150), (1.491, 4.872, 1.099), (1.555, 5.031, 1.150)),
    "B/16": ((1.352, 3.835, 0.974), (1.372, 3.875, 0.959), (1.328, 3.743, 0.945), (1.350, 3.726, 0.973)),
    "L/32": ((1.193, 4.170, 0.989), (1.261, 4.394, 1.046), (1.188, 4.095, 0.962), (1.267, 4.428, 1.050)),
    "L/16": ((1.023, 2.836, 0.838), (1.058, 2.945, 0.848), (1.028, 2.886, 0.849), (1.060, 2.976, 0.856)),
}
TABLE_24 = {
    "S/32": (-1.15, -0.21),
    "B/32": (0.52, 3.91),
    "B/16": (0.31, 1.33),
    "L/32": (5.34, 7.37),
    "L/16": (2.78, 2.27),
}


def point(name, gflop, value, error=math.nan):
    return Point(name, (name,), "zero_shot/imagenet/nll", Cost(gflop), Estimate(value, error))


def family(model):
    return [point(size, gflop, nll) for size, gflop, nll in zip(SIZES, GFLOP, NLL[model], strict=True)]


@pytest.mark.parametrize("model", TABLE_10)
def test_gains_are_those_of_e3_within_the_rounding_of_its_tables(model):
    vit = family("ViT")
    curve = loss_curve(GFLOP, NLL["ViT"])
    assert curve is not None
    for gain, normalized, plain in zip(gains_of(family(model), vit), *TABLE_10[model], strict=True):
        # Both NLL are rounded to 0.001, percentages to 0.01.
        rounding = 100 * 0.001 / gain.baseline.value.mean
        assert 100 * gain.improvement.mean == pytest.approx(plain, abs=rounding + 0.005)
        ratio = difficulty(curve, gain.baseline.cost.gflop, GFLOP[-1])
        assert 100 * gain.normalized.mean == pytest.approx(normalized, abs=ratio * rounding + 0.005)


@pytest.mark.parametrize("size", SHIFTED)
@pytest.mark.parametrize("column", [0, 1])
def test_mean_gains_of_several_sets_are_those_of_e3_within_rounding(size, column):
    values, baselines = SHIFTED[size][2 * column], SHIFTED[size][2 * column + 1]
    sets = zip(values, baselines, strict=True)
    (gain,) = mean_gains([gains_of([point(size, 2.0, one)], [point(size, 1.0, other)]) for one, other in sets])
    rounding = 100 * float(np.mean([0.001 / baseline for baseline in baselines]))
    assert 100 * gain.improvement.mean == pytest.approx(TABLE_24[size][column], abs=rounding + 0.005)
    assert math.isnan(gain.improvement.error)
    assert math.isnan(gain.normalized.mean)


def test_the_curve_is_the_least_squares_fit_of_powers_of_the_logarithm():
    costs, losses = np.array(GFLOP), np.array(NLL["ViT"])
    features = np.stack([np.log(costs) ** power for power in range(4)], axis=1)
    one, log, squared, cubed = np.linalg.lstsq(features, losses, rcond=None)[0]
    curve = loss_curve(GFLOP, NLL["ViT"])
    assert curve is not None
    np.testing.assert_allclose(curve(np.log(costs)), features @ [one, log, squared, cubed], rtol=1e-9)
    slopes = [(log + 2 * squared * np.log(cost) + 3 * cubed * np.log(cost) ** 2) / cost for cost in (78.0, 3000.0)]
    assert difficulty(curve, 78.0, 3000.0) == pytest.approx(slopes[1] / slopes[0])
    assert difficulty(curve, 78.0, 78.0) == 1.0


def test_fewer_than_four_costs_have_no_curve_and_where_the_fitted_loss_rises_there_is_no_difficulty():
    assert loss_curve([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) is None
    assert loss_curve([1.0, 2.0, 3.0, 3.0], [3.0, 2.0, 1.0, 1.1]) is None
    (gain,) = gains_of([point("a", 1.0, 1.0)], [point("b", 1.0, 2.0)])
    assert gain.improvement.mean == 0.5
    assert math.isnan(gain.normalized.mean)
    curve = loss_curve([1.0, 10.0, 100.0, 1000.0], [3.0, 1.0, 1.5, 1.4])
    assert curve is not None
    assert math.isnan(difficulty(curve, 31.6, 1000.0))
    assert math.isnan(difficulty(curve, 1.0, 31.6))


def test_the_error_of_an_improvement_is_that_of_a_ratio():
    found = improvement(Estimate(0.8, 0.02), Estimate(1.0, 0.01))
    assert found.mean == pytest.approx(0.2)
    random = np.random.default_rng(0)
    drawn = 1 - random.normal(0.8, 0.02, 10**5) / random.normal(1.0, 0.01, 10**5)
    assert found.error == pytest.approx(drawn.std(), rel=0.02)
    assert math.isnan(improvement(Estimate(0.8, math.nan), Estimate(1.0, 0.01)).error)


def test_settings_that_do_not_pair_and_losses_that_are_not_above_zero_are_refused():
    with pytest.raises(UserError, match="1 setting against 2 settings"):
        gains_of([point("a", 1.0, 1.0)], [point("a", 1.0, 1.0), point("b", 2.0, 1.0)])
    assert_refused("improvements need values above 0", improvement, Estimate(0.1, 0.0), Estimate(0.0, 0.0))
