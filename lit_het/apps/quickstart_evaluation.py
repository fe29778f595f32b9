"""What the quickstart measures: both models on characters and typefaces that training never saw."""

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
from lit_het.eval.recognition import embed_names, positions_of_names
from lit_het.eval.report.comparison import Comparison, compare
from lit_het.eval.report.statements import describe_comparison, describe_group_errors, describe_rank_test
from lit_het.eval.sets import ImageSet, Sets
from lit_het.runs.opening import open_run
from lit_het.types import Encoder

FACE, CHARACTERS, AMONG = "held_out_face", "held_out_characters", "held_out_characters_among_held_out"
TITLES = {
    FACE: "held-out face, all names",
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
    """The evaluation data: all names, those held out, look-alike groups, and images of both held-out sets.

    Attributes:
        names: every name; labels index it.
        held_out_names: names of held-out characters.
        groups: look-alike group of every name, -1 for none.
        training_groups: the same among training names only: held-out names make no training label ambiguous.
        shapes: number of every name's shape; look-alikes share one.
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
    """What one model does on the evaluation data.

    Attributes:
        results: by set, and `AMONG`.
        image_embeddings: by set, ``[n d]``.
        class_embeddings: of all names ``[k d]``.
        group_errors: by set, how many errors stay among look-alikes.
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
        shares = {f"{name}/errors_among_look_alikes": errors.share for name, errors in self.group_errors.items()}
        return figures | shares


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object that a file of an earlier start holds."""
    try:
        content = untrusted.read_json(path)
    except (OSError, untrusted.Malformed) as error:
        raise UserError(f"{path} cannot be read ({error}); delete {path.parent} to start anew") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object; delete {path.parent} to start anew")
    return content


def read_evaluation(directory: Path, trained_on: LoaderConfig) -> GlyphEvaluation:
    """Reads names, look-alikes and both held-out sets into memory, images as the model was trained on them."""
    names = read_lines(str(directory / "names.txt"))
    first_of_shape = read_json(directory / "homoglyphs.json")
    if missing := [name for name in names if not isinstance(first_of_shape.get(name), str)]:
        raise UserError(f"{directory}/homoglyphs.json says nothing of {missing[0]!r:.100}; delete {directory}")
    shapes = [first_of_shape[name] for name in names]
    by_set = {}
    for name in (FACE, CHARACTERS):
        shards, image_size = (str(directory / name),), trained_on.image_size
        loader = LoaderConfig(shards, image_size, labels=ClassIndex(), preprocessing=trained_on.preprocessing).build()
        label_names = read_lines(str(directory / name / "classnames.txt"))
        images, labels = [], []
        for batch in loader.epoch():
            assert batch.image is not None
            assert batch.label is not None
            images.append(batch.image[batch.valid])
            labels.append(batch.label[batch.valid])
        positions = positions_of_names(np.concatenate(labels), label_names, names)
        by_set[name] = Images(np.concatenate(images), positions)
    held_out_names = read_lines(str(directory / CHARACTERS / "classnames.txt"))
    alone = set(held_out_names)
    return GlyphEvaluation(
        names=names,
        held_out_names=held_out_names,
        groups=ambiguity.groups_of(shapes),
        training_groups=ambiguity.groups_of(
            [(name,) if name in alone else shape for name, shape in zip(names, shapes, strict=True)]
        ),
        shapes=np.unique(shapes, return_inverse=True)[1],
        images=by_set,
    )


def evaluate(config: ExperimentConfig, data: GlyphEvaluation, directory: Path) -> ModelEvaluation:
    """Returns what the model of a finished run does on the data in a folder."""
    model = open_run(config.run_dir).model()
    assert isinstance(model, Encoder)
    sets = Sets(config.data.image_size, config.data.preprocessing, lambda: model.features.tower)
    class_embeddings = embed_names(model, data.names)
    features, results, group_errors = {}, {}, {}
    for name, images in data.images.items():
        read = sets.open(ImageSet(name, str(directory / name), split=".")).features(model.features)
        features[name] = dataclasses.replace(read, labels=images.labels)
        results[name] = predict(ZeroShotPredictor(model, class_embeddings), features[name])
        group_errors[name] = ambiguity.errors_within_groups(results[name].predicted, images.labels, data.groups)
    # The held-out characters with only held-out names to choose from.
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
    """Returns DET against HET-XL on every set."""
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
    """Returns whether images of look-alikes (among training names) get more noise than others, on the held-out face.

    Look-alikes are mostly plain letters, so a head that only tells plain letters from marked ones would pass the test
    over all characters: it is repeated within both kinds.
    """
    marked = np.array([" with " in name for name in data.names])[data.images[FACE].labels]
    kinds = {"all characters": np.ones_like(marked), "plain characters": ~marked, "characters with marks": marked}
    return {
        kind: ambiguity.rank_test(*noise_by_ambiguity(evaluation, data, members)) for kind, members in kinds.items()
    }


def noise_by_ambiguity(
    evaluation: ModelEvaluation, data: GlyphEvaluation, members: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean noise norms of (look-alike, unique) shapes among some images of the held-out face ``[n]``."""
    labels = data.images[FACE].labels[members]
    ambiguous = data.training_groups[labels] != ambiguity.NO_GROUP
    return ambiguity.split_by_ambiguity(evaluation.noise_norms[FACE][members], ambiguous, data.shapes[labels])


def findings(evaluations: dict[str, ModelEvaluation], comparison: Comparison, noise: dict[str, RankTest]) -> list[str]:
    """Returns what was found, in plain sentences."""
    names = {"deterministic": "the deterministic head", "het_xl": "HET-XL"}
    return [
        describe_comparison(comparison),
        *(
            f"{TITLES[FACE].capitalize()}: {describe_group_errors(evaluation.group_errors[FACE], names[name])}"
            for name, evaluation in evaluations.items()
        ),
        *(
            f"{kind.capitalize()}: {describe_rank_test(test, 'look-alikes', 'unique shapes', 'HET-XL noise norm')}"
            for kind, test in noise.items()
        ),
    ]
