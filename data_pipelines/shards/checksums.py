"""Checksums beside shards, as ``sha256sum`` writes them."""

import hashlib
import re

from lit_het.data_pipelines.shards import storage
from lit_het.errors import UserError


def checksum(address: str) -> str:
    """Returns the SHA-256 of a file."""
    with storage.open_to_scan(address) as file:
        digest = hashlib.sha256()
        while block := file.read(2**23):
            digest.update(block)
    return digest.hexdigest()


def save_checksum(address: str) -> None:
    """Writes ``FILE.sha256`` beside a file, in the format of ``sha256sum``, or compares with an existing one."""
    path = f"{address}.sha256"
    if storage.exists(path):
        if mismatch := checksum_mismatch(address):
            raise UserError(f"{address}: {mismatch}")
        return
    content = f"{checksum(address)}  {address.rpartition('/')[2]}\n".encode()
    try:
        storage.write(path, content)
    except Exception as error:  # clients of stores raise their own types
        raise UserError(f"{path}: cannot be written ({storage.reason(error)}); leave out --checksum") from error


def checksum_mismatch(address: str) -> str:
    """Returns why a file does not match its ``FILE.sha256`` and how to fix it, or an empty string if it matches."""
    path = f"{address}.sha256"
    renewal = f"remove {path} and run lit-het data index --checksum"
    if not storage.exists(path):
        return "has no saved checksum; make one with lit-het data index --checksum"
    saved = re.match(rb"[0-9a-f]{64}\b", storage.read_whole(path), re.IGNORECASE)
    if saved is None:
        return f"{path} holds no SHA-256; {renewal}"
    if checksum(address) == saved[0].decode().lower():
        return ""
    return f"differs from {path}; fetch or write the shard again or, if it was replaced on purpose, {renewal}"
