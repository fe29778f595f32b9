"""Files are whole or not there."""

import pytest

from lit_het.files import completed, write_atomically


def test_a_file_that_is_not_finished_leaves_the_old_one_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(ZeroDivisionError), completed(path) as temporary:
        temporary.write_text("half")
        _ = 1 / 0
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
