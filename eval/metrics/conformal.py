"""Split conformal prediction: sets of classes that contain the true class with a chosen probability, the coverage.

The set of an image is every class whose probability reaches a threshold (Sadinle, Lei and Wasserman, "Least ambiguous
set-valued classifiers with bounded error levels", JASA 2019; score 1 - p_y). The threshold comes from images with
labels. If these and the new image are exchangeable, the coverage is guaranteed for any model, calibrated or not; a
better model has smaller sets. The guarantee is a mean over images and over draws of the calibration images, not one for
each image or class.

No other rule has smaller sets on average where probabilities are right. Adaptive prediction sets (Romano, Sesia and
Candès, "Classification with valid and adaptive coverage", NeurIPS 2020), which hold as many classes as add up to a
threshold, cover hard and easy images more evenly, at the price of larger sets.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from lit_het import untrusted
from lit_het.errors import UserError
from lit_het.eval.metrics.calibration import check_labels, check_log_probabilities

COVERAGES = tuple(percent / 100 for percent in range(50, 100))
"""The coverages for which a run stores thresholds."""


@dataclasses.dataclass(frozen=True)
class ConformalThresholds:
    """Thresholds for several coverages.

    Attributes:
        coverages: ascending probabilities that a set contains the true class.
        log_probabilities: for each coverage, the lowest log-probability of a class in a set, in nats.
        num_examples: n, the number of calibration examples.
        num_classes: k.
        candidates: `candidates_digest` of the captions of an image-text model, since sets among others have no
            guarantee; None for a classifier, which has its own classes, and in files of earlier versions.
    """

    coverages: tuple[float, ...]
    log_probabilities: tuple[float, ...]
    num_examples: int
    num_classes: int
    candidates: str | None = None

    def at(self, coverage: float) -> float:
        """Returns the threshold of the lowest stored coverage that is at least ``coverage``."""
        if not 0 < coverage <= self.coverages[-1]:
            raise UserError(
                f"coverage {coverage:g} has no stored threshold: it must be above 0 and at most {self.coverages[-1]:g}"
            )
        return self.log_probabilities[int(np.searchsorted(self.coverages, coverage))]

    def to_json(self) -> dict[str, Any]:
        """Returns JSON of the thresholds: an object of lists and numbers."""
        # JSON has no infinity: null stands for sets of all classes.
        finite = [value if math.isfinite(value) else None for value in self.log_probabilities]
        return dataclasses.asdict(self) | {"coverages": list(self.coverages), "log_probabilities": finite}


def candidates_digest(tokens: Int[np.ndarray, "k l"]) -> str:
    """Returns a digest of the tokens of candidates, whatever their order and however often each stands there."""
    rows = np.unique(tokens, axis=0).astype("<i8")
    return hashlib.sha256(f"{rows.shape}".encode() + rows.tobytes()).hexdigest()


def min_examples(coverage: float) -> int:
    """Returns the lowest number of calibration examples for a coverage: the least n with (n + 1) coverage <= n."""
    return math.ceil(_exact(coverage / (1 - coverage)))


def fit_conformal(
    log_probabilities: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"], coverages: Sequence[float] = COVERAGES
) -> ConformalThresholds:
    """Fits the threshold of each coverage: the ``ceil((n + 1) coverage)``-th highest log-probability of a label.

    Of n + 1 exchangeable examples, each is equally likely to have the r-th highest log-probability of its label. The
    last one is thus among the first r, where r = ceil((n + 1) coverage), with probability r / (n + 1) >= coverage, or
    more if examples tie (Vovk, Gammerman and Shafer, "Algorithmic learning in a random world", 2005; Sadinle et al.
    2019).

    Args:
        log_probabilities: of the calibration examples, computed as those of later examples.
        labels: their true classes.
        coverages: ascending, each between 0 and 1.
    """
    for coverage in coverages:
        if not 0 < coverage < 1:
            raise UserError(f"coverage = {coverage:g} must lie between 0 and 1")
    least = min_examples(coverages[-1])
    if len(labels) < least:
        raise UserError(
            f"coverage = {coverages[-1]:g} needs at least {least:,} calibration examples, and there are "
            f"{len(labels):,}; give more of them, or ask for a lower coverage"
        )
    check_labels(labels, log_probabilities.shape[1])
    check_log_probabilities(log_probabilities)
    descending = -np.sort(-np.take_along_axis(log_probabilities, labels[:, None], axis=1)[:, 0])
    ranks = [math.ceil(_exact((len(labels) + 1) * coverage)) for coverage in coverages]
    thresholds = tuple(float(descending[rank - 1]) for rank in ranks)
    return ConformalThresholds(tuple(coverages), thresholds, *log_probabilities.shape)


def prediction_sets(log_probabilities: Float[np.ndarray, "n k"], threshold: float) -> Bool[np.ndarray, "n k"]:
    """Returns which classes are in the set of each example: those whose log-probability is at least the threshold.

    A set is never empty: it has at least the most probable class, or all classes that tie for it. Where the model is
    right more often than the coverage asks for, the coverage is therefore higher.
    """
    check_log_probabilities(log_probabilities)
    return log_probabilities >= np.minimum(log_probabilities.max(axis=1), threshold)[:, None]


def read_conformal(path: Path) -> ConformalThresholds:
    """Reads the thresholds that ``lit-het calibrate`` wrote under ``conformal`` into a run's ``calibration.json``."""
    way_out = f"run lit-het calibrate {path.parent} --data SHARDS first"
    try:
        content = untrusted.read_json(path)
        stored = content["conformal"]
        found = ConformalThresholds(
            tuple(map(float, stored["coverages"])),
            tuple(-math.inf if value is None else float(value) for value in stored["log_probabilities"]),
            int(stored["num_examples"]),
            int(stored["num_classes"]),
            None if (candidates := stored.get("candidates")) is None else str(candidates),
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{path} is missing, and prediction sets need its thresholds; {way_out}") from error
    except KeyError as error:
        raise UserError(f"{path} has no {error} of prediction sets; {way_out}") from error
    except (OSError, ValueError, TypeError, OverflowError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path}: prediction sets cannot be read ({reason}); {way_out}") from error
    coverages, thresholds = found.coverages, found.log_probabilities
    has_range = all(0 < coverage < 1 for coverage in coverages) and not any(map(math.isnan, thresholds))
    is_sorted = list(coverages) == sorted(set(coverages)) and list(thresholds) == sorted(thresholds, reverse=True)
    if not (len(coverages) == len(thresholds) > 0 and has_range and is_sorted):
        raise UserError(f"{path}: coverages and log_probabilities do not match; {way_out}")
    return found


def _exact(value: float) -> float:
    """Returns a value without the rounding error of a product or quotient, which `math.ceil` would turn into one."""
    return round(value, 9)
