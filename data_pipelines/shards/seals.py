"""Seals: message authentication codes that distinguish this user's indexes from those that came with a data set.

A sealed file ends in a key identifier and an HMAC of its content. The key is random and stored in the user's cache, or
derived from the secret in `KEY_VARIABLE`, which hosts and users share in order to trust each other's indexes.
"""

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from lit_het.files import cache_folder
from lit_het.untrusted import Malformed

KEY_VARIABLE = "LIT_HET_INDEX_KEY"
"""The environment variable with a secret that several hosts or users share."""

_MAGIC = b"lit-het sealed\n"
_KEY_BYTES = 32
_MIN_SECRET = 16  # characters
_NAME_BYTES = 8


class ForeignKey(Malformed):
    """A file was sealed with another key."""


def sealed(content: bytes) -> bytes:
    """Returns content with a seal appended.

    Raises:
        OSError: the key can be neither read nor created.
    """
    key = _key()
    return content + _MAGIC + _name(key) + hmac.digest(key, content, "sha256")


def opened(content: bytes) -> bytes:
    """Verifies the seal and returns the content without it.

    Raises:
        ForeignKey: it was sealed with another key.
        Malformed: it has no seal, or was modified.
        OSError: as `sealed`.
    """
    # The seal is at the end, so that its place follows from the length alone.
    key, length = _key(), len(content) - len(_MAGIC) - _NAME_BYTES - hashlib.sha256().digest_size
    content, seal = content[: max(0, length)], content[max(0, length) :]
    if length < 0 or not seal.startswith(_MAGIC):
        raise Malformed("there is no seal")
    seal = seal.removeprefix(_MAGIC)
    if seal[:_NAME_BYTES] != _name(key):
        raise ForeignKey("sealed with another key")
    # Compares in constant time: timing must not reveal how many bytes of a forged seal are right.
    if not hmac.compare_digest(seal[_NAME_BYTES:], hmac.digest(key, content, "sha256")):
        raise Malformed("the seal is broken")
    return content


def _name(key: bytes) -> bytes:
    # A hash of the key names it without revealing it.
    return hashlib.sha256(b"name of " + key).digest()[:_NAME_BYTES]


def _key() -> bytes:
    secret = os.environ.get(KEY_VARIABLE, "")
    if not secret:
        return _saved_key(cache_folder("keys") / "index")
    if len(secret) < _MIN_SECRET:
        raise OSError(f"{KEY_VARIABLE} has fewer than {_MIN_SECRET} characters")
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


@functools.lru_cache
def _saved_key(path: Path) -> bytes:
    """Returns the key in a file, which is created if it is missing, by one of several processes."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Only its owner can read a temporary file.
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            # If another process was faster, its key is used.
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
    # Another user may have put a key of their own there before.
    status = path.stat()
    if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode) or status.st_size != _KEY_BYTES:
        raise OSError(f"{path} is not a key of this user; remove it")
    return path.read_bytes()
