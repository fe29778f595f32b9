"""Random access by name to the files of a folder, a tar or a zip archive, which is never extracted.

Hidden files and folders, and what desktops leave (``__MACOSX``), are ignored in all of them. Links stand for the files
that they point to.
"""

import gzip
import hashlib
import logging
import os
import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn, TypeAlias

import numpy as np

from lit_het import untrusted
from lit_het.data_pipelines.shards.tars import MAX_MEMBER_BYTES, DamagedTar, Member, is_hidden, target_of, whole_members
from lit_het.errors import UserError

MAX_EXPANSION = 100
"""The largest accepted compression ratio of an archive: images hardly compress, texts about tenfold."""

_COPY_BYTES = 2**20
_MAX_LINKS = 40  # one after the other, as in Linux: they may go round in circles

_logger = logging.getLogger(__name__)


class FolderFiles:
    """The files below a folder; links are followed.

    Attributes:
        path: the folder.
        sizes: of the files in bytes, by relative path, sorted.
        folders: the relative paths of all folders, empty ones included.
    """

    def __init__(self, path: Path):
        self.path = path
        self.folders: set[str] = set()
        found: dict[str, int] = {}
        for folder, folders, names in os.walk(path, followlinks=True, onerror=_refuse):
            folders[:] = [name for name in folders if not is_hidden(name)]
            below = Path(folder).relative_to(path)
            self.folders |= {(below / name).as_posix() for name in folders}
            for name in names:
                if not is_hidden(name):
                    found[(below / name).as_posix()] = _size(Path(folder) / name)
        self.sizes = dict(sorted(found.items()))

    def read(self, name: str) -> bytes:
        """Returns the content of a file."""
        try:
            return (self.path / name).read_bytes()
        except OSError as error:
            _refuse(error)

    def map(self, name: str) -> memoryview:
        """Returns the content of a file without reading it into memory."""
        try:
            with (self.path / name).open("rb") as file:
                return _mapped(file, 0, self.sizes[name])
        except OSError as error:
            _refuse(error)

    def where(self, name: str) -> str:
        """Returns the location of a file, for error messages."""
        return str(self.path / name)


class TarFiles:
    """The files in a tar archive, plain or gzipped; several threads may read at once.

    A gzipped archive is decompressed into an anonymous file, which is removed with the process however it ends.

    Args:
        path: the archive.
        scratch: a folder with space for the decompressed archive.
        nested: treat inner archives as folders: the files in ``a.tar`` are named ``a/...``.

    Attributes:
        path: the archive.
        sizes: of the files in bytes, by name, sorted.
        folders: the names of all folders.
    """

    def __init__(self, path: Path, scratch: Path, *, nested: bool = False):
        self.path = path
        self.folders: set[str] = set()
        self._file = _open(path, scratch)
        found: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        for name, offset, size in self._scan("", 0, os.fstat(self._file.fileno()).st_size, nested):
            if name in found:
                raise UserError(f"{path}: holds {name:.200} twice; download it again")
            found[name] = (offset, size)
        _follow(path, self._links, found)
        self._offsets = {name: offset for name, (offset, _) in found.items()}
        self.sizes = {name: found[name][1] for name in sorted(found)}

    def read(self, name: str) -> bytes:
        """Returns the content of a file."""
        # pread has no file position that threads would share.
        return os.pread(self._file.fileno(), self.sizes[name], self._offsets[name])

    def map(self, name: str) -> memoryview:
        """Returns the content of a file without reading it into memory."""
        return _mapped(self._file, self._offsets[name], self.sizes[name])

    def where(self, name: str) -> str:
        """Returns the location of a file, for error messages."""
        return f"{self.path}: {name}"

    def __del__(self):
        if hasattr(self, "_file"):
            self._file.close()

    def _scan(self, prefix: str, start: int, end: int, nested: bool) -> Iterator[tuple[str, int, int]]:
        for member in self._members(start, end):
            name = prefix + member.name.removeprefix("./")
            if is_hidden(name):
                continue
            if member.is_folder:
                self.folders.add(name)
            elif not member.is_file:
                self._links[name] = prefix + member.target
            elif nested and name.endswith(".tar"):
                inner = f"{name.removesuffix('.tar')}/"
                yield from self._scan(inner, member.offset, member.offset + member.size, nested=False)
            else:
                yield name, member.offset, member.size

    def _members(self, start: int, end: int) -> Iterator[Member]:
        try:
            yield from whole_members(self._file, start, end)
        except tarfile.TarError as error:
            raise UserError(f"{self.path}: is not a tar archive ({error}); download it again") from error
        except DamagedTar as error:
            raise UserError(f"{self.path}: is {error}; download it again") from error


class ZipFiles:
    """The files in a zip archive; several threads may read at once.

    Attributes:
        path: the archive.
        sizes: of the files in bytes, by name, sorted.
        folders: the names of all folders.
    """

    def __init__(self, path: Path):
        self.path = path
        self.folders: set[str] = set()
        self._archive: zipfile.ZipFile = self._whole(lambda: zipfile.ZipFile(path))
        found: dict[str, zipfile.ZipInfo] = {}
        links: dict[str, str] = {}
        for member in self._archive.infolist():
            name = member.filename.removeprefix("./")
            if is_hidden(name):
                continue
            if name.endswith("/"):  # is_dir() fails for an empty name
                self.folders.add(name.rstrip("/"))
                continue
            if name in found:
                raise UserError(f"{path}: holds {name:.200} twice; download it again")
            if member.file_size > MAX_MEMBER_BYTES:
                raise UserError(f"{path}: {name:.200} unpacks to {member.file_size:,} bytes; download it again")
            if stat.S_ISLNK(member.external_attr >> 16):
                links[name] = target_of(name, os.fsdecode(self._content(member)))
            else:
                found[name] = member
        _follow(path, links, found)
        self._members = found
        self.sizes = {name: found[name].file_size for name in sorted(found)}

    def read(self, name: str) -> bytes:
        """Returns the content of a file."""
        found = self._content(self._members[name])
        if len(found) != self.sizes[name]:
            raise UserError(f"{self.where(name)}: is truncated or damaged; download the archive again")
        return found

    def map(self, name: str) -> memoryview:
        """Returns the content of a file, which is read whole: compressed bytes cannot be mapped."""
        return memoryview(self.read(name))

    def where(self, name: str) -> str:
        """Returns the location of a file, for error messages."""
        return f"{self.path}: {name}"

    def _content(self, member: zipfile.ZipInfo) -> bytes:
        def content() -> bytes:
            with self._archive.open(member) as file:
                # No more than declared: a damaged file may unpack to any size.
                return file.read(member.file_size)

        return self._whole(content)

    def _whole(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:  # zipfile and its decompressors raise many kinds of exceptions on damage
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{self.path}: is truncated or damaged ({reason}); download it again") from error


def _follow(path: Path, links: Mapping[str, str], found: dict[str, Any]) -> None:
    """Adds what links point to, and warns of those that point to no file of the archive, and of special files."""
    left = []
    for name, target in links.items():
        for _ in range(_MAX_LINKS):
            target = links.get(target, target)
        if target in found:
            found.setdefault(name, found[target])
        else:
            left.append(name)
    if left:
        kinds = "links that point to no file in it, or special files"
        _logger.warning("%s: left out %s, such as %s", path, f"{len(left):,} {kinds}", left[0])


Files: TypeAlias = FolderFiles | TarFiles | ZipFiles


def open_files(path: Path, scratch: Path, *, nested: bool = False) -> Files:
    """Opens a folder, a tar or a zip archive; see `TarFiles` for the arguments."""
    if path.is_dir():
        return FolderFiles(path)
    return ZipFiles(path) if _is_zip(path) else TarFiles(path, scratch, nested=nested)


def open_published(source: Path, scratch: Path, archive: str, md5: str, folder: str) -> Files:
    """Opens a published archive, or the folder that was unpacked from it.

    Args:
        source: the archive or the folder, or a folder that holds one of them.
        scratch: a folder with space for a decompressed archive.
        archive: the name of the archive.
        md5: its MD5; another archive is used with a warning.
        folder: the name of the folder in it.
    """
    if source.is_dir():
        unpacked, packed = source / folder, source / archive
        if unpacked.is_dir() or not packed.is_file():
            return FolderFiles(unpacked if unpacked.is_dir() else source)
        source = packed
    files = open_files(source, scratch)
    warn_unless_published(source, md5)
    return files


def root_of(files: Files, path: str, archive: str) -> str:
    """Returns what precedes a path in the names of files, such as ``CUB_200_2011/`` before ``images.txt``.

    Args:
        files: a folder or an archive.
        path: the path of a file that must be there.
        archive: the name of the archive, for the message.
    """
    found = [name for name in files.sizes if f"/{name}".endswith(f"/{path}")]
    if not found:
        raise UserError(f"{files.path}: holds no {path}; give {archive}, or the folder unpacked from it")
    return min(found, key=len).removesuffix(path)


def warn_unless_published(path: Path, md5: str) -> None:
    """Logs a warning if the MD5 of an archive differs from that of the published one."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != md5:
        _logger.warning("%s: is not the published archive (MD5 %s, not %s); it is used as it is", path, found, md5)


def _mapped(file: IO[bytes], offset: int, size: int) -> memoryview:
    # An empty range cannot be mapped.
    return np.memmap(file, np.uint8, "r", offset, (size,)).data if size else memoryview(b"")


def _is_zip(path: Path) -> bool:
    try:
        return untrusted.read_bytes(path, 4) == b"PK\3\4"
    except OSError:
        return False  # reported where it is read


def _size(path: Path) -> int:
    try:
        found = path.stat()
    except OSError as error:
        _refuse(error)
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path}: is a pipe or a device, which may never end; remove it")
    return found.st_size


def _refuse(error: OSError) -> NoReturn:
    raise UserError(f"{error.filename}: cannot be read ({error.strerror}); fix or remove it") from error


def _open(path: Path, scratch: Path) -> IO[bytes]:
    try:
        file = untrusted.open_regular(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check the path of the source") from error
    if file.read(2) != b"\x1f\x8b":
        return file
    file.seek(0)
    unpacked = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 (its reader closes it)
    try:
        with file:
            _unpack(path, file, unpacked, scratch)
    except BaseException:
        unpacked.close()
        raise
    return unpacked


def _unpack(path: Path, file: IO[bytes], unpacked: IO[bytes], scratch: Path) -> None:
    # Checked while unpacking: the size in a gzip footer is of the last member only, and can be forged.
    max_bytes = MAX_EXPANSION * path.stat().st_size + _COPY_BYTES
    try:
        with gzip.open(file) as packed:
            while block := packed.read(_COPY_BYTES):
                unpacked.write(block)
                if unpacked.tell() > max_bytes:
                    raise UserError(f"{path}: unpacks to more than {MAX_EXPANSION} times its size; download it again")
        unpacked.flush()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: is truncated or damaged ({error}); download it again") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be unpacked in {scratch} ({error.strerror}); free space there") from error
