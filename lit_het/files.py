"""Files that are never half written, and the folder for those that can be made again."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lit_het.errors import UserError


@contextlib.contextmanager
def completed(path: Path) -> Iterator[Path]:
    """Yields a temporary path that takes the place of ``path`` at the end: nobody ever sees half of a file.

    The temporary file is there already, and empty.
    """
    # Other threads, processes and hosts may be writing the same file; and where others may write to the folder, none
    # can have put a link to a file of ours under a name that nobody can guess.
    temporary = path.with_name(f"{path.name}.partial-{secrets.token_hex(8)}")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it."""
    with completed(path) as temporary:
        temporary.write_text(text, "utf-8")


def cache_folder(name: str) -> Path:
    """Returns where the user's cache keeps files of one kind, a folder that nobody else can write to.

    It is made, where it can be: what reads or writes there meets the error where it cannot. One of ours that the group
    may write to, as a umask of 002 makes it, is made private.

    Raises:
        UserError: it belongs to another user, or all may write to it. They could change what is read from it, or run
            as programs that JAX has compiled.
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
    """Refuses a folder, or a link to one, that others own or may write to; root may do what it wants anyway."""
    try:
        link, found = folder.lstat(), folder.stat()
    except OSError:
        return
    problem = ""
    if not {link.st_uid, found.st_uid} <= {os.geteuid(), 0}:
        problem = "belongs to another user"
    elif found.st_mode & stat.S_IWOTH:
        problem = "may be written to by all users"
    elif found.st_mode & stat.S_IWGRP and found.st_uid == os.geteuid():
        folder.chmod(0o700)
    if problem:
        raise UserError(
            f"{folder} {problem}, who could change what is kept there; remove it, or set XDG_CACHE_HOME to a folder of "
            "your own"
        )


def kept_array(path: Path) -> np.ndarray | None:
    """Returns the array of a ``.npy`` file of the cache, left on the disk; None where it is missing or damaged."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception:  # whatever is wrong with the file, it can be made again
        return None
