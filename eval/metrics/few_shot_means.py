"""Means of few-shot accuracies over data sets (HET-XL App. O, Table 22; e3 App. A.5, Fig. 14, Tables 35, 36).

For D sets with accuracies a at s shots, and those of a reference model r,

    mean(s) = 1/D Σ_d a_d(s)        weighted_mean(s) = 1/D Σ_d a_d(s) / r_d(s).

The second gives hard sets the weight of easy ones; the reference has 1 at any number of shots. That of e3 is its
ViT-B/32, whose accuracies per set are not printed. Tables 35 and 36 print errors in percent, and for ViT-B/32 83.35 at
every number of shots: they are 100 - 16.65 weighted_mean(s). The paper does not explain the factor.

HET-XL Table 22 averages over U upstream settings as well,

    mean(s) = 1/(U D) Σ_u Σ_d a_ud(s),

with a standard error that it does not define: ours are that of the U means over sets, and that of the D means over
settings.
"""

import dataclasses
import math
import re
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from lit_het.errors import UserError
from lit_het.eval.evaluation import Evaluation
from lit_het.eval.metrics.significance import standard_error

MEAN, WEIGHTED_MEAN = "mean", "weighted_mean"
"""The names of the means, in the place of a set's."""

Accuracies = Mapping[str, Mapping[int, float]]
"""Accuracies by set and by number of shots."""


def few_shot_means(accuracies: Accuracies, reference: Accuracies | None = None) -> dict[str, dict[int, float]]:
    """Returns ``mean`` and, with a reference, ``weighted_mean``, by number of shots.

    Args:
        accuracies: of the model, from 0 to 1. Numbers of shots that a set lacks are left out of the means.
        reference: of the reference model, for these sets at least.
    """
    shots = [count for count in next(iter(accuracies.values()), {}) if all(count in one for one in accuracies.values())]
    if not shots:
        raise UserError(f"few-shot: {', '.join(accuracies) or 'no sets'} have no number of shots in common")
    means = {MEAN: {count: statistics.fmean(one[count] for one in accuracies.values()) for count in shots}}
    if reference is not None:
        for name in accuracies:
            for count in shots:
                if not reference.get(name, {}).get(count):
                    raise UserError(f"few-shot: the reference has no accuracy above 0 of {name} at {count} shots")
        means[WEIGHTED_MEAN] = {
            count: statistics.fmean(one[count] / reference[name][count] for name, one in accuracies.items())
            for count in shots
        }
    return means


@dataclasses.dataclass(frozen=True)
class MeanOverSettings:
    """A mean over settings and sets, and two standard errors, each NaN for one setting or set.

    Attributes:
        mean: over all.
        over_settings: error of the mean over other settings, with these sets.
        over_sets: error of the mean over other sets, with these settings.
    """

    mean: float
    over_settings: float
    over_sets: float


def means_over_settings(accuracies: Sequence[Accuracies]) -> dict[int, MeanOverSettings]:
    """Returns the mean over settings and sets by number of shots (HET-XL App. O, Table 22).

    Args:
        accuracies: of each setting, all with the same sets and numbers of shots.
    """
    sets, found = list(accuracies[0]), {}
    for shots in accuracies[0][sets[0]]:
        table = np.array([[of_setting[name][shots] for name in sets] for of_setting in accuracies])
        errors = standard_error(table.mean(axis=1)), standard_error(table.mean(axis=0))
        found[shots] = MeanOverSettings(float(table.mean()), *errors)
    return found


def evaluated_means(found: Sequence[Evaluation], reference: Accuracies | None = None) -> list[Evaluation]:
    """Returns the means over few-shot evaluations as evaluations of their own; raises as `few_shot_means`.

    Standard errors are those of the mean over these sets, whose draws of training images are independent; the reference
    counts as exact.
    """
    figures = few_shot_means({one.name: by_shots(one.figures) for one in found}, reference)
    chance = few_shot_means({one.name: by_shots(one.chance) for one in found}, reference)
    # Variances of independent terms add up, each with the square of its weight.
    squares = None if reference is None else {name: _squares(of_set) for name, of_set in reference.items()}
    variances = few_shot_means({one.name: _squares(by_shots(one.errors)) for one in found}, squares)
    return [
        Evaluation(
            kind="few_shot",
            name=name,
            figures={f"{shots}_shot": value for shots, value in figures[name].items()},
            errors={f"{shots}_shot": math.sqrt(value / len(found)) for shots, value in variances[name].items()},
            chance={f"{shots}_shot": value for shots, value in chance[name].items()},
        )
        for name in figures
    ]


def by_shots(figures: Mapping[str, float]) -> dict[int, float]:
    """Returns the figures ``<shots>_shot`` of an evaluation by number of shots."""
    matches = {name: re.fullmatch(r"(\d+)_shot", name) for name in figures}
    return {int(match[1]): figures[name] for name, match in matches.items() if match}


def _squares(values: Mapping[int, float]) -> dict[int, float]:
    return {shots: value**2 for shots, value in values.items()}
