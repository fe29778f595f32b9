"""Fits the law to a star sweep by its relative error, as SoViT does."""

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.optimize import least_squares

from lit_het.search.law.law import Law
from lit_het.search.law.observations import Star
from lit_het.search.law.residuals import Residuals

# The search ranges of c, s and a / b. Published values are c = 0.65 and s from 0.2 to 0.6.
RANGE_OF_C = 0.02, 5.0
RANGE_OF_S = 0.01, 10.0
RANGE_OF_RATIO = 0.01, 100.0
# Starts: each c with the best (a, b) of each dimension.
_STARTS_OF_C = (0.2, 0.4, 0.7, 1.2)
_STARTS_OF_EXPONENTS = (0.15, 0.4, 1.0, 2.5)
_EXACT = 1e-9
# Intervals need a squared error to a few per cent only.
ROUGH = 1e-6
_MOST_EVALUATIONS = 300


@dataclasses.dataclass(frozen=True)
class Fit:
    """The law that fits a sweep best.

    Attributes:
        star: the runs.
        law: the best law.
        parameters: ``[log c, log s_1, log a_1/b_1, log s_2, ...]``.
        squared_error: sum of the squared relative errors.
    """

    star: Star
    law: Law
    parameters: Float[np.ndarray, " p"]
    squared_error: float

    @property
    def degrees(self) -> int:
        """Runs beyond the number of parameters."""
        return len(self.star.f) - self.star.num_parameters

    @property
    def relative_error(self) -> float:
        """Estimated standard deviation of the relative error of a run."""
        return math.sqrt(self.squared_error / self.degrees)

    def predictions(self) -> Float[np.ndarray, " n"]:
        """Returns f̂ of each run."""
        found = np.empty_like(self.star.f)
        for name in self.star.dimensions:
            rows = self.star.of(name)
            found[rows] = self.law.value(name, self.star.x[rows], self.star.t[rows])
        return found


def fit(star: Star) -> Fit:
    """Returns the law with the least sum of squared relative errors ``(f̂ - f) / f``, of several fixed starts.

    Args:
        star: the runs, more than parameters.
    """
    residuals = Residuals(star)
    found = [search(residuals, start) for start in _starts(star, residuals)]
    parameters, error = min(found, key=lambda one: one[1])
    return Fit(star, residuals.law(parameters), parameters, error)


def search(
    residuals: Residuals, start: Float[np.ndarray, " p"], fixed: int | None = None, tolerance: float = _EXACT
) -> tuple[Float[np.ndarray, " p"], float]:
    """Returns the best parameters from a start, and their sum of squared errors.

    Args:
        residuals: of the runs.
        start: parameters ``[p]``.
        fixed: index of a parameter that retains its value; None for none.
        tolerance: relative change of the parameters or of the error that ends the search.
    """
    free = np.arange(len(start)) != (-1 if fixed is None else fixed)
    low, high = bounds(len(start))
    # A start must lie within the bounds; trf moves one on a bound inside.
    inside = np.clip(start, low, high)

    def whole(some: Float[np.ndarray, " q"]) -> Float[np.ndarray, " p"]:
        parameters = start.copy()
        parameters[free] = some
        return parameters

    def derivatives(some: Float[np.ndarray, " q"]) -> Float[np.ndarray, "n q"]:
        return residuals.jacobian(whole(some))[:, free]

    # SciPy's stubs know only the names of methods here.
    jacobian: Any = derivatives
    found = least_squares(
        lambda some: residuals.values(whole(some)),
        inside[free],
        jacobian,
        (low[free], high[free]),
        xtol=tolerance,
        ftol=tolerance,
        gtol=1e-12,
        max_nfev=_MOST_EVALUATIONS,
    )
    return whole(found.x), float(2 * found.cost)


def bounds(num_parameters: int) -> tuple[Float[np.ndarray, " p"], Float[np.ndarray, " p"]]:
    """Returns the search range of the parameters, as logarithms."""
    pairs = [RANGE_OF_C, *([RANGE_OF_S, RANGE_OF_RATIO] * (num_parameters // 2))]
    low, high = np.log(np.array(pairs)).T
    return low, high


def _starts(star: Star, residuals: Residuals) -> list[Float[np.ndarray, " p"]]:
    """Returns for each of a few c the best of a few (a, b) of each dimension; given c they do not interact."""
    ends = np.cumsum([len(rows) for rows in residuals.rows])[:-1]
    starts = []
    for c in _STARTS_OF_C:
        candidates = list(itertools.product(_STARTS_OF_EXPONENTS, repeat=2))
        points = [
            np.array([math.log(c), *([math.log(c / (a + b)), math.log(a / b)] * len(star.dimensions))])
            for a, b in candidates
        ]
        low, high = bounds(len(points[0]))
        points = [np.clip(point, low, high) for point in points]
        errors = [[float(part @ part) for part in np.split(residuals.values(point), ends)] for point in points]
        start = points[0].copy()
        for number, best in enumerate(np.argmin(np.array(errors), axis=0)):
            start[1 + 2 * number : 3 + 2 * number] = points[best][1 + 2 * number : 3 + 2 * number]
        starts.append(start)
    return starts
