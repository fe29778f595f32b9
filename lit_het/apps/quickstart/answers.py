"""How often the quickstart's models are right, and how often where they are sure, calibrated by names.

`calibrate` fits what users get to all held-out images. Here the names are split, and the images of one half of them are
scaled by what fits those of the other: neither an image nor its name is measured that was fitted on.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Float

from lit_het.eval.metrics.calibration import fit_temperature, scaled
from lit_het.eval.metrics.names import NoFit, fit_names, with_offset
from lit_het.eval.metrics.significance import Estimate, ratio_of_means, standard_error
from lit_het.eval.predictions import Predictions
from lit_het.eval.suite import EvaluationConfig
from lit_het.models.opening import open_run

SURE = 0.9
KNOWN, NEW, BOTH = "known names", "new names", "as many of both"
AS_TRAINED, BY_NAMES = "as trained", "calibrated by names"


@dataclasses.dataclass(frozen=True)
class Held:
    """Predictions of the held-out images among all names.

    Attributes:
        predictions: as trained, of the held-out typeface and characters.
        seen: the names that training had.
    """

    predictions: Predictions
    seen: Bool[np.ndarray, " k"]


def read_held(run_dir: Path, configs: Sequence[EvaluationConfig]) -> Held:
    """Predicts the images of the first two evaluations: of a held-out typeface, and of held-out characters."""
    run = open_run(run_dir)
    model, sets = run.model(calibrated=False), run.sets()
    parts = list[Predictions]()
    for config in configs[:2]:
        evaluator: Any = config.build(sets)
        [predictor] = evaluator.recognition.predictors(model, 0)
        parts.append(evaluator.recognition.predict(predictor, evaluator.opened.features(model.features)))
    fields = (field.name for field in dataclasses.fields(Predictions))
    both = {name: np.concatenate([getattr(part, name) for part in parts]) for name in fields}
    return Held(Predictions(**both), ~np.isin(np.arange(parts[0].num_classes), parts[1].labels))


@dataclasses.dataclass(frozen=True)
class Answers:
    """How good the answers of a model to some images are.

    Attributes:
        right: the share of right answers, with its standard error over names.
        sure: the share of images whose most probable name has at least the probability `SURE`.
        right_if_sure: the share of right answers among those, with its standard error over images; NaN without any.
        nll: mean negative log-likelihood, in nats.
        ece: expected calibration error; NaN where images have different weights.
    """

    right: Estimate
    sure: float
    right_if_sure: Estimate
    nll: float
    ece: float

    @staticmethod
    def of(predictions: Predictions, weight: Float[np.ndarray, " n"] | None = None) -> "Answers":
        """Measures predictions; weights of images have a mean of 1."""
        hits, weights = predictions.hits(1), np.ones(len(predictions.labels)) if weight is None else weight
        is_sure = weights * (predictions.confidence >= SURE)
        return Answers(
            right=Estimate(float((weights * hits).mean()), standard_error(weights * hits, predictions.labels)),
            sure=float(is_sure.mean()),
            right_if_sure=Estimate(
                *(ratio_of_means(is_sure * hits, is_sure) if is_sure.any() else (math.nan, math.nan))
            ),
            nll=-float((weights * predictions.label_log_p).mean()),
            ece=predictions.reliability().expected_calibration_error if weight is None else math.nan,
        )

    def figures(self) -> dict[str, float]:
        """Returns what is above by its name, without errors and what is NaN."""
        found = {"right": self.right.mean, "sure": self.sure, "right_if_sure": self.right_if_sure.mean}
        found |= {"nll": self.nll, "ece": self.ece}
        return {name: value for name, value in found.items() if not math.isnan(value)}


FoundAnswers: TypeAlias = Mapping[str, Mapping[str, Answers]]
"""The answers `AS_TRAINED` and `BY_NAMES`, each to images of `KNOWN` and of `NEW` names and of `BOTH`."""


def answers_of(held: Held) -> FoundAnswers:
    """Returns the answers to images of known names, of new ones, and to all with both kinds having half the weight."""
    predictions = held.predictions
    is_known = held.seen[predictions.labels]
    weight = np.where(is_known, 0.5 / is_known.mean(), 0.5 / (~is_known).mean())

    def answers(log_p: Mapping[str, np.ndarray]) -> dict[str, Answers]:
        of = {name: dataclasses.replace(predictions, log_probabilities=values) for name, values in log_p.items()}
        return {
            KNOWN: Answers.of(of[KNOWN].take(is_known)),
            NEW: Answers.of(of[NEW].take(~is_known)),
            BOTH: Answers.of(of[BOTH], weight),
        }

    as_trained: dict[str, np.ndarray] = dict.fromkeys((KNOWN, NEW, BOTH), predictions.log_probabilities)
    return {AS_TRAINED: answers(as_trained), BY_NAMES: answers(calibrated_by_names(held))}


def calibrated_by_names(held: Held) -> dict[str, Float[np.ndarray, "n k"]]:
    """Returns log-probabilities that suit images of known names, of new ones, and of both, of all images.

    They have a temperature of known names, one of new names, or a temperature with an offset: what the priors seen, new
    and balanced take. Each is fitted to the images of the half of the names that an image is not of.
    """
    predictions = held.predictions
    found = {name: predictions.log_probabilities.copy() for name in (KNOWN, NEW, BOTH)}
    first = np.random.default_rng(0).permutation(len(held.seen)) % 2 == 0
    for half in (first, ~first):
        measured = half[predictions.labels]
        log_p = predictions.log_probabilities[measured]
        for name, values in _calibrated(predictions.take(~measured), held.seen, log_p).items():
            found[name][measured] = values
    return found


def figures_of_answers(found: FoundAnswers) -> dict[str, float]:
    """Returns ``answers/<how>/<names>/<figure>`` of all answers."""
    return {
        f"answers/{how}/{names}/{figure}": value
        for how, by_names in found.items()
        for names, answers in by_names.items()
        for figure, value in answers.figures().items()
    }


def _calibrated(
    fitted: Predictions, seen: Bool[np.ndarray, " k"], log_p: Float[np.ndarray, "n k"]
) -> dict[str, Float[np.ndarray, "n k"]]:
    """Returns log-probabilities by what fits the predictions of other images."""
    is_known = seen[fitted.labels]
    of_known = fit_temperature(fitted.log_probabilities[is_known], fitted.labels[is_known])
    try:
        names = fit_names(fitted.log_probabilities, fitted.labels, seen)
    except NoFit:  # then `calibrate` has one temperature, too
        return dict.fromkeys((KNOWN, NEW, BOTH), scaled(log_p, of_known))
    return {
        KNOWN: scaled(log_p, of_known),
        NEW: scaled(log_p, names.alone.temperature),
        BOTH: with_offset(log_p, seen, names),
    }
