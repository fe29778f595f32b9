"""The members of tar archives. Where damage begins is told, not taken for the end, as tarfile does."""

import tarfile
from collections.abc import Iterator
from typing import Any

_BLOCK_BYTES = 512
_READ_BYTES = 2**16  # what a pipe holds
_END_BYTES = 1024  # at each end of a member, that tell it from others of its size
# What tarfile raises where an archive is damaged.
_DAMAGE = (tarfile.TarError, ValueError, OverflowError, RecursionError, EOFError)


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
    except _DAMAGE as error:
        raise DamagedTar(min(tar.offset, end)) from error


def member_ends(file: Any, member: tarfile.TarInfo) -> bytes:
    """Returns the first and the last bytes of a member's content, or all of a small one."""
    file.seek(member.offset_data)
    first = file.read(min(member.size, _END_BYTES))
    rest = min(member.size - len(first), _END_BYTES)
    file.seek(member.offset_data + member.size - rest)
    return first + file.read(rest)


def streamed_members(file: Any) -> Iterator[tuple[str, bytes]]:
    """Reads an archive from its beginning to its end, with nothing but ``file.read``.

    Yields:
        Name and content of every regular file up to the first that is damaged.

    Raises:
        tarfile.TarError: it is no uncompressed tar.
        DamagedTar: after the last whole member.
    """
    tar: Any = tarfile.open(fileobj=file, mode="r|", bufsize=_READ_BYTES, tarinfo=_StrictHeader)  # noqa: SIM115
    try:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() and not member.issparse() else None
            if content:
                yield member.name, content.read()
            tar.members.clear()  # or tarfile would keep a header for every member of the shard
    except _DAMAGE as error:
        raise DamagedTar(tar.offset) from error


class _StrictHeader(tarfile.TarInfo):
    """A header that must be whole: where one is not, tarfile by itself takes the archive for ended."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_StrictHeader":
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.HeaderError as error:
            if bytes(buf) == bytes(_BLOCK_BYTES):
                raise  # zeros are the end
            raise tarfile.ReadError(str(error)) from error
