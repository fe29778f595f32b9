"""Files that are never half written."""

from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it: nobody ever sees half of it."""
    temporary = path.with_name(f"{path.name}.partial")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)
