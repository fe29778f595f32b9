"""Evaluates zero-shot classification, and classifiers on their own classes."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Float

from lit_het.console import Bar, message
from lit_het.errors import UserError
from lit_het.eval.drawings import draw_predictions
from lit_het.eval.evaluation import Drawing, Evaluation, of_part
from lit_het.eval.features import Features
from lit_het.eval.metrics import multi_label, names, scores
from lit_het.eval.metrics.classes import relabelled_accuracy
from lit_het.eval.metrics.significance import standard_error
from lit_het.eval.predictions import (
    Predictions,
    Predictor,
    class_log_probabilities,
    class_scores,
    image_quantity,
    sigmoid_nll,
)
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.eval.sets.recognition import Recognition, read_json
from lit_het.tasks import quantities
from lit_het.types import EvaluatedModel

NOISY, CALIBRATED = "noisy", "calibrated"
# The number of images whose noise spectrum a report shows.
SPECTRUM_IMAGES = 512


@dataclasses.dataclass(frozen=True)
class ZeroShot:
    """The evaluator of a `ZeroShotConfig`."""

    opened: OpenSet
    recognition: Recognition
    samples: int = 0
    relabels: tuple[tuple[int, ...], ...] | None = None
    soft_labels: Float[np.ndarray, "n k"] | None = None

    def check(self, model: EvaluatedModel) -> None:
        """Checks a model."""
        self.recognition.check(model, self.samples)
        if self.samples and self.opened.config.has_several_labels:
            self.recognition.require_class_probabilities(model, "--samples")

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Returns all figures of `lit_het.eval.metrics.scores`: without prefix, ``calibrated/`` and ``noisy/``.

        Those of a classifier with a sigmoid loss have ``sigmoid_nll``, that loss, too.

        For images with several labels those of `lit_het.eval.metrics.multi_label`, as trained.
        """
        return self.of_features(model, self.opened.features(model.features))

    def of_features(self, model: EvaluatedModel, features: Features) -> Evaluation:
        """Returns the same for features of images of the set, with labels."""
        evaluated = (self._several_labels if features.labels.ndim == 2 else self._single_label)(model, features)
        # Of as many images as the spectrum: each takes a decomposition.
        aligned = image_quantity(model, quantities.kernel_alignment, features.values[:SPECTRUM_IMAGES])
        return _with_alignment(evaluated, aligned) if aligned.size else evaluated

    def _several_labels(self, model: EvaluatedModel, features: Features) -> Evaluation:
        kind, name = _kind(model), self.opened.config.name
        without_noise, with_noise = self.recognition.predictors(model, 0, self.samples)
        if self.recognition.has_class_probabilities(model):
            return Evaluation(kind, name, *_figures_of_several_labels(without_noise, with_noise, features))
        found = scores.multi_label_figures(class_scores(without_noise, features), features.labels)
        return Evaluation(kind, name, found)

    def _single_label(self, model: EvaluatedModel, features: Features) -> Evaluation:
        without_noise, with_noise = self.recognition.predictors(model, 0, self.samples)
        quiet = self.recognition.predict(without_noise, features)
        calibrated, factor = scores.calibrated(quiet, self.opened.config.name)
        parts = {"": quiet, CALIBRATED: calibrated}
        # A deterministic head has noise norms of zero, and no noisy predictions.
        if self.samples and quiet.noise_norm.any():
            parts[NOISY] = self.recognition.predict(with_noise, features)
        found, errors = {}, {}
        # The bootstrap takes seconds per part.
        with Bar(f"scoring {self.opened.config.name}", len(parts), "predictions") as bar:
            for part, predictions in parts.items():
                for part_figures, part_errors in self._scored(predictions):
                    found |= of_part(part, part_figures)
                    errors |= of_part(part, part_errors)
                bar.advance(1)
        if model.text is None and self.recognition.has_class_probabilities(model):
            for part, predictor in (("", without_noise), (NOISY, with_noise)):
                if part in parts:
                    by_image = sigmoid_nll(predictor, features)
                    found |= of_part(part, {"sigmoid_nll": float(by_image.mean())})
                    errors |= of_part(part, {"sigmoid_nll": standard_error(by_image)})
        found[f"{CALIBRATED}/temperature_factor"] = factor
        of_kinds, errors_of_kinds, curve = self._by_kind(quiet, without_noise, features)
        found, errors = found | of_kinds, errors | errors_of_kinds
        if self.relabels is not None:
            acceptable = [self.relabels[position] for position in quiet.positions]
            found["relabelled_top1"] = relabelled_accuracy(quiet.log_probabilities, acceptable)
        chance = dict(scores.chance(quiet.num_classes))
        # A uniform guess is as often wrong among its most confident answers as among all, and as far from any label.
        chance |= {"aurc": 1 - chance["top1"], "soft_nll": chance["nll"]}
        return Evaluation(
            kind=_kind(model),
            name=self.opened.config.name,
            figures=found,
            errors=errors,
            chance={name: value for name, value in chance.items() if name in found},
            draw=lambda: self._draw(model, {part or "plain": one for part, one in parts.items()}, curve),
            calibrated=str(model.calibration or ""),
        )

    def _scored(self, predictions: Predictions) -> Iterator[tuple[dict[str, float], dict[str, float]]]:
        """Yields metrics and their standard errors."""
        yield scores.figures(predictions)
        yield scores.decision_figures(predictions)
        if self.soft_labels is not None:
            by_image = scores.soft_nll(predictions.log_probabilities, self.soft_labels[predictions.positions])
            yield {"soft_nll": float(by_image.mean())}, {"soft_nll": standard_error(by_image)}

    def _by_kind(
        self, predictions: Predictions, predictor: Predictor, features: Features
    ) -> tuple[dict[str, float], dict[str, float], names.SeenAgainstNew | None]:
        """Returns figures of names that training captions had and of new ones, their errors, and the curve of both.

        There are none unless some of the names are seen and others new; of both kinds there must be images, too.
        """
        seen = predictor.seen
        if seen is None:
            return {}, {}, None
        message(f"{self.opened.config.name}: {predictor.new_names}")
        if seen.all() or not seen.any():
            return {}, {}, None
        raw = self.recognition.predict(dataclasses.replace(predictor, as_trained=True), features)
        found, errors = {"raw_top1": float(raw.hits(1).mean())}, {"raw_top1": standard_error(raw.hits(1))}
        if len({*seen[raw.labels].tolist()}) < 2:
            return found, errors, None
        curve = names.seen_against_new(raw.log_probabilities, raw.labels, seen)
        of_kinds, errors_of_kinds = names.figures_of_kinds(predictions.hits(1), predictions.labels, seen)
        return {**found, **of_kinds, "ausuc": curve.area}, {**errors, **errors_of_kinds}, curve

    def _draw(
        self, model: EvaluatedModel, parts: Mapping[str, Predictions], curve: names.SeenAgainstNew | None
    ) -> Drawing:
        drawing = draw_predictions(parts, self.recognition.class_names, self.opened)
        features = self.opened.features(model.features).values[:SPECTRUM_IMAGES]
        arrays = {**drawing.arrays, "spectrum": image_quantity(model, quantities.noise_spectrum, features)}
        if curve is not None:
            arrays["seen_against_new"] = np.stack([curve.seen, curve.new])
        return dataclasses.replace(drawing, arrays=arrays)


def _kind(model: EvaluatedModel) -> str:
    return "supervised" if model.text is None else "zero_shot"


def _with_alignment(evaluated: Evaluation, aligned: Float[np.ndarray, "n two"]) -> Evaluation:
    """Returns an evaluation with the alignment of noise: the cosines of the learned W and of a random one."""
    name, (learned, random) = "kernel_alignment", aligned.T

    def draw() -> Drawing:
        drawing = evaluated.draw()
        return dataclasses.replace(drawing, arrays={**drawing.arrays, name: aligned})

    return dataclasses.replace(
        evaluated,
        figures={**evaluated.figures, name: float(learned.mean())},
        errors={**evaluated.errors, name: standard_error(learned)},
        chance={**evaluated.chance, name: float(random.mean())},
        draw=draw,
    )


def _figures_of_several_labels(
    without_noise: Predictor, with_noise: Predictor, features: Features
) -> tuple[dict[str, float], dict[str, float]]:
    predictors = {"": without_noise, NOISY: with_noise}
    if not (with_noise.samples and with_noise.model.has_noise):
        del predictors[NOISY]
    found, errors = {}, {}
    for part, predictor in predictors.items():
        log_p = class_log_probabilities(predictor, features, joint=True)
        for into, values in zip((found, errors), multi_label.figures(log_p, features.labels), strict=True):
            into.update(of_part(part, values))
    return found, errors


def read_relabels(path: Path, opened: OpenSet) -> tuple[tuple[int, ...], ...]:
    """Reads the acceptable classes of each image, a list of lists of class indices in the order of the samples' keys.

    Keys that ``data prepare`` writes are in the order of the source, also where its samples were shuffled.

    Returns:
        The classes of each image, in the order of the set.
    """
    content, num_images = read_json(str(path)), opened.loader.num_samples
    if not isinstance(content, list) or len(content) != num_images:
        raise UserError(f"{path}: must be a JSON list with the classes of each of the set's {num_images:,} images")
    classes = range(len(opened.class_names))
    for position, answers in enumerate(content):
        if not isinstance(answers, list) or not all(type(answer) is int and answer in classes for answer in answers):
            raise UserError(
                f"{path}: entry {position} is not a list of class indices below {len(classes)}: {answers!r}"
            )
    # The order of the set is that of its shards: 0.tar, 1.tar, 10.tar.
    keys = opened.keys()
    repeated = next((key for key, count in collections.Counter(keys).items() if count > 1), None)
    if repeated is not None:
        raise UserError(f"{path}: its entries follow the keys of the set, where {repeated} occurs twice; rename one")
    entries = dict(zip(sorted(keys), content, strict=True))
    return tuple(tuple(entries[key]) for key in keys)
