"""Which names the training captions of a run had: ``RUN/familiarity.npz``, written when the run is calibrated."""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool

from lit_het import parameters
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar, message
from lit_het.data_pipelines.shards.hashed import captions_of
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.texts.captions_config import TextPlace
from lit_het.data_pipelines.texts.familiarity import Familiarity, Rule
from lit_het.data_pipelines.texts.prompts import fill_template
from lit_het.errors import UserError
from lit_het.models import origins
from lit_het.models.calibration.split import split_samples
from lit_het.tasks.base import AnyTask
from lit_het.training.directory import find_pretrained, load_config

FAMILIARITY = "familiarity.npz"
MOST_SAMPLES = 1_000_000
"""Samples whose captions are read; of more, so many are taken, evenly spread."""


def familiarity_path(run_dir: Path) -> Path:
    """Returns the path of the table of a run's training captions."""
    return run_dir / FAMILIARITY


def read_familiarity(run_dir: Path, digest: str | None) -> Familiarity | None:
    """Returns the table of a run's training captions; None if there is none.

    Args:
        run_dir: the run.
        digest: of the data that it was trained on; None if that is unknown.
    """
    found = Familiarity.load(path := familiarity_path(run_dir))
    if found is not None and digest is not None and found.digest != digest:
        message(f"{path} has the captions of another run: ignored; run lit-het calibrate {run_dir} again")
        return None
    return found


def copy_familiarity(source: Path, run_dir: Path, digest: str | None) -> None:
    """Copies the table of a run's training captions, if there is one; arguments are those of `read_familiarity`."""
    if read_familiarity(source, digest) is not None:
        shutil.copyfile(familiarity_path(source), familiarity_path(run_dir))


def require_familiarity(
    run_dir: Path, config: ExperimentConfig, task: AnyTask, digest: str | None, pretrained: Path | None = None
) -> Familiarity:
    """Returns the table of the captions that a run's text tower learned from, read and counted where it has none.

    These are the captions of its training, or where the text tower is locked, of the run that it comes from. Those that
    a tower was trained on before, where it is trained further, do not count.

    Args:
        run_dir: the run.
        config: of its training.
        task: of its configuration.
        digest: of the data that it was trained on; None if that is unknown.
        pretrained: current path of the run with the locked parameters, if it was moved.

    Raises:
        UserError: the text tower learned from captions that are not those of a run, or they cannot be read.
    """
    if (found := read_familiarity(run_dir, digest)) is not None:
        return found
    found = _learned_from(run_dir, config, task, digest, pretrained)
    found = dataclasses.replace(found, digest=digest or found.digest)
    found.save(familiarity_path(run_dir))
    message(f"{familiarity_path(run_dir)} has {found}")
    return found


def _learned_from(
    run_dir: Path, config: ExperimentConfig, task: AnyTask, digest: str | None, pretrained: Path | None
) -> Familiarity:
    """Reads and counts the captions that a text tower learned from; arguments as those of `require_familiarity`."""
    towers: Any = config.task
    is_locked = "text_tower" not in parameters.partition(task.shapes, config.task.locked_patterns)[1]
    if is_locked and config.pretrained is not None and towers.text_tower.weights is None:
        source = find_pretrained(pretrained or config.pretrained.run, run_dir)
        of_source = load_config(source)
        source_digest = origins.newest_info(source).get("data_digest")
        found = read_familiarity(source, source_digest)
        return found or _learned_from(source, of_source, of_source.task.build(), source_digest, None)
    if not config.data.shards or is_locked or towers.text_tower.weights is not None:
        raise UserError(f"the text tower of {run_dir} learned from other captions than those of its configuration")
    if config.data.stream is not None:
        raise UserError(f"{run_dir} was trained on a stream, whose captions are not read again")
    loader = training_loader(config)
    if digest is not None and loader.digest != digest:
        raise UserError(f"the shards of the training of {run_dir} have changed")
    count = min(loader.num_samples, MOST_SAMPLES)
    with Bar("reading captions of training", count, "samples") as bar:
        captions, is_sample = _captions(loader, count, bar.advance), count < loader.num_samples
        return Familiarity.of(captions, loader.digest, is_sample=is_sample)


def training_loader(config: ExperimentConfig, *, leaves_out: bool = True) -> Loader:
    """Returns a loader of the samples that a run was trained on, for their captions and keys.

    Args:
        config: of the run.
        leaves_out: False counts suspects and excluded samples among the samples, although they were left out.
    """
    # Prompts need the tokenizer of a decoder, and change no sample.
    mixture = tuple(dataclasses.replace(one, prompt=None) for one in config.data.mixture)
    data = dataclasses.replace(config.data.without_embeddings(), prompt=None, mixture=mixture)
    if not leaves_out:
        data = dataclasses.replace(data, suspects=None, exclude=())
    # The loader requires captions only with a tokenizer; any tokenizer will do.
    loader = Loader(data, config.tokenizer and (lambda texts: np.zeros((len(texts), 1), np.int32)))
    return split_samples(config, loader)[0]


def knows(
    familiarity: Familiarity, rule: Rule, names: Sequence[str], templates: Sequence[str]
) -> Bool[np.ndarray, " k"]:
    """Returns which names training captions had: without a prompt or, as whole captions, also in one."""
    found = familiarity.knows(names, rule)
    for template in templates if rule == "caption" else ():
        found |= familiarity.knows([fill_template(template, name) for name in names], rule)
    return found


def _captions(loader: Loader, count: int, advance: Callable[[int], object]) -> Iterator[str]:
    """Yields the captions of so many samples, evenly spread."""
    first, total = 0, loader.num_samples
    done = 0
    for summary, place in zip(loader.index.summaries, _places(loader), strict=True):
        numbers = first + np.flatnonzero(loader.numbers.marks(range(first, first + summary.count)))
        ranks = done + np.arange(len(numbers))
        # The ranks that are a multiple of total / count, rounded down.
        chosen = numbers[-(-ranks * count // total) * total // count == ranks]
        for captions in captions_of(loader.index, chosen.tolist(), place):
            yield from captions
            advance(1)
        first, done = first + summary.count, done + len(numbers)


def _places(loader: Loader) -> list[TextPlace]:
    """Returns where the captions of each shard are."""
    data_sets = zip(loader.config.texts, loader.config.data_sets(), strict=True)
    return [place for place, shards in data_sets for _ in shards]
