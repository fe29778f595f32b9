"""Whether a heteroscedastic model has learnt which classes are ambiguous: noise norms, and errors among homoglyphs.

Homoglyphs are classes whose images look the same. Homoglyph groups are given as one integer per class, ``groups [k]``;
a class without homoglyphs has -1 (`NO_GROUP`).
"""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np
import scipy
from jaxtyping import Bool, Float, Int

from lit_het.errors import UserError
from lit_het.eval.metrics.calibration import check_labels

NO_GROUP = -1


@dataclasses.dataclass(frozen=True)
class GroupErrors:
    """How many wrong predictions fall into the group of the true class.

    Attributes:
        errors: wrong predictions.
        within: wrong predictions that are another class of the same group.
        chance: expected share if errors were spread evenly over all other classes; NaN without errors.
    """

    errors: int
    within: int
    chance: float

    @property
    def share(self) -> float:
        """The share of errors within a group; NaN without errors."""
        return self.within / self.errors if self.errors else float("nan")


@dataclasses.dataclass(frozen=True)
class RankTest:
    """A two-sided Mann-Whitney test of whether the values of one group tend to be higher than those of another.

    Attributes:
        statistic: U of the first group: the number of pairs in which its value is higher; ties count one half.
        p_value: two-sided.
        auc: U over the number of pairs, the effect size: 0.5 is no difference, at 1 the first group is always higher.
        first_count, second_count: independent values in each group.
        first_median, second_median: their medians.
    """

    statistic: float
    p_value: float
    auc: float
    first_count: int
    second_count: int
    first_median: float
    second_median: float


def groups_of(shapes: Sequence[Hashable]) -> Int[np.ndarray, " k"]:
    """Returns group numbers from one key per class: classes with equal keys form a group, a unique key gives -1."""
    members: dict[Hashable, list[int]] = {}
    for index, shape in enumerate(shapes):
        members.setdefault(shape, []).append(index)
    groups = np.full(len(shapes), NO_GROUP)
    for number, indices in enumerate(indices for indices in members.values() if len(indices) > 1):
        groups[indices] = number
    return groups


def errors_within_groups(
    predictions: Int[np.ndarray, " n"], labels: Int[np.ndarray, " n"], groups: Int[np.ndarray, " k"]
) -> GroupErrors:
    """Counts the top-1 errors that confuse two classes of one group, and computes the level expected by chance."""
    check_labels(labels, len(groups))
    check_labels(predictions, len(groups))
    wrong = predictions != labels
    truth = groups[labels[wrong]]
    grouped = truth != NO_GROUP
    # With other classes of the group only: the true class itself cannot be an error.
    sizes = np.bincount(groups[groups != NO_GROUP], minlength=1)
    homoglyphs = np.where(grouped, sizes[np.where(grouped, truth, 0)] - 1, 0)
    return GroupErrors(
        errors=int(wrong.sum()),
        within=int((grouped & (truth == groups[predictions[wrong]])).sum()),
        chance=float(homoglyphs.mean() / (len(groups) - 1)) if wrong.any() else float("nan"),
    )


def rank_test(first: Float[np.ndarray, " n"], second: Float[np.ndarray, " m"]) -> RankTest:
    """Compares two samples of independent values.

    Mann and Whitney, "On a test of whether one of two random variables is stochastically larger than the
    other", Annals of Mathematical Statistics 1947. The effect size U / (n m) is the area under the ROC curve.
    """
    if first.size == 0 or second.size == 0:
        raise UserError(f"rank test: needs values in both groups, got {first.size} and {second.size}")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise UserError("rank test: a value is not finite; training diverged, use an earlier checkpoint")
    statistic, p_value = first.size * second.size / 2, 1.0
    # A deterministic head gives one value everywhere: the variance of the test is zero, and SciPy's p is undefined.
    if np.ptp(np.concatenate([first, second])) > 0:
        outcome = scipy.stats.mannwhitneyu(first, second, alternative="two-sided")
        statistic, p_value = float(outcome.statistic), float(outcome.pvalue)
    return RankTest(
        statistic=statistic,
        p_value=p_value,
        auc=statistic / (first.size * second.size),
        first_count=first.size,
        second_count=second.size,
        first_median=float(np.median(first)),
        second_median=float(np.median(second)),
    )


def means_by_unit(
    values: Float[np.ndarray, " n"], units: Int[np.ndarray, " n"]
) -> tuple[Int[np.ndarray, " u"], Float[np.ndarray, " u"]]:
    """Returns the distinct units in ascending order, and the mean value of each."""
    distinct, inverse = np.unique(units, return_inverse=True)
    return distinct, np.bincount(inverse, weights=values) / np.bincount(inverse)


def split_by_ambiguity(
    values: Float[np.ndarray, " n"], ambiguous: Bool[np.ndarray, " n"], units: Int[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, " a"], Float[np.ndarray, " u"]]:
    """Returns the mean values of ambiguous and of unambiguous units, ready for `rank_test`.

    Images of one character are not independent, and characters of one shape have equal images. ``units`` should
    therefore number the characters or, more strictly, the shapes.
    """
    # One value per unit: images of one character would count as independent observations otherwise.
    distinct, means = means_by_unit(values, units)
    _, shares = means_by_unit(ambiguous.astype(np.float64), units)
    mixed = (shares > 0) & (shares < 1)
    if mixed.any():
        raise UserError(
            f"rank test: unit {distinct[mixed][0]} is ambiguous in some images only; mark all its images the same way"
        )
    return means[shares == 1], means[shares == 0]
