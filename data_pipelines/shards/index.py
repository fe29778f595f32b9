"""Indexes of shards: each shard is scanned once, its index is saved beside it, and samples are read in any order.

An index is a cache: it is rebuilt when the size or modification time of its shard changes. It includes the faults of
the shard: samples with repeated keys and truncated samples are excluded, and counted by cause.
"""

import bisect
import dataclasses
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lit_het.data_pipelines.shards import seals, storage, urls
from lit_het.data_pipelines.shards.scan import scan
from lit_het.data_pipelines.shards.storage import Span, Unreadable
from lit_het.data_pipelines.shards.tables import MISSING_MEMBER, NO_FILE, Fault, ShardTable, from_bytes, to_bytes
from lit_het.data_pipelines.shards.tars import MAX_MEMBER_BYTES, NOT_A_FILE, too_large
from lit_het.data_pipelines.shards.writing import IMAGE, IMAGE_EXTENSIONS, extensions, missing_member
from lit_het.errors import UserError
from lit_het.files import cache_folder
from lit_het.untrusted import Malformed

MAX_INDEX_BYTES = 2**28
"""The largest index that is written or read; one of 10,000 samples usually has 300 kB."""

_MAX_TABLES = 16_384  # cached in memory

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ShardSummary:
    """The summary of a shard, which stays in memory when its table does not.

    Attributes:
        address: of the tar file.
        count: number of samples with all required members.
        faults: what was excluded.
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
            ``IMAGE_EXTENSIONS``. Samples without one are excluded and counted.
        optional: kinds that some samples may lack.
        attach: adds to the table of a shard kinds that lie in other files.
        advance: called with 1 after each shard, for a progress bar.
        own: of each address, a further kind that its samples must have, or None; None for none.

    Attributes:
        summaries: of the shards, in order.
    """

    def __init__(
        self,
        addresses: Sequence[str | Path],
        required: Sequence[str] = (),
        optional: Sequence[str] = (),
        attach: Callable[[ShardTable], ShardTable] = lambda table: table,
        advance: Callable[[int], None] = lambda count: None,
        own: Sequence[str | None] | None = None,
    ):
        self._optional, self._attach = tuple(optional), attach
        own = [None] * len(addresses) if own is None else own
        self._required = [(*required, *filter(None, [one])) for one in own]
        self.summaries: list[ShardSummary] = []
        summary = functools.partial(summarize, attach=attach)
        # Requests to a store overlap; scanning a local shard is bound by the processor.
        is_remote = any(map(urls.is_remote, map(str, addresses)))
        self._pool = ThreadPoolExecutor(storage.MAX_REQUESTS) if is_remote else None
        for result in (self._pool.map if self._pool else map)(summary, map(str, addresses), self._required):
            self.summaries.append(result)
            advance(1)
        self._starts = [0, *itertools.accumulate(summary.count for summary in self.summaries)]
        self._reader = storage.Reader()
        self._table = functools.lru_cache(maxsize=_MAX_TABLES)(self._load_table)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def counts(self) -> list[int]:
        """Number of samples of each shard."""
        return [summary.count for summary in self.summaries]

    @property
    def digest(self) -> str:
        """Identifies the samples and their order."""
        return hashlib.sha256(" ".join(summary.digest for summary in self.summaries).encode()).hexdigest()[:16]

    @property
    def names(self) -> list[bytes]:
        """The names of the shards, without their folders."""
        return [one.address.rpartition("/")[2].encode("utf-8", "surrogateescape") for one in self.summaries]

    def sizes(self, kind: str) -> np.ndarray:
        """Sizes in bytes of one kind of member of every sample, -1 if it is missing: ``[samples]`` int64."""
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

    def keys(self, shard: int) -> list[bytes]:
        """The keys of the samples of a shard, given by its number."""
        return self._table(shard).keys.tolist()

    def shard(self, sample: int) -> str:
        """The address of the tar file that holds a sample."""
        return self.summaries[self._locate(sample)[0]].address

    def samples_of(self, keys: Mapping[str, frozenset[str]]) -> list[int]:
        """Returns the samples of the given keys of each shard, by address, in ascending order."""
        found: list[int] = []
        for number, (summary, first) in enumerate(zip(self.summaries, self._starts[:-1], strict=True)):
            if wanted := {key.encode("utf-8", "surrogateescape") for key in keys.get(summary.address, ())}:
                found += [first + row for row, key in enumerate(self._table(number).keys.tolist()) if key in wanted]
        return found

    def span(self, sample: int, kind: str) -> Span | None:
        """The byte range of one member of a sample, or None if it is missing."""
        number, row = self._locate(sample)
        table = self._table(number)
        offset = int(table.offsets[kind][row]) if kind in table.offsets else -1
        address = table.elsewhere.get(kind, table.address)
        return Span(address, offset, int(table.sizes[kind][row])) if offset >= 0 else None

    def read(self, samples: Sequence[int], kinds: Sequence[str]) -> list[list[bytes | Unreadable]]:
        """Returns the members of each sample, or why they cannot be read; requests are concurrent."""
        if self._pool is not None:
            for _ in self._pool.map(self._table, {self._locate(sample)[0] for sample in samples}):
                pass
        wanted = [(sample, kind) for sample in samples for kind in kinds]
        spans = [self.span(*one) for one in wanted]
        flat = [_unreadable(span, kind) for span, (_, kind) in zip(spans, wanted, strict=True)]
        requested = [span for span, reason in zip(spans, flat, strict=True) if span is not None and reason is None]
        found = iter(self._reader.read(requested))
        flat = [reason or next(found) for reason in flat]
        return [flat[start : start + len(kinds)] for start in range(0, len(flat), len(kinds))]

    def _locate(self, sample: int) -> tuple[int, int]:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        number = bisect.bisect_right(self._starts, sample) - 1
        return number, sample - self._starts[number]

    def _load_table(self, number: int) -> ShardTable:
        table = index_shard(self.summaries[number].address)
        # The table was dropped from memory and read again; offsets of a replaced shard would read other samples.
        if table.digest != self.summaries[number].digest:
            raise UserError(f"{table.address}: changed while it was in use; start again")
        table = self._attach(table)
        required = self._required[number]
        return table.only(table.has(required), (*required, *self._optional))


def _unreadable(span: Span | None, kind: str) -> Unreadable | None:
    """Returns why a member is not requested, or None if it is."""
    if span is None:
        return Unreadable("missing member", f"the sample has no .{kind}")
    return too_large(span.size) if span.size > MAX_MEMBER_BYTES else None


def _missing_member_fault(table: ShardTable, kind: str) -> Fault:
    name = "/".join(extensions(kind))
    lacking = ~table.has([kind])
    row = int(lacking.argmax())
    key = table.keys[row].decode("utf-8", "surrogateescape")
    links = [one for one in extensions(kind) if one in table.offsets and table.offsets[one][row] == NO_FILE]
    way_out = missing_member(kind, key, (other for other in table.offsets if table.offsets[other][row] >= 0))
    example = f"{table.address}: key {key} has no .{name}; {NOT_A_FILE if links else way_out}"
    return Fault(f"{MISSING_MEMBER}{name}", int(lacking.sum()), example)


def index_path(address: str | Path) -> str:
    """Returns the address of a shard's index, if its folder is writable."""
    return f"{address}.index.npz"


def index_shard(address: str | Path) -> ShardTable:
    """Returns the table of a shard: from its index, or by scanning the shard and saving an index.

    The index is saved beside the shard, or in the user's cache. Only an index with our own seal is trusted. An index
    beside the shard with a foreign seal is not overwritten.
    """
    address = str(address)
    # Taken before the scan: if the shard changes meanwhile, the index is stale at once instead of wrong for ever.
    stamp = storage.stamp(address)
    beside, cached = index_path(address), _cached_path(address)
    # Beside the shard first, where other hosts find it too; the cache serves read-only folders.
    places = [beside, cached]
    for place in (beside, cached):
        try:
            content = seals.opened(storage.read_whole(place, MAX_INDEX_BYTES))
            if (saved := from_bytes(content, address, stamp)) is not None:
                return _with_images(saved)
        except seals.ForeignKey:
            if place == beside:
                places.remove(beside)
                _warn_of_foreign_indexes(urls.parent(address))
        except (OSError, Malformed):
            continue  # an index is only a cache: the scan replaces a missing or damaged one
    try:
        table = scan(address)
    except OSError as error:
        raise UserError(
            f"{address}: cannot be read ({storage.reason(error)}); check the store and start again"
        ) from error
    _save_index(table, stamp, places)
    return _with_images(table)


@functools.cache
def _warn_of_foreign_indexes(folder: str) -> None:
    """Warns once per folder that it has indexes which are not trusted."""
    _logger.warning(
        "%s: has indexes of other users, which are not trusted; the shards are scanned. Hosts and users with the same"
        " secret in %s trust each other's indexes",
        folder,
        seals.KEY_VARIABLE,
    )


def _save_index(table: ShardTable, stamp: str, places: Sequence[str]) -> None:
    """Writes an index to the first address that is writable."""
    failure = ""
    for place in places:
        try:
            content = seals.sealed(to_bytes(table, stamp))
            if len(content) > MAX_INDEX_BYTES:
                raise OSError(f"{len(content):,} bytes are more than {MAX_INDEX_BYTES:,}")
            storage.write(place, content)
            return
        except Exception as error:  # clients of stores raise their own types
            # Not an error: an index saves time, and the run goes on without it.
            failure = storage.reason(error)
    _logger.warning("%s: its index cannot be saved (%s); the next run scans again", table.address, failure)


def summarize(
    address: str, required: Sequence[str] = (), attach: Callable[[ShardTable], ShardTable] = lambda table: table
) -> ShardSummary:
    """Returns how many samples of a shard have all required members, and the faults of the others."""
    found = index_shard(address)
    table = attach(found)
    lacking = [_missing_member_fault(table, kind) for kind in required if not table.has([kind]).all()]
    return ShardSummary(address, int(table.has(required).sum()), (*table.faults, *lacking), found.digest)


def _cached_path(address: str) -> str:
    name = hashlib.sha256(urls.absolute(address).encode("utf-8", "surrogateescape")).hexdigest()[:24]
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
