"""The SHA-256 of what a run has written down about itself: its configuration and its tokenizer.

``RUN/manifest.json`` names each file with its SHA-256, and has one of its own. It is gone while the files change, so
that a kill between two of them leaves a run that opens unchecked, as runs of earlier versions do.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_het import untrusted
from lit_het.errors import UserError
from lit_het.files import completed, write_atomically

NAME = "manifest.json"
_SEAL, _FILES = "sha256", "files"
_MOST_BYTES = 2**16
_MOST_FILE_BYTES = 2**26  # of a file that it names: the tokenizer's model

KNOWN = frozenset({"config.json", "tokenizer.model"})
"""The files that a manifest may name: one that others wrote must not make us read any other."""


def write(run_dir: Path, files: Mapping[str, bytes]) -> None:
    """Writes files into a run's directory and then their manifest; what is there already stays untouched.

    Args:
        run_dir: which exists.
        files: content by name.
    """
    path = run_dir / NAME
    text = _sealed({name: _digest(content) for name, content in files.items()})
    changed = {name: content for name, content in files.items() if _content(run_dir / name) != content}
    if not changed and _content(path) == text.encode():
        return
    path.unlink(missing_ok=True)
    for name, content in changed.items():
        with completed(run_dir / name) as partial:
            partial.write_bytes(content)
    write_atomically(path, text)


def check(run_dir: Path) -> tuple[str, ...]:
    """Returns the names of a run's files that are what was written; none where there is no manifest.

    Raises:
        UserError: one is not, or the manifest itself is damaged.
    """
    path = run_dir / NAME
    while (before := _content(path)) is not None:
        files = _opened(before, path)
        differing = [name for name, digest in files.items() if _digest(_content(run_dir / name)) != digest]
        if not differing:
            return tuple(files)
        # Another process may have written them anew since the manifest was read.
        if _content(path) == before:
            raise UserError(
                f"{run_dir / differing[0]} is not what the run wrote: bring back a copy, or, if you have changed it "
                f"yourself, delete {path}"
            )
    return ()


def _opened(content: bytes, path: Path) -> dict[str, str]:
    files: Any = None
    with contextlib.suppress(untrusted.Malformed, KeyError, TypeError):
        files = untrusted.parse_json(content, _MOST_BYTES)[_FILES]
    if not isinstance(files, dict) or not set(files) <= KNOWN or _sealed(files).encode() != content:
        raise UserError(f"{path} is damaged: look whether the files beside it are right, then delete it")
    return files


def _sealed(files: Mapping[str, str]) -> str:
    text = json.dumps(files, sort_keys=True)
    return json.dumps({_SEAL: _digest(text.encode()), _FILES: dict(sorted(files.items()))}, indent=1) + "\n"


def _digest(content: bytes | None) -> str:
    return "" if content is None else hashlib.sha256(content).hexdigest()


def _content(path: Path) -> bytes | None:
    """Returns what a file holds, or None where there is none.

    Raises:
        UserError: it cannot be read.
    """
    try:
        content = untrusted.read_bytes(path, _MOST_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); mend it, or its permissions") from error
    if len(content) > _MOST_FILE_BYTES:
        raise UserError(f"{path} has more than {_MOST_FILE_BYTES:,} bytes, which no run writes; bring back a copy")
    return content
