"""Which file systems an address may name."""

import fsspec
import pytest

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
