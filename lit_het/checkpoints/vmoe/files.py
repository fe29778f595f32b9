"""The files in which V-MoE and e3 were released: ``NAME.index`` and ``NAME.data-00000-of-00008``, in MessagePack.

The index is a tree of shapes, slices and shard numbers; a data file maps numbers of arrays, counted over the flattened
index, to pieces of them. Only places are remembered when a checkpoint is opened; an array is read when it is asked for.
"""

import dataclasses
import enum
import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import ml_dtypes
import msgpack
import numpy as np

from lit_het.checkpoints.sources import Stored, checked
from lit_het.errors import UserError
from lit_het.untrusted import Malformed

# A key that marks a map of pieces.
_MARK = "__msgpack_array_chunk_a87ca2__"
# Arrays in a file are at most this large (2 GiB); MessagePack's own limit is lower.
_MOST_BYTES = 2**31 - 1

MAX_INDEX_BYTES = 2**26
"""Larger indexes are refused; those of the released models have less than 1 MB."""

MAX_SHARDS = 10_000
"""An index that speaks of more files, or a list of more pieces, is refused."""

MAX_DEPTH = 32
"""Trees of arrays that are deeper are refused."""

Slices: TypeAlias = tuple[slice, ...]


class _Kind(enum.IntEnum):
    """Extension types of the format."""

    NDARRAY = 1
    SHAPED_ARRAY = 4
    SLICE = 5
    SLICES = 6
    INDEX_INFO = 8


@dataclasses.dataclass(frozen=True)
class _Info:
    """What the index says of one array: its shape, and which shard holds which part."""

    shape: tuple[int, ...]
    slices: tuple[Slices, ...]
    shards: tuple[int, ...]


def open_vmoe(prefix: Path) -> dict[str, Stored]:
    """Returns the arrays of a checkpoint by their paths in its tree.

    Args:
        prefix: the path without ``.index``.

    Raises:
        UserError: a file is missing, cut short or not of this format.
    """
    infos, names = _index(prefix)
    shards = [prefix.with_name(name) for name in names]
    missing = [str(path) for path in shards if not path.exists()]
    if missing:
        raise UserError(f"{len(missing)} of {len(shards)} files are missing, the first is {missing[0]}")
    on_disk = sum(path.stat().st_size for path in shards)
    for name, info in infos.items():
        if math.prod(info.shape) > on_disk:
            raise UserError(f"{name[:100]!r} of shape {info.shape} does not fit into the files of {prefix}")
    arrays = {
        path: Stored(info.shape, functools.partial(_read, shards, number, info))
        for number, (path, info) in enumerate(infos.items())
    }
    return checked(arrays, prefix)


def shard_names(prefix: Path) -> tuple[str, ...]:
    """Returns the names of the data files that an index speaks of; errors are those of `open_vmoe`."""
    return _index(prefix)[1]


def _index(prefix: Path) -> tuple[dict[str, _Info], tuple[str, ...]]:
    path = prefix.with_name(f"{prefix.name}.index")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_INDEX_BYTES + 1)
        if len(content) > MAX_INDEX_BYTES:
            raise Malformed(f"more than {MAX_INDEX_BYTES:,} bytes")
        index = _unpacked(content, ext_hook=_decode, strict_map_key=False)
        count = index["shard_count"]
        if type(count) is not int or not 0 < count <= MAX_SHARDS:
            raise Malformed(f"shard_count = {count!r:.100} is not 1 to {MAX_SHARDS:,}")
        infos = dict(_flatten(index["index"]))
        for name, info in infos.items():
            _check(name, info, count)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; give the path of a V-MoE checkpoint without its ending") from error
    except Exception as error:  # whatever damage makes MessagePack and the decoding trip over
        raise UserError(f"{path} is no index of a V-MoE checkpoint ({_said(error)})") from error
    return infos, tuple(f"{prefix.name}.data-{number:05d}-of-{count:05d}" for number in range(count))


def _flatten(tree: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, _Info]]:
    """Yields leaves in the order in which arrays are numbered, that of sorted keys."""
    if isinstance(tree, _Info):
        yield path, tree
        return
    if not isinstance(tree, dict) or depth == MAX_DEPTH:
        raise Malformed(f"{path!r:.100} is no array, or deeper than {MAX_DEPTH}")
    for key in sorted(tree):
        yield from _flatten(tree[key], f"{path}/{key}" if path else key, depth + 1)


def _check(name: str, info: _Info, count: int) -> None:
    """Refuses an array whose shape is none, or that would lie in files that there are not."""
    if not all(type(size) is int and size >= 0 for size in info.shape):
        raise Malformed(f"{name!r:.100} has the shape {info.shape!r:.100}")
    if not all(type(shard) is int and 0 <= shard < count for shard in info.shards):
        raise Malformed(f"{name!r:.100} lies in the files {info.shards!r:.100} of {count}")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _read(shards: list[Path], number: int, info: _Info) -> np.ndarray:
    used = [shards[number] for number in sorted(set(info.shards))]
    on_disk = sum(shard.stat().st_size for shard in used)
    array: np.ndarray | None = None
    filled = 0
    for shard in used:
        offset = _offsets(shard).get(number)
        if offset is None:
            continue
        try:
            for place, piece in _pieces(shard, offset, info.shape):
                if array is None and math.prod(info.shape) * piece.itemsize > on_disk:
                    break
                array = np.empty(info.shape, piece.dtype) if array is None else array
                array[place] = piece
                filled += piece.size
        except Exception as error:  # as in the index
            raise UserError(f"{shard}: array {number} of shape {info.shape} is damaged ({_said(error)})") from error
    if array is None or filled != array.size:
        raise UserError(
            f"array {number} of shape {info.shape} is not whole in {shards[0].parent}: {filled} numbers found"
        )
    return array


def _pieces(shard: Path, offset: int, whole: tuple[int, ...]) -> Iterator[tuple[Slices, np.ndarray]]:
    """Yields the pieces of an array in a data file, and where they go."""
    with shard.open("rb") as file:
        file.seek(offset)
        unpacker = _unpacker(file, ext_hook=_decode)
        for pieces, place in unpacker.unpack():
            inside = [
                0 <= part.start < part.stop <= size and part.step in (None, 1)
                for part, size in zip(place, whole, strict=True)
            ]
            if not all(inside):
                raise Malformed(f"a piece at {place!r:.100}")
            yield place, np.concatenate(pieces).reshape([part.stop - part.start for part in place])


@functools.lru_cache
def _offsets(shard: Path) -> dict[int, int]:
    """Returns where a data file holds each array's pieces."""
    offsets = {}
    with shard.open("rb") as file:
        unpacker = _unpacker(file)
        try:
            for _ in range(unpacker.read_map_header()):
                key = unpacker.unpack()
                if key != _MARK:
                    offsets[int(key)] = unpacker.tell()
                unpacker.skip()
        except Exception as error:  # as in the index
            raise UserError(f"{shard} is cut short or no data file of a V-MoE checkpoint") from error
    return offsets


def _unpacked(data: bytes, **options: Any) -> Any:
    # Lists take their memory before there is anything in them.
    return msgpack.unpackb(data, max_array_len=MAX_SHARDS, **options)


def _unpacker(file: BinaryIO, **options: Any) -> Any:
    return msgpack.Unpacker(
        file, max_buffer_size=_MOST_BYTES, max_array_len=MAX_SHARDS, strict_map_key=False, **options
    )


def _decode(code: int, data: bytes) -> Any:
    """Decodes the format's own types; others stay as they are."""
    match code:
        case _Kind.NDARRAY:
            shape, name, buffer = _unpacked(data, raw=True, max_bin_len=_MOST_BYTES)
            return np.frombuffer(buffer, _dtype(name)).reshape(shape)
        case _Kind.SHAPED_ARRAY:
            return tuple(_unpacked(data, raw=True)[0])
        case _Kind.SLICE:
            return slice(*_unpacked(data, raw=True))
        case _Kind.SLICES:
            return tuple(_decode(_Kind.SLICE, part) for part in _unpacked(data, raw=True))
        case _Kind.INDEX_INFO:
            shape, slices, shards = _unpacked(data, raw=True)
            parts = tuple(_decode(_Kind.SLICES, part) for part in slices)
            return _Info(_decode(_Kind.SHAPED_ARRAY, shape), parts, tuple(shards))
    return msgpack.ExtType(code, data)


def _dtype(name: bytes) -> np.dtype:
    if name == b"bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    if not re.fullmatch(rb"(float|u?int)(8|16|32|64)", name):
        raise Malformed(f"numbers of the type {name!r:.50}")
    return np.dtype(name.decode())
