"""What lies in a folder of checkpoints: whole steps, what a kill or a fault left of others, and their sizes."""

import contextlib
import dataclasses
import datetime
import re
from pathlib import Path

from lit_het import untrusted
from lit_het.errors import UserError
from lit_het.untrusted import Malformed

# What stands behind the number of a step in the names of folders that are no checkpoints.
HALF_WRITTEN, DAMAGED = ".orbax-checkpoint-tmp", ".damaged"
COMPLETE = "complete"
_STATES = {"": COMPLETE, HALF_WRITTEN: "half written", DAMAGED: "set aside: damaged"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """What lies in a folder of checkpoints.

    Attributes:
        step: optimizer updates that it has seen.
        path: its folder.
        state: of these, only `COMPLETE` ones are ever restored.
        time: when it was last written to.
        size: bytes on disk.
    """

    step: int
    path: Path
    state: str
    time: datetime.datetime
    size: int


def entries(directory: Path) -> list[Entry]:
    """Returns what lies in a folder of checkpoints, by step.

    Raises:
        UserError: there is no such folder.
    """
    if not directory.is_dir():
        raise UserError(f"no checkpoints in {directory}; give a run, or its folder of checkpoints")
    found = []
    for path in directory.iterdir():
        match = re.fullmatch(r"(\d+)(\..*)?", path.name)
        if match is not None and (match[2] or "") in _STATES:
            time = datetime.datetime.fromtimestamp(path.stat().st_mtime)
            found.append(Entry(int(match[1]), path, _STATES[match[2] or ""], time, size_below(path)))
    return sorted(found, key=lambda entry: (entry.step, entry.path.name))


def complete_steps(directory: Path) -> list[int]:
    """Returns the steps that a folder of checkpoints holds whole, oldest first; none where there is no folder."""
    if not directory.is_dir():
        return []
    return sorted(int(path.name) for path in directory.iterdir() if re.fullmatch(r"[0-9]{1,18}", path.name))


def has_metadata(step: Path) -> bool:
    """Returns whether Orbax can read when a step was saved."""
    try:
        found = untrusted.read_json(step / "_CHECKPOINT_METADATA", 2**20)
    except (OSError, Malformed):
        return False
    times = [found.get(f"{name}_timestamp_nsecs") for name in ("init", "commit")] if isinstance(found, dict) else [""]
    return all(time is None or (type(time) is int and 0 <= time < 2**63) for time in times)


def size_below(directory: Path) -> int:
    """Returns the bytes of all files in a folder, also while files come, go and change their names."""
    size = 0
    with contextlib.suppress(FileNotFoundError):
        for path in directory.rglob("*"):
            size += path.stat().st_size if path.is_file() else 0
    return size
