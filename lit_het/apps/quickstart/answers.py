"""How often the quickstart's models are right, and how often where they are sure, calibrated as users get them.

`calibrate` fits to all held-out images. Here the names are split, and the images of one half of them are scaled by what
fits those of the other, so that none is measured by what was fitted to its name; but homoglyphs may be in both halves.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

from lit_het.eval.metrics.calibration import fit_temperature, scaled
from lit_het.eval.metrics.names import NoFit, fit_names, with_offset
from lit_het.eval.metrics.significance import Estimate, standard_error
from lit_het.eval.predictions import Predictions
from lit_het.eval.suite import EvaluationConfig
from lit_het.models.calibration.by_names import LEAST_NAMES
from lit_het.models.opening import open_run

SURE = 0.9
KNOWN, NEW, BOTH = "known names", "new names", "as many of both"
AS_TRAINED, CALIBRATED = "as trained", "calibrated"


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Predictions among all names, as trained.

    Attributes:
        known: of new images of names that training had.
        new: of images of other names.
    """

    known: Predictions
    new: Predictions

    @property
    def seen(self) -> Bool[np.ndarray, " k"]:
        """The names that training had."""
        return ~np.isin(np.arange(self.new.num_classes), self.new.labels)


def read_held_out(run_dir: Path, known: EvaluationConfig, new: EvaluationConfig) -> HeldOut:
    """Predicts the images of two zero-shot evaluations, of known and of new names."""
    run = open_run(run_dir)
    model, sets = run.model(calibrated=False), run.sets()
    found = list[Predictions]()
    for config in (known, new):
        evaluator: Any = config.build(sets)
        [predictor] = evaluator.recognition.predictors(model, 0)
        found.append(evaluator.recognition.predict(predictor, evaluator.opened.features(model.features)))
    return HeldOut(*found)


@dataclasses.dataclass(frozen=True)
class Answers:
    """How good the answers of a model are. Standard errors are over names, whose images depend on one another.

    Attributes:
        right: the share of right answers.
        sure: the share of images whose most probable name has at least the probability `SURE`.
        right_if_sure: the share of right answers among those; NaN without any.
        nll: mean negative log-likelihood, in nats.
        ece: expected calibration error; NaN of several kinds of images.
        by_kind: the share of right answers of each kind of images.
    """

    right: Estimate
    sure: float
    right_if_sure: Estimate
    nll: float
    ece: float
    by_kind: tuple[float, ...]

    @staticmethod
    def of(*kinds: Predictions) -> "Answers":
        """Measures predictions of kinds of images that count the same."""
        hits = [of.hits(1) for of in kinds]
        is_sure = [(of.confidence >= SURE).astype(np.float64) for of in kinds]
        sure = float(np.mean([one.mean() for one in is_sure]))
        right_if_sure = Estimate(math.nan, math.nan)
        if sure:
            share = float(np.mean([(one * hit).mean() for one, hit in zip(is_sure, hits, strict=True)])) / sure
            # By the delta method, as `ratio_of_means`, in each kind by itself.
            gaps = [one * (hit - share) / sure for one, hit in zip(is_sure, hits, strict=True)]
            right_if_sure = Estimate(share, _error(gaps, kinds))
        return Answers(
            right=Estimate(float(np.mean([hit.mean() for hit in hits])), _error(hits, kinds)),
            sure=sure,
            right_if_sure=right_if_sure,
            nll=-float(np.mean([of.label_log_p.mean() for of in kinds])),
            ece=kinds[0].reliability().expected_calibration_error if len(kinds) == 1 else math.nan,
            by_kind=tuple(float(hit.mean()) for hit in hits),
        )

    def figures(self) -> dict[str, float]:
        """Returns what is above by its name, without errors and what is NaN."""
        found = {"right": self.right.mean, "sure": self.sure, "right_if_sure": self.right_if_sure.mean}
        found |= {"nll": self.nll, "ece": self.ece}
        if len(self.by_kind) > 1:
            found |= dict(zip(("right_of_known", "right_of_new"), self.by_kind, strict=True))
        return {name: value for name, value in found.items() if not math.isnan(value)}


def _error(values: Sequence[np.ndarray], kinds: Sequence[Predictions]) -> float:
    """Returns the standard error over names of the mean of the means of kinds."""
    errors = [standard_error(of, kind.labels) for of, kind in zip(values, kinds, strict=True)]
    return math.hypot(*errors) / len(kinds)


FoundAnswers: TypeAlias = Mapping[str, Mapping[str, Answers]]
"""The answers `AS_TRAINED` and `CALIBRATED`, each to images of `KNOWN` and of `NEW` names and of `BOTH`."""


def answers_of(held_out: HeldOut) -> FoundAnswers:
    """Returns all answers, calibrated with the priors seen for known names, new for new ones, and balanced for both."""

    def answers(known: Predictions, new: Predictions, both: HeldOut) -> dict[str, Answers]:
        return {KNOWN: Answers.of(known), NEW: Answers.of(new), BOTH: Answers.of(both.known, both.new)}

    found = calibrated(held_out)
    return {
        AS_TRAINED: answers(held_out.known, held_out.new, held_out),
        CALIBRATED: answers(found[KNOWN].known, found[NEW].new, found[BOTH]),
    }


def calibrated(held_out: HeldOut) -> dict[str, HeldOut]:
    """Returns predictions that suit images of known names, of new ones, and of both, each of all images.

    They have a temperature of known names, one of new names, or a temperature with an offset, fitted to the images of
    the half of the names that an image is not of. Where `calibrate` has too few new names, all have one temperature.
    """
    seen, random = held_out.seen, np.random.default_rng(0)
    first = np.zeros(len(seen), bool)
    for kind in (seen, ~seen):  # half of each
        first[random.permutation(np.flatnonzero(kind))[::2]] = True
    parts, halves = (held_out.known, held_out.new), (first, ~first)
    fits = [_fitted(HeldOut(*(of.take(~half[of.labels]) for of in parts)), seen) for half in halves]

    def fitted(name: str, of: Predictions) -> Predictions:
        log_p = np.empty_like(of.log_probabilities)
        for half, fit in zip(halves, fits, strict=True):
            rows = half[of.labels]
            log_p[rows] = fit[name](of.log_probabilities[rows])
        return dataclasses.replace(of, log_probabilities=log_p)

    return {name: HeldOut(*(fitted(name, of) for of in parts)) for name in (KNOWN, NEW, BOTH)}


def figures_of_answers(found: FoundAnswers) -> dict[str, float]:
    """Returns ``answers/<how>/<names>/<figure>`` of all answers."""
    return {
        f"answers/{how}/{names}/{figure}": value
        for how, by_names in found.items()
        for names, answers in by_names.items()
        for figure, value in answers.figures().items()
    }


_Fit: TypeAlias = Callable[[Float[np.ndarray, "n k"]], Float[np.ndarray, "n k"]]


def _fitted(half: HeldOut, seen: Bool[np.ndarray, " k"]) -> dict[str, _Fit]:
    """Returns what `calibrate` would do to predictions, by the priors, from images of half of the names."""
    fields = ("log_probabilities", "labels")
    log_p, labels = (np.concatenate([getattr(of, field) for of in (half.known, half.new)]) for field in fields)
    try:
        if (~seen).sum() < LEAST_NAMES:
            raise NoFit("too few new names")
        names = fit_names(log_p, labels, seen)
    except NoFit:
        alone = fit_temperature(log_p, labels)
        return dict.fromkeys((KNOWN, NEW, BOTH), lambda log_p: scaled(log_p, alone))
    of_known = fit_temperature(half.known.log_probabilities, half.known.labels)
    return {
        KNOWN: lambda log_p: scaled(log_p, of_known),
        NEW: lambda log_p: scaled(log_p, names.alone.temperature),
        BOTH: lambda log_p: with_offset(log_p, seen, names),
    }
