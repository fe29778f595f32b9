"""Random views of training images for the linear probe: crops, flips and mixtures of two images (SoViT Table 9).

Features of mixed images are not mixtures of features, and every epoch has crops of its own: so the tower sees all
images in every epoch.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Int

from lit_het.data_pipelines.batches import rows_per_process
from lit_het.data_pipelines.images.transforms import InceptionCrop, RandomCrop
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.eval.features import Features, ReadingTime, stream_features
from lit_het.eval.fits import Crop, LinearProbeOptions
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.types import Batch, ImageFeatures

_RANDOM: Mapping[Crop, InceptionCrop | RandomCrop] = {"random": RandomCrop(224 / 256), "inception": InceptionCrop()}
# A row that only fills a batch of the tower.
_NONE = -1


class Examples(NamedTuple):
    """Consecutive batches of training.

    Attributes:
        features: of views.
        labels: of the m images that each view is mixed of.
        weights: of these labels; they sum to 1, or to 0 for a view that could not be read.
    """

    features: Float[np.ndarray, "steps b f"]
    labels: Int[np.ndarray, "steps b m"]
    weights: Float[np.ndarray, "steps b m"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which images each batch of training has, and how many batches are read together.

    Rows are numbered through all batches of all epochs.

    Attributes:
        images: of each row, an index into the features of the set.
        steps_per_epoch: each epoch has crops of its own.
        steps_per_chunk: batches that are read together; the last may be fewer.
    """

    images: Int[np.ndarray, "steps b"]
    steps_per_epoch: int
    steps_per_chunk: int

    @property
    def batch_size(self) -> int:
        """Rows of a batch, b."""
        return self.images.shape[1]

    def chunks(self) -> Iterator[slice]:
        """Yields the steps of each chunk."""
        for start in range(0, len(self.images), self.steps_per_chunk):
            yield slice(start, min(start + self.steps_per_chunk, len(self.images)))

    def before(self, rows: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns the rows before, in the same batch, with which rows are mixed; that of the first is the last."""
        steps, places = np.divmod(rows, self.batch_size)
        return np.where(rows == _NONE, _NONE, steps * self.batch_size + (places - 1) % self.batch_size)

    def crops(self, rows: Int[np.ndarray, "*n"]) -> Int[np.ndarray, "*n"]:
        """Returns the number of the crop of each row."""
        return rows // (self.steps_per_epoch * self.batch_size)

    def blocks(self, size: int) -> list[tuple[int, int]]:
        """Returns the first row of each batch of the tower, and the end of its chunk: no batch has rows of two."""
        ends = ((chunk.start * self.batch_size, chunk.stop * self.batch_size) for chunk in self.chunks())
        return [(first, end) for start, end in ends for first in range(start, end, size)]


class Views:
    """The random views of a set's images.

    Args:
        opened: the set.
        clean: the features of its images.
        tower: the image tower.
        options: of the probe.

    Raises:
        UserError: the set has no pixels, or its images are not squares.
    """

    def __init__(self, opened: OpenSet, clean: Features, tower: ImageFeatures, options: LinearProbeOptions):
        self._clean, self._tower, self._options, self._name = clean, tower, options, opened.config.name
        self._loaders: dict[Crop, Loader] = {
            crop: opened.augmented(_RANDOM[crop], options.seed) for crop in options.random_crops
        }

    def __call__(self, crop: Crop, plan: Plan) -> Iterator[Examples]:
        """Yields the examples of each chunk of a plan."""
        rows = plan.steps_per_chunk * plan.batch_size
        shares, spent = self._shares(len(plan.images)), ReadingTime()
        batches = self._batches(self._loaders[crop], plan, shares)
        found = (block for [block] in stream_features([self._tower], batches, _ignored, self._name, spent))
        # The numbers of rows stand in place of labels, as views that cannot be read are missing.
        for number, blocks in itertools.groupby(found, lambda block: int(block.labels[0]) // rows):
            steps = slice(number * plan.steps_per_chunk, (number + 1) * plan.steps_per_chunk)
            yield self._examples(blocks, plan.images[steps], number * rows, shares[steps])

    def _examples(
        self, blocks: Iterable[Features], images: Int[np.ndarray, "s b"], first: int, shares: Float[np.ndarray, " s"]
    ) -> Examples:
        is_read, features = np.zeros(images.size, bool), np.empty(0, np.float32)
        for block in blocks:
            rows, values = block.labels - first, block.joint_embeddings(self._tower)
            if not features.size:
                features = np.zeros((images.size, values.shape[1]), values.dtype)
            features[rows], is_read[rows] = values, True
        is_read, labels = is_read.reshape(images.shape), self._clean.labels[images]
        own = np.where(is_read & _before(is_read), shares[:, None], 1.0)
        weights = is_read[:, :, None] * np.stack([own, 1 - own], axis=-1)
        return Examples(
            features.reshape(*images.shape, -1),
            np.stack([labels, _before(labels)], axis=-1),
            weights.astype(np.float32),
        )

    def _shares(self, num_steps: int) -> Float[np.ndarray, " steps"]:
        """Returns the weight of each image in its own mixture, one for each batch, as `lit_het.objectives.mixup`."""
        if not self._options.mixup:
            return np.ones(num_steps)
        # The first stream of the seed orders the images.
        generator = np.random.default_rng((self._options.seed, 1))
        drawn = generator.beta(self._options.mixup, self._options.mixup, num_steps)
        return np.maximum(drawn, 1 - drawn)

    def _batches(self, loader: Loader, plan: Plan, shares: Float[np.ndarray, " steps"]) -> Iterator[Batch]:
        """Yields this process's rows of each batch of the tower, with the numbers of rows as labels."""
        size = loader.config.batch_size * self._tower.num_shards
        blocks, per_process = plan.blocks(size), rows_per_process(size, jax.process_count())

        def rows_of(number: int) -> Int[np.ndarray, " b"]:
            first, end = blocks[number]
            rows = first + jax.process_index() * per_process + np.arange(per_process)
            return np.where(rows < end, rows, _NONE)

        def wanted(number: int) -> Int[np.ndarray, " n"]:
            # A process also reads the image that its first row is mixed with.
            rows = rows_of(number)
            return np.union1d(rows, plan.before(rows))

        def choose(number: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
            rows = wanted(number)
            positions = self._clean.positions[plan.images.reshape(-1)[rows]]
            return np.where(rows == _NONE, -1, positions), plan.crops(rows)

        for number, batch in enumerate(loader.views(len(blocks), choose)):
            assert batch.image is not None
            rows = rows_of(number)
            own, other = (np.searchsorted(wanted(number), one) for one in (rows, plan.before(rows)))
            both = batch.valid[own] & batch.valid[other]
            share = np.where(both, shares[rows // plan.batch_size], 1.0)[:, None, None, None].astype(np.float32)
            mixed = np.round(share * batch.image[own] + (1 - share) * batch.image[other]).astype(np.uint8)
            yield Batch(batch.valid[own], image=mixed, label=rows.astype(np.int32))


def _before(rows: np.ndarray) -> np.ndarray:
    return np.roll(rows, 1, axis=1)


def _ignored(count: int) -> None:
    """Progress is that of the steps of training."""
