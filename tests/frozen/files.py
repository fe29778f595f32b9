"""Recorded data as JSON that a person can compare: what fits into a line is one."""

import difflib
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
_WIDTH = 120


def read(name: str) -> Any:
    """Returns what was recorded."""
    return json.loads(_path(name).read_text())


def exists(name: str) -> bool:
    """Returns whether anything was recorded under a name."""
    return _path(name).exists()


def write(name: str, value: Any) -> None:
    """Records a value anew."""
    _path(name).write_text(_text(value) + "\n")


def compare(recorded: Any, now: Any) -> None:
    """Raises an `AssertionError` with the lines in which a value differs from what was recorded."""
    before, after = (_text(value).splitlines() for value in (recorded, now))
    changed = "\n".join(difflib.unified_diff(before, after, "recorded", "now", n=1, lineterm=""))
    assert not changed, f"{changed}\nwhere this is meant, python -m tests.frozen.record [NAME ...] records it anew"


def _path(name: str) -> Path:
    return FOLDER / f"{name}.json"


def _text(value: Any, indent: int = 0, before: int = 0) -> str:
    """Returns JSON whose objects and lists are on one line each, unless that is too long; numbers and texts are.

    Args:
        value: of JSON.
        indent: spaces before the lines of its entries.
        before: characters before it on its first line.
    """
    line = json.dumps(value, ensure_ascii=False)
    if before + len(line) < _WIDTH or not _has_parts(value):
        return line
    inner = " " * (indent + 1)
    keys = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    entries = value.values() if isinstance(value, dict) else value
    lines = [
        f"{inner}{key}{_text(entry, indent + 1, indent + 1 + len(key))}"
        for key, entry in zip(keys, entries, strict=True)
    ]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([opening, ",\n".join(lines), " " * indent + closing])


def _has_parts(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict | list) for one in value))
