"""Evaluation of the quickstart: both models on characters and typefaces that were not in training."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from lit_het import untrusted
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.data_pipelines.loader import LoaderConfig
from lit_het.data_pipelines.storage import read_lines
from lit_het.errors import UserError
from lit_het.eval import ambiguity, scores
from lit_het.eval.ambiguity import GroupErrors, RankTest
from lit_het.eval.predictions import Predictions, ZeroShotPredictor, embed_images, predict
from lit_het.eval.recognition import class_indices, embed_class_names
from lit_het.eval.report.comparison import Comparison, compare
from lit_het.eval.report.statements import describe_comparison, describe_group_errors, describe_rank_test
from lit_het.eval.sets import ImageSet, Sets
from lit_het.runs.opening import open_run
from lit_het.types import Encoder

TYPEFACE, CHARACTERS, AMONG = "held_out_typeface", "held_out_characters", "held_out_characters_among_held_out"
TITLES = {
    TYPEFACE: "held-out typeface, all names",
    CHARACTERS: "held-out characters, all names",
    AMONG: "held-out characters, held-out names",
}


@dataclasses.dataclass(frozen=True)
class Images:
    """One evaluation set in memory.

    Attributes:
        image: pixels ``[n h w c]``.
        labels: index of each image's name among all names ``[n]``.
    """

    image: np.ndarray
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class GlyphEvaluation:
    """The evaluation data: all names, held-out names, groups of homoglyphs, and images of both held-out sets.

    Attributes:
        names: all names; labels are indices into them.
        held_out_names: names of held-out characters.
        groups: group of homoglyphs of every name, -1 for none.
        training_groups: the same for training names only, as held-out names make no training label ambiguous.
        shapes: index of every name's shape; homoglyphs have the same shape.
        images: by set.
    """

    names: tuple[str, ...]
    held_out_names: tuple[str, ...]
    groups: np.ndarray
    training_groups: np.ndarray
    shapes: np.ndarray
    images: dict[str, Images]


@dataclasses.dataclass(frozen=True)
class ModelEvaluation:
    """Results of one model on the evaluation data.

    Attributes:
        results: by set, and `AMONG`.
        image_embeddings: by set, ``[n d]``.
        class_embeddings: of all names ``[k d]``.
        group_errors: by set, how many errors are confusions of homoglyphs.
        noise_norms: by set, ``sqrt(tr Σ(x))`` of each image.
    """

    results: dict[str, Predictions]
    image_embeddings: dict[str, np.ndarray]
    class_embeddings: np.ndarray
    group_errors: dict[str, GroupErrors]
    noise_norms: dict[str, np.ndarray]

    def metrics(self) -> dict[str, float]:
        """Returns ``<set>/<figure>`` for every set and figure."""
        figures = {
            f"{name}/{figure}": value
            for name, result in self.results.items()
            for figure, value in scores.figures(result)[0].items()
        }
        shares = {f"{name}/errors_among_homoglyphs": errors.share for name, errors in self.group_errors.items()}
        return figures | shares


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of an earlier start."""
    try:
        content = untrusted.read_json(path)
    except (OSError, untrusted.Malformed) as error:
        raise UserError(f"{path} cannot be read ({error}); delete {path.parent} to start again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object; delete {path.parent} to start again")
    return content


def read_evaluation(directory: Path, trained_on: LoaderConfig) -> GlyphEvaluation:
    """Reads names, homoglyphs and both held-out sets into memory, with the preprocessing of training."""
    names = read_lines(str(directory / "names.txt"))
    first_of_shape = read_json(directory / "homoglyphs.json")
    if missing := [name for name in names if not isinstance(first_of_shape.get(name), str)]:
        raise UserError(f"{directory}/homoglyphs.json does not contain {missing[0]!r:.100}; delete {directory}")
    shapes = [first_of_shape[name] for name in names]
    by_set = {}
    for name in (TYPEFACE, CHARACTERS):
        shards, image_size = (str(directory / name),), trained_on.image_size
        loader = LoaderConfig(shards, image_size, labels=ClassIndex(), preprocessing=trained_on.preprocessing).build()
        label_names = read_lines(str(directory / name / "classnames.txt"))
        images, labels = [], []
        for batch in loader.epoch():
            assert batch.image is not None
            assert batch.label is not None
            images.append(batch.image[batch.valid])
            labels.append(batch.label[batch.valid])
        positions = class_indices(np.concatenate(labels), label_names, names)
        by_set[name] = Images(np.concatenate(images), positions)
    held_out_names = read_lines(str(directory / CHARACTERS / "classnames.txt"))
    held_out = set(held_out_names)
    return GlyphEvaluation(
        names=names,
        held_out_names=held_out_names,
        groups=ambiguity.groups_of(shapes),
        training_groups=ambiguity.groups_of(
            [(name,) if name in held_out else shape for name, shape in zip(names, shapes, strict=True)]
        ),
        shapes=np.unique(shapes, return_inverse=True)[1],
        images=by_set,
    )


def evaluate(config: ExperimentConfig, data: GlyphEvaluation, directory: Path) -> ModelEvaluation:
    """Evaluates the model of a finished run on the data in a folder."""
    model = open_run(config.run_dir).model()
    assert isinstance(model, Encoder)
    sets = Sets(config.data.image_size, config.data.preprocessing, lambda: model.features.tower)
    class_embeddings = embed_class_names(model, data.names)
    features, results, group_errors = {}, {}, {}
    for name, images in data.images.items():
        read = sets.open(ImageSet(name, str(directory / name), split=".")).features(model.features)
        features[name] = dataclasses.replace(read, labels=images.labels)
        results[name] = predict(ZeroShotPredictor(model, class_embeddings), features[name])
        group_errors[name] = ambiguity.errors_within_groups(results[name].predicted, images.labels, data.groups)
    # Held-out characters with held-out names as the only candidates.
    held_out = np.flatnonzero(np.isin(data.names, data.held_out_names))
    labels = np.searchsorted(held_out, features[CHARACTERS].labels)
    results[AMONG] = predict(
        ZeroShotPredictor(model, class_embeddings[held_out]), dataclasses.replace(features[CHARACTERS], labels=labels)
    )
    return ModelEvaluation(
        results=results,
        image_embeddings={name: embed_images(model, of_set.values) for name, of_set in features.items()},
        class_embeddings=class_embeddings,
        group_errors=group_errors,
        noise_norms={name: results[name].noise_norm for name in features},
    )


def compare_models(evaluations: dict[str, ModelEvaluation]) -> Comparison:
    """Compares the deterministic head with HET-XL on every set."""
    first, second = evaluations["deterministic"], evaluations["het_xl"]
    return compare(
        "deterministic",
        "HET-XL",
        {
            title: (scores.figures(first.results[name])[0], scores.figures(second.results[name])[0])
            for name, title in TITLES.items()
        },
        {title: scores.chance(first.results[name].num_classes) for name, title in TITLES.items()},
    )


def noise_tests(evaluation: ModelEvaluation, data: GlyphEvaluation) -> dict[str, RankTest]:
    """Tests whether images of homoglyphs (among training names) have more noise than others, on the held-out typeface.

    Homoglyphs are mostly plain letters, so a head that only distinguishes plain letters from marked ones would pass the
    test over all characters. The test is therefore repeated for plain and for marked characters.
    """
    marked = np.array([" with " in name for name in data.names])[data.images[TYPEFACE].labels]
    kinds = {"all characters": np.ones_like(marked), "plain characters": ~marked, "characters with marks": marked}
    return {
        kind: ambiguity.rank_test(*noise_by_ambiguity(evaluation, data, members)) for kind, members in kinds.items()
    }


def noise_by_ambiguity(
    evaluation: ModelEvaluation, data: GlyphEvaluation, members: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean noise norms of (homoglyph, unique) shapes among some images of the held-out typeface ``[n]``."""
    labels = data.images[TYPEFACE].labels[members]
    ambiguous = data.training_groups[labels] != ambiguity.NO_GROUP
    return ambiguity.split_by_ambiguity(evaluation.noise_norms[TYPEFACE][members], ambiguous, data.shapes[labels])


def findings(evaluations: dict[str, ModelEvaluation], comparison: Comparison, noise: dict[str, RankTest]) -> list[str]:
    """Returns the findings as sentences."""
    names = {"deterministic": "the deterministic head", "het_xl": "HET-XL"}
    return [
        describe_comparison(comparison),
        *(
            f"{TITLES[TYPEFACE].capitalize()}: {describe_group_errors(evaluation.group_errors[TYPEFACE], names[name])}"
            for name, evaluation in evaluations.items()
        ),
        *(
            f"{kind.capitalize()}: {describe_rank_test(test, 'homoglyphs', 'unique shapes', 'HET-XL noise norm')}"
            for kind, test in noise.items()
        ),
    ]
