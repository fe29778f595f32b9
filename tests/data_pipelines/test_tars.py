"""Sequential reads and reads with seeks find the same members of an archive."""

import gzip
import io
import posixpath
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het.data_pipelines.shards import tars
from lit_het.data_pipelines.shards.storage import Unreadable
from lit_het.data_pipelines.shards.tars import DamagedTar, streamed_members, whole_members


class OneWay(io.RawIOBase):
    """A file with ``read`` only, which gives less than it is asked for."""

    def __init__(self, content: bytes):
        self._file = io.BytesIO(content)

    def read(self, size: int = -1) -> bytes:
        return self._file.read(min(size, 700))

    def seek(self, offset: int, whence: int = 0) -> int:
        raise io.UnsupportedOperation


def outcome(members: Callable[[], Iterator[str]]) -> list[str]:
    """Names up to the end or the damage, and which of the two it was."""
    names: list[str] = []
    try:
        for name in members():
            names.append(name)
    except DamagedTar:
        return [*names, "damage"]
    except tarfile.TarError:
        return [*names, "no tar"]
    return [*names, "end"]


def with_jumps(content: bytes) -> Iterator[str]:
    return (member.name for member in whole_members(io.BytesIO(content), 0, len(content)))


def from_end_to_end(content: bytes) -> Iterator[str]:
    return (name for name, _ in streamed_members(OneWay(content)))


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 6000), junk=st.binary(max_size=40), cut=st.integers(0, 12_000))
def test_sequential_reads_find_damage_at_the_same_offset(shards: Path, place: int, junk: bytes, cut: int):
    content = (shards / "shard-000000.tar").read_bytes()
    content = (content[:place] + junk + content[place + len(junk) :])[:cut]
    assert outcome(lambda: from_end_to_end(content)) == outcome(lambda: with_jumps(content))


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0\n"), min_size=1, max_size=150)
KINDS = st.sampled_from([b"0", b"0", b"\0", b"1", b"2", b"3", b"5", b"6", b"7"])
ENTRIES = st.lists(st.tuples(NAMES, KINDS, st.binary(max_size=1500)), min_size=1)


@settings(max_examples=100, deadline=None)
@given(entries=ENTRIES, format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]), comment=st.text(max_size=9))
def test_members_equal_those_of_tarfile(entries: list[tuple[str, bytes, bytes]], format: int, comment: str):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format, pax_headers={"comment": comment}) as tar:
        for name, kind, content in entries:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mtime = kind, name[::-1], 0.5
            info.size = len(content) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(content))
    content = stream.getvalue()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        members = list(tar)
        contents = [(one.name, file.read()) for one in members if one.isreg() and (file := tar.extractfile(one))]
    targets = [posixpath.normpath(one.linkname) if one.issym() or one.islnk() else "" for one in members]
    assert list(whole_members(io.BytesIO(content), 0, len(content))) == [
        (one.name, one.offset_data, one.size, one.isreg(), one.isdir(), target)
        for one, target in zip(members, targets, strict=True)
    ]
    streamed = list(streamed_members(OneWay(content)))
    assert [(name, found) for name, found in streamed if isinstance(found, bytes)] == contents
    assert [name for name, _ in streamed] == [one.name for one in members if not one.isdir()]


def header(name: str = "a.txt", size: int = 0, kind: bytes = b"0") -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.type = size, kind
    return info.tobuf(tarfile.GNU_FORMAT)


def extension(content: bytes, kind: bytes = b"x") -> bytes:
    return header("extension", len(content), kind) + content.ljust(-(-len(content) // 512) * 512, b"\0")


def record(name: str, value: str) -> bytes:
    length = len(name) + len(value) + 3
    length += len(str(length + len(str(length))))
    return f"{length} {name}={value}\n".encode()


END = bytes(1024)
FIRST = header("first.txt", 1) + b"1".ljust(512, b"\0")
BOMBS = {
    "a size beyond all files": header(size=2**60) + END,
    "a size that only Python can hold": extension(record("size", "9" * 400)) + header() + END,
    "a size that is no number": extension(record("size", "-1")) + header() + END,
    "two thousand headers of one member": extension(record("a", "b")) * 2000 + header() + END,
    "a member without end of an unknown type": header(size=2**60, kind=b"Q") + END,
    "a name without end": header(size=2**60, kind=b"L") + END,
    "attributes of megabytes": extension(record("a", "b" * 2**21)) + header() + END,
    "attributes that are digits": extension(b"1" * 2**20) + header() + END,
    "attributes that overlap": extension(b"2 " * 2**19 + b"=") + header() + END,
    "attributes that are cut off": extension(b"30 path=a\n") + header() + END,
    "a list of holes without end": header(kind=b"S")[:482] + b"\1",
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("read", [with_jumps, from_end_to_end])
def test_a_tar_bomb_counts_as_damage_after_earlier_members(name: str, read: Callable[[bytes], Iterator[str]]):
    began = time.monotonic()
    assert outcome(lambda: read(FIRST + BOMBS[name])) in (["first.txt", "damage"], ["first.txt", "a.txt", "damage"])
    assert outcome(lambda: read(BOMBS[name]))[-1] in ("damage", "no tar")
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("read", [with_jumps, from_end_to_end])
def test_a_sparse_file_is_skipped_whatever_its_map(read: Callable[[bytes], Iterator[str]]):
    holes = extension(record("GNU.sparse.map", "x,y")) + header("holes.txt", 3) + b"abc".ljust(512, b"\0")
    content = FIRST + holes + header("last.txt") + END
    assert [name for name in outcome(lambda: read(content)) if name != "holes.txt"] == ["first.txt", "last.txt", "end"]
    files = [member.name for member in whole_members(io.BytesIO(content), 0, len(content)) if member.is_file]
    assert files == ["first.txt", "last.txt"]


def test_a_member_that_is_too_large_is_skipped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tars, "MAX_MEMBER_BYTES", 1)
    content = FIRST + header("large.txt", 2) + b"22".ljust(512, b"\0") + FIRST + END
    first, (name, reason), last = streamed_members(OneWay(content))
    assert first == last == ("first.txt", b"1")
    assert isinstance(reason, Unreadable)
    assert (name, str(reason)) == ("large.txt", "member too large (2 bytes, at most 1 are read)")


def test_unwanted_members_are_not_read():
    content = FIRST + header("b.jpg", 1) + b"2".ljust(512, b"\0") + END
    wanted = streamed_members(OneWay(content), lambda name: "b" in name)
    assert dict(wanted) == {"first.txt": b"", "b.jpg": b"2"}


def whole_tar(*names: str, magic: bool = True) -> bytes:
    headers = b"".join(map(header, names))
    if not magic:
        plain = headers[:148] + b" " * 8 + headers[156:257] + bytes(255)
        headers = plain[:148] + b"%06o\0 " % sum(plain) + plain[156:]
    return headers + bytes(1024)


AFTER = {
    "another archive": (whole_tar("b.txt"), ["b.txt", "end"]),
    "more zeros and another archive": (bytes(9 * 512) + whole_tar("b.txt"), ["b.txt", "end"]),
    "another archive that is cut": (whole_tar("b.txt")[:512], ["b.txt", "damage"]),
    "a damaged archive": (whole_tar("b.txt").replace(b"b.txt", b"c.txt"), ["damage"]),
    "an archive of v7": (whole_tar("b.txt", magic=False), ["b.txt", "end"]),
    "a compressed archive": (gzip.compress(whole_tar("b.txt")), ["damage"]),
    "an archive behind a stray byte": (b"\n" + whole_tar("b.txt"), ["damage"]),
    "what is no archive": (b"y\n" * 600, ["damage"]),
    "part of a block": (bytes(100), ["end"]),
}


@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize("read", [with_jumps, from_end_to_end])
def test_archives_behind_the_end_of_another_one_are_read(name: str, read: Callable[[bytes], Iterator[str]]):
    content, members = AFTER[name]
    assert outcome(lambda: read(whole_tar("a.txt") + content)) == ["a.txt", *members]


@pytest.mark.parametrize("between", [b"\n", bytes(700) + b"\n"])
def test_bytes_behind_the_end_that_are_not_read_are_named(between: bytes):
    content = whole_tar("a.txt") + between + whole_tar("b.txt")
    with pytest.raises(DamagedTar) as error:
        list(whole_members(io.BytesIO(content), 0, len(content)))
    assert error.value.offset == 512 + 1024 + len(between) - 1


def test_the_target_of_a_symbolic_link_is_relative_to_its_folder():
    link = tarfile.TarInfo("a/b/link")
    link.type, link.linkname = tarfile.SYMTYPE, "../" + "c" * 150
    content = link.tobuf(tarfile.GNU_FORMAT) + END
    (member,) = whole_members(io.BytesIO(content), 0, len(content))
    assert member.target == "a/" + "c" * 150
