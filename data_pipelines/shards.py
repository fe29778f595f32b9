"""Webdataset shards: write them, find them, and read any sample of them in any order.

A shard is an uncompressed tar. The members of one sample share a key (the path up to the first dot of the
base name) and lie side by side: ``000017.jpg``, ``000017.txt``, ``000017.cls``. An index of each shard, kept
beside it as ``<shard>.tar.index.npz``, turns the sequential format into random access by ``os.pread``.
"""

import bisect
import dataclasses
import functools
import glob
import itertools
import logging
import os
import shutil
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from braceexpand import braceexpand
from webdataset.writer import TarWriter

from lit_het.errors import UserError

IMAGE = "image"
"""The kind of member that stands for whichever of ``IMAGE_EXTENSIONS`` a sample has."""

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")

_INDEX_VERSION = 1
_MAX_OPEN_FILES = 512  # below the usual limit of 1,024 descriptors per process
_TAR_BLOCK_BYTES = 512

_logger = logging.getLogger(__name__)


def write_shards(
    directory: Path | str,
    samples: Iterable[Mapping[str, Any]],
    *,
    samples_per_shard: int = 10_000,
    name: str = "shard",
) -> list[Path]:
    """Writes samples to ``<directory>/<name>-000000.tar`` and so on; equal samples give equal bytes.

    A sample is ``{"__key__": "000017", "jpg": bytes, "txt": str, "cls": int, "json": dict}``. All shards are written
    under a temporary folder first, so that a writer that is killed leaves no shard under its final name.

    Returns:
        The paths of the shards, in order.

    Raises:
        UserError: the directory holds shards of this name already, a key has a dot in its base name, or there are
            no samples.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob(f"{glob.escape(name)}-*.tar")):
        raise UserError(f"{directory}: holds {name}-*.tar shards already; remove them or choose another folder")
    partial = directory / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        remaining = iter(samples)
        for number in itertools.count():
            part = list(itertools.islice(remaining, samples_per_shard))
            if not part:
                break
            _write_tar(partial / f"{name}-{number:06d}.tar", part)
        written = sorted(partial.iterdir())
        if not written:
            raise UserError(f"{directory}: there are no samples to write")
        return [path.rename(directory / path.name) for path in written]
    finally:
        shutil.rmtree(partial)


def _write_tar(path: Path, samples: Sequence[Mapping[str, Any]]) -> None:
    with path.open("wb") as file, TarWriter(file, mtime=0) as writer:
        for sample in samples:
            key = sample["__key__"]
            if not key or "." in key.rpartition("/")[2]:
                raise UserError(f"{path.name}: key {key!r} must not be empty nor hold a dot; name it otherwise")
            writer.write(dict(sample))


def expand(patterns: Path | str | Iterable[Path | str]) -> list[Path]:
    """Turns brace patterns (``{000..009}.tar``), globs and folders into a sorted list of tar paths, each one once.

    Raises:
        UserError: a pattern, or one alternative of its braces, matches no tar file.
    """
    patterns = [patterns] if isinstance(patterns, (str, Path)) else list(patterns)
    if not patterns:
        raise UserError("no shards are given; name tar files, folders or patterns such as 'train-{000..009}.tar'")
    return sorted({path for pattern in patterns for path in _expand_one(str(pattern))})


def _expand_one(pattern: str) -> list[Path]:
    if Path(pattern).is_file():  # before the braces: a file may carry them in its name
        return [Path(pattern)]
    paths: list[Path] = []
    for alternative in braceexpand(pattern):
        if Path(alternative).is_dir():
            found = sorted(Path(alternative).glob("*.tar"))
        else:
            found = [Path(match) for match in sorted(glob.glob(alternative, recursive=True))]
        if not found:
            raise UserError(f"{alternative}: no tar file matches; check the path of the shards")
        paths += found
    return paths


@dataclasses.dataclass(frozen=True)
class ShardTable:
    """Where the members of one shard's samples lie; a missing member has offset -1.

    Attributes:
        path: the tar file.
        keys: UTF-8 bytes ``[samples]``.
        offsets: for each kind of member, bytes from the start of the file ``[samples]`` int64.
        sizes: for each kind of member, bytes ``[samples]`` int64.
    """

    path: Path
    keys: np.ndarray
    offsets: dict[str, np.ndarray]
    sizes: dict[str, np.ndarray]

    def key(self, row: int) -> str:
        """The key of one sample."""
        return self.keys[row].decode("utf-8")


class ShardIndex:
    """Random access to the samples of many shards; safe to share between threads.

    Args:
        paths: tar files, as ``expand`` returns them.
        required: kinds of members that every sample must have: an extension, or ``"image"`` for any of
            ``IMAGE_EXTENSIONS``.
        advance: called with 1 after each shard, for a progress bar.

    Raises:
        UserError: a shard is empty, truncated, damaged or compressed, repeats a key, or has a sample without a
            required member.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        required: Sequence[str] = (),
        advance: Callable[[int], None] | None = None,
    ):
        self._shards: list[ShardTable] = []
        for path in paths:
            table = index_shard(path)
            for kind in required:
                _require(table, kind)
            self._shards.append(table)
            if advance is not None:
                advance(1)
        self._starts = [0, *itertools.accumulate(len(shard.keys) for shard in self._shards)]
        self._open = functools.lru_cache(maxsize=_MAX_OPEN_FILES)(_OpenFile)

    def __len__(self) -> int:
        return self._starts[-1]

    def key(self, sample: int) -> str:
        """The key of a sample within its shard."""
        shard, row = self._locate(sample)
        return shard.key(row)

    def shard(self, sample: int) -> Path:
        """The tar file that holds a sample."""
        return self._locate(sample)[0].path

    def read(self, sample: int, kind: str) -> bytes:
        """The bytes of one member of a sample.

        Raises:
            UserError: the sample has no such member, or the shard has become shorter than its index says.
        """
        shard, row = self._locate(sample)
        offset = int(shard.offsets[kind][row]) if kind in shard.offsets else -1
        if offset < 0:
            raise UserError(_missing(shard, row, kind))
        size = int(shard.sizes[kind][row])
        data = self._open(shard.path).read(size, offset)
        if len(data) < size:
            raise UserError(f"{shard.path}: ends inside key {shard.key(row)}; the shard changed after it was indexed")
        return data

    def _locate(self, sample: int) -> tuple[ShardTable, int]:
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        number = bisect.bisect_right(self._starts, sample) - 1
        return self._shards[number], sample - self._starts[number]


class _OpenFile:
    """A descriptor that closes itself when its last reader, or the cache of open files, lets go of it."""

    def __init__(self, path: Path):
        self._descriptor = os.open(path, os.O_RDONLY)

    def read(self, size: int, offset: int) -> bytes:
        # a method, so that the caller holds the file as long as it reads: the cache may have dropped it already
        return os.pread(self._descriptor, size, offset)

    def __del__(self):
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def index_path(shard: Path) -> Path:
    """Where the index of a shard is kept."""
    return shard.with_name(shard.name + ".index.npz")


def index_shard(path: Path) -> ShardTable:
    """Reads the index beside a shard, or scans the shard and writes one; kept in memory if the folder is read-only.

    An index is used again while the size and the time of change of its shard stay the same.

    Raises:
        UserError: the shard is missing, empty, truncated, damaged or compressed, or repeats a key.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path of the shards") from error
    stamp = np.array([_INDEX_VERSION, status.st_size, status.st_mtime_ns])
    kept = _load_table(path, stamp)
    if kept is not None:
        return kept
    table = _scan(path)
    try:
        _save_table(table, stamp)
    except OSError as error:
        _logger.warning("%s: the index cannot be kept beside it (%s); the next run scans again", path, error.strerror)
    return _with_images(table)


def _load_table(path: Path, stamp: np.ndarray) -> ShardTable | None:
    try:
        # opened here, because np.load forgets to close a file that turns out to be no archive
        with index_path(path).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            if not np.array_equal(arrays["stamp"], stamp):
                return None
            kinds = arrays["kinds"].tolist()
            offsets, sizes = dict(zip(kinds, arrays["offsets"], strict=True)), arrays["sizes"]
            return _with_images(ShardTable(path, arrays["keys"], offsets, dict(zip(kinds, sizes, strict=True))))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None  # an index is only a cache: whatever is wrong with it, the scan puts it right


def _save_table(table: ShardTable, stamp: np.ndarray) -> None:
    kept = index_path(table.path)
    temporary = kept.with_name(f".{kept.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with temporary.open("wb") as file:
            np.savez(
                file,
                stamp=stamp,
                keys=table.keys,
                kinds=np.array(list(table.offsets)),
                offsets=np.stack(list(table.offsets.values())),
                sizes=np.stack(list(table.sizes.values())),
            )
        temporary.replace(kept)
    finally:
        temporary.unlink(missing_ok=True)


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


def _require(table: ShardTable, kind: str) -> None:
    missing = table.offsets[kind] < 0 if kind in table.offsets else np.ones(len(table.keys), bool)
    if missing.any():
        raise UserError(_missing(table, int(missing.argmax()), kind))


def _missing(table: ShardTable, row: int, kind: str) -> str:
    name = "/".join(IMAGE_EXTENSIONS) if kind == IMAGE else kind
    return f"{table.path}: key {table.key(row)} has no .{name}; add the member or remove the sample"


def _scan(path: Path) -> ShardTable:
    """Reads the headers of a shard, not the payload."""
    samples: dict[str, dict[str, tuple[int, int]]] = {}
    previous = ""
    for name, offset, size in _members(path):
        folder, _, base = name.rpartition("/")
        stem, dot, kind = base.partition(".")
        if not stem or not dot:
            continue  # hidden files and files without extension are no part of a sample, as in webdataset
        key, kind = (f"{folder}/{stem}" if folder else stem), kind.lower()
        if (key != previous and key in samples) or kind in samples.get(key, {}):
            raise UserError(f"{path}: key {key} occurs twice; write the shard again with distinct keys")
        samples.setdefault(key, {})[kind] = (offset, size)
        previous = key
    if not samples:
        raise UserError(f"{path}: holds no samples; remove the shard or write it again")
    kinds = sorted({kind for sample in samples.values() for kind in sample})
    table = {kind: np.array([sample.get(kind, (-1, 0)) for sample in samples.values()], np.int64) for kind in kinds}
    return ShardTable(
        path=path,
        keys=np.array([key.encode("utf-8", "surrogateescape") for key in samples]),
        offsets={kind: table[kind][:, 0] for kind in kinds},
        sizes={kind: table[kind][:, 1] for kind in kinds},
    )


def _members(path: Path) -> Iterable[tuple[str, int, int]]:
    with path.open("rb") as file:
        try:
            tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 (closed just below)
        except tarfile.ReadError as error:
            raise UserError(f"{path}: is no uncompressed tar ({error}); unpack it or write it again") from error
        with tar:
            try:
                for member in tar:
                    if member.isfile():
                        yield member.name, member.offset_data, member.size
            except tarfile.ReadError as error:
                raise _truncated(path, tar.offset) from error
            # tarfile takes both a damaged header and the end of the file for the end of the archive
            file.seek(tar.offset)
            if file.read(_TAR_BLOCK_BYTES) != bytes(_TAR_BLOCK_BYTES):
                raise _truncated(path, tar.offset)


def _truncated(path: Path, offset: int) -> UserError:
    size = path.stat().st_size
    return UserError(
        f"{path}: is truncated or damaged at byte {min(offset, size)} of {size}; fetch or write the shard again"
    )
