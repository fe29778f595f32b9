"""Batches from shards: shuffled and endless for training, in order and once for evaluation.

The order is a pure function of (seed, position). So the state of the loader is one integer: the number of samples that
all hosts together have consumed. Sample ``i`` of the stream, its image, augmentation and label are the same on any
number of hosts and after any restart. Process ``p`` of ``P`` takes rows ``[p b/P, (p+1) b/P)`` of each batch.

One element of the grain pipeline is a whole batch: grain's overhead is paid once per batch, and each thread makes a
batch of its own.

A broken sample does not move the others. Samples that the index excludes are not part of the order. Samples that
cannot be read or decoded become invalid rows. Both are counted by cause and shard.
"""

import dataclasses
import hashlib
import math
import sys
from collections.abc import Callable, Generator, Iterable, Sequence

import grain
import numpy as np

from lit_het.data_pipelines import storage
from lit_het.data_pipelines.batches import (
    BatchMaker,
    Captions,
    ImageInput,
    Images,
    RawSample,
    Tokenizer,
    rows_per_process,
)
from lit_het.data_pipelines.embeddings import StoredEmbeddings, describe
from lit_het.data_pipelines.faults import FaultLog
from lit_het.data_pipelines.index import ShardIndex
from lit_het.data_pipelines.labels import LabelsConfig
from lit_het.data_pipelines.order import Mixed, Order, Sequential, Shifted, Shuffled, WindowShuffled
from lit_het.data_pipelines.portions import ALL, ConcatenatedRanges, Portion
from lit_het.data_pipelines.shards import IMAGE, expand
from lit_het.data_pipelines.storage import Unreadable
from lit_het.data_pipelines.transforms import Augmentation, InceptionCrop, Preprocessing, RandomCrop, Training
from lit_het.errors import UserError, require_at_least
from lit_het.types import Batch

_PADDING = -1  # the sample of a row that only fills the last batch


@dataclasses.dataclass(frozen=True)
class WeightedShards:
    """A data set that is mixed into another.

    Attributes:
        shards: as those of a `LoaderConfig`.
        weight: samples of this set for each one of the `LoaderConfig`'s own shards.
        portion: of its samples.
    """

    shards: tuple[str, ...]
    weight: float = 1.0
    portion: Portion = ALL

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise UserError(
                f"WeightedShards: weight = {self.weight} must be more than 0 and finite; leave the data set out instead"
            )


@dataclasses.dataclass(frozen=True)
class Streaming:
    """How a `Stream` reads shards that cannot seek.

    Attributes:
        shuffle_buffer: size of the shuffle buffer of a host, in undecoded samples over all threads.
    """

    shuffle_buffer: int = 10_000

    def __post_init__(self) -> None:
        require_at_least(1, self, "shuffle_buffer")


@dataclasses.dataclass(frozen=True)
class LoaderConfig:
    """Which shards to read and how.

    Attributes:
        shards: tar files, brace patterns, globs, folders or lists of these, local or at addresses of fsspec.
        image_size: pixels along each side.
        batch_size: samples over all hosts.
        labels: how to read labels; None reads none.
        portion: of the samples of ``shards``, to hold out a part of a training set for validation.
        mixture: further data sets, each in a fixed proportion to ``shards`` and with its own order.
        captions: the member with the captions; ``json/caption`` is the field ``caption`` of a JSON object.
        preprocessing: of evaluation images.
        crop: the random crop of training images; None uses the evaluation preprocessing.
        augmentations: of training images, in order; not applied in evaluation.
        seed: of order, crops and augmentations.
        shuffle: whether to shuffle each training epoch.
        window: number of shards that are shuffled together, for stores with slow random access; None shuffles all.
        threads: that read and decode batches ahead; 0 makes each batch on demand.
        prefetch_batches: number of batches prepared ahead.
        max_bad_fraction: fraction of the samples that may be broken or missing before the run stops.
        embeddings: a folder that ``lit-het embed`` wrote for these shards, read in place of images.
        slow_read_seconds: after which a pending read is reported, and again at growing intervals.
        stuck_read_seconds: after which a pending read ends the process, so that a scheduler restarts it.
        stream: reads shards that cannot seek sequentially, as a `Stream`; None has random access, as a `Loader`.
    """

    shards: tuple[str, ...]
    image_size: int = 32
    batch_size: int = 256
    labels: LabelsConfig | None = None
    portion: Portion = ALL
    mixture: tuple[WeightedShards, ...] = ()
    captions: str = "txt"
    preprocessing: Preprocessing = Preprocessing()
    crop: InceptionCrop | RandomCrop | None = None
    augmentations: tuple[Augmentation, ...] = ()
    seed: int = 0
    shuffle: bool = True
    window: int | None = None
    threads: int = 2
    prefetch_batches: int = 4
    max_bad_fraction: float = 0.0
    embeddings: str | None = None
    stream: Streaming | None = None
    slow_read_seconds: float = 60.0
    stuck_read_seconds: float = 1800.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "seed", "threads")
        require_at_least(1, self, "image_size", "batch_size", "prefetch_batches")
        if not 0 <= self.max_bad_fraction <= 1:
            raise UserError(f"LoaderConfig: max_bad_fraction = {self.max_bad_fraction} must be from 0 to 1")
        if not 0 < self.slow_read_seconds <= self.stuck_read_seconds:
            raise UserError(
                f"LoaderConfig: slow_read_seconds = {self.slow_read_seconds} must be more than 0 and at most "
                f"stuck_read_seconds = {self.stuck_read_seconds}"
            )
        if self.window is not None:
            require_at_least(1, self, "window")
        if self.stream is not None:
            for field in ("portion", "mixture", "shuffle", "window", "embeddings"):
                if getattr(self, field) != getattr(LoaderConfig, field):
                    raise UserError(f"LoaderConfig: a `stream` has no `{field}`; leave out one of them")

    @property
    def training(self) -> Training:
        """The preprocessing of training images."""
        return Training(self.preprocessing, self.crop, self.augmentations)

    def batch_maker(
        self, image_input: ImageInput, tokenizer: Tokenizer | None, address: str, faults: FaultLog
    ) -> BatchMaker:
        """Returns the maker of batches; label files are searched beside a shard's address.

        Raises:
            UserError: the labels cannot be read.
        """
        captions = Captions(self.captions, tokenizer) if tokenizer else None
        labels = self.labels.build(storage.parent(address)) if self.labels else None
        return BatchMaker(image_input, captions, labels, self.seed, faults)

    def data_sets(self, *, allow_commands: bool = False) -> list[list[str]]:
        """Returns the tar files of each data set, that of ``shards`` first.

        Args:
            allow_commands: see ``expand``.

        Raises:
            UserError: as ``expand``.
        """
        data_sets = (self.shards, *(data_set.shards for data_set in self.mixture))
        return [expand(shards, allow_commands=allow_commands) for shards in data_sets]

    def build(self, tokenizer: Tokenizer | None = None) -> "Loader":
        """Indexes the shards; captions are read only if there is a tokenizer or labels are caption words.

        Raises:
            UserError: as ``expand``, ``ShardIndex`` and the labels do.
        """
        return Loader(self, tokenizer)


class Loader:
    """Reads batches of NumPy arrays from shards.

    Args:
        config: which shards, and how.
        tokenizer: captions to ids ``[n l]``; None leaves ``Batch.text`` out.
        advance: called with 1 after each indexed shard, for a progress bar.
        faults: counts broken samples; None creates a log that stops at ``max_bad_fraction``.

    Attributes:
        config: as given.
        index: the samples of all shards.
        numbers: indices of the samples in an epoch, selected by the `Portion`.
        num_classes: of the labels, ``k``; None without labels.
        faults: samples excluded or masked since the loader was built.
        stored: the embeddings that are read in place of images, or None.

    Raises:
        UserError: no shards, or more of their samples are broken than ``max_bad_fraction`` allows.
    """

    def __init__(
        self,
        config: LoaderConfig,
        tokenizer: Tokenizer | None = None,
        advance: Callable[[int], None] = lambda count: None,
        faults: FaultLog | None = None,
    ):
        data_sets = config.data_sets()
        self.config = config
        self.faults = FaultLog(config.max_bad_fraction) if faults is None else faults
        self.stored: StoredEmbeddings | None = None
        if config.embeddings is not None:
            self.stored = StoredEmbeddings(config.embeddings, describe(config.training, config.image_size, random=True))
        image_input = self.stored or Images(config.training, config.image_size)
        self._maker = config.batch_maker(image_input, tokenizer, data_sets[0][0], self.faults)
        self.num_classes = self._maker.num_classes
        # Images are required even if embeddings are read instead: so both give the same order of samples.
        required = [IMAGE if member == image_input.member else member for member in self._maker.members]
        addresses = [address for shards in data_sets for address in shards]
        attach = self.stored.attach if self.stored else lambda table: table
        self.index = ShardIndex(addresses, required, [image_input.member], attach, advance)
        found = ((summary.address, fault) for summary in self.index.summaries for fault in summary.faults)
        self.faults.count_excluded(found, len(self.index))
        self._order, self.numbers = _order(config, self.index.counts, [len(shards) for shards in data_sets])

    @property
    def num_samples(self) -> int:
        """Number of samples per epoch, over all hosts."""
        return len(self.numbers)

    @property
    def digest(self) -> str:
        """Identifies the samples: equal for two loaders that read the same ones."""
        return self.index.digest

    def batches(self, position: int = 0, process_index: int = 0, process_count: int = 1) -> Generator[Batch]:
        """Endless training batches, from any position of the stream.

        Args:
            position: number of samples that all hosts together have consumed before.
            process_index: this host's number.
            process_count: how many hosts share each batch.

        Yields:
            This host's rows of each global batch, ``[b / process_count, ...]``.

        Raises:
            UserError: the batch cannot be divided among the hosts; later, too many samples cannot be read or labelled.
        """
        if position < 0:
            raise UserError(
                f"the loader cannot start at position {position}; give the samples consumed so far, 0 or more"
            )
        size = self.config.batch_size
        rows = rows_per_process(size, process_count)
        first = position + process_index * rows

        def read(number: int) -> Batch:
            positions = range(first + number * size, first + number * size + rows)
            return self._read([self._order[i] for i in positions], positions)

        return self._prefetch(grain.MapDataset.range(sys.maxsize).map(read))

    def epoch(
        self, batch_size: int | None = None, process_index: int = 0, process_count: int = 1, num_crops: int = 0
    ) -> Generator[Batch]:
        """Each sample once, in shard order, with the evaluation preprocessing; the last batch is padded.

        Args:
            batch_size: rows over all hosts; None takes the config's.
            process_index: this host's number.
            process_count: how many hosts share each batch; all get the same number of batches.
            num_crops: K; each sample K times in a row with the training preprocessing, whose randomness is a function
                of the seed, the shard's name, the key and the crop's number.

        Yields:
            This host's rows of each global batch, ``[b / process_count, ...]``.

        Raises:
            UserError: as ``batches``.
        """
        size = batch_size or self.config.batch_size
        rows = rows_per_process(size, process_count)
        repeats = max(1, num_crops)
        num_rows = repeats * self.num_samples

        def read(number: int) -> Batch:
            start = number * size + process_index * rows
            of_batch = range(start, start + rows)
            samples = [self.numbers[i // repeats] if i < num_rows else _PADDING for i in of_batch]
            if not num_crops:
                return self._read(samples, None)
            crops = zip(samples, (i % repeats for i in of_batch), strict=True)
            return self._read(samples, [0 if s == _PADDING else self._position_of_crop(s, crop) for s, crop in crops])

        return self._prefetch(grain.MapDataset.range(-(-num_rows // size)).map(read))

    def sources(self, positions: Iterable[int]) -> list[tuple[str, str]]:
        """Shard and key of the samples at the given positions of the training stream."""
        samples = [self._order[position] for position in positions]
        return [(self.index.shard(sample), self.index.key(sample)) for sample in samples]

    def read(self, samples: Sequence[int]) -> Batch:
        """Returns samples by their index in ``epoch``, with the evaluation preprocessing; raises as ``batches``."""
        return self._read([self.numbers[sample] for sample in samples], None)

    def _position_of_crop(self, sample: int, crop: int) -> int:
        """Returns the position of a crop's random stream, which does not depend on the other shards."""
        name = self.index.shard(sample).rpartition("/")[2]
        digest = hashlib.blake2b(f"{name} {self.index.key(sample)} {crop}".encode("utf-8", "surrogateescape"))
        return int.from_bytes(digest.digest()[:8], "little")

    def _prefetch(self, batches: grain.MapDataset) -> Generator[Batch]:
        threads = self.config.threads
        options = grain.ReadOptions(threads, max(threads, self.config.prefetch_batches) if threads else 0)
        iterator = iter(batches.to_iter_dataset(options))
        try:
            yield from iterator
        finally:
            iterator.close()  # ends the threads, even if the consumer stops early

    def _read(self, samples: Sequence[int], positions: Sequence[int] | None) -> Batch:
        """Makes a batch; positions seed the training preprocessing, None means evaluation preprocessing."""
        members = self._maker.members
        rows = [sample for sample in samples if sample != _PADDING]
        found = iter(self.index.read(rows, members))
        raw = [None if sample == _PADDING else self._raw(sample, next(found)) for sample in samples]
        return self._maker.make(raw, positions, self.num_samples)

    def _raw(self, sample: int, contents: Sequence[bytes | Unreadable]) -> RawSample:
        members = dict(zip(self._maker.members, contents, strict=True))
        return RawSample(self.index.shard(sample), self.index.key(sample), members)


def _order(config: LoaderConfig, counts: Sequence[int], num_shards: Sequence[int]) -> tuple[Order, ConcatenatedRanges]:
    """Returns the order of the samples, and their indices.

    Args:
        config: which data sets are mixed.
        counts: samples of each shard, over all data sets.
        num_shards: of each data set.
    """
    ends = np.cumsum(num_shards).tolist()
    orders, ranges, first = [], [], 0
    for number, data_set in enumerate((config, *config.mixture)):
        set_counts = counts[ends[number] - num_shards[number] : ends[number]]
        num_samples = sum(set_counts)
        if config.mixture and not num_samples:
            raise UserError(f"{data_set.shards[0]}: no sample can be used; fix it, or leave it out of the mixture")
        selected = data_set.portion.sample_range(num_samples)
        if num_samples and not selected:
            raise UserError(
                f"{data_set.shards[0]}: {data_set.portion} of {num_samples} samples is empty; take a larger portion"
            )
        # Each data set of a mixture has its own seed, so that they do not share permutations.
        orders.append(_data_set_order(config, data_set.portion.counts_per_shard(set_counts), config.seed + number))
        ranges.append(range(first + selected.start, first + selected.stop))
        first += num_samples
    starts = [samples.start for samples in ranges]
    if not config.mixture:
        return (Shifted(orders[0], starts[0]) if starts[0] else orders[0]), ConcatenatedRanges(ranges)
    return Mixed(orders, [1.0, *(data_set.weight for data_set in config.mixture)], starts), ConcatenatedRanges(ranges)


def _data_set_order(config: LoaderConfig, counts: Sequence[int], seed: int) -> Order:
    if not config.shuffle:
        return Sequential(sum(counts))
    if config.window is None:
        return Shuffled(sum(counts), seed)
    return WindowShuffled(counts, config.window, seed)
