"""Checksums beside shards, as ``sha256sum`` writes them."""

import hashlib
import re

from lit_het.data_pipelines import storage
from lit_het.errors import UserError


def checksum(address: str) -> str:
    """Returns the SHA-256 of a file."""
    with storage.open_to_scan(address) as file:
        digest = hashlib.sha256()
        while block := file.read(2**23):
            digest.update(block)
    return digest.hexdigest()


def keep_checksum(address: str) -> None:
    """Writes ``FILE.sha256`` beside a file, as ``sha256sum`` does, or compares the file with the one that is there.

    Raises:
        UserError: the file differs from what was kept of it, or its checksum cannot be written.
    """
    place = f"{address}.sha256"
    if storage.exists(place):
        if differs := differs_from_checksum(address):
            raise UserError(f"{address}: {differs}")
        return
    content = f"{checksum(address)}  {address.rpartition('/')[2]}\n".encode()
    try:
        storage.write(place, content)
    except Exception as error:  # read-only folders and stores, in their clients' words
        raise UserError(f"{place}: cannot be written ({storage.reason(error)}); leave out --checksum") from error


def differs_from_checksum(address: str) -> str:
    """Returns how a file differs from its ``FILE.sha256`` and the way out, nothing if it does not."""
    place = f"{address}.sha256"
    anew = f"remove {place} and run lit-het data index --checksum"
    if not storage.exists(place):
        return "no checksum was kept; make one with lit-het data index --checksum"
    kept = re.match(rb"[0-9a-f]{64}\b", storage.read_whole(place), re.IGNORECASE)
    if kept is None:
        return f"{place} holds no SHA-256; {anew}"
    if checksum(address) == kept[0].decode().lower():
        return ""
    return f"differs from {place}; fetch or write the shard again or, where it was replaced on purpose, {anew}"
