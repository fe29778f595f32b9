"""Relative improvements over a baseline, also normalised by how hard it is to improve at each cost (e3 App. D, M.3)."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.polynomial import Polynomial

from lit_het.errors import UserError, pluralize
from lit_het.eval.metrics.significance import Estimate
from lit_het.eval.pareto import Point

# The loss of the baseline is a polynomial of this degree in the logarithm of the cost.
DEGREE = 3


@dataclasses.dataclass(frozen=True)
class Gain:
    """A method beside its baseline of the same size.

    Attributes:
        method, baseline: one of each.
        improvement: relative to the baseline's value; 0.1 is a tenth of it. With its standard error over seeds.
        normalized: the improvement as it counts at the cost of the largest baseline; NaN without a curve.
    """

    method: Point
    baseline: Point
    improvement: Estimate
    normalized: Estimate


def gains_of(methods: Sequence[Point], baselines: Sequence[Point]) -> list[Gain]:
    """Returns the gains of methods over baselines, which belong together in the order of their costs."""
    if len(methods) != len(baselines):
        raise UserError(
            f"{pluralize(len(methods), 'setting')} against {pluralize(len(baselines), 'setting')}: gains need as many "
            "settings in both groups, which belong together in the order of their costs"
        )
    curve = loss_curve([point.cost.gflop for point in baselines], [point.value.mean for point in baselines])
    largest = baselines[-1].cost.gflop
    found = []
    for method, baseline in zip(methods, baselines, strict=True):
        gain = improvement(method.value, baseline.value)
        ratio = math.nan if curve is None else difficulty(curve, baseline.cost.gflop, largest)
        found.append(Gain(method, baseline, gain, Estimate(gain.mean * ratio, gain.error * abs(ratio))))
    return found


def mean_gains(by_figure: Sequence[Sequence[Gain]]) -> list[Gain]:
    """Returns the mean of the gains in several figures (e3 Table 24); the figures are those of the first.

    Means have no errors, as the figures of a run are not independent.
    """
    if len(by_figure) == 1:
        return list(by_figure[0])
    return [
        dataclasses.replace(
            of_setting[0],
            improvement=Estimate(float(np.mean([gain.improvement.mean for gain in of_setting])), math.nan),
            normalized=Estimate(float(np.mean([gain.normalized.mean for gain in of_setting])), math.nan),
        )
        for of_setting in zip(*by_figure, strict=True)
    ]


def improvement(value: Estimate, baseline: Estimate) -> Estimate:
    """Returns ``(baseline - value) / baseline`` of a figure that should be low, with its error by the delta method."""
    if not baseline.mean > 0:
        raise UserError(f"a baseline's value is {baseline.mean:.4g}: improvements need values above 0")
    ratio = value.mean / baseline.mean
    return Estimate(1 - ratio, math.hypot(value.error, ratio * baseline.error) / baseline.mean)


def loss_curve(costs: Sequence[float], losses: Sequence[float]) -> Polynomial | None:
    """Returns the loss as a cubic polynomial of the logarithm of the cost, by least squares; None for below 4 costs.

    The φ of e3 App. D, fitted to the baseline at several sizes.
    """
    if len(set(costs)) <= DEGREE:
        return None
    return Polynomial.fit(np.log(costs), losses, DEGREE)


def difficulty(curve: Polynomial, cost: float, reference: float) -> float:
    """Returns ``φ'(reference) / φ'(cost)``, by which an improvement at a cost is multiplied (e3 Eq. 4).

    It is NaN if the fitted loss does not fall at both costs.
    """
    # φ is a function of log(cost): dφ / d cost = φ'(log cost) / cost.
    slope, at_reference = (float(curve.deriv()(np.log(one))) / one for one in (cost, reference))
    return at_reference / slope if slope < 0 and at_reference < 0 else math.nan
