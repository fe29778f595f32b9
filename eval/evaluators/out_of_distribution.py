"""Evaluates out-of-distribution detection: scores that should be higher for out-of-distribution images."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from lit_het.errors import UserError, require_at_least
from lit_het.eval.evaluation import Drawing, Evaluation
from lit_het.eval.out_of_distribution import (
    detection_errors,
    detection_figures,
    entropy_score,
    fit_features,
    max_probability_score,
)
from lit_het.eval.predictions import Predictions, predict
from lit_het.eval.recognition import ClassNamesConfig, Recognition
from lit_het.eval.sets import ImageSet, OpenSet, Sets, parse_set, require_one_label, require_other_split
from lit_het.types import EvaluatedModel


@dataclasses.dataclass(frozen=True)
class OutOfDistributionConfig:
    """Detection of images without a class of the set (e3 Sec. 5, App. L.5).

    Attributes:
        data: the in-distribution set.
        near: out-of-distribution sets of similar images, ``NAME=FOLDER`` or ``FOLDER`` with shards.
        far: out-of-distribution sets of dissimilar images.
        train_split: the folder of shards to fit Mahalanobis distances to; None leaves these scores out.
        names: candidate class names.
        samples: S, the number of noise samples per image; 0 disables the noise.

    Raises:
        UserError: a negative number of samples.
    """

    data: ImageSet
    near: tuple[str, ...] = ()
    far: tuple[str, ...] = ()
    train_split: str | None = None
    names: ClassNamesConfig = ClassNamesConfig()
    samples: int = 0

    def __post_init__(self) -> None:
        require_at_least(0, self, "samples")

    def build(self, sets: Sets) -> "OutOfDistribution":
        """Opens all sets.

        Raises:
            UserError: no out-of-distribution set is given; otherwise as `OpenSet`.
        """
        require_one_label(self.data)
        if not self.near + self.far:
            raise UserError("give out-of-distribution sets with --near NAME=DIR or --far NAME=DIR")
        size, allowed = self.data.batch_size, self.data.max_bad_fraction
        like = ImageSet("", "", batch_size=size, max_bad_fraction=allowed, labelled=False)
        outside = {}
        for distance, places in (("near", self.near), ("far", self.far)):
            for place in places:
                found = parse_set(place, like)
                title = f"{distance}/{found.name}"
                if title in outside:
                    raise UserError(f"two sets have the name {title}; give each its own name, NAME=DIR")
                outside[title] = sets.open(dataclasses.replace(found, name=title))
        inside = sets.open(self.data)
        train = None
        if self.train_split is not None:
            require_other_split(self.data, self.train_split)
            train = sets.open(
                dataclasses.replace(self.data, name=f"{self.data.name} ({self.train_split})", split=self.train_split)
            )
        return OutOfDistribution(inside, outside, train, self.names.build(inside), self.samples)


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
        self.recognition.check(model)

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Returns ``<near or far>/<set>/<score>/<figure>`` with standard errors."""
        predictor = self.recognition.predictor(model, self.samples)
        fitted = None
        if self.train is not None:
            train = self.train.features(model.features)
            fitted = fit_features(train.values, train.labels)

        def score(opened: OpenSet) -> Mapping[str, np.ndarray]:
            features = opened.features(model.features)
            # Labels of out-of-distribution sets index other classes: zeros replace them.
            unlabelled = dataclasses.replace(features, labels=np.zeros(len(features.values), np.int64))
            found = _scores(predict(predictor, unlabelled))
            if fitted is not None:
                found["mahalanobis"] = fitted.mahalanobis_score(features.values)
                found["relative_mahalanobis"] = fitted.relative_mahalanobis_score(features.values)
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
        )


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
