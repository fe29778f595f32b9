"""Bytes of files wherever they lie: local ones by ``pread``, remote ones by fsspec, tried again where a store fails."""

import functools
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fsspec.implementations.local import LocalFileSystem

from lit_het import stores
from lit_het.data_pipelines.watchdog import reading
from lit_het.errors import UserError
from lit_het.files import completed

MAX_TEXT_BYTES = 2**26
"""Text files, such as class names and lists of shards, of more bytes (64 MiB) are refused."""

PIPE = "pipe:"
# Seconds to wait before each new try of a remote store.
BACK_OFF = (0.5, 1.0, 2.0, 4.0, 8.0)
MAX_REQUESTS = 16  # to a store, at a time
_MAX_OPEN_FILES = 512  # below the usual limit of 1,024 descriptors per process
# What no second try would mend.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, ImportError)

_UNREADABLE, _NO_ANSWER, _SHORTER = "unreadable shard", "store does not answer", "shard is shorter than its index says"
# What another try, another day, may not meet again.
PASSING = (_UNREADABLE, _NO_ANSWER, _SHORTER)

_Result = TypeVar("_Result")


class Span(NamedTuple):
    """A piece of a file: its address, the first byte, and how many."""

    address: str
    offset: int
    size: int


class Unreadable(Exception):
    """Bytes that cannot be had.

    Attributes:
        cause: a few words that are the same for all with this defect, for counting.
    """

    def __init__(self, cause: str, detail: str):
        super().__init__(f"{cause} ({detail})")
        self.cause = cause


def readable(content: bytes | Unreadable) -> bytes:
    """Returns bytes that were read.

    Raises:
        Unreadable: they could not be.
    """
    if isinstance(content, Unreadable):
        raise content
    return content


def is_pipe(address: str) -> bool:
    """Returns whether an address is a shell command whose output is to be read, such as ``pipe:zcat file``."""
    return address.startswith(PIPE)


def shortened(address: str) -> str:
    """Returns an address in quotes, on one line."""
    return repr(address if len(address) <= 80 else f"{address[:80]}...")


def is_remote(address: str) -> bool:
    """Returns whether an address is one for fsspec, such as ``gs://bucket/file``, and no local path."""
    return "://" in address and not is_pipe(address)


filesystem = functools.lru_cache(maxsize=2**16)(stores.filesystem)


def stamp(address: str) -> str:
    """Returns what changes when a file does: its size and time of change, or the tag that its store gives it.

    Raises:
        UserError: there is no such file, it is a pipe or device, or its store does not answer.
    """
    if is_pipe(address):
        raise UserError(f"{address}: a command cannot seek; read it with `data.stream` in a configuration file")
    try:
        if not is_remote(address):
            status = Path(address).stat()
            if not stat.S_ISREG(status.st_mode):
                raise OSError("is no regular file")
            return f"{status.st_size} {status.st_mtime_ns}"
        files, path = filesystem(address)
        info = retried(lambda: files.info(path))
    except Exception as error:
        raise UserError(f"{address}: cannot be read ({reason(error)}); check the path of the shards") from error
    tags = (
        info[name]
        for name in ("etag", "ETag", "md5Hash", "mtime", "updated", "LastModified", "created")
        if info.get(name)
    )
    return f"{info['size']} {next(tags, '')}".strip()


def open_to_scan(address: str) -> Any:
    """Returns a binary file to be read from its beginning to its end, with jumps."""
    if not is_remote(address):
        return Path(address).open("rb")
    return _RetriedFile(address)


def size(address: str) -> int:
    """Returns the bytes of a file; raises as `stamp`."""
    return int(stamp(address).partition(" ")[0])


def read_whole(address: str, most_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Returns the content of a small file.

    Raises:
        OSError: there is none, or it has more than ``most_bytes``.
    """
    if is_remote(address):
        files, path = filesystem(address)
        content = retried(lambda: files.cat_file(path, 0, most_bytes + 1))
    else:
        with Path(address).open("rb") as file:
            content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(f"more than {most_bytes:,} bytes")
    return content


def text_lines(address: str) -> tuple[str, ...]:
    """Returns the lines of a UTF-8 file, without surrounding blanks; empty ones at its end are left out.

    Raises:
        UserError: the file is missing or not UTF-8.
    """
    try:
        text = read_whole(address).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{address}: cannot be read ({reason(error)}); check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{address}: not UTF-8 text; save it as UTF-8, one entry a line") from error
    # Not str.splitlines, which also splits at characters that may stand in a name (U+0085, U+2028).
    return tuple(line.strip() for line in text.rstrip().split("\n"))


def read_lines(address: str) -> tuple[str, ...]:
    """Returns the lines of a UTF-8 file such as ``classnames.txt``, whose numbers mean something.

    Raises:
        UserError: as `text_lines`; the file is empty, or holds an empty line before its end.
    """
    lines = text_lines(address)
    if "" in lines:
        what = "the file is empty" if len(lines) == 1 else f"line {lines.index('') + 1} is empty"
        raise UserError(f"{address}: {what}; write one entry a line")
    return lines


def write(address: str, content: bytes) -> None:
    """Writes a small file that is never seen half written.

    Raises:
        OSError: it cannot be written.
    """
    if is_remote(address):
        files, path = filesystem(address)
        if not isinstance(files, LocalFileSystem):
            retried(lambda: files.pipe_file(path, content))  # stores show an object when it is whole
            return
        address = path
    Path(address).parent.mkdir(parents=True, exist_ok=True)
    with completed(Path(address)) as temporary:
        temporary.write_bytes(content)


def exists(address: str) -> bool:
    """Returns whether there is a file.

    Raises:
        UserError: its store does not answer.
    """
    if not is_remote(address):
        return Path(address).is_file()
    files, path = filesystem(address)
    try:
        return retried(lambda: files.isfile(path))
    except OSError as error:
        raise UserError(f"{address}: the store does not answer ({reason(error)}); start again") from error


def parent(address: str) -> str:
    """Returns the folder of a file."""
    return address.rpartition("/")[0] if is_remote(address) else str(Path(address).parent)


def absolute(address: str) -> str:
    """Returns an address that means the same file from every folder."""
    return address if is_remote(address) else str(Path(address).resolve())


class _RetriedFile:
    """A file in a store, for long reads; each is asked for again where the store fails, and then is an `OSError`."""

    def __init__(self, address: str):
        files, path = filesystem(address)
        # Headers lie an image apart: one long read is faster than a request for each.
        self._file = retried(lambda: files.open(path, "rb", block_size=2**23, cache_type="readahead"))

    def read(self, size: int = -1) -> bytes:
        return retried(lambda: self._file.read(size))

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
    """A file that is read from its beginning to its end; a store is asked again where it fails.

    Raises:
        Unreadable: it cannot be opened, or later not be read.
    """

    def __init__(self, address: str):
        self._address, self._is_remote = address, is_remote(address)
        self._file = self._tried(lambda: open_to_scan(address))

    def read(self, size: int) -> bytes:
        """Returns the next bytes, none at the end."""
        return self._tried(lambda: self._file.read(size))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _tried(self, call: Callable[[], _Result]) -> _Result:
        try:
            with reading(self._address):
                return call()
        except OSError as error:
            is_final = not self._is_remote or isinstance(error, _FINAL)
            raise Unreadable(_UNREADABLE if is_final else _NO_ANSWER, reason(error)) from error


class Reader:
    """Reads pieces of files, which it keeps open; safe to share between threads."""

    def __init__(self) -> None:
        self._open = functools.lru_cache(maxsize=_MAX_OPEN_FILES)(_OpenFile)

    def read(self, spans: Sequence[Span]) -> list[bytes | Unreadable]:
        """Returns the bytes of each piece, or why it cannot be read; pieces of a remote store are read at once."""
        found: list[bytes | Unreadable] = [b""] * len(spans)
        remote: dict[str, list[int]] = {}
        for number, span in enumerate(spans):
            if is_remote(span.address):
                remote.setdefault(span.address.partition("://")[0], []).append(number)
            else:
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
        return data if len(data) == span.size else _shorter(span)


def retried(call: Callable[[], _Result]) -> _Result:
    """Returns what a call to a store returns, after as many tries as `BACK_OFF` has pauses, and one.

    Raises:
        OSError: all have failed; stores themselves raise what their clients' libraries raise.
    """
    for pause in (*BACK_OFF, None):
        try:
            return call()
        except _FINAL:
            raise
        except Exception as error:
            if pause is None:
                raise OSError(reason(error)) from error
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def _read_remote(spans: Sequence[Span]) -> list[bytes | Unreadable]:
    files, _ = filesystem(spans[0].address)
    paths = [filesystem(span.address)[1] for span in spans]
    found: list[Any] = [None] * len(spans)
    waiting = list(range(len(spans)))
    for pause in (*BACK_OFF, None):
        starts = [spans[n].offset for n in waiting]
        ends = [spans[n].offset + spans[n].size for n in waiting]
        try:
            with reading(spans[waiting[0]].address):
                results = files.cat_ranges([paths[n] for n in waiting], starts, ends, on_error="return")
        except Exception as error:  # of the whole request
            results = [error] * len(waiting)
        for number, result in zip(waiting, results, strict=True):
            found[number] = result
        waiting = [n for n in waiting if isinstance(found[n], Exception) and not isinstance(found[n], _FINAL)]
        if not waiting or pause is None:
            break
        time.sleep(pause)
    return [_checked(span, result) for span, result in zip(spans, found, strict=True)]


def _checked(span: Span, result: Any) -> bytes | Unreadable:
    if isinstance(result, _FINAL):
        return Unreadable(_UNREADABLE, reason(result))
    if isinstance(result, Exception):
        return Unreadable(_NO_ANSWER, reason(result))
    return bytes(result) if len(result) == span.size else _shorter(span)


def _shorter(span: Span) -> Unreadable:
    return Unreadable(_SHORTER, f"{span.address} changed after it was indexed")


class _OpenFile:
    """A descriptor that closes itself when its last reader, or the cache of open files, lets go of it."""

    def __init__(self, path: str):
        self._descriptor = os.open(path, os.O_RDONLY)

    def read(self, size: int, offset: int) -> bytes:
        # a method, so that the caller holds the file as long as it reads: the cache may have dropped it already
        return os.pread(self._descriptor, size, offset)

    def __del__(self):
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def reason(error: BaseException) -> str:
    """Returns what an error says, on one line."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())[:200]
    return text or type(error).__name__
