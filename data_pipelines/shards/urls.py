"""Addresses of files and shards: local paths, those of fsspec, and commands."""

import posixpath
from pathlib import Path

PIPE = "pipe:"


def is_pipe(address: str) -> bool:
    """Returns whether an address is a shell command whose output is a shard, such as ``pipe:zcat file``."""
    return address.startswith(PIPE)


def shortened(address: str) -> str:
    """Returns an address in quotes, truncated to 80 characters."""
    return repr(address if len(address) <= 80 else f"{address[:80]}...")


def is_remote(address: str) -> bool:
    """Returns whether an address is for fsspec, such as ``gs://bucket/file``, rather than a local path."""
    return "://" in address and not is_pipe(address)


def parent(address: str) -> str:
    """Returns the folder of a file."""
    return address.rpartition("/")[0] if is_remote(address) else str(Path(address).parent)


def absolute(address: str) -> str:
    """Returns the absolute form of an address."""
    return address if is_remote(address) else str(Path(address).resolve())


def canonical(address: str) -> str:
    """Returns the one spelling of an address, or a command as it is, to compare with others."""
    if not is_remote(address):
        return address if is_pipe(address) else absolute(address)
    scheme, _, path = address.partition("://")
    return f"{scheme}://{posixpath.normpath(path)}"
