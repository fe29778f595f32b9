"""Writes and verifies ``RUN/manifest.json``: the SHA-256 of a run's configuration and tokenizer.

The manifest also contains a SHA-256 of itself. It is deleted before the files change and written after them. If the
process is killed in between, the run has no manifest and opens unchecked, like runs of earlier versions.
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
_DIGEST_KEY, _FILES_KEY = "sha256", "files"
_MAX_BYTES = 2**16
_MAX_FILE_BYTES = 2**26  # of a listed file; the largest is the tokenizer's model

KNOWN = frozenset({"config.json", "tokenizer.model"})
"""The only files that a manifest may list: a forged manifest must not cause other files to be read."""


def write(run_dir: Path, files: Mapping[str, bytes]) -> None:
    """Writes files into a run's directory, then their manifest. Files with the same content are not written again.

    Args:
        run_dir: an existing directory.
        files: content by name.
    """
    path = run_dir / NAME
    text = _serialized({name: _digest(content) for name, content in files.items()})
    changed = {name: content for name, content in files.items() if _content(run_dir / name) != content}
    if not changed and _content(path) == text.encode():
        return
    # First the manifest disappears, then the files change: a kill in between leaves a run without a manifest, not with
    # a wrong one.
    path.unlink(missing_ok=True)
    for name, content in changed.items():
        with completed(run_dir / name) as partial:
            partial.write_bytes(content)
    write_atomically(path, text)


def check(run_dir: Path) -> tuple[str, ...]:
    """Returns the names of a run's verified files; an empty tuple if there is no manifest."""
    path = run_dir / NAME
    while (before := _content(path)) is not None:
        files = _parsed(before, path)
        differing = [name for name, digest in files.items() if _digest(_content(run_dir / name)) != digest]
        if not differing:
            return tuple(files)
        # Another process may have rewritten the files since the manifest was read: then check again.
        if _content(path) == before:
            raise UserError(
                f"{run_dir / differing[0]} is not what the run wrote: restore a backup, or, if you changed it "
                f"yourself, delete {path}"
            )
    return ()


def _parsed(content: bytes, path: Path) -> dict[str, str]:
    files: Any = None
    with contextlib.suppress(untrusted.Malformed, KeyError, TypeError):
        files = untrusted.parse_json(content, _MAX_BYTES)[_FILES_KEY]
    if not isinstance(files, dict) or not set(files) <= KNOWN or _serialized(files).encode() != content:
        raise UserError(f"{path} is damaged: check the files beside it, then delete it")
    return files


def _serialized(files: Mapping[str, str]) -> str:
    text = json.dumps(files, sort_keys=True)
    return json.dumps({_DIGEST_KEY: _digest(text.encode()), _FILES_KEY: dict(sorted(files.items()))}, indent=1) + "\n"


def _digest(content: bytes | None) -> str:
    return "" if content is None else hashlib.sha256(content).hexdigest()


def _content(path: Path) -> bytes | None:
    """Returns the content of a file, or None if it does not exist."""
    try:
        content = untrusted.read_bytes(path, _MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); fix the file or its permissions") from error
    if len(content) > _MAX_FILE_BYTES:
        raise UserError(f"{path} has more than {_MAX_FILE_BYTES:,} bytes, which no run writes; restore a backup")
    return content
