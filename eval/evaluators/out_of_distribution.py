"""Evaluates out-of-distribution detection: scores that should be higher for out-of-distribution images."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from lit_het.errors import UserError
from lit_het.eval.evaluation import Drawing, Evaluation
from lit_het.eval.metrics.out_of_distribution import (
    detection_errors,
    detection_figures,
    entropy_score,
    fit_features,
    max_probability_score,
)
from lit_het.eval.metrics.uncertainty import sampled
from lit_het.eval.predictions import Predictions, num_members, predict
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.folders import parse_set
from lit_het.eval.sets.open_sets import OpenSet, Sets
from lit_het.eval.sets.recognition import Recognition
from lit_het.types import EvaluatedModel


@dataclasses.dataclass(frozen=True)
class OutOfDistribution:
    """The evaluator of an `OutOfDistributionConfig`; keys of ``outside`` are ``near/<set>`` and ``far/<set>``."""

    inside: OpenSet
    outside: dict[str, OpenSet]
    train: OpenSet | None
    recognition: Recognition
    samples: int

    def check(self, model: EvaluatedModel) -> None:
        """Checks a model as `Recognition.check` does."""
        self.recognition.check(model, self.samples)

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Returns ``<near or far>/<set>/<score>/<figure>`` with standard errors."""
        predictor = self.recognition.predictor(model, self.samples)
        fitted = None
        if self.train is not None:
            train = self.train.features(model.features)
            fitted = fit_features(train.joint_embeddings(model.features), train.labels)

        def score(opened: OpenSet) -> Mapping[str, np.ndarray]:
            features = opened.features(model.features)
            # Labels of out-of-distribution sets index other classes: zeros replace them.
            unlabelled = features.unlabelled()
            found = _scores(predict(predictor, unlabelled))
            if num_members(model, self.samples) > 1:
                _, information = sampled([(predictor, unlabelled)], opened.config.name)
                # A head in closed form has one prediction, whatever S.
                found |= {} if information is None else {"mutual_information": information}
            if fitted is not None:
                embeddings = features.joint_embeddings(model.features)
                found["mahalanobis"] = fitted.mahalanobis_score(embeddings)
                found["relative_mahalanobis"] = fitted.relative_mahalanobis_score(embeddings)
            return found

        inside = score(self.inside)
        outside = {name: score(opened) for name, opened in self.outside.items()}
        figures = {
            f"{name}/{kind}/{figure}": value
            for name, by_kind in outside.items()
            for kind, values in by_kind.items()
            for figure, value in detection_figures(inside[kind], values).items()
        }
        errors = {
            f"{name}/{kind}/{figure}": value
            for name, by_kind in outside.items()
            for kind, values in by_kind.items()
            for figure, value in detection_errors(inside[kind], values).items()
        }
        arrays = {f"inside/{kind}": values for kind, values in inside.items()}
        arrays |= {f"{name}/{kind}": values for name, by_kind in outside.items() for kind, values in by_kind.items()}
        return Evaluation(
            kind="out_of_distribution",
            name=self.inside.config.name,
            figures=figures,
            errors=errors,
            chance={name: 0.5 for name in figures if name.endswith("/auroc")},
            draw=lambda: Drawing(arrays),
            calibrated=str(model.calibration or ""),
        )


def open_outside(places: Mapping[str, Sequence[str]], inside: ImageSet, sets: Sets) -> dict[str, OpenSet]:
    """Opens out-of-distribution sets, by ``near/<set>`` and ``far/<set>``.

    Args:
        places: ``near`` and ``far`` sets, ``NAME=FOLDER`` or ``FOLDER`` with shards.
        inside: the in-distribution set, whose batch size and limit of unreadable images they share.
        sets: opens them.
    """
    size, allowed = inside.batch_size, inside.max_bad_fraction
    like = ImageSet("", "", batch_size=size, max_bad_fraction=allowed, labelled=False)
    outside = {}
    for distance, arguments in places.items():
        for argument in arguments:
            found = parse_set(argument, like)
            title = f"{distance}/{found.name}"
            if title in outside:
                raise UserError(f"two sets have the name {title}; give each its own name, NAME=DIR")
            outside[title] = sets.open(dataclasses.replace(found, name=title))
    return outside


def _scores(predictions: Predictions) -> dict[str, np.ndarray]:
    found = {
        "max_probability": max_probability_score(predictions.log_probabilities),
        "entropy": entropy_score(predictions.log_probabilities),
        # Liu et al., "Energy-based out-of-distribution detection", NeurIPS 2020, at temperature 1.
        "energy": -predictions.log_normalizer,
    }
    # A head without noise has a norm of zero everywhere, which carries no information.
    if predictions.noise_norm.any():
        found["noise_norm"] = predictions.noise_norm
    return found
