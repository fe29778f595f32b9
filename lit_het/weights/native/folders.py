"""Lists a folder of checkpoints: complete, half-written and damaged steps, and their sizes."""

import contextlib
import dataclasses
import datetime
import re
from pathlib import Path

from lit_het import untrusted
from lit_het.errors import UserError
from lit_het.untrusted import Malformed

# Suffixes of step folders that are not checkpoints: interrupted saves, and damaged steps that were set aside.
HALF_WRITTEN, DAMAGED = ".orbax-checkpoint-tmp", ".damaged"
COMPLETE = "complete"
_STATES = {"": COMPLETE, HALF_WRITTEN: "half written", DAMAGED: "set aside: damaged"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """One step in a folder of checkpoints.

    Attributes:
        step: number of optimizer updates.
        path: folder of the step.
        state: `COMPLETE`, half written or damaged. Only complete steps are restored.
        time: of the last modification.
        size: bytes on disk.
    """

    step: int
    path: Path
    state: str
    time: datetime.datetime
    size: int


def entries(directory: Path) -> list[Entry]:
    """Returns all steps in a folder of checkpoints, sorted by number."""
    if not directory.is_dir():
        raise UserError(f"no checkpoints in {directory}; give a run, or its folder of checkpoints")
    found = []
    for path in directory.iterdir():
        match = re.fullmatch(r"(\d+)(\..*)?", path.name)
        if match is not None and (match[2] or "") in _STATES:
            time = datetime.datetime.fromtimestamp(path.stat().st_mtime)
            found.append(Entry(int(match[1]), path, _STATES[match[2] or ""], time, directory_size(path)))
    return sorted(found, key=lambda entry: (entry.step, entry.path.name))


def complete_steps(directory: Path) -> list[int]:
    """Returns the complete steps in a folder of checkpoints, oldest first; an empty list if there is no folder."""
    if not directory.is_dir():
        return []
    # Orbax gives a step its bare number when the save is complete; other names are unfinished or set aside.
    return sorted(int(path.name) for path in directory.iterdir() if re.fullmatch(r"[0-9]{1,18}", path.name))


def has_metadata(step: Path) -> bool:
    """Returns whether Orbax can read the timestamps of a step."""
    try:
        found = untrusted.read_json(step / "_CHECKPOINT_METADATA", 2**20)
    except (OSError, Malformed):
        return False
    times = [found.get(f"{name}_timestamp_nsecs") for name in ("init", "commit")] if isinstance(found, dict) else [""]
    return all(time is None or (type(time) is int and 0 <= time < 2**63) for time in times)


def directory_size(directory: Path) -> int:
    """Returns the bytes of all files in a folder."""
    size = 0
    # Files may be renamed or removed meanwhile: a save may be writing here.
    with contextlib.suppress(FileNotFoundError):
        for path in directory.rglob("*"):
            size += path.stat().st_size if path.is_file() else 0
    return size
