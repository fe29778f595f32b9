"""``lit-het data select``: the images of a pool whose labels would say most, by a trained model."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from lit_het.console import Bar, message
from lit_het.data_pipelines.prepare.corrupted import copy_names
from lit_het.data_pipelines.shards.index import ShardIndex, index_shard
from lit_het.data_pipelines.shards.storage import Unreadable, content_or_raise
from lit_het.data_pipelines.shards.writing import IMAGE, write_shards
from lit_het.errors import UserError, pluralize
from lit_het.eval.answers import label_predictor
from lit_het.eval.predictions import Predictor, member_blocks
from lit_het.eval.selection import bald, entropy, epig
from lit_het.eval.sets.folders import unlabelled
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.files import write_columns
from lit_het.models.candidates import read_templates
from lit_het.models.opening import Run, open_run

Method = Literal["bald", "epig", "entropy", "random"]


@dataclasses.dataclass(frozen=True)
class SelectOptions:
    """What is selected, and how.

    Attributes:
        labels: the class names to choose among.
        method: how images are ranked, see `lit_het.eval.selection`.
        count: number of images to select.
        target: shards of images whose predictions are to improve; only for EPIG.
        prompts: templates around each label, see `lit_het.models.candidates.read_templates`.
        samples: noise samples; heads without noise have none.
        targets: at most so many target images, evenly spread.
        seed: of the samples, and of a random selection.
        to: folder for shards of the selected samples; None writes only their table.
    """

    labels: tuple[str, ...]
    method: Method
    count: int
    target: str | None = None
    prompts: str | None = None
    samples: int = 64
    targets: int = 500
    seed: int = 0
    to: Path | None = None


def select(run_dir: Path, pool: str, output: Path, options: SelectOptions, pretrained: Path | None = None) -> None:
    """Writes a table with a row per selected image, the most informative first, and their samples as shards.

    Args:
        run_dir: the run.
        pool: folder or pattern of the shards to choose from; their labels and captions are not read.
        output: file that ends in .csv or .parquet.
        options: what and how.
        pretrained: current path of the run with the locked parameters, if it was moved.
    """
    if options.to is not None and options.to.exists() and (not options.to.is_dir() or any(options.to.iterdir())):
        raise UserError(f"--to {options.to} is not an empty folder; choose another one")
    if (options.target is not None) != (options.method == "epig"):
        raise UserError(
            "--target SHARDS and --method epig belong together: EPIG is the information about target images"
        )
    run = open_run(run_dir, pretrained)
    _check_samples(run, options.method, options.samples)
    model = run.model()
    model.check_samples(options.samples)
    predictor = label_predictor(model, options.labels, read_templates(options.prompts))
    predictor = dataclasses.replace(predictor, samples=options.samples if model.has_noise else 0)
    sets = run.sets()
    opened = sets.open(unlabelled(pool))
    _check_count(pool, opened.loader.num_samples, options.count)  # before images are read, and with those that can be
    features = opened.features(model.features)
    _check_count(pool, len(features.values), options.count)
    target = None if options.target is None else sets.open(unlabelled(options.target))
    scores = _scores(predictor, opened, target, options)
    chosen = np.argsort(-scores, kind="stable")[: options.count]
    loader = opened.loader
    numbers = [loader.numbers[position] for position in features.positions[chosen].tolist()]
    columns = {
        "shard": [loader.index.shard(number) for number in numbers],
        "key": [loader.index.key(number) for number in numbers],
        options.method: scores[chosen].tolist(),
    }
    write_columns(output, columns)
    message(f"{pluralize(len(chosen), 'image')} of {len(scores):,} in {output}")
    if options.to is not None:
        _write_samples(options.to, loader.index, numbers)


def _write_samples(folder: Path, index: ShardIndex, numbers: Sequence[int]) -> None:
    """Writes samples with all their members as shards, in the order given, and the names that lie beside the pool."""
    found = {kind for shard in {index.shard(number) for number in numbers} for kind in index_shard(shard).offsets}
    kinds = sorted(found - {IMAGE})  # which is any of these
    whole = ShardIndex([summary.address for summary in index.summaries], [IMAGE], kinds)
    with Bar(f"writing {folder}", len(numbers), "samples") as bar:

        def samples() -> Iterator[dict[str, Any]]:
            keys = set[str]()
            for number in numbers:
                key = whole.key(number)
                # Keys of different shards may be equal.
                key = f"{key}-{number}" if key in keys else key
                keys.add(key)
                yield {"__key__": key, **_members(whole, number, kinds)}
                bar.advance(1)

        write_shards(folder, samples())
    copy_names(index.shard(numbers[0]), folder)
    message(f"{pluralize(len(numbers), 'sample')} in {folder}")


def _members(index: ShardIndex, number: int, kinds: Sequence[str]) -> dict[str, bytes]:
    there = [kind for kind in kinds if index.span(number, kind)]
    try:
        return dict(zip(there, map(content_or_raise, index.read([number], there)[0]), strict=True))
    except Unreadable as error:
        raise UserError(
            f"{index.shard(number)}: key {index.key(number)}: {error}; remove it (lit-het data check lists all)"
        ) from error


def _check_count(pool: str, num_images: int, count: int) -> None:
    if num_images < count:
        raise UserError(f"{pool} has {pluralize(num_images, 'image')}; lower --count {count}")


def _check_samples(run: Run, method: Method, samples: int) -> None:
    """Checks that the model has the samples that a method compares."""
    if method not in ("bald", "epig"):
        return
    if samples < 2:
        raise UserError(f"--method {method} compares samples; give --samples 2 or more")
    sampled = run.config.task.head.sampled
    if sampled == "nothing":
        raise UserError(
            f"{run.run_dir} predicts in closed form, without samples; fit its posterior with "
            "--task.head.prediction samples"
        )
    if sampled == "weights" or run.task.num_predictions > 1:
        return
    if method == "epig":
        raise UserError(
            f"{run.run_dir} draws its noise for every image alone, so that no image tells about another; --method epig "
            "needs a posterior (lit-het add-noise --task.head bayes_vlm), --method bald does not"
        )
    if not run.task.has_image_noise:
        raise UserError(f"{run.run_dir} has no noise to compare samples of; take --method entropy")


def _scores(
    predictor: Predictor, pool: OpenSet, target: OpenSet | None, options: SelectOptions
) -> Float[np.ndarray, " n"]:
    """Returns the score of every image of the pool."""
    features = pool.features(predictor.model.features)
    if options.method == "random":
        return np.random.default_rng(options.seed).random(len(features.values))
    targets = None if target is None else _samples_of(predictor, target, options)
    found = []
    with Bar(f"{options.method} of {pool.config.name}", len(features.values), "images") as bar:
        for samples, _ in member_blocks(predictor, features, seed=options.seed):
            if targets is not None:
                found.append(epig(samples, targets))
            else:
                found.append(entropy(samples) if options.method == "entropy" else bald(samples))
            bar.advance(len(samples))
    return np.concatenate(found)


def _samples_of(predictor: Predictor, target: OpenSet, options: SelectOptions) -> Float[np.ndarray, "t s k"]:
    """Returns the log-probabilities of the samples of evenly spread target images."""
    spread = target.features(predictor.model.features).spread(options.targets)
    return np.concatenate([samples for samples, _ in member_blocks(predictor, spread, seed=options.seed)])
