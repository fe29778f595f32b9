"""Batches from shards: shuffled without end for training, in order once for evaluation.

The order is a pure function of (seed, position), so the whole state of the loader is one integer: the number of
samples consumed so far by all hosts together. Sample ``i`` of the stream, its picture, augmentation and label are the
same on any number of hosts, after any restart; process ``p`` of ``P`` takes rows ``[p b/P, (p+1) b/P)`` of each batch.

One element of the grain pipeline is a whole batch: the cost of grain's bookkeeping is paid once a batch, and a thread
works on a batch of its own.

What is wrong with a sample never moves the others. Samples that the index knows to be broken are in nobody's order;
what reading and decoding find keeps its place as an invalid row. Both are counted by cause and shard.
"""

import collections
import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import grain
import numpy as np

from data_pipelines import storage
from data_pipelines.augment import StreamRandom
from data_pipelines.images import BrokenImage
from data_pipelines.index import ShardIndex
from data_pipelines.labels import Labels, LabelsConfig
from data_pipelines.order import InTurn, Mixed, Order, Shuffled, WindowShuffled
from data_pipelines.shards import IMAGE, expand
from data_pipelines.storage import Unreadable, readable
from data_pipelines.transforms import Augmentation, InceptionCrop, Preprocessing, Training
from lit_het.errors import UserError, require_at_least
from lit_het.types import Batch

Tokenizer = Callable[[list[str]], np.ndarray]

_PADDING = -1  # stands for a sample in rows that only fill the last batch

# A rate of broken samples means little at the start of a run; it is taken over no fewer samples than this.
_MIN_SAMPLES_FOR_RATE = 10_000


@dataclasses.dataclass(frozen=True)
class WeightedShards:
    """A data set that is mixed into another.

    Attributes:
        shards: as those of a `LoaderConfig`.
        weight: samples of this set for each one of the `LoaderConfig`'s own shards.
    """

    shards: tuple[str, ...]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise UserError(
                f"WeightedShards: weight = {self.weight} must be more than 0; leave the data set out instead"
            )


@dataclasses.dataclass(frozen=True)
class LoaderConfig:
    """Which shards to read and how.

    Attributes:
        shards: tar files, brace patterns, globs, folders or lists of these, here or at addresses that fsspec knows.
        image_size: pixels along each side.
        batch_size: samples of all hosts together.
        labels: how to read labels; None reads none.
        mixture: further data sets, each in a fixed proportion to ``shards`` and with an order of its own.
        captions: the member that holds them; ``json/caption`` is the field ``caption`` of a JSON object.
        preprocessing: how pictures become squares.
        crop: which part of a picture training takes; None fits pictures as evaluation does.
        augmentations: changes of training pictures, in order; evaluation never changes them.
        seed: of order, crops and augmentations.
        shuffle: whether training takes each epoch in an order of its own.
        window: shards whose samples are shuffled together, where reads far apart are slow; None shuffles all.
        threads: that read and decode batches ahead; 0 reads each batch when it is asked for.
        prefetch_batches: kept ready.
        max_bad_fraction: part of the samples that may be broken or missing before the run stops.
    """

    shards: tuple[str, ...]
    image_size: int = 32
    batch_size: int = 256
    labels: LabelsConfig | None = None
    mixture: tuple[WeightedShards, ...] = ()
    captions: str = "txt"
    preprocessing: Preprocessing = Preprocessing()
    crop: InceptionCrop | None = None
    augmentations: tuple[Augmentation, ...] = ()
    seed: int = 0
    shuffle: bool = True
    window: int | None = None
    threads: int = 2
    prefetch_batches: int = 4
    max_bad_fraction: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "seed", "threads", "max_bad_fraction")
        require_at_least(1, self, "image_size", "batch_size", "prefetch_batches")
        if self.window is not None:
            require_at_least(1, self, "window")

    def data_sets(self) -> list[list[str]]:
        """Returns the tar files of each data set, that of ``shards`` first.

        Raises:
            UserError: as ``expand``.
        """
        return [expand(shards) for shards in (self.shards, *(data_set.shards for data_set in self.mixture))]

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

    Attributes:
        config: as given.
        index: the samples behind the batches.
        num_classes: of the labels, ``k``; None without labels.
        faults: how many samples were left out or masked since the loader was built, by shard and cause.
        examples: the first of each of these.

    Raises:
        UserError: no shards, or more of their samples are broken than ``max_bad_fraction`` allows.
    """

    def __init__(
        self,
        config: LoaderConfig,
        tokenizer: Tokenizer | None = None,
        advance: Callable[[int], None] = lambda count: None,
    ):
        data_sets = config.data_sets()
        self.config = config
        self.faults: collections.Counter[tuple[str, str]] = collections.Counter()
        self.examples: dict[tuple[str, str], str] = {}
        self._tokenizer = tokenizer
        self._training = Training(config.preprocessing, config.crop, config.augmentations)
        self._labels: Labels | None = config.labels.build(storage.parent(data_sets[0][0])) if config.labels else None
        self.num_classes = self._labels.num_classes if self._labels else None
        self._caption, _, self._caption_field = config.captions.partition("/")
        members = [self._caption] * bool(tokenizer) + ([self._labels.member] if self._labels else [])
        self._members = tuple(dict.fromkeys([IMAGE, *members]))
        self.index = ShardIndex([address for shards in data_sets for address in shards], self._members, advance=advance)
        self._leave_out()
        self._order = _order(config, self.index.counts, [len(shards) for shards in data_sets])
        self._bad_lock = threading.Lock()
        self._bad: set[int] = set()
        self._num_read = 0

    @property
    def bad_samples(self) -> collections.Counter[str]:
        """For each cause, how many samples were left out or masked since the loader was built."""
        causes: collections.Counter[str] = collections.Counter()
        for (_, cause), count in self.faults.items():
            causes[cause] += count
        return causes

    @property
    def num_samples(self) -> int:
        """Samples in one epoch, over all hosts."""
        return len(self.index)

    def batches(self, position: int = 0, process_index: int = 0, process_count: int = 1) -> Generator[Batch]:
        """Training batches without end, from any position of the stream.

        Args:
            position: samples that all hosts together have consumed before.
            process_index: this host's number.
            process_count: how many hosts share each batch.

        Yields:
            This host's rows of each global batch, ``[b / process_count, ...]``.

        Raises:
            UserError: the batch cannot be divided among the hosts; later, a sample cannot be read or labelled.
        """
        if position < 0:
            raise UserError(
                f"the loader cannot start at position {position}; give the samples consumed so far, 0 or more"
            )
        size = self.config.batch_size
        rows = _rows_per_process(size, process_count)
        first = position + process_index * rows

        def read(number: int) -> Batch:
            start = first + number * size
            samples = [self._order[i] for i in range(start, start + rows)]
            return self._read(samples, start)

        return self._prefetch(grain.MapDataset.range(sys.maxsize).map(read))

    def epoch(self, batch_size: int | None = None, process_index: int = 0, process_count: int = 1) -> Generator[Batch]:
        """Each sample once, in the order of the shards, without augmentation; the last batch ends in invalid rows.

        Args:
            batch_size: samples of all hosts together; None takes the config's.
            process_index: this host's number.
            process_count: how many hosts share each batch; all see the same number of batches.

        Yields:
            This host's rows of each global batch, ``[b / process_count, ...]``.

        Raises:
            UserError: as ``batches``.
        """
        size = batch_size or self.config.batch_size
        rows = _rows_per_process(size, process_count)

        def read(number: int) -> Batch:
            start = number * size + process_index * rows
            return self._read([i if i < self.num_samples else _PADDING for i in range(start, start + rows)], None)

        return self._prefetch(grain.MapDataset.range(-(-self.num_samples // size)).map(read))

    def _prefetch(self, batches: grain.MapDataset) -> Generator[Batch]:
        threads = self.config.threads
        options = grain.ReadOptions(threads, max(threads, self.config.prefetch_batches) if threads else 0)
        iterator = iter(batches.to_iter_dataset(options))
        try:
            yield from iterator
        finally:
            iterator.close()  # ends the threads, also when the consumer stops early

    def _read(self, samples: Sequence[int], augment_from: int | None) -> Batch:
        """Reads samples into a batch; row ``i`` is augmented as position ``augment_from + i``, or not for None."""
        size = self.config.image_size
        image = np.zeros((len(samples), size, size, 3), np.uint8)
        valid = np.zeros(len(samples), bool)
        captions = [""] * len(samples)
        label = self._labels.zeros(len(samples)) if self._labels else None
        random = StreamRandom(self.config.seed)
        rows = [row for row, sample in enumerate(samples) if sample != _PADDING]
        found = self.index.read([samples[row] for row in rows], self._members)
        for row, contents in zip(rows, found, strict=True):
            try:
                members = dict(zip(self._members, map(readable, contents), strict=True))
                if augment_from is None:
                    pixels = self.config.preprocessing.apply(members[IMAGE], size)
                else:
                    pixels = self._training.apply(members[IMAGE], size, random.at(augment_from + row))
                texts = {member: _text(content) for member, content in members.items() if member != IMAGE}
                captions[row] = self._caption_of(texts) if self._tokenizer else ""
            except (BrokenImage, Unreadable) as error:
                self._count_bad(samples[row], error.cause, str(error))
                continue
            if label is not None and self._labels:
                label[row] = self._encode_label(samples[row], self._labels, texts)
            image[row], valid[row] = pixels, True
        with self._bad_lock:
            self._num_read += len(samples)
        return Batch(valid=valid, image=image, text=self._tokenise(captions, valid), label=label)

    def _caption_of(self, texts: Mapping[str, str]) -> str:
        """Returns a caption, which is never empty."""
        caption: Any = texts[self._caption]
        if self._caption_field:
            try:
                caption = json.loads(caption)[self._caption_field]
            except (ValueError, KeyError, TypeError) as error:
                raise Unreadable(
                    f"no caption in .{self.config.captions}", f"{type(error).__name__}: {error}"
                ) from error
        if not isinstance(caption, str) or not caption.strip():
            raise Unreadable("empty caption", repr(caption))
        return caption

    def _tokenise(self, captions: list[str], valid: np.ndarray) -> np.ndarray | None:
        if self._tokenizer is None:
            return None
        text = self._tokenizer(captions)
        text[~valid] = 0
        return text

    def _encode_label(self, sample: int, labels: Labels, texts: dict[str, str]) -> Any:
        try:
            return labels.encode(texts[labels.member])
        except UserError as error:
            raise UserError(f"{self._name(sample)}: {error}") from error

    def _leave_out(self) -> None:
        """Counts what the index found, and stops if it is too much."""
        faults = [(summary.address, fault) for summary in self.index.summaries for fault in summary.faults]
        self.faults.update({(address, fault.cause): fault.count for address, fault in faults})
        self.examples.update({(address, fault.cause): fault.example for address, fault in faults})
        left_out = sum(fault.count for _, fault in faults)
        if faults and (left_out > self.config.max_bad_fraction * (left_out + len(self.index)) or not len(self.index)):
            raise UserError(
                f"{faults[0][1].example}; {left_out} of {left_out + len(self.index)} samples cannot be used, and"
                f" --data.max-bad-fraction allows {self.config.max_bad_fraction:g}"
            )

    def _count_bad(self, sample: int, cause: str, reason: str) -> None:
        fault = (self.index.shard(sample), cause)
        with self._bad_lock:
            self.faults[fault] += 1
            self.examples.setdefault(fault, f"{self._name(sample)}: {reason}")
            self._bad.add(sample)
            seen = min(self.num_samples, max(self._num_read, _MIN_SAMPLES_FOR_RATE))
            exceeded = len(self._bad) > self.config.max_bad_fraction * seen
        if exceeded:
            raise UserError(
                f"{self._name(sample)}: {reason}; {len(self._bad)} bad of {seen} samples: mend them,"
                " or allow more with --data.max-bad-fraction"
            )

    def _name(self, sample: int) -> str:
        return f"{self.index.shard(sample)}: key {self.index.key(sample)}"


def _order(config: LoaderConfig, counts: Sequence[int], num_shards: Sequence[int]) -> Order:
    """Returns the order of a mixture, whose data sets have so many of the shards each."""
    ends = np.cumsum(num_shards).tolist()
    of_sets = [counts[end - number : end] for end, number in zip(ends, num_shards, strict=True)]
    starts = np.cumsum([0, *map(sum, of_sets)]).tolist()
    # Data sets of a mixture do not share their permutations.
    orders = [_order_of_one(config, of_set, config.seed + number) for number, of_set in enumerate(of_sets)]
    if len(orders) == 1:
        return orders[0]
    return Mixed(orders, [1.0, *(data_set.weight for data_set in config.mixture)], starts)


def _order_of_one(config: LoaderConfig, counts: Sequence[int], seed: int) -> Order:
    if not config.shuffle:
        return InTurn(sum(counts))
    if config.window is None:
        return Shuffled(sum(counts), seed)
    return WindowShuffled(counts, config.window, seed)


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable("text is not UTF-8", error.reason) from error


def _rows_per_process(batch_size: int, process_count: int) -> int:
    if batch_size < 1 or batch_size % process_count:
        raise UserError(
            f"a batch of {batch_size} cannot be divided among {process_count} processes;"
            " set --data.batch-size to a multiple of them"
        )
    return batch_size // process_count
