"""Reads and writes files: local ones with ``pread``, remote ones through fsspec, with retries."""

import functools
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsspec.implementations.local import LocalFileSystem

from lit_het.data_pipelines.shards import stores
from lit_het.data_pipelines.shards.stores import PERMANENT_ERRORS, reason, with_retries
from lit_het.data_pipelines.shards.urls import is_pipe, is_remote
from lit_het.data_pipelines.shards.watchdog import reading
from lit_het.errors import UserError
from lit_het.files import completed
from lit_het.untrusted import read_bytes

MAX_TEXT_BYTES = 2**26
"""The largest accepted text file, such as class names and lists of shards: 64 MiB."""

MAX_REQUESTS = 16  # to a store, concurrently
_MAX_OPEN_FILES = 512  # below the usual limit of 1,024 descriptors per process

_UNREADABLE = "unreadable shard"
_NO_ANSWER = "store does not answer"
_TRUNCATED = "shard is shorter than its index says"
# Causes that a later run may not meet again.
TRANSIENT_CAUSES = (_UNREADABLE, _NO_ANSWER, _TRUNCATED)

_Result = TypeVar("_Result")


class Span(NamedTuple):
    """A byte range of a file: its address, the first byte, and the number of bytes."""

    address: str
    offset: int
    size: int


class Unreadable(Exception):
    """Content that cannot be read.

    Attributes:
        cause: a short description, equal for all files with this defect, for counting.
    """

    def __init__(self, cause: str, detail: str):
        super().__init__(f"{cause} ({detail})")
        self.cause = cause


def content_or_raise(content: bytes | Unreadable) -> bytes:
    """Returns content that was read, or raises the reason why it was not.

    Raises:
        Unreadable: the content could not be read.
    """
    if isinstance(content, Unreadable):
        raise content
    return content


filesystem = functools.lru_cache(maxsize=2**16)(stores.filesystem)


def stamp(address: str) -> str:
    """Returns a string that changes with the file: its size and modification time, or its tag in a store."""
    if is_pipe(address):
        raise UserError(f"{address}: a command cannot seek; read it with `data.stream` in a configuration file")
    try:
        if not is_remote(address):
            status = Path(address).stat()
            if not stat.S_ISREG(status.st_mode):
                raise OSError("not a regular file")
            return f"{status.st_size} {status.st_mtime_ns}"
        files, path = filesystem(address)
        info = with_retries(lambda: files.info(path))
    except Exception as error:
        raise UserError(f"{address}: cannot be read ({reason(error)}); check the path of the shards") from error
    tags = (
        info[name]
        for name in ("etag", "ETag", "md5Hash", "mtime", "updated", "LastModified", "created")
        if info.get(name)
    )
    return f"{info['size']} {next(tags, '')}".strip()


def open_to_scan(address: str) -> Any:
    """Opens a binary file for sequential reads with seeks."""
    if not is_remote(address):
        return Path(address).open("rb")
    return _RetriedFile(address)


def size(address: str) -> int:
    """Returns the size of a file in bytes; raises as `stamp`."""
    return int(stamp(address).partition(" ")[0])


def read_whole(address: str, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Returns the content of a small file.

    Raises:
        OSError: it cannot be read, or has more than ``max_bytes``.
    """
    if is_remote(address):
        files, path = filesystem(address)
        content = with_retries(lambda: files.cat_file(path, 0, max_bytes + 1))
    else:
        content = read_bytes(Path(address), max_bytes + 1)
    # One byte more than allowed was requested: its presence shows that the file is too large.
    if len(content) > max_bytes:
        raise OSError(f"more than {max_bytes:,} bytes")
    return content


def text_lines(address: str) -> tuple[str, ...]:
    """Returns the lines of a UTF-8 file, each stripped, without empty lines at the end."""
    try:
        text = read_whole(address).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{address}: cannot be read ({reason(error)}); check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{address}: not UTF-8 text; save it as UTF-8, one entry per line") from error
    # Not str.splitlines, which also splits at characters that names may contain (U+0085, U+2028).
    return tuple(line.strip() for line in text.rstrip().split("\n"))


def read_lines(address: str) -> tuple[str, ...]:
    """Returns the lines of a UTF-8 file such as ``classnames.txt``, in which line numbers are labels."""
    lines = text_lines(address)
    if "" in lines:
        what = "the file is empty" if len(lines) == 1 else f"line {lines.index('') + 1} is empty"
        raise UserError(f"{address}: {what}; write one entry per line")
    return lines


def write(address: str, content: bytes) -> None:
    """Writes a small file atomically.

    Raises:
        OSError: it cannot be written.
    """
    if is_remote(address):
        files, path = filesystem(address)
        if not isinstance(files, LocalFileSystem):
            # Object stores make an object visible only when it is complete.
            with_retries(lambda: files.pipe_file(path, content))
            return
        address = path
    Path(address).parent.mkdir(parents=True, exist_ok=True)
    with completed(Path(address)) as temporary:
        temporary.write_bytes(content)


def exists(address: str) -> bool:
    """Returns whether a file exists."""
    if not is_remote(address):
        return Path(address).is_file()
    files, path = filesystem(address)
    try:
        return with_retries(lambda: files.isfile(path))
    except OSError as error:
        raise UserError(f"{address}: the store does not answer ({reason(error)}); start again") from error


class _RetriedFile:
    """A file in a store, for sequential reads with retries; a read that still fails raises `OSError`."""

    def __init__(self, address: str):
        files, path = filesystem(address)
        # Headers lie one image apart: one long read is faster than a request per header.
        self._file = with_retries(lambda: files.open(path, "rb", block_size=2**23, cache_type="readahead"))

    def read(self, size: int = -1) -> bytes:
        return with_retries(lambda: self._file.read(size))

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "_RetriedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SequentialFile:
    """A file that is read sequentially, from a store with retries.

    Raises:
        Unreadable: it cannot be opened, or a later read fails.
    """

    def __init__(self, address: str):
        self._address, self._is_remote = address, is_remote(address)
        self._file = self._guarded(lambda: open_to_scan(address))

    def read(self, size: int) -> bytes:
        """Returns the next bytes; none at the end of the file."""
        return self._guarded(lambda: self._file.read(size))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _guarded(self, call: Callable[[], _Result]) -> _Result:
        try:
            with reading(self._address):
                return call()
        except OSError as error:
            is_permanent = not self._is_remote or isinstance(error, PERMANENT_ERRORS)
            raise Unreadable(_UNREADABLE if is_permanent else _NO_ANSWER, reason(error)) from error


class Reader:
    """Reads byte ranges of files and caches open files; safe to share between threads."""

    def __init__(self) -> None:
        self._open = functools.lru_cache(maxsize=_MAX_OPEN_FILES)(_OpenFile)

    def read(self, spans: Sequence[Span]) -> list[bytes | Unreadable]:
        """Returns the content of each byte range, or why it cannot be read; those of a store are read concurrently."""
        found: list[bytes | Unreadable] = [b""] * len(spans)
        remote: dict[str, list[int]] = {}
        for number, span in enumerate(spans):
            if is_remote(span.address):
                remote.setdefault(span.address.partition("://")[0], []).append(number)
            else:
                # Local reads of a batch follow each other; the loader's threads overlap batches.
                found[number] = self._read_local(span)
        for numbers in remote.values():
            for number, result in zip(numbers, _read_remote([spans[n] for n in numbers]), strict=True):
                found[number] = result
        return found

    def _read_local(self, span: Span) -> bytes | Unreadable:
        try:
            with reading(span.address):
                data = self._open(span.address).read(span.size, span.offset)
        except OSError as error:
            return Unreadable(_UNREADABLE, reason(error))
        return data if len(data) == span.size else _truncated(span)


def _read_remote(spans: Sequence[Span]) -> list[bytes | Unreadable]:
    files, _ = filesystem(spans[0].address)
    paths = [filesystem(span.address)[1] for span in spans]
    found: list[Any] = [None] * len(spans)
    # Only the failed ranges of a request are requested again.
    waiting = list(range(len(spans)))
    for pause in (*stores.BACK_OFF, None):
        starts = [spans[n].offset for n in waiting]
        ends = [spans[n].offset + spans[n].size for n in waiting]
        try:
            with reading(spans[waiting[0]].address):
                results = files.cat_ranges([paths[n] for n in waiting], starts, ends, on_error="return")
        except Exception as error:  # the whole request failed
            results = [error] * len(waiting)
        for number, result in zip(waiting, results, strict=True):
            found[number] = result
        waiting = [n for n in waiting if isinstance(found[n], Exception) and not isinstance(found[n], PERMANENT_ERRORS)]
        if not waiting or pause is None:
            break
        time.sleep(pause)
    return [_checked(span, result) for span, result in zip(spans, found, strict=True)]


def _checked(span: Span, result: Any) -> bytes | Unreadable:
    if isinstance(result, PERMANENT_ERRORS):
        return Unreadable(_UNREADABLE, reason(result))
    if isinstance(result, Exception):
        return Unreadable(_NO_ANSWER, reason(result))
    return bytes(result) if len(result) == span.size else _truncated(span)


def _truncated(span: Span) -> Unreadable:
    return Unreadable(_TRUNCATED, f"{span.address} changed after it was indexed")


class _OpenFile:
    """A file descriptor that closes when neither a reader nor the cache refers to it."""

    def __init__(self, path: str):
        self._descriptor = os.open(path, os.O_RDONLY)

    def read(self, size: int, offset: int) -> bytes:
        # As a method it holds a reference to the file, which the cache may evict during the read.
        return os.pread(self._descriptor, size, offset)

    def __del__(self):
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)
