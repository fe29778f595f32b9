"""Readers with a defect each, which a fuzzer must find; in a module, so that its processes can import them."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lit_het.errors import UserError
from scripts.testing.fuzzing.readers import Target
from scripts.testing.fuzzing.seeds import Files

TEXT = b"a whole line\n" * 20


def seeds() -> Iterator[Files]:
    """One small text, and one that nothing changes."""
    yield {"text": TEXT, "other": b"stays"}


def _is_changed(folder: Path) -> bool:
    assert (folder / "other").read_bytes() == b"stays"
    return (folder / "text").read_bytes() != TEXT


def sound(folder: Path) -> None:
    """Refuses what is changed in one line."""
    if _is_changed(folder):
        raise UserError("the text is changed; copy it again")


def key_error(folder: Path) -> None:
    """Looks for what is not there."""
    if _is_changed(folder):
        {}["missing"]


class TwoLinesError(UserError):
    """Has a message of two lines."""

    def __str__(self) -> str:
        return "the text is changed\nand that is bad"


def two_lines(folder: Path) -> None:
    """Says too much."""
    if _is_changed(folder):
        raise TwoLinesError


def spins(folder: Path) -> None:
    """Comes to no end."""
    spinning = _is_changed(folder)
    while spinning:
        pass


def allocates(folder: Path) -> None:
    """Takes 2 GB."""
    if _is_changed(folder):
        np.ones(2 * 10**9, np.uint8)


def allocates_and_refuses(folder: Path) -> None:
    """Takes 2 GB, and blames the text if there are none."""
    try:
        allocates(folder)
    except MemoryError as error:
        raise UserError("the text is too large") from error


def dies(folder: Path) -> None:
    """Ends its process, as damage in a native library does."""
    if _is_changed(folder):
        os.kill(os.getpid(), signal.SIGSEGV)


READERS = (sound, key_error, two_lines, spins, allocates, allocates_and_refuses, dies)
TARGETS = {read.__name__: Target(seeds, read, changed=("text",)) for read in READERS}
