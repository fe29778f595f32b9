"""Features and labels of images, from which all evaluators start."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int, Real

from lit_het import distributed
from lit_het.errors import UserError
from lit_het.training import preemption
from lit_het.types import Batch, ImageFeatures


@dataclasses.dataclass(frozen=True)
class Features:
    """Features of the readable images of a set, in order.

    Attributes:
        values: features of the image tower; those of ensemble members are concatenated. Token ids where texts are read.
        labels: class indices (zeros if labels are not read), or vectors of zeros and ones.
        positions: the index of each image among all images of the set, unreadable ones included.
    """

    values: Real[np.ndarray, "n f"]
    labels: Int[np.ndarray, " n"] | Float[np.ndarray, "n k"]
    positions: Int[np.ndarray, " n"]

    def take(self, rows: np.ndarray) -> "Features":
        """Returns the features of the given rows."""
        return Features(self.values[rows], self.labels[rows], self.positions[rows])

    def spread(self, most: int) -> "Features":
        """Returns the features of at most so many images, evenly spread."""
        count = min(most, len(self.values))
        return self.take(np.arange(count) * len(self.values) // count)

    def embeddings(self, tower: ImageFeatures) -> Float[np.ndarray, "n m d"]:
        """Returns the (mean) embeddings of every member of a tower, which distances and probes compare."""
        return self.values.reshape(len(self.values), tower.num_members, -1)[:, :, : tower.mean_size]

    def joint_embeddings(self, tower: ImageFeatures) -> Float[np.ndarray, "n md"]:
        """Returns the same, members side by side."""
        return self.embeddings(tower).reshape(len(self.values), -1)

    def unlabelled(self) -> "Features":
        """Returns the features with zeros as labels, which those of sets without classes are."""
        return dataclasses.replace(self, labels=np.zeros(len(self.values), np.int32))


@dataclasses.dataclass
class ReadingTime:
    """What the computation of features waited for, in seconds, and of how many images.

    Both overlap: while the devices compute, the next images are decoded. What is waited for bounds the speed.

    Attributes:
        decoding: waiting for images to be read and decoded.
        tower: waiting for the image tower.
        num_images: images whose features were computed.
    """

    decoding: float = 0.0
    tower: float = 0.0
    num_images: int = 0

    @contextlib.contextmanager
    def waiting_for(self, what: Literal["decoding", "tower"]) -> Iterator[None]:
        """Counts the time of the block."""
        began = time.monotonic()
        yield
        setattr(self, what, getattr(self, what) + time.monotonic() - began)


def read_features(
    towers: Sequence[ImageFeatures],
    batches: Iterable[Batch],
    advance: Callable[[int], object],
    name: str,
    spent: ReadingTime | None = None,
) -> list[Features]:
    """Returns the features of the valid rows of all batches by each tower, see `stream_features`."""
    return joined(stream_features(towers, batches, advance, name, spent or ReadingTime()))


def joined(blocks: Iterable[list[Features]]) -> list[Features]:
    """Returns the features of all blocks, by each tower."""
    by_tower = zip(*blocks, strict=True)
    # Labels and positions are the same for each tower.
    fields = ([(rows.values, rows.labels, rows.positions) for rows in of_tower] for of_tower in by_tower)
    return [Features(*map(np.concatenate, zip(*rows, strict=True))) for rows in fields]


def stream_features(
    towers: Sequence[ImageFeatures],
    batches: Iterable[Batch],
    advance: Callable[[int], object],
    name: str,
    spent: ReadingTime,
) -> Iterator[list[Features]]:
    """Yields the features of the valid rows of each batch, by each tower.

    Args:
        towers: the image towers.
        batches: of images.
        advance: called with the number of images just read.
        name: of the set, for messages.
        spent: the time is added to it.

    Raises:
        UserError: features are not finite, or there is no valid row.
        Preempted: the run was asked to stop.
    """
    seen = found = 0
    for batch, features in _ahead(towers, batches, spent):
        preemption.leave_if_due()
        valid = distributed.gather_rows(batch.valid)
        with spent.waiting_for("tower"):
            rows = [np.asarray(by_tower)[valid] for by_tower in features]
        if not all(np.isfinite(by_tower).all() for by_tower in rows):
            raise UserError(f"{name}: an embedding is not finite; training diverged, use an earlier checkpoint")
        label = np.zeros(len(batch.valid), np.int32) if batch.label is None else np.asarray(batch.label)
        labels, positions = distributed.gather_rows(label)[valid], seen + np.flatnonzero(valid)
        seen, found, spent.num_images = seen + len(valid), found + len(positions), spent.num_images + len(positions)
        if len(positions):
            yield [Features(by_tower, labels, positions) for by_tower in rows]
        advance(len(positions))
    if not found:
        raise UserError(f"{name}: the set has no valid image; check its path and its shards")


def _ahead(
    towers: Sequence[ImageFeatures], batches: Iterable[Batch], spent: ReadingTime
) -> Iterator[tuple[Batch, Sequence[object]]]:
    """Yields each batch with its features, after the next batch was sent to the device.

    The device thus computes while the host reads the features of the batch before.
    """
    before, waiting = None, iter(batches)
    while True:
        with spent.waiting_for("decoding"):
            batch = next(waiting, None)
        if batch is None:
            break
        assert batch.view is not None
        with spent.waiting_for("tower"):
            now = batch, [tower.extract(np.asarray(batch.view)) for tower in towers]
        if before is not None:
            yield before
        before = now
    if before is not None:
        yield before
