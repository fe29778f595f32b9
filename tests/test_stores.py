"""Which file systems an address may name."""

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lit_het import stores
from lit_het.checkpoints import sources
from lit_het.data_pipelines import storage
from lit_het.errors import UserError
from lit_het.stores import REFUSED, filesystem


@pytest.mark.parametrize("protocol", REFUSED)
@pytest.mark.parametrize("form", ["{}://x/y.tar", "{}::memory:///x.json", "simplecache::{}://x", "{}://::file:///x"])
def test_stores_that_do_more_than_read_are_refused_anywhere_in_an_address(protocol, form):
    address = form.format(protocol)
    with pytest.raises(UserError, match=rf"{protocol}:// .*; use the address of the file itself"):
        filesystem(address)


def test_data_and_weights_use_the_same_file_systems():
    for opened in (storage.filesystem, sources.fetch):
        with pytest.raises(UserError, match="reference:// evaluates templates"):
            opened("reference://::memory:///refs.json")


def test_caches_and_archives_may_be_chained():
    fsspec.filesystem("memory").pipe_file("/stores/x", b"content")
    files, path = filesystem("simplecache::memory:///stores/x")
    assert files.cat_file(path) == b"content"


def test_downloads_of_weights_are_retried_unless_the_file_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(stores, "BACK_OFF", (0.0, 0.0))
    requests, original = [], MemoryFileSystem.get_file

    def get_file(self, remote, *rest, **fields):
        requests.append(remote)
        if len(requests) < 3:
            raise TimeoutError("no answer")
        original(self, remote, *rest, **fields)

    monkeypatch.setattr(MemoryFileSystem, "get_file", get_file)
    fsspec.filesystem("memory").pipe_file("/stores/weights.npz", b"content")
    assert sources.fetch("memory:///stores/weights.npz").read_bytes() == b"content"
    assert len(requests) == 3
    with pytest.raises(UserError, match="FileNotFoundError"):
        sources.fetch("memory:///stores/missing.npz")
    assert len(requests) == 4
    folder = sources.fetch("memory:///stores", ("weights.npz", "missing.npz"))
    assert [path.name for path in folder.iterdir()] == ["weights.npz"]
