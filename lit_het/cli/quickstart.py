"""``lit-het quickstart``: data, upstream tower, LiT twice, evaluation and a report, from nothing in minutes."""

import dataclasses
import json
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from configs import quickstart_lit_deterministic, quickstart_lit_het_xl, quickstart_upstream
from configs.experiment import ExperimentConfig
from data_pipelines.glyphs import FACES, write_glyph_shards
from data_pipelines.labels import ClassIndex
from data_pipelines.loader import LoaderConfig
from data_pipelines.storage import read_lines
from data_pipelines.tokenizers import train_sentencepiece
from eval import ambiguity, scores
from eval.ambiguity import GroupErrors, RankTest
from eval.predictions import Predictions, ZeroShotPredictor, embed_images, predict
from eval.recognition import embed_names, positions_of_names
from eval.report.comparison import Comparison, compare, print_table
from eval.report.statements import describe_comparison, describe_group_errors, describe_rank_test
from eval.sets import ImageSet, Sets
from lit_het import untrusted
from lit_het.cli import runs
from lit_het.cli.train import train_unless_done
from lit_het.errors import UserError
from lit_het.files import write_atomically
from lit_het.training.logging import Bar
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


def quickstart(run_dir: Path, seed: int) -> None:
    """Runs every stage that is not done yet, then evaluates and reports.

    Raises:
        UserError: ``run_dir`` holds a finished quickstart, or one with another seed.
    """
    if (run_dir / "results.json").exists():
        raise UserError(f"{run_dir} holds a finished quickstart; open {run_dir}/report.html or give another --run-dir")
    clock = Clock(run_dir, seed)
    with clock.stage("data"):
        write_data(run_dir / "data", seed)
    upstream = quickstart_upstream.get_config(run_dir)
    num_words = len(read_lines(str(run_dir / "data" / "words.txt")))
    upstream = dataclasses.replace(upstream, task=dataclasses.replace(upstream.task, num_classes=num_words))
    deterministic = quickstart_lit_deterministic.get_config(run_dir)
    het_xl = quickstart_lit_het_xl.get_config(run_dir)
    for config in (upstream, deterministic, het_xl):
        with clock.stage(config.run_dir.name):
            train_unless_done(_with_seed(config, seed))
    with clock.stage("evaluation"):
        data = read_evaluation(run_dir / "data", deterministic.data)
        evaluations = {
            "deterministic": _evaluate(deterministic, data, run_dir / "data"),
            "het_xl": _evaluate(het_xl, data, run_dir / "data"),
        }
    # matplotlib is slow to import and only the report needs it.
    from lit_het.cli.quickstart_report import write_report

    comparison = compare_models(evaluations)
    noise = noise_tests(evaluations["het_xl"], data)
    sentences = findings(evaluations, comparison, noise)
    seconds = clock.seconds()
    results = {
        **{name: evaluation.metrics() for name, evaluation in evaluations.items()},
        "noise_of_look_alikes": {kind: dataclasses.asdict(test) for kind, test in noise.items()},
        "seconds": seconds,
        "seconds_by_stage": clock.stages,
        "peak_memory_bytes": peak_memory_bytes(),
        "num_names": len(data.names),
        "seed": seed,
    }
    write_report(run_dir, data, evaluations, comparison, noise, sentences, results)
    write_atomically(run_dir / "results.json", json.dumps(results, indent=2) + "\n")
    console = Console()
    console.print(print_table(comparison, "Zero-shot classification of characters by name"))
    for sentence in sentences:
        console.print(sentence, highlight=False)
    console.print(f"{seconds:.0f} s, {results['peak_memory_bytes'] / 1e9:.2f} GB at most", highlight=False)
    console.print(f"report: {run_dir / 'report.html'}", highlight=False, soft_wrap=True)


class Clock:
    """Adds up the seconds of all stages, over interruptions, in ``stages.json``; remembers the seed."""

    def __init__(self, run_dir: Path, seed: int):
        self._path = run_dir / "stages.json"
        self._seed = seed
        self.stages: dict[str, float] = {}
        # The time between the start of the process and now: imports.
        self._uncounted = time.monotonic() - _process_start()
        run_dir.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            before = _read_json(self._path)
            if before.get("seed") != seed:
                raise UserError(
                    f"{run_dir} was begun with seed {before.get('seed')}; give this --seed or another --run-dir"
                )
            stages = before.get("stages")
            if not isinstance(stages, dict) or not all(isinstance(value, int | float) for value in stages.values()):
                raise UserError(f"{self._path} holds no times of stages; delete it")
            self.stages = stages

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the time inside for stage ``name``."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.monotonic() - began + self._uncounted
            self._uncounted = 0.0
            write_atomically(self._path, json.dumps({"seed": self._seed, "stages": self.stages}) + "\n")

    def seconds(self) -> float:
        """Returns the seconds of all stages together."""
        return sum(self.stages.values())


def _read_json(path: Path) -> dict[str, Any]:
    """Returns the object that a file of an earlier start holds."""
    try:
        content = untrusted.read_json(path)
    except (OSError, untrusted.Malformed) as error:
        raise UserError(f"{path} cannot be read ({error}); delete {path.parent} to start anew") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no JSON object; delete {path.parent} to start anew")
    return content


def peak_memory_bytes() -> int:
    """Returns the largest resident size that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _process_start() -> float:
    """Returns when this process started, on the monotonic clock."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process().create_time())


def write_data(directory: Path, seed: int) -> None:
    """Writes shards and tokenizer unless they are there.

    They are written under a temporary name first: the folder is there only when it is complete.

    Raises:
        UserError: the folder holds characters that were drawn with another seed.
    """
    if directory.exists():
        config = _read_json(directory / "glyphs.json").get("config")
        drawn_with = config.get("seed") if isinstance(config, dict) else None
        if drawn_with != seed:
            raise UserError(
                f"{directory} was drawn with seed {drawn_with}; give --seed {drawn_with} or another --run-dir"
            )
        return
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with Bar("drawing characters", len(FACES) + 3, "steps") as bar:
        write_glyph_shards(quickstart_upstream.glyphs(seed), partial, bar.advance)
    names = read_lines(str(partial / "train" / "classnames.txt"))
    size = quickstart_lit_deterministic.VOCABULARY_SIZE
    (partial / "tokenizer.model").write_bytes(train_sentencepiece(names, vocabulary_size=size, model_type="bpe"))
    partial.rename(directory)


def _with_seed(config: ExperimentConfig, seed: int) -> ExperimentConfig:
    return dataclasses.replace(config, seed=seed, data=dataclasses.replace(config.data, seed=seed))


def read_evaluation(directory: Path, trained_on: LoaderConfig) -> GlyphEvaluation:
    """Reads names, look-alikes and both held-out sets into memory, images as the model was trained on them."""
    names = read_lines(str(directory / "names.txt"))
    first_of_shape = _read_json(directory / "homoglyphs.json")
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


def _evaluate(config: ExperimentConfig, data: GlyphEvaluation, directory: Path) -> ModelEvaluation:
    model = runs.open_run(config.run_dir).model()
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
