"""Files are read from local disks and from stores whose requests may fail."""

import io
import os
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lit_het.data_pipelines.shards import storage, stores
from lit_het.data_pipelines.shards.index import ShardIndex, index_path
from lit_het.data_pipelines.shards.storage import Reader, Span, Unreadable
from lit_het.data_pipelines.shards.writing import write_shards
from tests.data_pipelines.conftest import cause_of
from tests.refusals import assert_refused


class ReadFromRange(io.RawIOBase):
    """A file that makes one request per read."""

    def __init__(self, files, path):
        self._content, self._place = files.store[files._strip_protocol(path)].getvalue(), 0

    def fetch(self, start, end):
        return self._content[start:end]

    def read(self, size=-1):
        data = self.fetch(self._place, len(self._content) if size < 0 else self._place + size)
        self._place += len(data)
        return data

    def seek(self, offset, whence=0):
        self._place = offset + (0, self._place, len(self._content))[whence]
        return self._place

    def tell(self):
        return self._place


class Stumbling(MemoryFileSystem):
    """A store whose first requests fail."""

    protocol = "stumbling"
    failures = 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("stumbling://", "memory://"))

    def _stumble(self):
        if Stumbling.failures > 0:
            Stumbling.failures -= 1
            raise TimeoutError("the store is busy")

    def cat_file(self, path, start=None, end=None, **options):
        self._stumble()
        return super().cat_file(path, start, end, **options)

    def info(self, path, **options):
        self._stumble()
        return super().info(path, **options)


fsspec.register_implementation("stumbling", Stumbling, clobber=True)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(stores, "BACK_OFF", (0.0, 0.0, 0.0))
    monkeypatch.setattr(Stumbling, "failures", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = fsspec.filesystem("stumbling")
    samples = [{"__key__": f"k{i}", "jpg": b"pixels", "txt": f"text {i}"} for i in range(5)]
    for path in write_shards(tmp_path / "local", samples, samples_per_shard=3):
        files.pipe_file(f"/data/{path.name}", path.read_bytes())
    yield [f"stumbling:///data/shard-00000{i}.tar" for i in range(2)]
    files.store.clear()


def test_a_store_is_read_like_a_folder(store: list[str]):
    index = ShardIndex(store, ["txt"])
    assert index.read(range(5), ["txt"]) == [[f"text {i}".encode()] for i in range(5)]
    assert fsspec.filesystem("stumbling").exists(index_path(store[0]))


def test_requests_that_fail_are_retried(store: list[str]):
    Stumbling.failures = 3
    index = ShardIndex(store[:1], ["txt"])
    Stumbling.failures = 3
    assert index.read([0, 1], ["txt"]) == [[b"text 0"], [b"text 1"]]


def test_a_scan_survives_failed_requests_and_saves_no_index_when_the_store_stays_down(store: list[str], monkeypatch):
    def failing(self, start, end):
        if left and left.pop():
            raise ValueError("what tarfile would take for damage")
        return fetch(self, start, end)

    fetch, left = ReadFromRange.fetch, [True] * 1000
    monkeypatch.setattr(ReadFromRange, "fetch", failing)
    monkeypatch.setattr(Stumbling, "_open", lambda self, path, mode="rb", **_: ReadFromRange(self, path))
    assert_refused(
        r"shard-000000.tar: cannot be read \(what tarfile would take for damage\)", ShardIndex, store[:1], ["txt"]
    )
    assert not fsspec.filesystem("stumbling").exists(index_path(store[0]))
    left[:] = [True] * 3
    assert len(ShardIndex(store[:1], ["txt"])) == 3


def test_a_store_that_does_not_answer_is_distinguished_from_a_missing_file(store: list[str]):
    index = ShardIndex(store, ["txt"])
    index.read([0, 4], ["txt"])
    Stumbling.failures = 10**6
    (content,) = index.read([0], ["txt"])[0]
    assert (cause_of(content), str(content)) == ("store does not answer", "store does not answer (the store is busy)")
    assert_refused(r"shard-000000.tar: cannot be read \(the store is busy\)", ShardIndex, store)
    Stumbling.failures = 0
    fsspec.filesystem("stumbling").rm("/data/shard-000001.tar")
    assert cause_of(*index.read([4], ["txt"])[0]) == "unreadable shard"


def test_local_and_remote_byte_ranges_are_read_together_in_order(store: list[str], tmp_path: Path):
    (tmp_path / "file").write_bytes(b"0123456789")
    local, remote = str(tmp_path / "file"), store[0]
    spans = [Span(local, 2, 3), Span(remote, 0, 2), Span(local, 8, 5), Span(str(tmp_path / "none"), 0, 1)]
    first, second, short, missing = Reader().read(spans)
    assert (first, second) == (b"234", b"k0")
    assert isinstance(short, Unreadable)
    assert cause_of(missing) == "unreadable shard"


def test_an_object_that_changes_has_another_stamp(store: list[str]):
    before = storage.stamp(store[0])
    assert before == storage.stamp(store[0])
    fsspec.filesystem("stumbling").pipe_file("/data/shard-000000.tar", b"x" * 10_240)
    assert storage.stamp(store[0]) != before


def test_a_pipe_or_device_in_place_of_a_shard_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "shard.tar")
    for address in (str(tmp_path / "shard.tar"), "/dev/zero"):
        assert_refused(r"cannot be read \(not a regular file\); check the path of the shards", storage.stamp, address)


def test_a_text_file_above_the_limit_is_a_one_line_error(store: list[str], tmp_path: Path):
    fsspec.filesystem("stumbling").pipe_file("/data/names.txt", b"cat\n" * 100)
    (tmp_path / "names.txt").write_bytes(b"cat\n" * 100)
    for address in ("stumbling:///data/names.txt", str(tmp_path / "names.txt")):
        assert len(storage.text_lines(address)) == 100
        with pytest.raises(OSError, match="more than 399 bytes"):
            storage.read_whole(address, 399)
    os.truncate(tmp_path / "names.txt", storage.MAX_TEXT_BYTES + 1)
    message = r"names\.txt: cannot be read \(more than 67,108,864 bytes\)"
    assert_refused(message, storage.read_lines, str(tmp_path / "names.txt"))


def test_a_text_file_that_is_a_pipe_or_a_device_is_refused(tmp_path):
    os.mkfifo(tmp_path / "classnames.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    for name in ("classnames.txt", "zero.txt"):
        assert_refused("cannot be read .*not a regular file", storage.read_lines, str(tmp_path / name))
