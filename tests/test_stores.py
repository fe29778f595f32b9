"""Which file systems an address may name."""

import logging
import socket

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import constants

from lit_het.data_pipelines.shards import storage, stores
from lit_het.data_pipelines.shards.stores import REFUSED, filesystem
from lit_het.errors import UserError
from lit_het.weights import formats, sources


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
    fsspec.filesystem("memory").pipe_file("/stores/1_Pooling/weights.npz", b"other content")
    folder = sources.fetch("memory:///stores", ("weights.npz", "missing.npz", "1_Pooling/weights.npz"))
    assert sorted(path.name for path in folder.iterdir()) == ["1_Pooling", "weights.npz"]
    assert (folder / "1_Pooling/weights.npz").read_bytes() == b"other content"
    assert (folder / "weights.npz").read_bytes() == b"content"


def test_google_cloud_without_its_package_names_the_extra(monkeypatch):
    def missing(address):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec, "url_to_fs", missing)
    with pytest.raises(UserError, match=r"^gs://b/x.npz: Please install gcsfs .*: pip install 'lit-het\[gcs\]'$"):
        filesystem("gs://b/x.npz")
    with pytest.raises(UserError, match=r"Google Storage$"):
        filesystem("s3://b/x.npz")


@pytest.mark.parametrize(
    ("address", "owned"), [("hf://gpt2", "gpt2"), ("hf://gpt2/", "gpt2"), ("hf://", "name"), ("hf://datasets/me", "me")]
)
def test_an_address_of_the_hub_without_an_owner_is_refused_before_any_request(address, owned):
    with pytest.raises(UserError, match=f"names no owner; write hf://owner/{owned}$"):
        formats.open_weights(address)


def test_a_hub_that_is_switched_off_is_not_asked(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"^hf://me/mine: HF_HUB_OFFLINE is set; unset it, or give the folder"):
        formats.open_weights("hf://me/mine")


def test_a_hub_out_of_reach_gives_one_line_that_names_the_whole_address(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(stores, "BACK_OFF", (0.0,))

    def unreachable(*address, **options):
        logging.getLogger("huggingface_hub.utils._http").warning("thrown while requesting. Retrying in 1s")
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    with pytest.raises(UserError, match=r"^hf://me/mine cannot be read \(.*not known\); check the address and the net"):
        formats.open_weights("hf://me/mine")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "address", ["hf://a b/c", "hf://me/..", "hf://datasets/me/a--b", "hf://me/" + "x" * 10_000_000]
)
def test_an_invalid_name_of_the_hub_is_refused_without_a_request(address, monkeypatch):
    monkeypatch.setattr(fsspec, "url_to_fs", lambda _: pytest.fail("asked the Hub"))
    with pytest.raises(UserError, match=r"write hf://owner/name$"):
        filesystem(address)
