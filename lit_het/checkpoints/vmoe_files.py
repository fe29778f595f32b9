"""The files in which V-MoE and e3 were released: ``NAME.index`` and ``NAME.data-00000-of-00008``, in MessagePack.

The index is a tree of shapes, slices and shard numbers; a data file maps numbers of arrays, counted over the flattened
index, to pieces of them. Only places are remembered when a checkpoint is opened; an array is read when it is asked for.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import msgpack
import numpy as np

from lit_het.checkpoints.sources import Stored
from lit_het.errors import UserError

# A key that marks a map of pieces.
_MARK = "__msgpack_array_chunk_a87ca2__"
# Arrays in a file are at most this large (2 GiB); MessagePack's own limit is lower.
_MOST_BYTES = 2**31 - 1

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
    return {
        path: Stored(info.shape, functools.partial(_read, shards, number, info))
        for number, (path, info) in enumerate(infos.items())
    }


def shard_names(prefix: Path) -> tuple[str, ...]:
    """Returns the names of the data files that an index speaks of; errors are those of `open_vmoe`."""
    return _index(prefix)[1]


def _index(prefix: Path) -> tuple[dict[str, _Info], tuple[str, ...]]:
    path = prefix.with_name(f"{prefix.name}.index")
    try:
        index = msgpack.unpackb(path.read_bytes(), ext_hook=_decode, strict_map_key=False)
        infos, count = dict(_flatten(index["index"])), index["shard_count"]
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; give the path of a V-MoE checkpoint without its ending") from error
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise UserError(f"{path} is no index of a V-MoE checkpoint ({type(error).__name__}: {error})") from error
    return infos, tuple(f"{prefix.name}.data-{number:05d}-of-{count:05d}" for number in range(count))


def _flatten(tree: Any, path: str = "") -> Iterator[tuple[str, _Info]]:
    """Yields leaves in the order in which arrays are numbered, that of sorted keys."""
    if isinstance(tree, _Info):
        yield path, tree
        return
    for key in sorted(tree):
        yield from _flatten(tree[key], f"{path}/{key}" if path else key)


def _read(shards: list[Path], number: int, info: _Info) -> np.ndarray:
    array: np.ndarray | None = None
    filled = 0
    for shard in [shards[number] for number in sorted(set(info.shards))]:
        offset = _offsets(shard).get(number)
        if offset is None:
            continue
        with shard.open("rb") as file:
            file.seek(offset)
            unpacker = msgpack.Unpacker(file, ext_hook=_decode, max_buffer_size=_MOST_BYTES, strict_map_key=False)
            for pieces, place in unpacker.unpack():
                shape = tuple(part.stop - part.start for part in place)
                piece = np.concatenate(pieces).reshape(shape)
                array = np.empty(info.shape, piece.dtype) if array is None else array
                array[place] = piece
                filled += piece.size
    if array is None or filled != array.size:
        raise UserError(
            f"array {number} of shape {info.shape} is not whole in {shards[0].parent}: {filled} numbers found"
        )
    return array


@functools.lru_cache
def _offsets(shard: Path) -> dict[int, int]:
    """Returns where a data file holds each array's pieces."""
    offsets = {}
    with shard.open("rb") as file:
        unpacker = msgpack.Unpacker(file, max_buffer_size=_MOST_BYTES, strict_map_key=False)
        try:
            for _ in range(unpacker.read_map_header()):
                key = unpacker.unpack()
                if key != _MARK:
                    offsets[int(key)] = unpacker.tell()
                unpacker.skip()
        except (ValueError, msgpack.UnpackException) as error:
            raise UserError(f"{shard} is cut short or no data file of a V-MoE checkpoint") from error
    return offsets


def _decode(code: int, data: bytes) -> Any:
    """Decodes the format's own types; others stay as they are."""
    match code:
        case _Kind.NDARRAY:
            shape, name, buffer = msgpack.unpackb(data, raw=True, max_bin_len=_MOST_BYTES)
            return np.frombuffer(buffer, _dtype(name)).reshape(shape)
        case _Kind.SHAPED_ARRAY:
            return tuple(msgpack.unpackb(data, raw=True)[0])
        case _Kind.SLICE:
            return slice(*msgpack.unpackb(data, raw=True))
        case _Kind.SLICES:
            return tuple(_decode(_Kind.SLICE, part) for part in msgpack.unpackb(data, raw=True))
        case _Kind.INDEX_INFO:
            shape, slices, shards = msgpack.unpackb(data, raw=True)
            parts = tuple(_decode(_Kind.SLICES, part) for part in slices)
            return _Info(_decode(_Kind.SHAPED_ARRAY, shape), parts, tuple(shards))
    return msgpack.ExtType(code, data)


def _dtype(name: bytes) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == b"bfloat16" else np.dtype(name.decode())
