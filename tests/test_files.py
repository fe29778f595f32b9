"""Files are whole or not there."""

import pytest

from lit_het.files import completed, write_atomically


def write_half(path):
    with completed(path) as temporary:
        temporary.write_text("half")
        raise InterruptedError


def test_a_file_that_is_not_finished_leaves_the_old_one_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(InterruptedError):
        write_half(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
