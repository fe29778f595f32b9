"""How well a sweep determines the exponents: profile likelihood and bootstrap over runs.

An exponent is "not identified" where the runs fit about as well with a value at the end of its search range.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Float
from scipy import stats

from lit_het.errors import UserError
from lit_het.search.law.fitting import RANGE_OF_C, RANGE_OF_S, ROUGH, Fit, bounds, search
from lit_het.search.law.observations import PARAMETERS_PER_DIMENSION, Star
from lit_het.search.law.residuals import Residuals

LEVEL = 0.9
RESAMPLES = 200
# Ends of a profile interval are found to this share of themselves.
_PRECISION = 2e-3
# A better fit found on the way replaces the first one.
_BETTER = 1e-6


@dataclasses.dataclass(frozen=True)
class Exponent:
    """An estimated exponent.

    Attributes:
        value: of the best fit.
        bootstrap: percentile interval over resampled runs; None without resamples.
        profile: interval of the profile likelihood; an end is None where it lies beyond the search range. None for a
            and b, which have no profile.
        reason: why the runs do not identify the exponent, or empty.
    """

    value: float
    bootstrap: tuple[float, float] | None = None
    profile: tuple[float | None, float | None] | None = None
    reason: str = ""

    @property
    def is_identified(self) -> bool:
        """Whether the runs determine the exponent."""
        return not self.reason

    def covers(self, value: float) -> bool:
        """Returns whether a value is in the profile interval."""
        low, high = self.profile or (None, None)
        return (low is None or low <= value) and (high is None or value <= high)


@dataclasses.dataclass(frozen=True)
class Exponents:
    """All exponents of a law.

    Attributes:
        fit: the best fit.
        level: of the intervals.
        c: exponent of compute.
        s: scaling exponents by dimension.
        a: exponents of the dimensions where compute is unbounded.
        b: exponents of the cost of larger models.
    """

    fit: Fit
    level: float
    c: Exponent
    s: dict[str, Exponent]
    a: dict[str, Exponent]
    b: dict[str, Exponent]

    def named(self, kinds: str = "sab") -> dict[str, Exponent]:
        """Returns c, and the exponents of some kinds by names such as ``s width``."""
        return {"c": self.c} | {f"{kind} {name}": one for kind in kinds for name, one in getattr(self, kind).items()}


def exponents(fit: Fit, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0) -> Exponents:
    """Returns the exponents of a fit with their intervals.

    Args:
        fit: the best fit.
        level: of the intervals, such as 0.9.
        resamples: of the bootstrap; 0 for none.
        seed: of the bootstrap.
    """
    check(level, resamples)
    fit, profiles = _profiles(fit, level)
    drawn = _quantiles(bootstrap(fit, resamples, seed), level) if resamples else None
    residuals = Residuals(fit.star)
    names = fit.star.dimensions

    def interval(*path: str) -> tuple[float, float] | None:
        return None if drawn is None else drawn[path]

    c_reason = _why_unbounded(profiles[0], RANGE_OF_C, "c")
    c = Exponent(fit.law.c, interval("c"), profiles[0], c_reason)
    s, a, b = {}, {}, {}
    for number, name in enumerate(names):
        curve, profile = fit.law.curves[name], profiles[1 + 2 * number]
        vanished = _why_vanished(residuals.at_bound(number, fit.parameters))
        of_s = vanished or _why_unbounded(profile, RANGE_OF_S, "s")
        s[name] = Exponent(fit.law.scaling_exponent(name), interval("s", name), profile, of_s)
        of_ratio = vanished or _why_at_bound(fit.parameters, 2 + 2 * number, "a / b") or of_s
        a[name] = Exponent(curve.a, interval("a", name), reason=of_ratio)
        b[name] = Exponent(curve.b, interval("b", name), reason=of_ratio)
    return Exponents(fit, level, c, s, a, b)


def check(level: float, resamples: int) -> None:
    """Checks the arguments of `exponents`."""
    if not 0 < level < 1:
        raise UserError(f"level {level:g} must be between 0 and 1, such as 0.9")
    if resamples < 0:
        raise UserError(f"{resamples} resamples must be at least 0")


def bootstrap(fit: Fit, resamples: int = RESAMPLES, seed: int = 0) -> dict[tuple[str, ...], Float[np.ndarray, " r"]]:
    """Returns the exponents of resampled runs, by ("c",) and ("s" or "a" or "b", dimension).

    The runs of each dimension are resampled by themselves, so that none lacks runs; a resample with fewer different
    runs than parameters is drawn again. Every search starts from the best fit.

    Args:
        fit: the best fit.
        resamples: r.
        seed: of the draws.
    """
    generator, star = np.random.default_rng(seed), fit.star
    found: dict[tuple[str, ...], list[float]] = {}
    for _ in range(resamples):
        residuals = Residuals(star, _draw(star, generator))
        law = residuals.law(search(residuals, fit.parameters, tolerance=ROUGH)[0])
        found.setdefault(("c",), []).append(law.c)
        for name, curve in law.curves.items():
            found.setdefault(("s", name), []).append(law.scaling_exponent(name))
            found.setdefault(("a", name), []).append(curve.a)
            found.setdefault(("b", name), []).append(curve.b)
    return {path: np.array(values) for path, values in found.items()}


def profile(
    fit: Fit, index: int, level: float = LEVEL
) -> tuple[tuple[float | None, float | None], Float[np.ndarray, " p"] | None]:
    """Returns the profile-likelihood interval of an exponent, and better parameters if some were met on the way.

    Values are in the interval for which the other parameters can be chosen such that the squared error is less than
    ``1 + F / (n - p)`` of the least one, with the quantile F of Fisher's distribution with 1 and n - p degrees: the
    noise of the runs is not known (Bates and Watts, "Nonlinear Regression Analysis and Its Applications", 1988,
    Sec. 6.1).

    Args:
        fit: the best fit.
        index: of the exponent among `Fit.parameters`.
        level: of the interval.

    Returns:
        Its ends, each None where the search range ends first; and parameters ``[p]`` or None.
    """
    threshold = fit.squared_error * (1 + float(stats.f.ppf(level, 1, fit.degrees)) / fit.degrees)
    low, high = (bound[index] for bound in bounds(len(fit.parameters)))
    residuals, best = Residuals(fit.star), [fit.parameters, fit.squared_error]

    def excess(value: float, start: Float[np.ndarray, " p"]) -> tuple[float, Float[np.ndarray, " p"]]:
        moved = start.copy()
        moved[index] = value
        parameters, error = search(residuals, moved, index, ROUGH)
        if error < best[1]:
            best[:] = parameters, error
        return error - threshold, parameters

    ends = [_end(excess, fit.parameters, index, bound, _width(residuals, fit, index)) for bound in (low, high)]
    better = best[0] if best[1] < fit.squared_error * (1 - _BETTER) else None
    return (ends[0], ends[1]), better


_Excess = Callable[[float, Float[np.ndarray, " p"]], tuple[float, Float[np.ndarray, " p"]]]


def _end(excess: _Excess, parameters: Float[np.ndarray, " p"], index: int, bound: float, width: float) -> float | None:
    """Returns the value at which the excess becomes positive between the estimate and a bound, or None."""
    inside, sign, step = float(parameters[index]), 1 if bound > parameters[index] else -1, width
    outside = inside
    while True:
        outside = inside + sign * step
        reached = sign * (outside - bound) >= 0
        outside = bound if reached else outside
        above, moved = excess(outside, parameters)
        if above > 0:
            break
        if reached:
            return None
        inside, parameters, step = outside, moved, 1.6 * step
    while abs(outside - inside) > _PRECISION:
        middle = (inside + outside) / 2
        above, moved = excess(middle, parameters)
        if above > 0:
            outside = middle
        else:
            inside, parameters = middle, moved
    return math.exp((inside + outside) / 2)


def _width(residuals: Residuals, fit: Fit, index: int) -> float:
    """Returns about one standard error of a parameter, from the curvature, within reason."""
    jacobian = residuals.jacobian(fit.parameters)
    covariance = np.linalg.pinv(jacobian.T @ jacobian, hermitian=True)[index, index]
    return float(np.clip(fit.relative_error * math.sqrt(max(covariance, 0.0)), 0.01, 0.3))


def _profiles(fit: Fit, level: float) -> tuple[Fit, dict[int, tuple[float | None, float | None]]]:
    """Returns the profile intervals of c and every s by index, and the fit, which may have become better."""
    indices = [0, *range(1, len(fit.parameters), 2)]
    for _ in range(len(fit.parameters)):
        found = {}
        for index in indices:
            found[index], better = profile(fit, index, level)
            if better is not None:
                residuals = Residuals(fit.star)
                parameters, error = search(residuals, better)
                fit = Fit(fit.star, residuals.law(parameters), parameters, error)
                break
        else:
            return fit, found
    raise UserError("the best fit was not found: the runs fit almost as well with very different exponents")


def _quantiles(
    drawn: dict[tuple[str, ...], Float[np.ndarray, " r"]], level: float
) -> dict[tuple[str, ...], tuple[float, float]]:
    sides = (1 - level) / 2, (1 + level) / 2
    quantiles = {path: np.quantile(values, sides) for path, values in drawn.items()}
    return {path: (float(low), float(high)) for path, (low, high) in quantiles.items()}


def _draw(star: Star, generator: np.random.Generator) -> Float[np.ndarray, " n"]:
    """Returns how often each run is drawn."""
    counts = np.zeros(len(star.f))
    for name in star.dimensions:
        rows = np.flatnonzero(star.of(name))
        while True:
            times = np.bincount(generator.integers(len(rows), size=len(rows)), minlength=len(rows))
            # A dimension with barely more runs than parameters would never pass a stricter test.
            if np.count_nonzero(times) >= min(PARAMETERS_PER_DIMENSION, len(rows) - 1):
                break
        counts[rows] = times
    return counts


def _why_unbounded(ends: tuple[float | None, float | None], limits: tuple[float, float], name: str) -> str:
    open_ends = [f"{limit:g}" for end, limit in zip(ends, limits, strict=True) if end is None]
    return f"the runs fit about as well with {name} = {' and '.join(open_ends)}" if open_ends else ""


def _why_vanished(names: list[str]) -> str:
    """Returns why an optimum has no meaning: one of the two terms between which it lies is 0."""
    missing = [name for name in names if name in ("α", "β")]
    return f"the best fit has {' and '.join(missing)} = 0: no optimum lies within the sizes" if missing else ""


def _why_at_bound(parameters: Float[np.ndarray, " p"], index: int, name: str) -> str:
    low, high = (bound[index] for bound in bounds(len(parameters)))
    value = parameters[index]
    return f"{name} is at the end of its search range" if min(value - low, high - value) < 1e-3 else ""
