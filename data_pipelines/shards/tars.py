"""Reads the members of tar archives, and reports damage with its offset instead of taking it for the end.

The standard library's tarfile parses single header blocks only. Its archive reader recurses once per extension header,
copies their content, follows sizes past the end of the file, and raises arbitrary exceptions on damage.
"""

import io
import posixpath
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lit_het.data_pipelines.shards.storage import Unreadable

MAX_MEMBER_BYTES = 2**27
"""The largest member that is read into memory: 128 MiB."""

MAX_EXTENSION_BYTES = 2**20
"""The largest extension header (a long name or pax attributes); a larger one counts as damage."""

MAX_EXTENSIONS = 16
"""The most extension headers of one member; more count as damage. Writers use four at most."""

NOT_A_FILE = "it is a link or no plain file; write the shard again with tar --dereference --hard-dereference"
"""Why a member that is neither a file nor a folder has no content, and the way out."""

_BLOCK_BYTES = 512
_READ_BYTES = 2**16  # the capacity of a pipe
_END_BYTES = 1024  # hashed at each end of a member, to distinguish members of equal size
_ATTRIBUTES = (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_LONG_NAMES = {tarfile.GNUTYPE_LONGNAME: "path", tarfile.GNUTYPE_LONGLINK: "linkpath"}
_EXTENSION_TYPES = (*_ATTRIBUTES, tarfile.XGLTYPE, *_LONG_NAMES)
_MAX_DIGITS = 18  # of a number in attributes

# What desktops, editors and file servers leave in folders, beside hidden files.
_HIDDEN_FOLDERS = frozenset(("__MACOSX", "@eaDir", "lost+found"))

_ReadAt = Callable[[int, int], bytes]


class Member(NamedTuple):
    """A file, folder or link in an archive.

    Attributes:
        name: path within the archive.
        offset: of the content, in bytes from the start of the file.
        size: of the content, in bytes.
        is_file: whether it is a regular file that is not sparse.
        is_folder: whether it is a folder.
        target: the path within the archive that a link points to; empty for all others.
    """

    name: str
    offset: int
    size: int
    is_file: bool
    is_folder: bool
    target: str = ""


class DamagedTar(Exception):
    """An archive that is truncated or damaged.

    Attributes:
        offset: of the damage, in bytes from the start of the file.
    """

    def __init__(self, offset: int):
        super().__init__(f"truncated or damaged at byte {offset}")
        self.offset = offset


def target_of(name: str, link: str) -> str:
    """Returns the path that a symbolic link points to, relative to the same folder as the path of the link."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), link))


def is_hidden(path: str) -> bool:
    """Returns whether a file or folder is hidden, or lies in a hidden folder such as ``__MACOSX``."""
    parts = path.split("/")
    return any(part in _HIDDEN_FOLDERS or (part.startswith(".") and part not in (".", "..")) for part in parts)


def whole_members(file: Any, start: int, end: int) -> Iterator[Member]:
    """Reads the headers, not the payload, of an archive between two positions of a binary file.

    Yields:
        Every member before the first damage; offsets are relative to the file.

    Raises:
        tarfile.TarError: it is not an uncompressed tar.
        DamagedTar: after the last whole member.
    """

    def read_at(position: int, size: int) -> bytes:
        if position >= end:
            return b""
        file.seek(position)
        return file.read(min(size, end - position))

    for member in _members(read_at, start):
        if member.offset + member.size > end:
            raise DamagedTar(end)
        yield member


def member_ends(file: Any, member: Member) -> bytes:
    """Returns the first and last kilobyte of a member's content, or all of it if it is smaller."""
    file.seek(member.offset)
    first = file.read(min(member.size, _END_BYTES))
    rest = min(member.size - len(first), _END_BYTES)
    file.seek(member.offset + member.size - rest)
    return first + file.read(rest)


def streamed_members(
    file: Any, is_wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, bytes | Unreadable]]:
    """Reads an archive sequentially, from a file that cannot seek.

    Args:
        file: an object with ``read``.
        is_wanted: whether to read the content of a file with this name; otherwise its content is empty.

    Yields:
        Name and content of every file before the first damage; for links, special files and files that are too large,
        the reason in place of the content.

    Raises:
        tarfile.TarError: it is not an uncompressed tar.
        DamagedTar: after the last whole member.
    """
    stream = _Stream(file)
    for member in _members(stream.read_at, 0):
        if member.is_folder:
            continue
        if not member.is_file:
            yield member.name, Unreadable("link or special file", NOT_A_FILE)
        elif member.size > MAX_MEMBER_BYTES:
            yield member.name, too_large(member.size)
        elif is_wanted(member.name):
            content = stream.read_at(member.offset, member.size)
            if len(content) < member.size:
                raise DamagedTar(stream.position)
            yield member.name, content
        else:
            yield member.name, b""


def too_large(size: int) -> Unreadable:
    """Returns why a member of more than `MAX_MEMBER_BYTES` bytes is not read."""
    return Unreadable("member too large", f"{size:,} bytes, at most {MAX_MEMBER_BYTES:,} are read")


class _Stream:
    """Reads at increasing positions of a file that cannot seek."""

    def __init__(self, file: Any):
        self._file = io.BufferedReader(_Raw(file), _READ_BYTES)
        self.position = 0

    def read_at(self, position: int, size: int) -> bytes:
        """Returns the bytes at a position; fewer than ``size`` at the end of the file."""
        while self.position < position and self._read(min(position - self.position, _READ_BYTES)):
            pass
        return self._read(size) if self.position == position else b""

    def _read(self, size: int) -> bytes:
        content = self._file.read(size)
        self.position += len(content)
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
    """Yields the members of an archive that starts at a position, whether or not their contents are complete."""
    position = start
    try:
        while (found := _next_member(read_at, position)) is not None:
            member, position = found
            yield member
    except DamagedTar as error:
        if error.offset == start:
            raise tarfile.ReadError(str(error.__cause__)) from error
        raise


def _next_member(read_at: _ReadAt, position: int) -> tuple[Member, int] | None:
    """Returns the member whose headers start at a position, and the next position; None at the end of the archive."""
    extensions, is_ended = dict[str, str](), False
    # A loop with a limit instead of recursion: a chain of headers in a hostile file must not exhaust the stack.
    start = position
    for _ in range(MAX_EXTENSIONS + 1):
        block = read_at(position, _BLOCK_BYTES)
        # Zeros end an archive, but not between an extension header and its member. Another archive may follow, as after
        # `cat a.tar b.tar`. Anything else is damage: it may be an archive behind a stray byte, or a compressed one.
        while position == start and block == bytes(_BLOCK_BYTES):
            start = position = position + _BLOCK_BYTES
            block, is_ended = read_at(position, _BLOCK_BYTES), True
        if is_ended and not any(block):
            return None
        try:
            header = _header(block)
            if header.type not in _EXTENSION_TYPES:
                return _member(read_at, position, block, header, extensions)
            if header.size > MAX_EXTENSION_BYTES:
                raise ValueError(f"attributes of {header.size:,} bytes")
            content = read_at(position + _BLOCK_BYTES, header.size)
            if len(content) < header.size:
                raise ValueError("truncated attributes")
            if header.type in _ATTRIBUTES:
                extensions |= _attributes(content)
            elif header.type in _LONG_NAMES:
                extensions[_LONG_NAMES[header.type]] = _text(content.partition(b"\0")[0])
        except ValueError as error:
            zeros = len(block) - len(block.lstrip(b"\0")) if is_ended else 0
            raise DamagedTar(position + zeros) from error
        position += _BLOCK_BYTES + _padded(header.size)
    raise DamagedTar(position)


def _header(block: bytes) -> tarfile.TarInfo:
    """Parses a block.

    Raises:
        ValueError: it is not a header.
    """
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except Exception as error:  # tarfile documents HeaderError, but raises other types on damage
        raise ValueError(f"{error}") from error
    if header.size < 0:
        raise ValueError("negative size")
    return header


def _member(
    read_at: _ReadAt, position: int, block: bytes, header: tarfile.TarInfo, extensions: dict[str, str]
) -> tuple[Member, int]:
    size = _number(extensions["size"]) if "size" in extensions else header.size
    offset = position + _BLOCK_BYTES
    is_sparse = header.type == tarfile.GNUTYPE_SPARSE or any(name.startswith("GNU.sparse.") for name in extensions)
    has_more = header.type == tarfile.GNUTYPE_SPARSE and block[482] != 0
    while has_more:  # further blocks of the sparse map
        more = read_at(offset, _BLOCK_BYTES)
        if len(more) < _BLOCK_BYTES:
            raise ValueError("truncated header")
        offset, has_more = offset + _BLOCK_BYTES, more[504] != 0
    # Links and other types without content may still declare a size, which tarfile ignores too.
    content_size = size if header.isreg() or header.type not in tarfile.SUPPORTED_TYPES else 0
    name = extensions.get("path", header.name).rstrip("/")
    target = extensions.get("linkpath", header.linkname)
    if header.issym():
        target = target_of(name, target)
    is_file, is_link = header.isreg() and not is_sparse, header.issym() or header.islnk()
    member = Member(name, offset, content_size, is_file, header.isdir(), posixpath.normpath(target) if is_link else "")
    return member, offset + _padded(content_size)


def _attributes(content: bytes) -> dict[str, str]:
    """Parses the records ``LENGTH NAME=VALUE`` of a pax header; keeps path, linkpath, size and sparse attributes."""
    found: dict[str, str] = {}
    position = 0
    while position < len(content) and content[position]:
        digits = content[position : position + _MAX_DIGITS + 1].partition(b" ")[0]
        length = _number(digits.decode("ascii"))
        record = content[position + len(digits) + 1 : position + length]
        if len(record) < 2 or len(digits) + 1 + len(record) != length or record[-1:] != b"\n":
            raise ValueError("damaged attributes")
        name, _, value = record[:-1].partition(b"=")
        if name in (b"path", b"linkpath", b"size") or name.startswith(b"GNU.sparse."):
            found[_text(name)] = _text(value)
        position += length
    return found


def _number(digits: str) -> int:
    if not digits.isdecimal() or len(digits) > _MAX_DIGITS:
        raise ValueError("damaged number")
    return int(digits)


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


def _padded(size: int) -> int:
    return -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
