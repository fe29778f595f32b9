"""The table of one shard: offsets and sizes of its samples' members, its faults, and the table's format on disk."""

import dataclasses
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lit_het.untrusted import Malformed, parse_json, read_npz_array

_VERSION = 6
NO_FILE = -2
"""The offset of a link or special file, which has no content."""

MISSING_MEMBER = "no ."
"""The start of the cause of a `Fault` for samples that lack a member."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """A defect of some samples of a shard, or of the shard itself.

    Attributes:
        cause: a short description, equal for all samples with this defect.
        count: number of samples with it.
        example: the first of them, and how to fix it.
    """

    cause: str
    count: int
    example: str

    @property
    def is_missing_member(self) -> bool:
        """Whether samples lack a member; otherwise the shard is damaged."""
        return self.cause.startswith(MISSING_MEMBER)


@dataclasses.dataclass(frozen=True)
class ShardTable:
    """Offsets and sizes of the members of one shard's samples; a missing member has offset -1, a link `NO_FILE`.

    Attributes:
        address: of the tar file.
        keys: UTF-8 bytes ``[samples]``.
        offsets: by kind of member, bytes from the start of the file ``[samples]`` int64.
        sizes: by kind of member, bytes ``[samples]`` int64.
        digest: of the names, sizes, first and last bytes of all members, to identify the shard's content.
        faults: what the scan excluded.
        elsewhere: the address of the file for each kind of member that lies in another file.
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
        """Returns the table of the selected samples and kinds of members."""
        offsets = {kind: self.offsets[kind][rows] for kind in kinds if kind in self.offsets}
        sizes = {kind: self.sizes[kind][rows] for kind in offsets}
        return dataclasses.replace(self, keys=self.keys[rows], offsets=offsets, sizes=sizes)


def to_bytes(table: ShardTable, stamp: str) -> bytes:
    """Serialises a table as an ``.npz`` archive, with its shard's stamp (`storage.stamp`)."""
    file, shape = io.BytesIO(), (len(table.offsets), len(table.keys))
    np.savez(
        file,
        # The version is part of the stamp: an index of an older program is stale like that of a changed shard.
        stamp=np.array(f"{_VERSION} {stamp}"),
        keys=table.keys,
        kinds=np.array(list(table.offsets), "U"),
        offsets=np.array(list(table.offsets.values()), np.int64).reshape(shape),
        sizes=np.array(list(table.sizes.values()), np.int64).reshape(shape),
        digest=np.array(table.digest),
        # As text: an array of objects could only be saved as a pickle.
        faults=np.array(json.dumps([dataclasses.astuple(fault) for fault in table.faults])),
    )
    return file.getvalue()


def from_bytes(content: bytes, address: str, stamp: str) -> ShardTable | None:
    """Parses a serialised table; returns None if it has another version, or the shard has changed since.

    Raises:
        Malformed: it is not a valid table of a shard of this size.
    """
    file = io.BytesIO(content)
    # The stamp is read first, and alone: a stale index is then recognised without reading its columns.
    if str(read_npz_array(file, "stamp")) != f"{_VERSION} {stamp}":
        return None
    keys, kinds, offsets, sizes, digest, faults = (
        read_npz_array(file, name) for name in ("keys", "kinds", "offsets", "sizes", "digest", "faults")
    )
    if [array.dtype.kind for array in (keys, kinds, offsets, sizes, digest, faults)] != list("SUiiUU"):
        raise Malformed("arrays of an index have other types")
    if (keys.ndim, kinds.ndim) != (1, 1) or {offsets.shape, sizes.shape} != {(len(kinds), len(keys))}:
        raise Malformed("arrays of an index differ in length")
    end = int(stamp.partition(" ")[0])
    # Compared with ``end - sizes``, not ``offsets + sizes > end``: the sum of two large numbers could overflow.
    if (offsets < NO_FILE).any() or (sizes < 0).any() or (offsets > end - sizes).any():
        raise Malformed("members of an index lie outside of the shard")
    listed, names = parse_json(str(faults)), kinds.tolist()
    if not isinstance(listed, list) or not all(map(_is_fault, listed)):
        raise Malformed("faults of an index have other types")
    return ShardTable(
        address=address,
        keys=keys,
        offsets=dict(zip(names, offsets, strict=True)),
        sizes=dict(zip(names, sizes, strict=True)),
        digest=str(digest),
        faults=tuple(Fault(*fields) for fields in listed),
    )


def _is_fault(fields: Any) -> bool:
    return isinstance(fields, list) and list(map(type, fields)) == [str, int, str]
