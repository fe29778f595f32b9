"""What shards hold and where: scanned once, kept beside them, and then read in any order.

An index is a cache: it is made again when the size or the time of change of its shard differ. What is wrong with a
shard is part of its index: samples that cannot be told apart or are cut off are left out, and counted by cause.
"""

import bisect
import collections
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import logging
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from data_pipelines import storage
from data_pipelines.shards import IMAGE, IMAGE_EXTENSIONS, extensions, key_and_extension
from data_pipelines.storage import Span, Unreadable
from data_pipelines.tars import DamagedTar, member_ends, whole_members
from lit_het.errors import UserError
from lit_het.files import NUMPY_HEADERS, cache_folder

_INDEX_VERSION = 3
# Tables of shards that are kept in memory, some 300 kB each for 10,000 samples.
_MAX_TABLES = 16_384
# Keys are kept side by side, each as long as the longest.
_MAX_KEY_LENGTH = 1024

DAMAGED = "truncated or damaged shard"
REPEATED = "repeated key"
NO_TAR = "no uncompressed tar"
EMPTY = "shard without samples"
LONG_KEY = "key too long"
_LACK = "no ."

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A defect that some samples of a shard have, or the shard itself.

    Attributes:
        cause: the same words for all with this defect.
        count: how many have it.
        example: the first of them, and the way out.
    """

    cause: str
    count: int
    example: str

    @property
    def is_lack(self) -> bool:
        """Whether samples lack a member, rather than that a shard is damaged."""
        return self.cause.startswith(_LACK)


@dataclasses.dataclass(frozen=True)
class ShardTable:
    """Where the members of one shard's samples lie; a missing member has offset -1.

    Attributes:
        address: of the tar file.
        keys: UTF-8 bytes ``[samples]``.
        offsets: for each kind of member, bytes from the start of the file ``[samples]`` int64.
        sizes: for each kind of member, bytes ``[samples]`` int64.
        digest: tells shards of other content apart, by names, sizes, first and last bytes of all members.
        faults: what the scan left out.
        elsewhere: kinds of members that lie in another file, and its address.
    """

    address: str
    keys: np.ndarray
    offsets: dict[str, np.ndarray]
    sizes: dict[str, np.ndarray]
    digest: str
    faults: tuple[Fault, ...] = ()
    elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def has(self, kinds: Iterable[str]) -> np.ndarray:
        """Returns which samples have a member of each kind, ``[samples]`` bool."""
        found = np.ones(len(self.keys), bool)
        for kind in kinds:
            found &= self.offsets[kind] >= 0 if kind in self.offsets else False
        return found

    def only(self, rows: np.ndarray, kinds: Iterable[str]) -> "ShardTable":
        """Returns some samples and kinds of members."""
        offsets = {kind: self.offsets[kind][rows] for kind in kinds if kind in self.offsets}
        sizes = {kind: self.sizes[kind][rows] for kind in offsets}
        return dataclasses.replace(self, keys=self.keys[rows], offsets=offsets, sizes=sizes)


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
        found = iter(self._reader.read([span for span in spans if span is not None]))
        missing = Unreadable("missing member", "of these kinds the sample has not all")
        flat = [next(found) if span is not None else missing for span in spans]
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


def _lack(table: ShardTable, kind: str) -> Fault:
    name = "/".join(extensions(kind))
    lacking = ~table.has([kind])
    key = table.keys[int(lacking.argmax())].decode("utf-8", "surrogateescape")
    example = f"{table.address}: key {key} has no .{name}; add the member or remove the sample"
    return Fault(f"{_LACK}{name}", int(lacking.sum()), example)


def index_path(address: str | Path) -> str:
    """Returns where the index of a shard is kept, if its folder can be written to."""
    return f"{address}.index.npz"


def index_shard(address: str | Path) -> ShardTable:
    """Reads the index of a shard, or scans the shard and writes one: beside it, or into the user's cache.

    Raises:
        UserError: the shard cannot be read.
    """
    address = str(address)
    stamp = f"{_INDEX_VERSION} {storage.stamp(address)}"
    places = (index_path(address), _cached_path(address))
    for place in places:
        kept = _load(place, address, stamp)
        if kept is not None:
            return _with_images(kept)
    try:
        table = _scan(address)
    except OSError as error:
        raise UserError(
            f"{address}: cannot be read ({storage.reason(error)}); check the store and start again"
        ) from error
    content, refusal = _packed(table, stamp), ""
    for place in places:
        try:
            storage.write(place, content)
            break
        except Exception as error:  # read-only folders and stores, in their clients' words
            refusal = storage.reason(error)
    else:
        _logger.warning("%s: its index cannot be kept (%s); the next run scans again", address, refusal)
    return _with_images(table)


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


def _packed(table: ShardTable, stamp: str) -> bytes:
    file = io.BytesIO()
    np.savez(
        file,
        stamp=np.array(stamp),
        keys=table.keys,
        kinds=np.array(list(table.offsets), "U"),
        offsets=np.array(list(table.offsets.values()), np.int64),
        sizes=np.array(list(table.sizes.values()), np.int64),
        digest=np.array(table.digest),
        faults=np.array(json.dumps([dataclasses.astuple(fault) for fault in table.faults])),
    )
    return file.getvalue()


def _load(place: str, address: str, stamp: str) -> ShardTable | None:
    try:
        content = io.BytesIO(storage.read_whole(place))
        with NUMPY_HEADERS, np.load(content, allow_pickle=False) as arrays:
            if str(arrays["stamp"]) != stamp:
                return None
            kinds = arrays["kinds"].tolist()
            offsets = dict(zip(kinds, arrays["offsets"], strict=True))
            sizes = dict(zip(kinds, arrays["sizes"], strict=True))
            faults = tuple(Fault(*fault) for fault in json.loads(str(arrays["faults"])))
            return ShardTable(address, arrays["keys"], offsets, sizes, str(arrays["digest"]), faults)
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile):
        return None  # an index is only a cache: whatever is wrong with it, the scan puts it right


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


class _Faults:
    """Counts defects by cause, with the first example of each."""

    def __init__(self, address: str):
        self.address = address
        self._counts: collections.Counter[str] = collections.Counter()
        self._examples: dict[str, str] = {}

    def add(self, cause: str, example: str) -> None:
        self._counts[cause] += 1
        self._examples.setdefault(cause, f"{self.address}: {example}")

    def listed(self) -> tuple[Fault, ...]:
        return tuple(Fault(cause, count, self._examples[cause]) for cause, count in self._counts.items())


def _scan(address: str) -> ShardTable:
    """Reads the headers of a shard, and of the payload no more than tells it from others."""
    faults = _Faults(address)
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    previous, is_repeated = "", False
    digest = hashlib.sha256()
    for name, offset, size, ends in _members(address, faults):
        digest.update(f"{name} {offset} {size} ".encode("utf-8", "surrogateescape") + ends)
        names = key_and_extension(name)
        if names is None:
            continue
        key, kind = names
        if len(key) > _MAX_KEY_LENGTH:
            faults.add(LONG_KEY, f"key {key[:50]}... has more than {_MAX_KEY_LENGTH} characters; name it otherwise")
            continue
        if key != previous:
            is_repeated = key in samples
            if is_repeated:
                faults.add(REPEATED, f"key {key} occurs twice; write the shard again with distinct keys")
        elif not is_repeated and kind in samples[key]:
            faults.add(REPEATED, f"key {key} has two members .{kind}; write the shard again with one")
            continue
        previous = key
        if not is_repeated:
            samples.setdefault(key, {})[kind] = (offset, size)
    if not samples and not faults.listed():
        faults.add(EMPTY, "holds no samples; remove the shard or write it again")
    kinds = sorted({kind for sample in samples.values() for kind in sample})
    table = {kind: np.array([sample.get(kind, (-1, 0)) for sample in samples.values()], np.int64) for kind in kinds}
    return ShardTable(
        address=address,
        keys=np.array([key.encode("utf-8", "surrogateescape") for key in samples], "S"),
        offsets={kind: table[kind][:, 0] for kind in kinds},
        sizes={kind: table[kind][:, 1] for kind in kinds},
        digest=digest.hexdigest()[:16],
        faults=faults.listed(),
    )


def _members(address: str, faults: _Faults) -> Iterable[tuple[str, int, int, bytes]]:
    """Returns name, place, size, first and last bytes of every whole file in a tar."""
    with storage.open_to_scan(address) as file:
        size = file.seek(0, io.SEEK_END)
        try:
            for member in whole_members(file, 0, size):
                if member.is_file:
                    yield member.name, member.offset, member.size, member_ends(file, member)
        except tarfile.TarError as error:
            faults.add(NO_TAR, f"is no uncompressed tar ({error}); unpack it or write it again")
        except DamagedTar as error:
            where = f"at byte {error.offset} of {size}"
            faults.add(DAMAGED, f"is truncated or damaged {where}; fetch or write the shard again")
