"""Reads the MessagePack files in which V-MoE and e3 were released: ``NAME.index`` and ``NAME.data-00000-of-00008``.

The index is a tree of shapes, slices and shard numbers. A data file maps the number of an array, its position in the
flattened index, to chunks of the array. Opening a checkpoint reads only the index; each array is read on demand.
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

from lit_het.errors import UserError
from lit_het.untrusted import Malformed
from lit_het.weights.sources import StoredArray, validated

# A key of every data file, beside the array numbers.
_CHUNK_MARKER = "__msgpack_array_chunk_a87ca2__"
# Maximum size of a chunk (2 GiB); MessagePack's default limit is lower.
_MAX_CHUNK_BYTES = 2**31 - 1

MAX_INDEX_BYTES = 2**26
"""A larger index is refused; those of the released models have less than 1 MB."""

MAX_SHARDS = 10_000
"""An index with more data files, or a list of more chunks, is refused."""

MAX_DEPTH = 32
"""A deeper tree of arrays is refused."""

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
    """The index entry of one array: its shape, and the slice in each shard."""

    shape: tuple[int, ...]
    slices: tuple[Slices, ...]
    shards: tuple[int, ...]


def open_vmoe(prefix: Path) -> dict[str, StoredArray]:
    """Returns the arrays of a checkpoint by their paths in its tree.

    Args:
        prefix: the path without ``.index``.
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
        path: StoredArray(info.shape, functools.partial(_read, shards, number, info))
        for number, (path, info) in enumerate(infos.items())
    }
    return validated(arrays, prefix)


def shard_names(prefix: Path) -> tuple[str, ...]:
    """Returns the names of the data files of an index; raises the errors of `open_vmoe`."""
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
        raise UserError(f"{path} is missing; give the path of a V-MoE checkpoint without the suffix .index") from error
    except Exception as error:  # damaged files make MessagePack and the decoder raise any exception
        raise UserError(f"{path} is not the index of a V-MoE checkpoint ({_one_line(error)})") from error
    return infos, tuple(f"{prefix.name}.data-{number:05d}-of-{count:05d}" for number in range(count))


def _flatten(tree: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, _Info]]:
    """Yields the leaves in the order of sorted keys, in which arrays are numbered."""
    if isinstance(tree, _Info):
        yield path, tree
        return
    if not isinstance(tree, dict) or depth == MAX_DEPTH:
        raise Malformed(f"{path!r:.100} is not an array, or deeper than {MAX_DEPTH} levels")
    for key in sorted(tree):
        yield from _flatten(tree[key], f"{path}/{key}" if path else key, depth + 1)


def _check(name: str, info: _Info, count: int) -> None:
    """Raises `Malformed` if the shape or a shard number of an array is invalid."""
    if not all(type(size) is int and size >= 0 for size in info.shape):
        raise Malformed(f"{name!r:.100} has the shape {info.shape!r:.100}")
    if not all(type(shard) is int and 0 <= shard < count for shard in info.shards):
        raise Malformed(f"{name!r:.100} refers to the shards {info.shards!r:.100}, but there are {count}")


def _one_line(error: Exception) -> str:
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
            for slices, chunk in _chunks(shard, offset, info.shape):
                # Arrays are stored uncompressed: a larger one than its files is damage and must not be allocated.
                if array is None and math.prod(info.shape) * chunk.itemsize > on_disk:
                    break
                array = np.empty(info.shape, chunk.dtype) if array is None else array
                array[slices] = chunk
                filled += chunk.size
        except Exception as error:  # as in the index
            raise UserError(f"{shard}: array {number} of shape {info.shape} is damaged ({_one_line(error)})") from error
    # Elements are counted, as a gap between chunks would hold whatever was in memory before.
    if array is None or filled != array.size:
        raise UserError(
            f"array {number} of shape {info.shape} is incomplete in {shards[0].parent}: {filled} elements found"
        )
    return array


def _chunks(shard: Path, offset: int, shape: tuple[int, ...]) -> Iterator[tuple[Slices, np.ndarray]]:
    """Yields the chunks of an array in a data file, with their slices of the array."""
    with shard.open("rb") as file:
        file.seek(offset)
        unpacker = _unpacker(file, ext_hook=_decode)
        for parts, slices in unpacker.unpack():
            inside = [
                0 <= one.start < one.stop <= size and one.step in (None, 1)
                for one, size in zip(slices, shape, strict=True)
            ]
            if not all(inside):
                raise Malformed(f"a chunk at {slices!r:.100}")
            yield slices, np.concatenate(parts).reshape([one.stop - one.start for one in slices])


@functools.lru_cache
def _offsets(shard: Path) -> dict[int, int]:
    """Returns array number → offset of its chunks in a data file."""
    offsets = {}
    with shard.open("rb") as file:
        unpacker = _unpacker(file)
        try:
            for _ in range(unpacker.read_map_header()):
                key = unpacker.unpack()
                if key != _CHUNK_MARKER:
                    offsets[int(key)] = unpacker.tell()
                unpacker.skip()
        except Exception as error:  # as in the index
            raise UserError(f"{shard} is truncated or not a data file of a V-MoE checkpoint") from error
    return offsets


def _unpacked(data: bytes, **options: Any) -> Any:
    # MessagePack allocates a list by its declared length, before reading its elements.
    return msgpack.unpackb(data, max_array_len=MAX_SHARDS, **options)


def _unpacker(file: BinaryIO, **options: Any) -> Any:
    return msgpack.Unpacker(
        file, max_buffer_size=_MAX_CHUNK_BYTES, max_array_len=MAX_SHARDS, strict_map_key=False, **options
    )


def _decode(code: int, data: bytes) -> Any:
    """Decodes the extension types of the format; others are returned unchanged."""
    match code:
        case _Kind.NDARRAY:
            shape, name, buffer = _unpacked(data, raw=True, max_bin_len=_MAX_CHUNK_BYTES)
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
