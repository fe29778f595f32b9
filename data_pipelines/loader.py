"""Batches from shards: shuffled without end for training, in order once for evaluation.

The order is a pure function of (seed, position), so the whole state of the loader is one integer: the number of
samples consumed so far by all hosts together. Sample ``i`` of the stream, its picture, augmentation and label are the
same on any number of hosts, after any restart; process ``p`` of ``P`` takes rows ``[p b/P, (p+1) b/P)`` of each batch.

One element of the grain pipeline is a whole batch: the cost of grain's bookkeeping is paid once a batch, and a thread
works on a batch of its own.
"""

import collections
import dataclasses
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, cast

import grain
import numpy as np

from data_pipelines.augment import RandomAffine, StreamRandom
from data_pipelines.images import BrokenImage, decode
from data_pipelines.labels import Labels, LabelsConfig
from data_pipelines.shards import IMAGE, ShardIndex, expand
from lit_het.errors import UserError, require_at_least
from lit_het.types import Batch

Tokenizer = Callable[[list[str]], np.ndarray]

_TEXT = "txt"
_PADDING = -1  # stands for a sample in rows that only fill the last batch

# A rate of broken samples means little at the start of a run; it is taken over no fewer samples than this.
_MIN_SAMPLES_FOR_RATE = 10_000


@dataclasses.dataclass(frozen=True)
class LoaderConfig:
    """Which shards to read and how.

    Attributes:
        shards: tar files, brace patterns, globs or folders.
        image_size: pixels along each side.
        batch_size: samples of all hosts together.
        labels: how to read labels; None reads none.
        augmentation: changes of training pictures; evaluation never changes them.
        seed: of order and augmentation.
        shuffle: whether training takes each epoch in an order of its own.
        threads: that read and decode batches ahead; 0 reads each batch when it is asked for.
        prefetch_batches: kept ready.
        max_bad_fraction: part of the samples that may be unreadable before the run stops.
    """

    shards: tuple[str, ...]
    image_size: int = 32
    batch_size: int = 256
    labels: LabelsConfig | None = None
    augmentation: RandomAffine | None = None
    seed: int = 0
    shuffle: bool = True
    threads: int = 2
    prefetch_batches: int = 4
    max_bad_fraction: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "seed", "threads", "max_bad_fraction")
        require_at_least(1, self, "image_size", "batch_size", "prefetch_batches")

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
        bad_samples: for each cause, how many unreadable samples were masked since the loader was built.
    """

    def __init__(
        self,
        config: LoaderConfig,
        tokenizer: Tokenizer | None = None,
        advance: Callable[[int], None] | None = None,
    ):
        paths = expand(config.shards)
        self.config = config
        self.bad_samples: collections.Counter[str] = collections.Counter()
        self._tokenizer = tokenizer
        self._labels: Labels | None = config.labels.build(paths[0].parent) if config.labels else None
        self.num_classes = self._labels.num_classes if self._labels else None
        self._members = [_TEXT] if tokenizer else []
        if self._labels and self._labels.member not in self._members:
            self._members.append(self._labels.member)
        self.index = ShardIndex(paths, [IMAGE, *self._members], advance)
        self._order = _order(len(self.index), config.seed, config.shuffle)
        self._bad_lock = threading.Lock()
        self._bad: set[int] = set()
        self._num_read = 0

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
            samples = [cast(int, self._order[i]) for i in range(start, start + rows)]
            return self._read(samples, start if self.config.augmentation else None)

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
        """Reads samples into a batch; row ``i`` is augmented as position ``augment_from + i``."""
        size = self.config.image_size
        image = np.zeros((len(samples), size, size, 3), np.uint8)
        valid = np.zeros(len(samples), bool)
        captions = [""] * len(samples)
        label = self._labels.zeros(len(samples)) if self._labels else None
        random = StreamRandom(self.config.seed)
        for row, sample in enumerate(samples):
            if sample == _PADDING:
                continue
            try:
                pixels = decode(self.index.read(sample, IMAGE), size)
                texts = {member: self.index.read(sample, member).decode("utf-8") for member in self._members}
            except BrokenImage as error:
                self._count_bad(sample, error.cause, str(error))
                continue
            except UnicodeDecodeError as error:
                self._count_bad(sample, "text is not UTF-8", f"text is not UTF-8 ({error.reason})")
                continue
            if self.config.augmentation and augment_from is not None:
                pixels = self.config.augmentation.apply(pixels, random.at(augment_from + row))
            if label is not None and self._labels:
                label[row] = self._encode_label(sample, self._labels, texts)
            image[row], valid[row], captions[row] = pixels, True, texts.get(_TEXT, "")
        with self._bad_lock:
            self._num_read += len(samples)
        return Batch(valid=valid, image=image, text=self._tokenise(captions, valid), label=label)

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

    def _count_bad(self, sample: int, cause: str, reason: str) -> None:
        with self._bad_lock:
            self.bad_samples[cause] += 1
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


def _order(num_samples: int, seed: int, shuffle: bool) -> grain.MapDataset[int]:
    """Maps the position in the endless stream to a sample; every epoch is a permutation of its own."""
    order = grain.MapDataset.range(num_samples)
    if shuffle:
        # grain numbers the epochs' seeds upwards, so neighbouring seeds would share orders if they were not hashed
        order = order.shuffle(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    return order.repeat()


def _rows_per_process(batch_size: int, process_count: int) -> int:
    if batch_size < 1 or batch_size % process_count:
        raise UserError(
            f"a batch of {batch_size} cannot be divided among {process_count} processes;"
            " set --data.batch-size to a multiple of them"
        )
    return batch_size // process_count
