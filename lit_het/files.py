"""Atomic writes, tables of columns, locks, and the user's cache directory."""

import contextlib
import csv
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lit_het.errors import UserError

_FORMULA = re.compile(r"'*[=+\-@\t\r]")


@contextlib.contextmanager
def completed(path: Path) -> Iterator[Path]:
    """Yields the path of an empty temporary file, which replaces ``path`` at the end; readers never see half a file."""
    # A random name, as other threads, processes and hosts may write the same file. O_EXCL and O_NOFOLLOW, as another
    # user of a shared directory could otherwise plant a link that makes us overwrite one of our own files.
    temporary = path.with_name(f"{path.name}.partial-{secrets.token_hex(8)}")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def completed_folder(path: Path) -> Iterator[Path]:
    """Yields a new temporary folder, which is renamed to ``path`` at the end, and removed after an error."""
    temporary = path.with_name(f"{path.name}.partial-{secrets.token_hex(8)}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file under a temporary name and renames it."""
    with completed(path) as temporary:
        temporary.write_text(text, "utf-8")


def write_columns(path: Path, columns: Mapping[str, Iterable[Any]]) -> None:
    """Writes columns of equal length to a .parquet file or, by any other ending, as CSV, row by row."""
    with completed(path) as partial:
        if path.suffix == ".parquet":
            try:
                import pyarrow as pa
                import pyarrow.parquet as pq
            except ImportError as error:
                raise UserError(f"--output {path} needs pyarrow: pip install 'lit-het[parquet]'") from error
            pq.write_table(pa.table({name: list(column) for name, column in columns.items()}), partial)
        else:
            with partial.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                writer.writerows(map(cell_of, row) for row in zip(*columns.values(), strict=True))


def cell_of(value: Any) -> Any:
    """Returns a value for CSV; a text that a spreadsheet could take for a formula has an apostrophe before it."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def text_of(cell: str) -> str:
    """Returns the text that `cell_of` made a cell of."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Waits for the other processes that hold a lock file; the lock is released when the process ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_safetensors(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Writes arrays, which must be contiguous, under a temporary name and renames the file."""
    import safetensors.numpy

    with completed(path) as temporary:
        mode = temporary.stat().st_mode
        safetensors.numpy.save_file(arrays, temporary, metadata)
        temporary.chmod(mode)  # it writes a new file, which only its owner could read


def cache_folder(name: str) -> Path:
    """Returns the directory of the user's cache for one kind of file, to which only this user can write.

    The directory is created if possible; if not, reading or writing there raises the error. A directory of this user
    that its group can write to (umask 002) is made private.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit-het"
    with contextlib.suppress(OSError):
        root.parent.mkdir(parents=True, exist_ok=True)
    for folder in (root, root / name):
        with contextlib.suppress(OSError):
            folder.mkdir(0o700)
        _check_private(folder)
    return root / name


def _check_private(folder: Path) -> None:
    """Checks that no other user owns or can write to a directory or the link to it; root may."""
    # Another user could replace cached files, such as compiled programs, which JAX would run as this user.
    try:
        link, found = folder.lstat(), folder.stat()
    except OSError:
        return
    problem = ""
    if not {link.st_uid, found.st_uid} <= {os.geteuid(), 0}:
        problem = "belongs to another user"
    elif found.st_mode & stat.S_IWOTH:
        problem = "can be written to by all users"
    elif found.st_mode & stat.S_IWGRP and found.st_uid == os.geteuid():
        folder.chmod(0o700)
    if problem:
        raise UserError(
            f"{folder} {problem}, so cached files could be replaced; remove it, or set XDG_CACHE_HOME to a directory "
            "of your own"
        )


def cached_array(path: Path) -> np.ndarray | None:
    """Returns the memory-mapped array of a ``.npy`` file in the cache, or None if it is missing or damaged."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception:  # a cached file can be recreated, whatever is wrong with it
        return None
