"""Files that are never half written, and the folder for those that can be made again."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np


@contextlib.contextmanager
def completed(path: Path) -> Iterator[Path]:
    """Yields a temporary path that takes the place of ``path`` at the end: nobody ever sees half of a file."""
    # Other threads, processes and hosts may be writing the same file.
    temporary = path.with_name(f"{path.name}.partial-{os.getpid()}-{threading.get_ident()}")
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
    """Returns where the user's cache keeps files of one kind."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "lit-het" / name


def kept_array(path: Path) -> np.ndarray | None:
    """Returns the array of a ``.npy`` file of the cache, left on the disk; None where it is missing or damaged."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception:  # whatever is wrong with the file, it can be made again
        return None
