"""By which models images were seen in training: those are no images to calibrate on, or to choose models by."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import UInt8

from lit_het.console import message
from lit_het.data_pipelines.shards.index import ShardSummary
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.errors import UserError
from lit_het.models import origins
from lit_het.models.calibration.seen_names import training_loader
from lit_het.models.calibration.split import split_samples
from lit_het.training.directory import find_pretrained, load_config


class Seen(NamedTuple):
    """A model that was trained on some images, and a shard of them."""

    model: Path
    shard: str


def seen(run_dir: Path, images: Loader, pretrained: Path | None = None) -> Seen | None:
    """Returns by which training images were seen: that of a run, or of an image-text model that its towers come from.

    A message names a model whose training shards cannot be read.

    Args:
        run_dir: the run.
        images: of some shards.
        pretrained: current path of the run with the locked parameters, if it was moved.
    """
    for model in _models(run_dir, pretrained):
        if shard := _trained_on(model, images):
            return Seen(model, shard)
    return None


def _models(run_dir: Path, pretrained: Path | None = None) -> Iterator[Path]:
    """Yields a run and the image-text models that its towers come from or are the mean of, with theirs."""
    yield run_dir
    with contextlib.suppress(UserError):  # one that is gone
        if (source := load_config(run_dir).pretrained) is not None:
            found = find_pretrained(pretrained or source.run, run_dir)
            if load_config(found).task.embeds_texts:
                yield from _models(found)
    for one in origins.merged(run_dir):
        try:
            yield from _models(find_pretrained(one, run_dir))
        except UserError:
            message(f"not checked whether {one}, of the mean {run_dir}, was trained on these images: no run is there")


def _trained_on(run_dir: Path, images: Loader) -> str | None:
    """Returns a shard of the images of which a run was trained on a sample; None also where that cannot be known."""
    config = load_config(run_dir)
    if not config.data.shards:  # an imported model
        return None
    try:
        if config.data.stream is not None:
            raise UserError("it was trained on a stream, which has no index")
        return _shared(images, training_loader(config, leaves_out=False))
    except UserError as error:
        info = origins.newest_info(run_dir)
        # The shards of training cannot be read, but a copy of all of them is known by its digest. Runs of earlier
        # versions have only the one in which their suspects count.
        if info.get("shards_digest", info.get("data_digest")) != images.index.digest:
            message(f"not checked whether {run_dir} was trained on these images: {error}")
            return None
        return _shared(images, split_samples(config, images)[0])


def _shared(held_out: Loader, trained_on: Loader) -> str | None:
    """Returns a shard of which both loaders read a sample, also where it is a copy; None if there is none."""
    chosen = {shard.digest: rows for shard, rows in _rows(held_out)}
    for shard, rows in _rows(trained_on):
        others = chosen.get(shard.digest, rows[:0])
        if (rows[: len(others)] & others[: len(rows)]).any():
            return shard.address
    return None


def _rows(loader: Loader) -> Iterator[tuple[ShardSummary, UInt8[np.ndarray, " n"]]]:
    """Yields the shards of which a loader reads samples, and which rows, in one bit for each."""
    first = 0
    for shard in loader.index.summaries:
        marks = loader.numbers.marks(range(first, first + shard.count))
        if marks.any():
            yield shard, np.packbits(marks)
        first += shard.count
