"""Batches from shards: shuffled without end for training, in order once for evaluation.

The order is a pure function of (seed, position), so the whole state of the loader is one integer: the number of
samples consumed so far by all hosts together. Sample ``i`` of the stream, its image, augmentation and label are the
same on any number of hosts, after any restart; process ``p`` of ``P`` takes rows ``[p b/P, (p+1) b/P)`` of each batch.

One element of the grain pipeline is a whole batch: the cost of grain's bookkeeping is paid once a batch, and a thread
works on a batch of its own.

What is wrong with a sample never moves the others. Samples that the index knows to be broken are in nobody's order;
what reading and decoding find keeps its place as an invalid row. Both are counted by cause and shard.
"""

import dataclasses
import hashlib
import math
import sys
from collections.abc import Callable, Generator, Iterable, Sequence

import grain
import numpy as np

from lit_het.data_pipelines import storage
from lit_het.data_pipelines.batches import BatchMaker, Captions, Images, RawSample, Tokenizer, Views, rows_per_process
from lit_het.data_pipelines.embeddings import StoredEmbeddings, describe
from lit_het.data_pipelines.faults import FaultLog
from lit_het.data_pipelines.index import ShardIndex
from lit_het.data_pipelines.labels import LabelsConfig
from lit_het.data_pipelines.order import InTurn, Mixed, Order, Shifted, Shuffled, WindowShuffled
from lit_het.data_pipelines.portions import ALL, Numbers, Portion
from lit_het.data_pipelines.shards import IMAGE, expand
from lit_het.data_pipelines.storage import Unreadable
from lit_het.data_pipelines.transforms import Augmentation, InceptionCrop, Preprocessing, RandomCrop, Training
from lit_het.errors import UserError, require_at_least
from lit_het.types import Batch

_PADDING = -1  # stands for a sample in rows that only fill the last batch


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
        shuffle_buffer: samples, undecoded, that the threads of a host hold together and draw from.
    """

    shuffle_buffer: int = 10_000

    def __post_init__(self) -> None:
        require_at_least(1, self, "shuffle_buffer")


@dataclasses.dataclass(frozen=True)
class LoaderConfig:
    """Which shards to read and how.

    Attributes:
        shards: tar files, brace patterns, globs, folders or lists of these, here or at addresses that fsspec knows.
        image_size: pixels along each side.
        batch_size: samples of all hosts together.
        labels: how to read labels; None reads none.
        portion: of the samples of ``shards``, to keep some of a training set for validation.
        mixture: further data sets, each in a fixed proportion to ``shards`` and with an order of its own.
        captions: the member that holds them; ``json/caption`` is the field ``caption`` of a JSON object.
        preprocessing: how images become squares.
        crop: which part of an image training takes; None fits images as evaluation does.
        augmentations: changes of training images, in order; evaluation never changes them.
        seed: of order, crops and augmentations.
        shuffle: whether training takes each epoch in an order of its own.
        window: shards whose samples are shuffled together, where reads far apart are slow; None shuffles all.
        threads: that read and decode batches ahead; 0 reads each batch when it is asked for.
        prefetch_batches: kept ready.
        max_bad_fraction: part of the samples that may be broken or missing before the run stops.
        embeddings: a folder that ``lit-het embed`` wrote for these shards, to be read in place of images.
        slow_read_seconds: after which a read that has not come back is named, again and again.
        stuck_read_seconds: after which it ends the run, so that it is started again.
        stream: reads shards that cannot seek from end to end, as a `Stream`; None reads at random, as a `Loader`.
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
        """How images become squares in training."""
        return Training(self.preprocessing, self.crop, self.augmentations)

    def batch_maker(self, views: Views, tokenizer: Tokenizer | None, address: str, faults: FaultLog) -> BatchMaker:
        """Joins views with captions and labels, whose files are looked for near the address of a shard.

        Raises:
            UserError: the labels cannot be read.
        """
        captions = Captions(self.captions, tokenizer) if tokenizer else None
        labels = self.labels.build(storage.parent(address)) if self.labels else None
        return BatchMaker(views, captions, labels, self.seed, faults)

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
        """Indexes the shards; captions are read only for a tokenizer or for labels made of words.

        Raises:
            UserError: as ``expand``, ``ShardIndex`` and the labels do.
        """
        return Loader(self, tokenizer)


class Loader:
    """Reads batches of NumPy arrays from shards.

    Args:
        config: which shards, and how.
        tokenizer: captions to ids ``[n l]``; None leaves ``Batch.text`` out.
        advance: called with 1 after each shard that was indexed, for a progress bar.
        faults: where to count what is wrong; None makes one that stops at ``max_bad_fraction``.

    Attributes:
        config: as given.
        index: the samples of all shards.
        numbers: which of them an epoch holds, as its `Portion` says.
        num_classes: of the labels, ``k``; None without labels.
        faults: what was left out or masked since the loader was built.
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
        views = self.stored or Images(config.training, config.image_size)
        self._maker = config.batch_maker(views, tokenizer, data_sets[0][0], self.faults)
        self.num_classes = self._maker.num_classes
        # Samples without images are left out, also where images are not read: the order is the same.
        required = [IMAGE if member == views.member else member for member in self._maker.members]
        addresses = [address for shards in data_sets for address in shards]
        attach = self.stored.attach if self.stored else lambda table: table
        self.index = ShardIndex(addresses, required, [views.member], attach, advance)
        found = ((summary.address, fault) for summary in self.index.summaries for fault in summary.faults)
        self.faults.leave_out(found, len(self.index))
        self._order, self.numbers = _order(config, self.index.counts, [len(shards) for shards in data_sets])

    @property
    def num_samples(self) -> int:
        """Samples in one epoch, over all hosts."""
        return len(self.numbers)

    @property
    def digest(self) -> str:
        """Tells whether two loaders read the same samples."""
        return self.index.digest

    def batches(self, position: int = 0, process_index: int = 0, process_count: int = 1) -> Generator[Batch]:
        """Training batches without end, from any position of the stream.

        Args:
            position: samples that all hosts together have consumed before.
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
        """Each sample once, in the order of the shards, as evaluation sees it; the last batch ends in invalid rows.

        Args:
            batch_size: rows of all hosts together; None takes the config's.
            process_index: this host's number.
            process_count: how many hosts share each batch; all see the same number of batches.
            num_crops: K; each sample K times in a row, changed at random as in training. What is random is a function
                of the seed, the shard's name, the key and the number of the crop.

        Yields:
            This host's rows of each global batch, ``[b / process_count, ...]``.

        Raises:
            UserError: as ``batches``.
        """
        size = batch_size or self.config.batch_size
        rows = rows_per_process(size, process_count)
        views = max(1, num_crops)
        num_rows = views * self.num_samples

        def read(number: int) -> Batch:
            start = number * size + process_index * rows
            of_batch = range(start, start + rows)
            samples = [self.numbers[i // views] if i < num_rows else _PADDING for i in of_batch]
            if not num_crops:
                return self._read(samples, None)
            crops = zip(samples, (i % views for i in of_batch), strict=True)
            return self._read(samples, [0 if s == _PADDING else self._position_of_crop(s, crop) for s, crop in crops])

        return self._prefetch(grain.MapDataset.range(-(-num_rows // size)).map(read))

    def sources(self, positions: Iterable[int]) -> list[tuple[str, str]]:
        """Shard and key of the samples at some positions of the stream of training batches."""
        samples = [self._order[position] for position in positions]
        return [(self.index.shard(sample), self.index.key(sample)) for sample in samples]

    def read(self, samples: Sequence[int]) -> Batch:
        """Some samples, by their place in ``epoch``, as evaluation sees them; raises as ``batches``."""
        return self._read([self.numbers[sample] for sample in samples], None)

    def _position_of_crop(self, sample: int, crop: int) -> int:
        """Returns a place among random streams that does not change where other shards come or go."""
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
            iterator.close()  # ends the threads, also when the consumer stops early

    def _read(self, samples: Sequence[int], positions: Sequence[int] | None) -> Batch:
        """Reads samples into a batch; in training each is changed as its position in the stream says."""
        members = self._maker.members
        rows = [sample for sample in samples if sample != _PADDING]
        found = iter(self.index.read(rows, members))
        raw = [None if sample == _PADDING else self._raw(sample, next(found)) for sample in samples]
        return self._maker.make(raw, positions, self.num_samples)

    def _raw(self, sample: int, contents: Sequence[bytes | Unreadable]) -> RawSample:
        members = dict(zip(self._maker.members, contents, strict=True))
        return RawSample(self.index.shard(sample), self.index.key(sample), members)


def _order(config: LoaderConfig, counts: Sequence[int], num_shards: Sequence[int]) -> tuple[Order, Numbers]:
    """Returns the order of a mixture, whose data sets have so many of the shards each, and the samples in it."""
    ends = np.cumsum(num_shards).tolist()
    orders, chosen, first = [], [], 0
    for number, data_set in enumerate((config, *config.mixture)):
        of_set = counts[ends[number] - num_shards[number] : ends[number]]
        if config.mixture and not sum(of_set):
            raise UserError(f"{data_set.shards[0]}: no sample can be used; mend it, or leave it out of the mixture")
        within = data_set.portion.of(sum(of_set))
        if sum(of_set) and not within:
            raise UserError(
                f"{data_set.shards[0]}: {data_set.portion} of {sum(of_set)} samples are none; take a larger portion"
            )
        # Data sets of a mixture do not share their permutations.
        orders.append(_order_of_one(config, data_set.portion.cut(of_set), config.seed + number))
        chosen.append(range(first + within.start, first + within.stop))
        first += sum(of_set)
    starts = [samples.start for samples in chosen]
    if not config.mixture:
        return (Shifted(orders[0], starts[0]) if starts[0] else orders[0]), Numbers(chosen)
    return Mixed(orders, [1.0, *(data_set.weight for data_set in config.mixture)], starts), Numbers(chosen)


def _order_of_one(config: LoaderConfig, counts: Sequence[int], seed: int) -> Order:
    if not config.shuffle:
        return InTurn(sum(counts))
    if config.window is None:
        return Shuffled(sum(counts), seed)
    return WindowShuffled(counts, config.window, seed)
