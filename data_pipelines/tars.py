"""The members of tar archives. Where damage begins is told, not taken for the end, as tarfile does.

Only single header blocks are parsed by tarfile. Its reader of archives nests as deeply as their extension headers do,
copies what they hold, follows sizes past the end of the file, and raises whatever damage makes it trip over.
"""

import io
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lit_het.data_pipelines.storage import Unreadable

MAX_MEMBER_BYTES = 2**27
"""A member of more bytes (128 MiB) is not read into memory."""

MAX_EXTENSION_BYTES = 2**20
"""An archive in which a long name, or the attributes of a member, take more bytes is damaged."""

MAX_EXTENSIONS = 16
"""An archive with more headers than this for one member is damaged: writers take four at most."""

_BLOCK_BYTES = 512
_READ_BYTES = 2**16  # what a pipe holds
_END_BYTES = 1024  # at each end of a member, that tell it from others of its size
_ATTRIBUTES = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENSION_TYPES = (*_ATTRIBUTES, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_MAX_DIGITS = 18  # of a number in attributes

_ReadAt = Callable[[int, int], bytes]


class Member(NamedTuple):
    """A file, folder or link in an archive.

    Attributes:
        name: with its folders.
        offset: of the content, bytes from the start of the file.
        size: of the content, bytes.
        is_file: whether it is a regular file, none with holes.
        is_folder: whether it is a folder.
    """

    name: str
    offset: int
    size: int
    is_file: bool
    is_folder: bool


class DamagedTar(Exception):
    """An archive that is truncated or damaged.

    Attributes:
        offset: of the damage, bytes from the start of the file.
    """

    def __init__(self, offset: int):
        super().__init__(f"truncated or damaged at byte {offset}")
        self.offset = offset


def whole_members(file: Any, start: int, end: int) -> Iterator[Member]:
    """Reads the headers of an archive between two places of a binary file, not the payload.

    Yields:
        Every member up to the first that is damaged; places are those in the file.

    Raises:
        tarfile.TarError: it is no uncompressed tar.
        DamagedTar: after the last whole member.
    """

    def read_at(place: int, size: int) -> bytes:
        if place >= end:
            return b""
        file.seek(place)
        return file.read(min(size, end - place))

    for member in _members(read_at, start):
        if member.offset + member.size > end:
            raise DamagedTar(end)
        yield member


def member_ends(file: Any, member: Member) -> bytes:
    """Returns the first and the last bytes of a member's content, or all of a small one."""
    file.seek(member.offset)
    first = file.read(min(member.size, _END_BYTES))
    rest = min(member.size - len(first), _END_BYTES)
    file.seek(member.offset + member.size - rest)
    return first + file.read(rest)


def streamed_members(
    file: Any, is_wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, bytes | Unreadable]]:
    """Reads an archive from its beginning to its end, with nothing but ``file.read``.

    Args:
        file: with ``read``.
        is_wanted: whether the content of the file of a name is to be read; else it is passed over and empty.

    Yields:
        Name and content of every regular file up to the first that is damaged; of one that is too large, why it is not
        read.

    Raises:
        tarfile.TarError: it is no uncompressed tar.
        DamagedTar: after the last whole member.
    """
    stream = _Stream(file)
    for member in _members(stream.read_at, 0):
        if not member.is_file:
            continue
        if member.size > MAX_MEMBER_BYTES:
            yield member.name, too_large(member.size)
        elif is_wanted(member.name):
            content = stream.read_at(member.offset, member.size)
            if len(content) < member.size:
                raise DamagedTar(stream.place)
            yield member.name, content
        else:
            yield member.name, b""


def too_large(size: int) -> Unreadable:
    """Returns why a member of more than `MAX_MEMBER_BYTES` bytes is not read."""
    return Unreadable("member too large", f"{size:,} bytes, at most {MAX_MEMBER_BYTES:,} are read")


class _Stream:
    """Bytes at places that only grow, of a file that can be read but not sought."""

    def __init__(self, file: Any):
        self._file = io.BufferedReader(_Raw(file), _READ_BYTES)
        self.place = 0

    def read_at(self, place: int, size: int) -> bytes:
        """Returns the bytes at a place, fewer at the end of the file."""
        while self.place < place and self._read(min(place - self.place, _READ_BYTES)):
            pass
        return self._read(size) if self.place == place else b""

    def _read(self, size: int) -> bytes:
        content = self._file.read(size)
        self.place += len(content)
        return content


class _Raw(io.RawIOBase):
    def __init__(self, file: Any):
        self._wrapped = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._wrapped.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)


def _members(read_at: _ReadAt, start: int) -> Iterator[Member]:
    """Yields the members of an archive that begins at a place; their contents may lie beyond its end."""
    place = start
    try:
        while (found := _next_member(read_at, place)) is not None:
            member, place = found
            yield member
    except DamagedTar as error:
        if error.offset == start:
            raise tarfile.ReadError(str(error.__cause__)) from error
        raise


def _next_member(read_at: _ReadAt, place: int) -> tuple[Member, int] | None:
    """Returns the member whose headers begin at a place, and the place behind it; None at the end of the archive."""
    extensions: dict[str, str] = {}
    for _ in range(MAX_EXTENSIONS + 1):
        block = read_at(place, _BLOCK_BYTES)
        if block == bytes(_BLOCK_BYTES) and not extensions:
            return None
        try:
            header = _header(block)
            if header.type not in _EXTENSION_TYPES:
                return _member(read_at, place, block, header, extensions)
            if header.size > MAX_EXTENSION_BYTES:
                raise ValueError(f"attributes of {header.size:,} bytes")
            content = read_at(place + _BLOCK_BYTES, header.size)
            if len(content) < header.size:
                raise ValueError("truncated attributes")
            if header.type in _ATTRIBUTES:
                extensions |= _attributes(content)
            elif header.type == tarfile.GNUTYPE_LONGNAME:
                extensions["path"] = _text(content.partition(b"\0")[0])
        except ValueError as error:
            raise DamagedTar(place) from error
        place += _BLOCK_BYTES + _padded(header.size)
    raise DamagedTar(place)


def _header(block: bytes) -> tarfile.TarInfo:
    """Parses a block.

    Raises:
        ValueError: it is no header.
    """
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except Exception as error:  # tarfile promises a HeaderError, and raises what it trips over
        raise ValueError(f"{error}") from error
    if header.size < 0:
        raise ValueError("negative size")
    return header


def _member(
    read_at: _ReadAt, place: int, block: bytes, header: tarfile.TarInfo, extensions: dict[str, str]
) -> tuple[Member, int]:
    size = _number(extensions["size"]) if "size" in extensions else header.size
    offset = place + _BLOCK_BYTES
    is_sparse = header.type == tarfile.GNUTYPE_SPARSE or any(name.startswith("GNU.sparse.") for name in extensions)
    has_more = header.type == tarfile.GNUTYPE_SPARSE and block[482] != 0
    while has_more:  # blocks that list where the holes are
        more = read_at(offset, _BLOCK_BYTES)
        if len(more) < _BLOCK_BYTES:
            raise ValueError("truncated header")
        offset, has_more = offset + _BLOCK_BYTES, more[504] != 0
    # what tarfile knows not to have content has none, whatever its size says
    held = size if header.isreg() or header.type not in tarfile.SUPPORTED_TYPES else 0
    name = extensions.get("path", header.name).rstrip("/")
    member = Member(name, offset, held, header.isreg() and not is_sparse, header.isdir())
    return member, offset + _padded(held)


def _attributes(content: bytes) -> dict[str, str]:
    """Returns what a pax header says of a member, whose records are lines ``LENGTH NAME=VALUE``."""
    found: dict[str, str] = {}
    place = 0
    while place < len(content) and content[place]:
        digits = content[place : place + _MAX_DIGITS + 1].partition(b" ")[0]
        length = _number(digits.decode("ascii"))
        record = content[place + len(digits) + 1 : place + length]
        if len(record) < 2 or len(digits) + 1 + len(record) != length or record[-1:] != b"\n":
            raise ValueError("damaged attributes")
        name, _, value = record[:-1].partition(b"=")
        if name in (b"path", b"size") or name.startswith(b"GNU.sparse."):
            found[_text(name)] = _text(value)
        place += length
    return found


def _number(digits: str) -> int:
    if not digits.isdecimal() or len(digits) > _MAX_DIGITS:
        raise ValueError("damaged number")
    return int(digits)


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
