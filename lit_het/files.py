"""Files that are never half written."""

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def completed(path: Path) -> Iterator[Path]:
    """Yields a temporary path that takes the place of ``path`` at the end: nobody ever sees half of a file."""
    temporary = path.with_name(f"{path.name}.partial")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it."""
    with completed(path) as temporary:
        temporary.write_text(text, "utf-8")
