"""An archive that is read from end to end holds what one holds that is read with jumps."""

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipelines.tars import DamagedTar, streamed_members, whole_members


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


def test_contents_are_those_of_the_shard(shards: Path):
    shard = shards / "shard-000000.tar"
    with tarfile.open(shard) as tar:
        files = {name: tar.extractfile(name) for name in tar.getnames()}
        expected = {name: file.read() for name, file in files.items() if file}
    assert dict(streamed_members(OneWay(shard.read_bytes()))) == expected


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 6000), junk=st.binary(max_size=40), cut=st.integers(0, 12_000))
def test_damage_is_found_where_jumps_find_it(shards: Path, place: int, junk: bytes, cut: int):
    content = (shards / "shard-000000.tar").read_bytes()
    content = (content[:place] + junk + content[place + len(junk) :])[:cut]
    assert outcome(lambda: from_end_to_end(content)) == outcome(lambda: with_jumps(content))
