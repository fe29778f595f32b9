"""Statistics of figures: standard errors over seeds and examples, and tests between two groups of runs."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import scipy
from jaxtyping import Float, Int

from lit_het.errors import UserError
from lit_het.eval.metrics.rows import row_blocks

RESAMPLES = 1000
ROUNDING = 1e-9
"""Values of a figure that differ by less, relative to the largest, are the same: sums in another order differ so."""

# The reason for no test where both groups have the same values: the figure does not depend on their difference.
EQUAL = "equal"


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error; NaN for a single seed."""

    mean: float
    error: float

    def shown(self, digits: int) -> str:
        """Returns the estimate with ``digits`` decimals; the error is left out for a single seed."""
        error = "" if np.isnan(self.error) else f" ± {self.error:.{digits}f}"
        return f"{self.mean:.{digits}f}{error}"


@dataclasses.dataclass(frozen=True)
class WelchTest:
    """A figure in two groups of runs, and Welch's test for equal means.

    Attributes:
        one: estimate from the first group.
        other: estimate from the second.
        difference: mean of the first group minus mean of the second group.
        interval: bounds of the difference's 95 % confidence interval.
        statistic: Welch's t.
        degrees: its degrees of freedom, after Welch and Satterthwaite.
        p_value: two-sided: the probability of a |t| at least as large if the means were equal.
        untested: the reason for no test, or empty; without a test, interval, statistic, degrees and p-value are NaN.
    """

    one: Estimate
    other: Estimate
    difference: float
    interval: tuple[float, float]
    statistic: float
    degrees: float
    p_value: float
    untested: str = ""


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean and its standard error ``s / sqrt(n)``, which is NaN if a value is not finite."""
    # Infinity minus infinity is NaN here, which needs no warning.
    with np.errstate(invalid="ignore"):
        mean = float(np.mean(values))
    return Estimate(mean, standard_error(np.asarray(values, np.float64)))


def welch(one: Sequence[float], other: Sequence[float]) -> WelchTest:
    """Compares a figure between two groups of runs with Welch's t-test, which does not assume equal variances.

    Welch, "The generalization of 'Student's' problem when several different population variances are involved",
    Biometrika 1947; the two-sample unequal variance t-test of HET-XL, Table 6.
    """
    if not one or not other:
        raise UserError("a comparison needs at least one run in each group")
    estimates = estimate(one), estimate(other)
    untested = _why_untested(one, other)
    if untested:
        with np.errstate(invalid="ignore"):
            difference = float(np.float64(estimates[0].mean) - estimates[1].mean)
        return WelchTest(*estimates, difference, (math.nan, math.nan), math.nan, math.nan, math.nan, untested)
    with warnings.catch_warnings():
        # SciPy warns if one group varies by rounding only; Welch's test is valid as long as the other group varies.
        warnings.filterwarnings("ignore", "Precision loss", RuntimeWarning)
        test: Any = scipy.stats.ttest_ind(one, other, equal_var=False)
    bounds = test.confidence_interval(0.95)
    return WelchTest(
        *estimates,
        difference=estimates[0].mean - estimates[1].mean,
        interval=(float(bounds.low), float(bounds.high)),
        statistic=float(test.statistic),
        degrees=float(test.df),
        p_value=float(test.pvalue),
    )


def welch_tests(runs: Sequence[Mapping[str, float]], against: Sequence[Mapping[str, float]]) -> dict[str, WelchTest]:
    """Runs `welch` for each figure that all runs of both groups have, in the order of the first run."""
    if not runs or not against:
        raise UserError("a comparison needs at least one run in each group")
    names = [name for name in runs[0] if all(name in run for run in (*runs, *against))]
    if not names:
        raise UserError("no figure is in all of these runs: evaluate them on the same data sets first")
    return {name: welch([run[name] for run in runs], [run[name] for run in against]) for name in names}


def holm(p_values: Mapping[str, float], level: float = 0.05) -> frozenset[str]:
    """Returns the names of significant tests after Holm's correction: the family-wise error rate is at most ``level``.

    Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of Statistics 1979. The tests
    may be dependent.
    """
    found = []
    # The smallest p-value must survive division by the number of tests. The divisor shrinks from one to the next, until
    # the first test fails.
    for number, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        if p_values[name] > level / (len(p_values) - number):
            break
        found.append(name)
    return frozenset(found)


def standard_error(values: Float[np.ndarray, " n"], groups: Int[np.ndarray, " n"] | None = None) -> float:
    """Returns the standard error of a mean: ``s / sqrt(n)``, with n - 1 in the variance.

    Examples of one group, such as the captions of one image, may be dependent: the error is cluster-robust, after Liang
    and Zeger, "Longitudinal data analysis using generalized linear models", Biometrika 1986. It is NaN for a single
    example or group, and if a value is not finite.
    """
    # Infinity minus infinity is NaN here, which needs no warning.
    with np.errstate(invalid="ignore"):
        deviations = values - values.mean(dtype=np.float64)
    if groups is not None:
        deviations = np.bincount(np.unique(groups, return_inverse=True)[1], deviations)
    count = len(deviations)
    return float(np.sqrt((deviations**2).sum() * count / (count - 1)) / len(values)) if count > 1 else math.nan


def ratio_of_means(values: Float[np.ndarray, " n"], of: Float[np.ndarray, " n"]) -> tuple[float, float]:
    """Returns the ratio of two means over the same examples, and its standard error by the delta method.

    Args:
        values: in the numerator.
        of: in the denominator; their mean is not zero.
    """
    ratio = float(values.mean() / of.mean())
    return ratio, standard_error((values - ratio * of) / of.mean())


def bootstrap_error(
    figure: Callable[[Int[np.ndarray, "r n"]], Float[np.ndarray, " r"]],
    num_examples: int,
    seed: int = 0,
    groups: Int[np.ndarray, " n"] | None = None,
) -> float:
    """Returns the bootstrap standard error of a figure: its deviation over `RESAMPLES` resamples of n examples.

    Efron, "Bootstrap methods: another look at the jackknife", Annals of Statistics 1979.

    Args:
        figure: maps the counts of each example in each of ``r`` resamples to the figure of each resample.
        num_examples: n.
        seed: of the resamples.
        groups: of dependent examples, such as the questions about one image, which are drawn whole; None for none.
    """
    if num_examples == 0:
        raise UserError("no valid example to score: check that the split holds labelled images that can be read")
    group = np.arange(num_examples) if groups is None else np.unique(groups, return_inverse=True)[1]
    size = int(group.max()) + 1
    generator = np.random.default_rng(seed)
    figures = np.empty(RESAMPLES)
    for draws in row_blocks(RESAMPLES, num_examples):
        count = draws.stop - draws.start
        # The offset gives each resample its own range of indices, so that one bincount counts all resamples.
        drawn = generator.integers(size, size=(count, size)) + size * np.arange(count)[:, None]
        times = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
        figures[draws] = figure(times[:, group])
    return float(np.std(figures, ddof=1))


def _why_untested(one: Sequence[float], other: Sequence[float]) -> str:
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return "a run's figure is not finite"
    if min(len(one), len(other)) < 2:
        return "a test needs two runs in each group"
    rounding = ROUNDING * max(map(abs, (*one, *other)))
    is_same = len(one) == len(other) and np.allclose(sorted(one), sorted(other), rtol=0, atol=rounding)
    if is_same or np.ptp((*one, *other)) <= rounding:
        return EQUAL
    if max(np.ptp(one), np.ptp(other)) <= rounding:
        return "the figure does not vary within the groups"
    return ""
