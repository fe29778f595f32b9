"""What a heteroscedastic model learnt about ambiguous classes: noise norms, and errors among look-alikes.

Groups of classes that look alike are given as one integer a class, ``groups [k]``; a class that looks like no
other has -1 (`NO_GROUP`).
"""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import stats

from lit_het.errors import UserError
from lit_het.eval.calibration import check_labels

NO_GROUP = -1


@dataclasses.dataclass(frozen=True)
class GroupErrors:
    """How many wrong predictions stayed within the group of the true class.

    Attributes:
        errors: wrong predictions.
        within: those of them that fall on another class of the same group.
        chance: share to expect if each error fell evenly on the other classes; NaN without errors.
    """

    errors: int
    within: int
    chance: float

    @property
    def share(self) -> float:
        """Share of the errors within a group; NaN without errors."""
        return self.within / self.errors if self.errors else float("nan")


@dataclasses.dataclass(frozen=True)
class RankTest:
    """A two-sided Mann-Whitney test of whether one group's values tend to exceed another's.

    Attributes:
        statistic: U of the first group: the pairs in which it is higher, ties counting one half.
        p_value: two-sided.
        auc: U over the number of pairs, the effect size: 0.5 no difference, 1 the first is always higher.
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
    """Group numbers from one key a class: classes with equal keys form a group, a lone key gives -1."""
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
    """Share of the top-1 errors that confuse two classes of one group, beside its chance level.

    Raises:
        UserError: no examples, or a prediction or label outside ``groups``.
    """
    check_labels(labels, len(groups))
    check_labels(predictions, len(groups))
    wrong = predictions != labels
    truth = groups[labels[wrong]]
    grouped = truth != NO_GROUP
    sizes = np.bincount(groups[groups != NO_GROUP], minlength=1)
    mates = np.where(grouped, sizes[np.where(grouped, truth, 0)] - 1, 0)
    return GroupErrors(
        errors=int(wrong.sum()),
        within=int((grouped & (truth == groups[predictions[wrong]])).sum()),
        chance=float(mates.mean() / (len(groups) - 1)) if wrong.any() else float("nan"),
    )


def rank_test(first: Float[np.ndarray, " n"], second: Float[np.ndarray, " m"]) -> RankTest:
    """Compare two samples of independent values.

    Mann and Whitney, "On a test of whether one of two random variables is stochastically larger than the
    other", Annals of Mathematical Statistics 1947. The effect size U / (n m) is the area under the ROC curve.

    Raises:
        UserError: an empty sample, or a value that is not finite.
    """
    if first.size == 0 or second.size == 0:
        raise UserError(f"rank test: needs values in both groups, got {first.size} and {second.size}")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise UserError("rank test: a value is not finite; training diverged, use an earlier checkpoint")
    statistic, p_value = first.size * second.size / 2, 1.0
    # With one value everywhere (a deterministic head) the test's variance is zero and its p undefined.
    if np.ptp(np.concatenate([first, second])) > 0:
        outcome = stats.mannwhitneyu(first, second, alternative="two-sided")
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
    """The distinct units, rising, and the mean value of each."""
    distinct, inverse = np.unique(units, return_inverse=True)
    return distinct, np.bincount(inverse, weights=values) / np.bincount(inverse)


def split_by_ambiguity(
    values: Float[np.ndarray, " n"], ambiguous: Bool[np.ndarray, " n"], units: Int[np.ndarray, " n"]
) -> tuple[Float[np.ndarray, " a"], Float[np.ndarray, " u"]]:
    """Mean values of the ambiguous and of the unambiguous units, ready for `rank_test`.

    Several images of one character are not independent, and neither are characters of one shape, whose
    images are equal: let ``units`` number the characters, or more strictly the shapes.

    Raises:
        UserError: a unit with both ambiguous and unambiguous values.
    """
    distinct, means = means_by_unit(values, units)
    _, shares = means_by_unit(ambiguous.astype(np.float64), units)
    mixed = (shares > 0) & (shares < 1)
    if mixed.any():
        raise UserError(f"rank test: unit {distinct[mixed][0]} is ambiguous in some images only; mark it one way")
    return means[shares == 1], means[shares == 0]
