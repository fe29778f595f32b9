"""The members of tar archives. Where damage begins is told, not taken for the end, as tarfile does."""

import tarfile
from collections.abc import Iterator
from typing import Any

_BLOCK_BYTES = 512


class DamagedTar(Exception):
    """An archive that is truncated or damaged.

    Attributes:
        offset: of the damage, bytes from the start of the file.
    """

    def __init__(self, offset: int):
        super().__init__(f"truncated or damaged at byte {offset}")
        self.offset = offset


def whole_members(file: Any, start: int, end: int) -> Iterator[tarfile.TarInfo]:
    """Reads the headers of an archive between two places of a binary file, not the payload.

    Yields:
        Every member up to the first that is damaged; places are those in the file.

    Raises:
        tarfile.TarError: it is no uncompressed tar.
        DamagedTar: after the last whole member.
    """
    file.seek(start)
    tar = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 (the file is its owner's to close)
    last = -1
    try:
        for member in tar:
            # A header may say that its content lies before it, and tarfile would read in a circle.
            if member.offset <= last or member.size < 0 or member.offset_data + member.size > end:
                raise tarfile.ReadError
            last = member.offset
            yield member
        # tarfile takes both a damaged header and the end of the file for the end of the archive
        file.seek(tar.offset)
        if file.read(_BLOCK_BYTES) != bytes(_BLOCK_BYTES):
            raise tarfile.ReadError
    except (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError) as error:
        raise DamagedTar(min(tar.offset, end)) from error
