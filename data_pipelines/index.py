"""What shards hold and where: scanned once, kept beside them, and then read in any order.

An index is a cache: it is made again when the size or the time of change of its shard differ. What is wrong with a
shard is part of its index: samples that cannot be told apart or are cut off are left out, and counted by cause.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lit_het.data_pipelines import seals, storage
from lit_het.data_pipelines.scan import scan
from lit_het.data_pipelines.shards import IMAGE, IMAGE_EXTENSIONS, extensions
from lit_het.data_pipelines.storage import Span, Unreadable
from lit_het.data_pipelines.tables import LACK, Fault, ShardTable, packed, unpacked
from lit_het.data_pipelines.tars import MAX_MEMBER_BYTES, too_large
from lit_het.errors import UserError
from lit_het.files import cache_folder
from lit_het.untrusted import Malformed

MAX_INDEX_BYTES = 2**28
"""An index of more bytes is neither written nor read; some 300 kB are usual for 10,000 samples."""

_MAX_TABLES = 16_384  # of shards that are kept in memory

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ShardSummary:
    """What is known of a shard whose table is not in memory.

    Attributes:
        address: of the tar file.
        count: samples with all members that are asked for.
        faults: what was left out.
        digest: as in `ShardTable`.
    """

    address: str
    count: int
    faults: tuple[Fault, ...]
    digest: str


class ShardIndex:
    """Random access to the samples of many shards; safe to share between threads.

    Args:
        addresses: tar files, as ``expand`` returns them.
        required: kinds of members that every sample must have: an extension, or ``"image"`` for any of
            ``IMAGE_EXTENSIONS``. Samples without one are left out and counted.
        optional: kinds that may be read where a sample has them.
        attach: adds kinds that lie in other files to what is known of a shard.
        advance: called with 1 after each shard, for a progress bar.

    Attributes:
        summaries: of the shards, in order.

    Raises:
        UserError: a shard cannot be read.
    """

    def __init__(
        self,
        addresses: Sequence[str | Path],
        required: Sequence[str] = (),
        optional: Sequence[str] = (),
        attach: Callable[[ShardTable], ShardTable] = lambda table: table,
        advance: Callable[[int], None] = lambda count: None,
    ):
        self._required, self._kinds, self._attach = tuple(required), (*required, *optional), attach
        self.summaries: list[ShardSummary] = []
        summary = functools.partial(summarize, required=self._required, attach=attach)
        # Stores answer many at once; scanning a local shard is work for the processor.
        is_remote = any(map(storage.is_remote, map(str, addresses)))
        self._pool = ThreadPoolExecutor(storage.MAX_REQUESTS) if is_remote else None
        for of_shard in (self._pool.map if self._pool else map)(summary, map(str, addresses)):
            self.summaries.append(of_shard)
            advance(1)
        self._starts = [0, *itertools.accumulate(summary.count for summary in self.summaries)]
        self._reader = storage.Reader()
        self._table = functools.lru_cache(maxsize=_MAX_TABLES)(self._load_table)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def counts(self) -> list[int]:
        """Samples of each shard."""
        return [summary.count for summary in self.summaries]

    @property
    def digest(self) -> str:
        """Tells whether two indexes hold the same samples in the same order."""
        return hashlib.sha256(" ".join(summary.digest for summary in self.summaries).encode()).hexdigest()[:16]

    def sizes(self, kind: str) -> np.ndarray:
        """The bytes of one kind of member of every sample, -1 where there is none: ``[samples]`` int64."""
        parts = [np.empty(0, np.int64)]
        for number, summary in enumerate(self.summaries):
            table = self._table(number)
            none = np.full(summary.count, -1)
            parts.append(np.where(table.has([kind]), table.sizes[kind], none) if kind in table.sizes else none)
        return np.concatenate(parts)

    def key(self, sample: int) -> str:
        """The key of a sample within its shard."""
        number, row = self._locate(sample)
        return self._table(number).keys[row].decode("utf-8", "surrogateescape")

    def shard(self, sample: int) -> str:
        """The address of the tar file that holds a sample."""
        return self.summaries[self._locate(sample)[0]].address

    def span(self, sample: int, kind: str) -> Span | None:
        """Where one member of a sample lies, or None if it has none."""
        number, row = self._locate(sample)
        table = self._table(number)
        offset = int(table.offsets[kind][row]) if kind in table.offsets else -1
        address = table.elsewhere.get(kind, table.address)
        return Span(address, offset, int(table.sizes[kind][row])) if offset >= 0 else None

    def read(self, samples: Sequence[int], kinds: Sequence[str]) -> list[list[bytes | Unreadable]]:
        """Returns the members of each sample, or why they cannot be read; all are asked for at once."""
        if self._pool is not None:
            for _ in self._pool.map(self._table, {self._locate(sample)[0] for sample in samples}):
                pass
        spans = [self.span(sample, kind) for sample in samples for kind in kinds]
        flat = [_unreadable(span) for span in spans]
        asked = [span for span, reason in zip(spans, flat, strict=True) if span is not None and reason is None]
        found = iter(self._reader.read(asked))
        flat = [reason or next(found) for reason in flat]
        return [flat[start : start + len(kinds)] for start in range(0, len(flat), len(kinds))]

    def _locate(self, sample: int) -> tuple[int, int]:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        number = bisect.bisect_right(self._starts, sample) - 1
        return number, sample - self._starts[number]

    def _load_table(self, number: int) -> ShardTable:
        table = index_shard(self.summaries[number].address)
        if table.digest != self.summaries[number].digest:
            raise UserError(f"{table.address}: changed while it was in use; start again")
        table = self._attach(table)
        return table.only(table.has(self._required), self._kinds)


def _unreadable(span: Span | None) -> Unreadable | None:
    """Returns why a member is not even asked for."""
    if span is None:
        return Unreadable("missing member", "of these kinds the sample has not all")
    return too_large(span.size) if span.size > MAX_MEMBER_BYTES else None


def _lack(table: ShardTable, kind: str) -> Fault:
    name = "/".join(extensions(kind))
    lacking = ~table.has([kind])
    key = table.keys[int(lacking.argmax())].decode("utf-8", "surrogateescape")
    example = f"{table.address}: key {key} has no .{name}; add the member or remove the sample"
    return Fault(f"{LACK}{name}", int(lacking.sum()), example)


def index_path(address: str | Path) -> str:
    """Returns where the index of a shard is kept, if its folder can be written to."""
    return f"{address}.index.npz"


def index_shard(address: str | Path) -> ShardTable:
    """Reads the index of a shard, or scans the shard and writes one: beside it, or into the user's cache.

    An index is believed that has our own seal. One beside the shard that others have sealed stays as it is.

    Raises:
        UserError: the shard cannot be read.
    """
    address = str(address)
    stamp = storage.stamp(address)
    beside, cached = index_path(address), _cached_path(address)
    places = [beside, cached]
    for place in (beside, cached):
        try:
            content = seals.opened(storage.read_whole(place, MAX_INDEX_BYTES))
            if (kept := unpacked(content, address, stamp)) is not None:
                return _with_images(kept)
        except seals.OtherKey:
            if place == beside:
                places.remove(beside)
                _tell_of_others(storage.parent(address))
        except (OSError, Malformed):
            continue  # an index is only a cache: whatever is wrong with it, the scan puts it right
    try:
        table = scan(address)
    except OSError as error:
        raise UserError(
            f"{address}: cannot be read ({storage.reason(error)}); check the store and start again"
        ) from error
    _keep(table, stamp, places)
    return _with_images(table)


@functools.cache
def _tell_of_others(folder: str) -> None:
    """Says once a folder that it has indexes which are not believed."""
    _logger.warning(
        "%s: has indexes that others have made, which are not believed; the shards are scanned. Hosts and users with"
        " the same secret in %s believe one another",
        folder,
        seals.KEY_VARIABLE,
    )


def _keep(table: ShardTable, stamp: str, places: Sequence[str]) -> None:
    """Writes an index to the first place that takes it."""
    refusal = ""
    for place in places:
        try:
            content = seals.sealed(packed(table, stamp))
            if len(content) > MAX_INDEX_BYTES:
                raise OSError(f"{len(content):,} bytes are more than {MAX_INDEX_BYTES:,}")
            storage.write(place, content)
            return
        except Exception as error:  # read-only folders and stores, in their clients' words
            refusal = storage.reason(error)
    _logger.warning("%s: its index cannot be kept (%s); the next run scans again", table.address, refusal)


def summarize(
    address: str, required: Sequence[str] = (), attach: Callable[[ShardTable], ShardTable] = lambda table: table
) -> ShardSummary:
    """Returns how many samples of a shard have all members that are asked for, and what is wrong with the others."""
    found = index_shard(address)
    table = attach(found)
    lacking = [_lack(table, kind) for kind in required if not table.has([kind]).all()]
    return ShardSummary(address, int(table.has(required).sum()), (*table.faults, *lacking), found.digest)


def _cached_path(address: str) -> str:
    name = hashlib.sha256(storage.absolute(address).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return str(cache_folder("indexes") / f"{name}.npz")


def _with_images(table: ShardTable) -> ShardTable:
    """Adds the kind ``"image"``: the first of ``IMAGE_EXTENSIONS`` that each sample has."""
    offsets = np.full(len(table.keys), -1, np.int64)
    sizes = np.zeros(len(table.keys), np.int64)
    for extension in IMAGE_EXTENSIONS:
        if extension in table.offsets:
            chosen = (offsets < 0) & (table.offsets[extension] >= 0)
            offsets[chosen] = table.offsets[extension][chosen]
            sizes[chosen] = table.sizes[extension][chosen]
    return dataclasses.replace(table, offsets={**table.offsets, IMAGE: offsets}, sizes={**table.sizes, IMAGE: sizes})
