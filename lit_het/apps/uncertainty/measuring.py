"""Measures what one method of uncertainty answers, and what its uncertainty finds."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float

from lit_het import parameters
from lit_het.apps.scoring import caption_columns
from lit_het.console import message
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.errors import UserError
from lit_het.eval.evaluators.out_of_distribution import open_outside
from lit_het.eval.evaluators.retrieval import read_captions
from lit_het.eval.evaluators.shift import open_copies
from lit_het.eval.features import Features
from lit_het.eval.metrics import scores
from lit_het.eval.metrics.out_of_distribution import detection_figures
from lit_het.eval.metrics.precision_at_r import of_classes
from lit_het.eval.metrics.selective import aurc
from lit_het.eval.metrics.uncertainty import (
    Answers,
    Member,
    Method,
    answers,
    neighbour_distance,
    severity_correlation,
    views,
)
from lit_het.eval.metrics.vector_scaling import fit_vector_scaling
from lit_het.eval.predictions import BLOCK_SIZE, Predictions, Predictor, class_scores, log_probabilities
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.open_sets import OpenSet, Sets
from lit_het.eval.sets.recognition import Recognition
from lit_het.eval.suite import ClassNamesConfig
from lit_het.models.opening import Run, open_run
from lit_het.models.predictor import Model
from lit_het.types import EvaluatedModel

# Of pairs, whose captions compete with one another as in lit-het data score, and of every corrupted copy: it bounds the
# samples, whose cost grows with S times the number of classes.
_MOST_IMAGES = 10_000
_TIMED_IMAGES, _REPEATS = 1024, 3


@dataclasses.dataclass(frozen=True)
class BenchmarkOptions:
    """The images that methods are measured on.

    Attributes:
        data: labelled sets.
        names: candidate class names, of all sets.
        samples: S, noise samples per image of heads with noise.
        outside: out-of-distribution sets, ``NAME=FOLDER`` or ``FOLDER``.
        corrupted: corrupted copies of the first set, as ``lit-het data corrupt`` writes them; None for none.
        pairs: image-text pairs of which some captions are wrong; None for none.
        captions: the member with their captions, as of `lit_het.apps.scoring.ScoreOptions`.
        wrong: the field of their JSON that is 1 where the caption is wrong.
        training: images to which distances are measured; None leaves this score out.
    """

    data: tuple[ImageSet, ...]
    names: ClassNamesConfig = ClassNamesConfig()
    samples: int = 16
    outside: tuple[str, ...] = ()
    corrupted: str | None = None
    pairs: ImageSet | None = None
    captions: str = "txt"
    wrong: str = "is_wrong"
    training: ImageSet | None = None


class Benchmark:
    """Measures methods on the same images; features are computed once for models of the same image tower."""

    def __init__(self, options: BenchmarkOptions):
        self._options = options
        self._opened: dict[tuple[int, Preprocessing], OpenData] = {}

    def measure(
        self, name: str, runs: Sequence[Path], *, baselines: bool = False
    ) -> Iterator[tuple[str, dict[str, float]]]:
        """Yields the name and the figures of a model, or of an ensemble of several.

        With ``baselines`` these include vector scaling, and test-time augmentation and prompts as an ensemble follow.

        Figures are ``<set>/<prediction>/<figure>``, ``errors/<set>/<score>``, ``outside/<set>/<score>``,
        ``captions/<score>`` (all AUROC), ``severity/<corruption>/<score>`` and ``cost/<what>``.
        """
        opened = [open_run(path) for path in runs]
        data = self._open(opened)
        # As trained: figures with fitted temperatures stand beside these.
        models = [run.model(calibrated=False) for run in opened]
        for recognition in data.recognitions():
            for model in models:
                recognition.check(model, self._options.samples if model.has_noise else 0)
        sizes = {"cost/head_megabytes": sum(map(_head_bytes, opened)) / 1e6}
        found = self._figures(data, lambda names: _joint(models, names, self._options.samples), models, baselines)
        yield name, {**found, **sizes}
        if baselines:
            yield f"{name}, test-time augmentation", self._figures(data, lambda names: _augmented(models, names))
            if any(len(recognition.templates) > 1 for recognition in data.recognitions()):
                yield f"{name}, prompts as an ensemble", self._figures(data, lambda names: _by_prompt(models, names))
            else:
                message("prompts as an ensemble are left out: every set has a single prompt; see --prompts")

    def _open(self, runs: Sequence[Run]) -> "OpenData":
        inputs = [(run.config.data.image_size, run.config.data.preprocessing) for run in runs]
        if len(set(inputs)) > 1:
            raise UserError(
                f"{' and '.join(str(run.run_dir) for run in runs)} preprocess images differently and cannot form an "
                "ensemble; benchmark them one by one"
            )
        if inputs[0] not in self._opened:
            self._opened[inputs[0]] = open_data(self._options, Sets(*inputs[0], lambda: runs[0].tower))
        return self._opened[inputs[0]]

    def _figures(
        self,
        data: "OpenData",
        method_on: Callable[[Recognition], Method],
        models: Sequence[EvaluatedModel] = (),
        vector: bool = False,
    ) -> dict[str, float]:
        """Returns all figures of a method; image-text models are scored on pairs."""
        found: dict[str, float] = {}
        inside = None
        for opened, recognition in data.labelled:
            method, name = method_on(recognition), opened.config.name
            answered = _answers(method, opened, recognition.matched, data)
            found |= _of_answers(method, opened, answered, recognition, vector)
            inside = inside or (method, opened, answered.scores)
        assert inside is not None, "a benchmark has at least one labelled set"
        method, opened, known = inside
        for name, other in data.outside.items():
            scored = _answers(method, other, Features.unlabelled, data).scores
            found |= {f"outside/{name.partition('/')[2]}/{by}": _auroc(known[by], scored[by]) for by in known}
        found |= self._of_corruptions(method, opened, data)
        if data.pairs is not None and models and all(model.text is not None for model in models):
            found |= self._of_pairs(method, models, data.pairs, data)
        cost = costs(method, opened) | _megabytes(method)
        return found | {f"cost/{name}": value for name, value in cost.items()}

    def _of_corruptions(self, method: Method, clean: OpenSet, data: "OpenData") -> dict[str, float]:
        """Returns rank correlations with the severity, of the scores of at most `_MOST_IMAGES` of each copy."""
        found: dict[str, float] = {}
        if not data.copies:
            return found
        matched = data.labelled[0][1].matched
        at = {part: _answers(method, one, matched, data, _MOST_IMAGES).scores for part, one in data.copies.items()}
        first = _answers(method, clean, matched, data, _MOST_IMAGES).scores
        for corruption in dict.fromkeys(part.partition("/")[0] for part in at):
            severities = sorted((part for part in at if part.startswith(f"{corruption}/")), key=_severity)
            for by in first:
                ordered = [first[by], *(at[part][by] for part in severities)]
                correlation, rises = severity_correlation(ordered)
                found[f"severity/{corruption}/{by}"] = correlation
                found[f"severity_rises/{corruption}/{by}"] = float(rises)
        return found

    def _of_pairs(
        self, method: Method, models: Sequence[EvaluatedModel], pairs: OpenSet, data: "OpenData"
    ) -> dict[str, float]:
        """Returns what scores of at most `_MOST_IMAGES` of the images find, and of a single model its loss."""
        answered = answers(method, pairs, Features.unlabelled, _MOST_IMAGES)
        by, positions = dict(answered.scores), answered.quiet.positions
        if len(models) == 1:
            features = pairs.features(models[0].features).spread(_MOST_IMAGES)
            captions = [data.captions[position] for position in positions]
            columns = caption_columns(models[0], features.values, captions, _MOST_IMAGES)
            by |= {"loss": columns["loss"], "clip_score": -columns["similarity"]}
        wrong = data.is_wrong[positions]
        return {f"captions/{name}": _auroc(values[~wrong], values[wrong]) for name, values in by.items()}


def _answers(
    method: Method,
    opened: OpenSet,
    matched: Callable[[Features], Features],
    data: "OpenData",
    most: int | None = None,
) -> Answers:
    """Returns answers, and where there are training images, the distance to the nearest of them as one more score."""
    answered = answers(method, opened, matched, most)
    if data.training is None:
        return answered
    tower = method.members[0].tower
    features = opened.features(tower)
    features = features if most is None else features.spread(most)
    rows, others = (one.joint_embeddings(tower) for one in (features, data.training.features(tower)))
    scored = {**answered.scores, "neighbour_distance": neighbour_distance(rows, others)}
    return dataclasses.replace(answered, scores=scored)


def _of_answers(
    method: Method, opened: OpenSet, answered: Answers, recognition: Recognition, vector: bool
) -> dict[str, float]:
    """Returns the figures of the answers to a labelled set, the errors that scores find, and retrieval."""
    name, found = opened.config.name, {}
    for kind, predictions in (("quiet", answered.quiet), ("sampled", answered.sampled)):
        if predictions is not None:
            fitted, _ = scores.calibrated(predictions, name)
            parts = {"": predictions, "fitted_": fitted}
            if vector and kind == "quiet":
                parts["vector_"] = vector_scaled(predictions)
            for prefix, part in parts.items():
                values = _figures_of(part)
                found |= {f"{name}/{kind}/{prefix}{figure}": value for figure, value in values.items()}
    best = answered.sampled or answered.quiet
    wrong = best.predicted != best.labels
    if wrong.any() and not wrong.all():
        by_score = answered.scores.items()
        found |= {f"errors/{name}/{by}": _auroc(values[~wrong], values[wrong]) for by, values in by_score}
    scored = [
        class_scores(member.quiet(), recognition.matched(opened.features(member.tower))) for member in method.members
    ]
    matches = zip(("r_precision", "map_at_r"), of_classes(np.mean(scored, axis=0), best.labels), strict=True)
    return found | {f"retrieval/{name}/{figure}": value for figure, value in matches if np.isfinite(value)}


@dataclasses.dataclass(frozen=True)
class OpenData:
    """The opened sets of `BenchmarkOptions`, for models that preprocess images alike."""

    labelled: Sequence[tuple[OpenSet, Recognition]]
    outside: Mapping[str, OpenSet]
    copies: Mapping[str, OpenSet]
    pairs: OpenSet | None
    captions: tuple[str, ...]
    is_wrong: Bool[np.ndarray, " n"]
    training: OpenSet | None

    def recognitions(self) -> list[Recognition]:
        """Returns the candidates of every labelled set."""
        return [recognition for _, recognition in self.labelled]


def open_data(options: BenchmarkOptions, sets: Sets) -> OpenData:
    """Opens all sets."""
    labelled = []
    for config in options.data:
        opened = sets.open(config)
        recognition = options.names.build(opened)
        recognition.check_labels(opened)
        labelled.append((opened, recognition))
    first, _ = labelled[0]
    outside = open_outside({"outside": options.outside}, first.config, sets)
    copies = open_copies(options.corrupted, first, sets) if options.corrupted else {}
    pairs, captions, wrong = None, (), np.zeros(0, bool)
    if options.pairs is not None:
        pairs = sets.open(options.pairs)
        captions = tuple(one[0] for one in read_captions(pairs, options.captions))
        wrong = _read_wrong(pairs, options.wrong)
    training = None if options.training is None else sets.open(options.training)
    return OpenData(labelled, outside, copies, pairs, captions, wrong, training)


def _read_wrong(pairs: OpenSet, field: str) -> Bool[np.ndarray, " n"]:
    try:
        values = [found.get(field) for found in pairs.texts("json", json.loads) if found is not None]
    except (ValueError, AttributeError) as error:
        raise UserError(f"{pairs.config.shards}: a .json is no JSON object; --wrong names one of its fields") from error
    if any(value not in (0, 1) for value in values) or len(set(values)) < 2:
        raise UserError(f"{pairs.config.shards}: {field} must be 0 or 1 in every .json, and both must occur (--wrong)")
    return np.array(values, bool)


def _joint(models: Sequence[EvaluatedModel], recognition: Recognition, samples: int) -> Method:
    """Returns the models, each with noise samples where its head has noise."""
    each = [(model, recognition.predictor(model, samples if model.has_noise else 0)) for model in models]
    return Method(tuple(Member(predictor, model.features) for model, predictor in each))


def _augmented(models: Sequence[EvaluatedModel], recognition: Recognition) -> Method:
    """Returns the models on several views of every image, without noise."""
    each = [(recognition.predictor(model), view) for model in models for view in views(model.features)]
    return Method(tuple(Member(predictor, view) for predictor, view in each))


def _by_prompt(models: Sequence[EvaluatedModel], recognition: Recognition) -> Method:
    """Returns the models with one prompt at a time, without noise."""
    single = [dataclasses.replace(recognition, templates=(template,)) for template in recognition.templates]
    return Method(tuple(Member(one.predictor(model), model.features) for model in models for one in single))


def vector_scaled(predictions: Predictions, seed: int = 0) -> Predictions:
    """Scales each random half of the images by the vector scaling of the other half."""
    logits, labels = predictions.log_probabilities + predictions.log_normalizer[:, None], predictions.labels
    scaled, halves = np.empty_like(logits), scores.random_halves(len(labels), seed)
    for fitted, held_out in (halves, halves[::-1]):
        scaled[held_out] = fit_vector_scaling(logits[fitted], labels[fitted])(logits[held_out])
    return dataclasses.replace(predictions, log_probabilities=scaled)


def _figures_of(predictions: Predictions) -> dict[str, float]:
    """Returns figures without standard errors over images, which would be bootstrapped for seconds."""
    values, hits = scores.per_image(predictions), predictions.hits(1)
    found = {name: float(values[name].mean()) for name in ("top1", "nll")}
    found["ece"] = predictions.reliability().expected_calibration_error
    found["aurc"] = aurc(predictions.confidence, 1 - hits)
    for _, _, size in scores.sets_of_half(predictions, (0.9,)):
        found["set_size90"] = float(size.mean())
    return found


def costs(method: Method, opened: OpenSet) -> dict[str, float]:
    """Returns ``tower_passes``, and ``<prediction>_microseconds`` of the probabilities of up to 1,024 images of a set.

    The time is the fastest of three; noise norms, which no prediction needs, are not in it.
    """
    found: dict[str, float] = {"tower_passes": float(len({member.tower.tower for member in method.members}))}
    features = opened.features_of([member.tower for member in method.members])
    some = [rows.unlabelled().take(np.arange(min(_TIMED_IMAGES, len(rows.values)))) for rows in features]
    for kind in ("quiet", "sampled") if method.has_noise else ("quiet",):
        seconds = []
        for _ in range(_REPEATS + 1):  # the first also compiles
            began = time.perf_counter()
            for member, rows in zip(method.members, some, strict=True):
                log_probabilities(member.quiet() if kind == "quiet" else member.predictor, rows)
            seconds.append(time.perf_counter() - began)
        found[f"{kind}_microseconds"] = 1e6 * min(seconds[1:]) / len(some[0].values)
    return found


def _megabytes(method: Method) -> dict[str, float]:
    """Returns the memory of the largest program after the image tower, on a device with a block of images."""
    # Views and prompts are answered by the program of their model.
    predictors = {id(member.predictor.model): member.predictor for member in method.members}.values()
    found = {"quiet_megabytes": max(_megabytes_of(one, 0) for one in predictors)}
    if method.has_noise:
        found["sampled_megabytes"] = max(_megabytes_of(one, one.samples) for one in predictors)
    return found


def _megabytes_of(predictor: Predictor, samples: int) -> float:
    model = predictor.model
    assert isinstance(model, Model), "a run is opened as this"
    return model.program_bytes(predictor.probabilities, BLOCK_SIZE, samples, predictor.class_embeddings) / 1e6


def _auroc(inside: Float[np.ndarray, " n"], outside: Float[np.ndarray, " m"]) -> float:
    return detection_figures(inside, outside)["auroc"]


def _severity(part: str) -> int:
    return int(part.partition("/")[2])


def _head_bytes(run: Run) -> float:
    return float(sum(x.nbytes for x in parameters.flatten(run.params.get("head", {})).values()))
