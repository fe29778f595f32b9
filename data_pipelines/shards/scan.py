"""Scans the tar headers of a shard for the keys, offsets and sizes of its samples; the index saves the result."""

import collections
import hashlib
import io
import tarfile
from collections.abc import Container, Iterable

import numpy as np

from lit_het.data_pipelines.shards import storage
from lit_het.data_pipelines.shards.tables import NO_FILE, Fault, ShardTable
from lit_het.data_pipelines.shards.tars import DamagedTar, member_ends, whole_members
from lit_het.data_pipelines.shards.writing import key_and_extension

MAX_SAMPLES = 2**18
"""The most samples of a shard; further ones are excluded."""

MAX_KINDS = 64
"""The most kinds of members of a shard, each a column of its table; further ones are excluded."""

MAX_KEY_BYTES = 1024
"""The longest key; samples with longer ones are excluded, because all keys are padded to the longest."""

DAMAGED = "truncated or damaged shard"
REPEATED = "repeated key"
APART = "members apart"
NO_TAR = "not an uncompressed tar"
EMPTY = "shard without samples"
LONG_KEY = "key too long"
TOO_MANY = "too many samples or kinds of members"


def scan(address: str) -> ShardTable:
    """Reads the headers of a shard, and the first and last bytes of each member for its digest.

    Raises:
        OSError: the shard cannot be read.
    """
    faults = _Faults(address)
    samples, digest = _Samples(faults), hashlib.sha256()
    for name, offset, size, ends in _members(address, faults):
        # The first and last KiB of each member identify its content without reading the whole shard.
        digest.update(f"{name} {offset} {size} ".encode("utf-8", "surrogateescape") + ends)
        if names := key_and_extension(name):
            samples.add(*names, offset, size)
    if not samples.found and not faults.listed():
        faults.add(EMPTY, "holds no samples; remove the shard or write it again")
    return samples.table(address, digest.hexdigest()[:16])


def returning(key: str, kind: str, present: Container[str]) -> tuple[str, str]:
    """Returns the cause and the way out for a key that returns after others, with another kind of member or the same.

    Members of one sample are adjacent (webdataset): a stream cannot wait for those that come later.
    """
    if kind in present:
        return REPEATED, f"key {key} occurs twice; write the shard again with distinct keys"
    return (
        APART,
        f"key {key}: its .{kind} does not follow its other members; write the shard again with tar --sort=name",
    )


class _Samples:
    """Groups consecutive members with the same key into samples."""

    def __init__(self, faults: "_Faults"):
        self.found: dict[str, dict[str, tuple[int, int]]] = {}
        self._faults, self._kinds = faults, set[str]()
        self._previous, self._is_repeated = "", False

    def add(self, key: str, kind: str, offset: int, size: int) -> None:
        """Adds a member, or counts why it is excluded."""
        if len(key.encode("utf-8", "surrogateescape")) > MAX_KEY_BYTES:
            self._faults.add(LONG_KEY, f"key {key[:50]}... has more than {MAX_KEY_BYTES} bytes; use a shorter key")
            return
        if len(self._kinds | {kind}) > MAX_KINDS or (len(self.found) >= MAX_SAMPLES and key not in self.found):
            most = f"at most {MAX_SAMPLES:,} samples with {MAX_KINDS} kinds of members are read"
            dots = "a key ends at the first dot of a name, so rename the files without further dots"
            self._faults.add(TOO_MANY, f"key {key}: {most}; {dots if '.' in kind else 'split the shard'}")
            return
        if key != self._previous:
            self._is_repeated = key in self.found
            if self._is_repeated:
                self._faults.add(*returning(key, kind, self.found[key]))
        elif not self._is_repeated and kind in self.found[key]:
            self._faults.add(REPEATED, f"key {key} has two members .{kind}; write the shard again with one")
            return
        self._previous = key
        if not self._is_repeated:
            self._kinds.add(kind)
            self.found.setdefault(key, {})[kind] = (offset, size)

    def table(self, address: str, digest: str) -> ShardTable:
        """Returns the table of the samples."""
        kinds, samples = sorted(self._kinds), self.found.values()
        table = {kind: np.array([sample.get(kind, (-1, 0)) for sample in samples], np.int64) for kind in kinds}
        return ShardTable(
            address=address,
            keys=np.array([key.encode("utf-8", "surrogateescape") for key in self.found], "S"),
            offsets={kind: table[kind][:, 0] for kind in kinds},
            sizes={kind: table[kind][:, 1] for kind in kinds},
            digest=digest,
            faults=self._faults.listed(),
        )


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


def _members(address: str, faults: _Faults) -> Iterable[tuple[str, int, int, bytes]]:
    """Yields name, offset, size, and first and last bytes of every complete file in a tar, and of links."""
    with storage.open_to_scan(address) as file:
        size = file.seek(0, io.SEEK_END)
        try:
            for member in whole_members(file, 0, size):
                if member.is_file:
                    yield member.name, member.offset, member.size, member_ends(file, member)
                elif not member.is_folder:
                    yield member.name, NO_FILE, 0, b""
        except tarfile.TarError as error:
            faults.add(NO_TAR, f"is not an uncompressed tar ({error}); unpack it or write it again")
        except DamagedTar as error:
            where = f"at byte {error.offset} of {size}"
            faults.add(DAMAGED, f"is truncated or damaged {where}; fetch or write the shard again")
