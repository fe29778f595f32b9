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
from lit_het.eval.metrics.scores import figures
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
    """The answers of a model to some images, weighted so that those of known and of new names count the same.

    Attributes:
        predictions: of the images.
        weight: of each image; their mean is 1.
    """

    predictions: Predictions
    weight: Float[np.ndarray, " n"]

    @property
    def is_sure(self) -> Bool[np.ndarray, " n"]:
        """Whether the most probable name has at least the probability `SURE`."""
        return self.predictions.confidence >= SURE

    @property
    def right(self) -> Estimate:
        """The share of right answers, with its standard error over names."""
        values = self.weight * self.predictions.hits(1)
        return Estimate(float(values.mean()), standard_error(values, self.predictions.labels))

    @property
    def sure(self) -> float:
        """The share of images with sure answers."""
        return float((self.weight * self.is_sure).mean())

    @property
    def right_if_sure(self) -> Estimate:
        """The share of right answers among sure ones, with its standard error over images; NaN if there are none."""
        if not self.is_sure.any():
            return Estimate(math.nan, math.nan)
        of = self.weight * self.is_sure
        return Estimate(*ratio_of_means(of * self.predictions.hits(1), of))

    def figures(self) -> dict[str, float]:
        """Returns what is above, with the NLL in nats and the calibration error where all weights are the same."""
        found = {"right": self.right.mean, "sure": self.sure, "right_if_sure": self.right_if_sure.mean}
        if np.allclose(self.weight, 1):
            values, _ = figures(self.predictions)
            found |= {name: values[name] for name in ("nll", "ece")}
        return found


FoundAnswers: TypeAlias = Mapping[str, Mapping[str, Answers]]
"""The answers `AS_TRAINED` and `BY_NAMES`, each to images of `KNOWN` and of `NEW` names and of `BOTH`."""


def answers_of(held: Held) -> FoundAnswers:
    """Returns all answers of a model.

    Calibrated are those of known names by the temperature of known names, of new ones by that of new ones, and of both
    by a temperature with an offset: the priors seen, new and balanced. None of them has seen the names it is used on.
    """
    predictions, seen = held.predictions, held.seen
    is_known = seen[predictions.labels]
    fitted = {name: predictions.log_probabilities.copy() for name in (KNOWN, NEW, BOTH)}
    first = np.random.default_rng(0).permutation(len(seen)) % 2 == 0
    for half in (first, ~first):
        measured = half[predictions.labels]
        for name, log_p in _calibrated(predictions.take(~measured), seen, predictions.take(measured)).items():
            fitted[name][measured] = log_p
    rows = {KNOWN: is_known, NEW: ~is_known, BOTH: np.ones_like(is_known)}
    weight = np.where(is_known, 0.5 / is_known.mean(), 0.5 / (~is_known).mean())

    def answers(log_probabilities: Mapping[str, np.ndarray]) -> dict[str, Answers]:
        found = {}
        for name, of in rows.items():
            chosen = dataclasses.replace(predictions, log_probabilities=log_probabilities[name]).take(of)
            found[name] = Answers(chosen, weight[of] / weight[of].mean())
        return found

    return {AS_TRAINED: answers(dict.fromkeys(rows, predictions.log_probabilities)), BY_NAMES: answers(fitted)}


def figures_of_answers(found: FoundAnswers) -> dict[str, float]:
    """Returns ``answers/<how>/<names>/<figure>`` of all answers."""
    return {
        f"answers/{how}/{names}/{figure}": value
        for how, by_names in found.items()
        for names, answers in by_names.items()
        for figure, value in answers.figures().items()
    }


def _calibrated(
    fitted: Predictions, seen: Bool[np.ndarray, " k"], measured: Predictions
) -> dict[str, Float[np.ndarray, "n k"]]:
    """Returns log-probabilities for images of known names, of new ones and of both, fitted to other images."""
    is_known = seen[fitted.labels]
    of_known = fit_temperature(fitted.log_probabilities[is_known], fitted.labels[is_known])
    log_p = measured.log_probabilities
    try:
        names = fit_names(fitted.log_probabilities, fitted.labels, seen)
    except NoFit:  # then `calibrate` has one temperature, too
        return dict.fromkeys((KNOWN, NEW, BOTH), scaled(log_p, of_known))
    return {
        KNOWN: scaled(log_p, of_known),
        NEW: scaled(log_p, names.alone.temperature),
        BOTH: with_offset(log_p, seen, names),
    }
