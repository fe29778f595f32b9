"""Batches from shards: shuffled and endless for training, in order and once for evaluation.

The order is a pure function of (seed, position). So the state of the loader is one integer: the number of samples that
all hosts together have consumed. Sample ``i`` of the stream, its image, augmentation and label are the same on any
number of hosts and after any restart. Process ``p`` of ``P`` takes rows ``[p b/P, (p+1) b/P)`` of each batch.

One element of the grain pipeline is a whole batch: grain's overhead is paid once per batch, and each thread makes a
batch of its own.

A broken sample does not move the others. Samples that the index excludes are not part of the order. Samples that
cannot be read or decoded become invalid rows. Both are counted by cause and shard.
"""

import copy
import dataclasses
import hashlib
import itertools
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING

import grain
import numpy as np
from jaxtyping import Float, Int

from lit_het.console import message
from lit_het.data_pipelines.batches import (
    RawSample,
    Tokenizer,
    batch_maker,
    input_of,
    rows_per_process,
)
from lit_het.data_pipelines.data_config import STORED, LoaderConfig, WeightedShards
from lit_het.data_pipelines.shards.faults import FaultLog
from lit_het.data_pipelines.shards.hashed import marked, of_other_languages
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.order import Chosen, HeldOut, Mixed, Order, Sequential, Shuffled, WindowShuffled
from lit_het.data_pipelines.shards.portions import Concatenated, Marked, Portion
from lit_het.data_pipelines.shards.sample_tables import excluded_samples
from lit_het.data_pipelines.shards.storage import Unreadable
from lit_het.data_pipelines.shards.suspects import suspects_of
from lit_het.data_pipelines.shards.tables import ShardTable
from lit_het.data_pipelines.shards.writing import common_shards
from lit_het.errors import UserError
from lit_het.tasks.held_out import group
from lit_het.types import Batch

if TYPE_CHECKING:
    from lit_het.data_pipelines.embeddings import StoredEmbeddings

_PADDING = -1  # the sample of a row that only fills the last batch


class Loader:
    """Reads batches of NumPy arrays from shards.

    Args:
        config: which shards, and how.
        tokenizer: captions and sources to ids ``[n l]``; None leaves ``Batch.text`` out.
        advance: called with 1 after each indexed shard, for a progress bar.
        faults: counts broken samples; None creates a log that stops at ``max_bad_fraction``.
        has_captions: False leaves ``Batch.text`` out, and reads sources alone.

    Attributes:
        config: as given.
        required: the kinds of members that every sample has, but captions.
        index: the samples of all shards.
        numbers: indices of the samples in an epoch, selected by the `Portion`.
        num_classes: of the labels, ``k``; None without labels.
        faults: samples excluded or masked since the loader was built.
        stored: the embeddings that are read in place of images, or None.
        beside: the embeddings that are read beside images and captions, by the fields of `Batch`.
    """

    def __init__(
        self,
        config: LoaderConfig,
        tokenizer: Tokenizer | None = None,
        advance: Callable[[int], None] = lambda count: None,
        faults: FaultLog | None = None,
        *,
        has_captions: bool = True,
    ):
        data_sets = config.data_sets()
        _check_held_out(config, data_sets)
        self.config = config
        self.faults = FaultLog(config.max_bad_fraction) if faults is None else faults
        own_input, tokenizer = input_of(config, tokenizer), tokenizer if has_captions else None
        self.stored, self.beside = _stored_embeddings(config, has_texts=tokenizer is not None)
        image_input = self.stored or own_input
        addresses = [*itertools.chain(*data_sets)]
        beside = tuple(self.beside.values())
        self._maker = batch_maker(config, image_input, tokenizer, addresses, self.faults, beside)
        self.num_classes = self._maker.num_classes
        # Images are required even if embeddings are read instead: so both give the same order of samples.
        self._all_stored = [part for part in (self.stored, *beside) if part is not None]
        kinds = [part.member for part in self._all_stored]
        others = (kind for kind in self._maker.shared if kind not in kinds)
        self.required = list(dict.fromkeys([own_input.member, *others]))
        addresses = [address for shards in data_sets for address in shards]
        own = None
        if tokenizer is not None:
            texts = zip(config.texts, data_sets, strict=True)
            own = [place.member for place, shards in texts for _ in shards]
        # Captions also where they are not read: a portion by caption is the same for any model.
        kinds += [member for place in config.texts for member in place.members]
        self.index = ShardIndex(addresses, self.required, kinds, self._attach, advance, own)
        found = ((summary.address, fault) for summary in self.index.summaries for fault in summary.faults)
        self.faults.count_excluded(found, len(self.index))
        self._num_shards = [len(shards) for shards in data_sets]
        of_shards = np.cumsum([0, *self.index.counts])
        self._ends = of_shards[np.cumsum(self._num_shards)]
        self._suspects = suspects_of(config, self.index, data_sets[0])
        self._weight = 0.0 if config.suspects is None else config.suspects.weight
        self._excluded = excluded_samples(config.exclude, self.index)
        if config.language is not None and config.language.only:
            self._excluded = np.union1d(self._excluded, self._of_other_languages(config.language.only))
        self._order, self.numbers = _order(config, self.index, self._num_shards, self._left_out)

    def _of_other_languages(self, only: Sequence[str]) -> list[int]:
        found, count = of_other_languages(self.index, self._num_shards, self.config.texts), len(self.index)
        if len(found) == count:
            raise UserError(f"no sample has a caption in {' or '.join(only)}; change data.language.only, or its place")
        message(f"{len(found):,} of {count:,} samples have no caption in {' or '.join(only)}")
        return found

    def _attach(self, table: ShardTable) -> ShardTable:
        for stored in self._all_stored:
            table = stored.attach(table)
        return table

    def with_portion(self, portion: Portion) -> "Loader":
        """Returns a loader of another portion of ``shards``, with the same index."""
        other = copy.copy(self)
        other.config = dataclasses.replace(self.config, portion=portion)
        other._order, other.numbers = _order(other.config, self.index, self._num_shards, self._left_out)
        return other

    @property
    def num_samples(self) -> int:
        """Number of samples per epoch, over all hosts."""
        return len(self.numbers)

    @property
    def digest(self) -> str:
        """Identifies the samples: equal for two loaders of the same shards that leave out the same of them."""
        others = self._suspects.tobytes()
        if len(self._excluded):
            others += b"excluded" + self._excluded.tobytes()
        if self.config.portion.by in ("sample", "name"):  # shards of other names have other samples in the portion
            others += b"/".join(self.index.names)
        return hashlib.sha256(self.index.digest.encode() + others).hexdigest()[:16] if others else self.index.digest

    @property
    def _left_out(self) -> Int[np.ndarray, " n"]:
        """The samples that are not read, in ascending order."""
        return self._excluded if self._weight else np.union1d(self._excluded, self._suspects)

    def batches(self, position: int = 0, process_index: int = 0, process_count: int = 1) -> Generator[Batch]:
        """Endless training batches, from any position of the stream.

        Args:
            position: number of samples that all hosts together have consumed before.
            process_index: this host's number.
            process_count: how many hosts share each batch.

        Yields:
            This host's rows of each global batch, ``[b / process_count, ...]``.
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

        # The stream never ends: positions are computed, so the length costs nothing.
        return self._prefetch(grain.MapDataset.range(sys.maxsize).map(read))

    def epoch(
        self,
        batch_size: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
        num_crops: int = 0,
        num_samples: int | None = None,
    ) -> Generator[Batch]:
        """Each sample once, in shard order, with the evaluation preprocessing; the last batch is padded.

        Args:
            batch_size: rows over all hosts; None takes the config's.
            process_index: this host's number.
            process_count: how many hosts share each batch; all get the same number of batches.
            num_crops: K; each sample K times in a row with the training preprocessing, whose randomness is a function
                of the seed, the shard's name, the key and the crop's number.
            num_samples: only so many samples, evenly spread over the epoch; None takes all.

        Yields:
            This host's rows of each global batch, ``[b / process_count, ...]``.
        """
        size = batch_size or self.config.batch_size
        rows = rows_per_process(size, process_count)
        repeats = max(1, num_crops)
        count = self.num_samples if num_samples is None else min(num_samples, self.num_samples)
        num_rows = repeats * count

        def read(number: int) -> Batch:
            start = number * size + process_index * rows
            of_batch = range(start, start + rows)
            places = (i // repeats * self.num_samples // count if i < num_rows else _PADDING for i in of_batch)
            samples = self._samples_at(places)
            if not num_crops:
                return self._read(samples, None)
            return self._read(samples, self._positions_of_crops(samples, [i % repeats for i in of_batch]))

        return self._prefetch(grain.MapDataset.range(-(-num_rows // size)).map(read))

    def views(
        self, count: int, choose: Callable[[int], tuple[Int[np.ndarray, " b"], Int[np.ndarray, " b"]]]
    ) -> Generator[Batch]:
        """Yields ``count`` batches with the training preprocessing.

        Args:
            count: of the batches.
            choose: the number of a batch to its samples by their index in ``epoch``, -1 for an invalid row, and to the
                numbers of their crops, as in ``epoch``.
        """

        def read(number: int) -> Batch:
            places, crops = (part.tolist() for part in choose(number))
            samples = self._samples_at(places)
            return self._read(samples, self._positions_of_crops(samples, crops))

        return self._prefetch(grain.MapDataset.range(count).map(read))

    def sources(self, positions: Iterable[int]) -> list[tuple[str, str]]:
        """Shard and key of the samples at the given positions of the training stream."""
        samples = [self._order[position] for position in positions]
        return [(self.index.shard(sample), self.index.key(sample)) for sample in samples]

    def read(self, samples: Sequence[int]) -> Batch:
        """Returns samples by their index in ``epoch``, with the evaluation preprocessing; raises as ``batches``."""
        return self._read([self.numbers[sample] for sample in samples], None)

    def _samples_at(self, places: Iterable[int]) -> list[int]:
        """Returns samples by their index in ``epoch``."""
        return [_PADDING if place == _PADDING else self.numbers[place] for place in places]

    def _positions_of_crops(self, samples: Sequence[int], crops: Sequence[int]) -> list[int]:
        pairs = zip(samples, crops, strict=True)
        return [0 if sample == _PADDING else self._position_of_crop(sample, crop) for sample, crop in pairs]

    def _position_of_crop(self, sample: int, crop: int) -> int:
        """Returns the position of a crop's random stream, which does not depend on the other shards."""
        name = self.index.shard(sample).rpartition("/")[2]
        digest = hashlib.blake2b(f"{name} {self.index.key(sample)} {crop}".encode("utf-8", "surrogateescape"))
        return int.from_bytes(digest.digest()[:8], "little")

    def _prefetch(self, batches: grain.MapDataset) -> Generator[Batch]:
        threads = self.config.threads
        # At least one batch per thread is in preparation; with fewer, threads would have nothing to do.
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
        batch = self._maker.make(raw, positions, self.num_samples)
        return dataclasses.replace(batch, weight=self._weights(samples)) if self._weight else batch

    def _weights(self, samples: Sequence[int]) -> Float[np.ndarray, " b"]:
        """Returns the weight of suspects, and 1 for other samples."""
        # A binary search, as a set of suspects would need several times their memory.
        first, end = (np.searchsorted(self._suspects, samples, side) for side in ("left", "right"))
        return np.where(first < end, self._weight, 1.0).astype(np.float32)

    def _raw(self, sample: int, contents: Sequence[bytes | Unreadable]) -> RawSample:
        members = dict(zip(self._maker.members, contents, strict=True))
        data_set = int(np.searchsorted(self._ends, sample, "right"))
        return RawSample(self.index.shard(sample), self.index.key(sample), members, data_set)


def _stored_embeddings(
    config: LoaderConfig, *, has_texts: bool
) -> tuple["StoredEmbeddings | None", "dict[str, StoredEmbeddings]"]:
    """Returns the stored embeddings that are read in place of images, and others by the fields of `Batch`."""
    if not any(getattr(config, field) for field in STORED):
        return None, {}
    from lit_het.data_pipelines.embeddings import StoredEmbeddings, describe, describe_captions

    images, beside = None, {}
    if config.embeddings is not None:
        images = StoredEmbeddings(config.embeddings, describe(config.training, config.image_size, random=True))
    for field, address in (("teacher_image", config.teacher_embeddings), ("teacher_logits", config.teacher_logits)):
        if address is not None:
            beside[field] = StoredEmbeddings(address, None, field=field)
    place = config.texts[0]
    texts = (("text_embedding", config.text_embeddings), ("teacher_text", config.teacher_text_embeddings))
    for field, address in texts if has_texts else ():
        if address is not None:
            beside[field] = StoredEmbeddings(address, describe_captions(place), place.only_member(), field)
    return images, beside


def _order(
    config: LoaderConfig, index: ShardIndex, num_shards: Sequence[int], left_out: Int[np.ndarray, " n"]
) -> tuple[Order, Concatenated]:
    """Returns the order of the samples, and their indices.

    Args:
        config: which data sets are mixed.
        index: of the shards of all data sets.
        num_shards: of each data set.
        left_out: samples that are not read, in ascending order.
    """
    counts, ends = index.counts, np.cumsum(num_shards).tolist()
    orders, parts, first = list[Order](), list[range | Marked](), 0
    for number, data_set in enumerate((config, *config.mixture)):
        shards = range(ends[number] - num_shards[number], ends[number])
        set_counts = counts[shards.start : shards.stop]
        num_samples = sum(set_counts)
        if config.mixture and not num_samples:
            raise UserError(f"{data_set.shards[0]}: no sample can be used; fix it, or leave it out of the mixture")
        begin, end = np.searchsorted(left_out, [first, first + num_samples])
        chosen: Sequence[range | Marked]
        if data_set.portion.by == "order" and begin == end:
            selected = data_set.portion.sample_range(num_samples)
            chosen = [range(first + selected.start, first + selected.stop)]
            chosen_counts = data_set.portion.counts_per_shard(set_counts)
        else:
            chosen = marked(data_set.portion, index, shards, config.texts[number], left_out[begin:end])
            chosen_counts = list(map(len, chosen))
        if num_samples and not any(chosen_counts):
            if end - begin == num_samples or (begin < end and data_set.portion.by == "order"):
                raise UserError(
                    f"{data_set.shards[0]}: all samples are left out; lower suspects.fraction, or name fewer tables in "
                    "exclude"
                )
            raise UserError(
                f"{data_set.shards[0]}: {data_set.portion} of {num_samples} samples is empty; take a larger portion"
            )
        # Each data set of a mixture has its own seed, so that they do not share permutations.
        order = _data_set_order(config, chosen_counts, config.seed + number)
        orders.append(order if chosen == [range(num_samples)] else Chosen(order, Concatenated(chosen)))
        parts += chosen
        first += num_samples
    return _mixed(config, orders) if config.mixture else orders[0], Concatenated(parts)


def _check_held_out(config: LoaderConfig, data_sets: Sequence[Sequence[str]]) -> None:
    """Checks that what is held out is not trained on as well."""
    sets = list(zip((config, *config.mixture), data_sets, strict=True))
    for one, shards in sets:
        for other, others in sets:
            if other is one or not (isinstance(one, WeightedShards) and one.held_out):
                continue
            if common := common_shards(shards, one.portion, others, other.portion):
                raise UserError(
                    f"{common[0]} is held out and trained on; give both data sets the same shards, and a `portion` "
                    "without common samples, or give them different shards"
                )


def _mixed(config: LoaderConfig, orders: Sequence[Order]) -> Order:
    """Returns the order of a mixture, from those of its data sets."""
    sets = list(zip([1.0, *(one.weight for one in config.mixture)], orders, strict=True))
    if config.held_out_share is None:
        return Mixed(orders, [weight for weight, _ in sets])
    is_held_out = [False, *(one.held_out for one in config.mixture)]
    others = [one for one, is_apart in zip(sets, is_held_out, strict=True) if not is_apart]
    order = Mixed([order for _, order in others], [weight for weight, _ in others]) if len(others) > 1 else orders[0]
    return HeldOut(order, orders[is_held_out.index(True)], *group(config.batch_size, config.held_out_share))


def _data_set_order(config: LoaderConfig, counts: Sequence[int], seed: int) -> Order:
    if not config.shuffle:
        return Sequential(sum(counts))
    if config.window is None:
        return Shuffled(sum(counts), seed)
    return WindowShuffled(counts, config.window, seed)
